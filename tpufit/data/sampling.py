"""The order of the rows, as a function of (seed, epoch)."""

from __future__ import annotations

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
