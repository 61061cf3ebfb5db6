"""The order of rows as a function of (seed, epoch), and the rows of a batch that a process reads."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..backend import block_of_rows


def permute_rows(rows: int, seed: int, epoch: int, within: int | None = None) -> NDArray[np.int64]:
    """Return a random permutation of shape `(rows,)` that depends only on the arguments.

    Permutes all rows, or only the rows within each block of `within`.

    Example:
        >>> permute_rows(5, seed=0, epoch=1).tolist() == permute_rows(5, seed=0, epoch=1).tolist()
        True
        >>> sorted(permute_rows(5, seed=0, epoch=1).tolist())
        [0, 1, 2, 3, 4]
    """
    generator = np.random.Generator(np.random.Philox(key=np.array([seed % (1 << 64), epoch], np.uint64)))
    if within is None:
        return generator.permutation(rows)
    return np.concatenate([i + generator.permutation(min(within, rows - i)) for i in range(0, rows, within)])


def select_shard_rows(shards: Sequence[int], count: int, rows: int) -> NDArray[np.int64]:
    """Return the rows of some of a batch's `count` shards, shard by shard; the shards need not be adjacent.

    Example:
        >>> select_shard_rows([0, 2], count=4, rows=7).tolist(), select_shard_rows([1, 3], count=4, rows=7).tolist()
        ([0, 1, 4, 5], [2, 3, 6])
    """
    blocks = [block_of_rows(i, count, rows) for i in shards]
    return np.concatenate([np.arange(block.start, block.stop) for block in blocks])
