"""The order of the rows, as a function of (seed, epoch), and the rows of a batch that a process reads."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def order(rows: int, seed: int, epoch: int, within: int | None = None) -> NDArray[np.int64]:
    """A random permutation, shape `(rows,)`, that depends on nothing but its arguments.

    It permutes all rows, or only those within each block of so many.

    Example:
        >>> order(5, seed=0, epoch=1).tolist() == order(5, seed=0, epoch=1).tolist()
        True
        >>> sorted(order(5, seed=0, epoch=1).tolist())
        [0, 1, 2, 3, 4]
    """
    generator = np.random.Generator(np.random.Philox(key=np.array([seed % (1 << 64), epoch], np.uint64)))
    if within is None:
        return generator.permutation(rows)
    return np.concatenate([i + generator.permutation(min(within, rows - i)) for i in range(0, rows, within)])


def rows_of(shards: Sequence[int], count: int, rows: int) -> NDArray[np.int64]:
    """The rows of a batch that some of its `count` shards hold, shard by shard; they need not be neighbours.

    A batch is split into equal blocks of consecutive rows, one a device; the last blocks may hold fewer, or none.

    Example:
        >>> rows_of([0, 2], count=4, rows=7).tolist(), rows_of([1, 3], count=4, rows=7).tolist()
        ([0, 1, 4, 5], [2, 3, 6])
    """
    block = -(-rows // count)
    return np.concatenate([np.arange(min(i * block, rows), min((i + 1) * block, rows)) for i in shards])
