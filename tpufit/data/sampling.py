"""The order of the rows, as a function of (seed, epoch), and which rows of a batch a process is to read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def order(rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """A random permutation that depends on nothing but its arguments.

    Args:
        rows: How many rows there are.
        seed: The run's seed, from 0.
        epoch: The number of the pass over the data, from 0.

    Returns:
        The row numbers in their order, shape `(rows,)`.

    Example:
        >>> order(5, seed=0, epoch=1).tolist() == order(5, seed=0, epoch=1).tolist()
        True
        >>> sorted(order(5, seed=0, epoch=1).tolist())
        [0, 1, 2, 3, 4]
    """
    generator = np.random.Generator(np.random.Philox(key=[seed % (1 << 64), epoch]))
    return generator.permutation(rows)


def rows_of(places: Sequence[int], count: int, rows: int) -> NDArray[np.int64]:
    """The rows of a batch that lie on some of the devices, among all that share it.

    A batch is split into equal blocks of consecutive rows, one a device; what is missing in the last blocks is padding.

    Args:
        places: Where the devices of this process stand on the mesh, from 0; they need not be neighbours.
        count: How many devices there are in all.
        rows: How many rows the batch has.

    Returns:
        The numbers of the rows within the batch, in the order of the places.

    Example:
        >>> rows_of([0, 2], count=4, rows=7).tolist(), rows_of([1, 3], count=4, rows=7).tolist()
        ([0, 1, 4, 5], [2, 3, 6])
    """
    block = -(-rows // count)
    return np.concatenate([np.arange(min(i * block, rows), min((i + 1) * block, rows)) for i in places])
