"""`Share` and `LocalBatch`: on a pod, each host reads and sends only its rows of each global batch."""

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
from .batches import count_rows
from .sampling import select_shard_rows
from .to_tensors import as_tensors

T = TypeVar("T")


class LocalBatch(NamedTuple):
    """A host's rows of a global batch."""

    batch: Any  # the rows of the host's cores, core by core, in the data's nest
    rows: int  # in the global batch


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
        """Return the indices of the host's rows in a batch of `count` rows."""
        return select_shard_rows(self.shards, self.cores, count)

    def select(self, batch: Any) -> LocalBatch:
        """Select the host's rows from a whole global batch, a nest of arrays and tensors.

        Raises:
            DataError: Two tensors have different numbers of rows.

        Example:
            >>> Share((0, 2), cores=4).select((torch.arange(7), 0.5))
            LocalBatch(batch=(tensor([0, 1, 4, 5]), tensor(0.5000)), rows=7)
        """
        batch = as_tensors(batch)
        rows = count_rows(tree_leaves(batch))
        mine = torch.from_numpy(self.rows(rows))

        def select(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or not leaf.dim():
                return leaf
            if len(leaf) != rows:
                raise DataError(
                    f"on several hosts each tensor of a batch must have one row per sample, got tensors of {rows} and "
                    f"{len(leaf)} rows: build other tensors in the module"
                )
            return leaf[mine]

        return LocalBatch(tree_map(select, batch), rows)


def map_batch(function: Callable[[Any], Any], batch: Any) -> Any:
    """Call a function on a batch, or on a `LocalBatch`'s rows."""
    return LocalBatch(function(batch.batch), batch.rows) if isinstance(batch, LocalBatch) else function(batch)


def drop_rows(batch: Any) -> Any:
    """Return the batch without its rows, for a host that has none."""
    # Cloned, because a view would keep all rows alive.
    return tree_map(
        lambda leaf: leaf[:0].clone() if isinstance(leaf, Tensor) and leaf.dim() else leaf, as_tensors(batch)
    )


class PerHost(Generic[T]):
    """Marks an iterable whose batches differ by host, such as a stream split by `tpufit.process_index()`.

    Any other iterable is assumed to yield the same batches on all hosts, of which each host keeps its rows. The batches
    of all hosts must have the same number of rows; a pass ends when the first host has no more batches. A resumed
    training skips the same number of batches on each host; data with `state_dict` get the state of process 0.

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
