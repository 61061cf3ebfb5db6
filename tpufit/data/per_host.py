"""`Share` and `LocalBatch`: on a pod each host reads and sends only its own rows of each global batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ..errors import DataError
from .batches import as_tensors, count_rows
from .sampling import rows_of

T = TypeVar("T")


class LocalBatch(NamedTuple):
    """A host's own rows of a global batch."""

    batch: Any  # the rows of its cores, core by core, in the nest of the data
    rows: int  # of the global batch


@dataclass(frozen=True)
class Share:
    """A host's share of every batch."""

    shards: tuple[int, ...]  # the numbers of the host's cores
    cores: int  # the number of all cores

    @property
    def hosts(self) -> int:
        """The number of hosts."""
        return self.cores // len(self.shards)

    def rows(self, count: int) -> NDArray[np.int64]:
        """The numbers of the host's rows in a batch of so many."""
        return rows_of(self.shards, self.cores, count)

    def of(self, batch: Any) -> LocalBatch:
        """Take the host's rows out of a global batch, a nest of arrays and tensors, that it has whole.

        Raises:
            DataError: Two tensors have different numbers of rows.

        Example:
            >>> Share((0, 2), cores=4).of((torch.arange(7), 0.5))
            LocalBatch(batch=(tensor([0, 1, 4, 5]), tensor(0.5000)), rows=7)
        """
        batch = as_tensors(batch)
        rows = count_rows(tree_leaves(batch))
        mine = torch.from_numpy(self.rows(rows))

        def own(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or not leaf.dim():
                return leaf
            if len(leaf) != rows:
                raise DataError(
                    f"on several hosts each tensor of a batch must have one row a sample, got {rows} and {len(leaf)}"
                )
            return leaf[mine]

        return LocalBatch(tree_map(own, batch), rows)


def map_batch(function: Callable[[Any], Any], batch: Any) -> Any:
    """Call a function with a batch, or with the batch of a part."""
    return LocalBatch(function(batch.batch), batch.rows) if isinstance(batch, LocalBatch) else function(batch)


def without_rows(batch: Any) -> Any:
    """The batch of a host that has no rows."""
    # Clones, because a view would keep all the rows.
    return tree_map(
        lambda leaf: leaf[:0].clone() if isinstance(leaf, Tensor) and leaf.dim() else leaf, as_tensors(batch)
    )


class PerHost(Generic[T]):
    """Marks an iterable that gives each host batches of its own, such as a stream split by `tpufit.process_index()`.

    Any other iterable is taken to give all hosts the same batches, of which each keeps its own rows. All hosts must
    give batches of as many rows; a pass ends with the first host that has no more. A training that is resumed skips as
    many batches on each host; data that keep their own position get that of process 0.

    Args:
        data: An iterable of batches, or a `DataLoader`.

    Example:
        >>> import tpufit
        >>> files = ["a", "b", "c", "d"][tpufit.process_index() :: tpufit.process_count()]
        >>> data = PerHost([torch.ones(2, 3) for file in files])
        >>> len(list(data))
        4
    """

    def __init__(self, data: Iterable[T]) -> None:
        self.data = data

    def __iter__(self) -> Iterator[T]:
        return iter(self.data)
