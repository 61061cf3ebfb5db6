"""The sources of batches: one class for each form of data. `batches` makes one pass over the data.

An offset is a position in a pass, in the source's unit: rows where any row can be read, else the data's own batches.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, repeat
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Subset, default_collate

from ..errors import DataError
from ..utils.random import RNGState
from ..utils.user_code import warn
from .batch_joiner import Joiner
from .batches import count_rows, is_flat, require_dense, select_rows
from .cache import CachedDataset
from .forms import require_batch
from .per_host import LocalBatch, PerHost, Share, drop_rows
from .read_loader import read_loader
from .reused_memory import group_batches
from .sampling import permute_rows
from .texts import RowsOfTokens
from .to_tensors import as_tensors
from .worker_states import WorkerStates

Transform = Callable[[Any], Any]
Rows = slice | NDArray[np.int64]
Batches = Iterator[tuple[int, Any]]
Hook = Callable[[], object]

# The batches of arrays that are gathered at once, and the most memory for them.
_MOST_AT_ONCE = 64
_BYTES_AT_ONCE = 1 << 20


def _do_nothing() -> None: ...


class Source(ABC):
    """Yields the batches of some data, pass after pass.

    Attributes:
        batch_size: Rows per core, or None if the data make their own batches.
        device_transform: The data's function of a batch, which runs on the device; or None.
        any_thread: True if passes may be made in different threads.
        in_memory: True if the rows are in memory, so that reading ahead in a thread is useless.
        runs_users_code: True if reading the data runs the user's code, which may draw random numbers.
        may_overwrite: True if reading a batch may overwrite the memory of earlier batches.
        generators: The user's random generators that the data draw from.
        stride: The offset between two global batches.
        per_host: True if batches differ by host.
        facts: Facts about the data for a report, by name.
    """

    batch_size: int | None = None
    device_transform: Transform | None = None
    any_thread: bool = True
    in_memory: bool = False
    runs_users_code: bool = False
    may_overwrite: bool = False
    generators: Sequence[torch.Generator] = ()
    stride: int
    per_host: bool = False
    facts: Mapping[str, str] = {}

    @abstractmethod
    def batches(self, index: int, start: int = 0, skipped: Hook = _do_nothing) -> Batches:
        """Make one pass over the data. Its index and the seed determine the order.

        Args:
            start: The offset to begin at: 0, or an offset that came with a batch of the same pass.
            skipped: Called when everything before `start` has been skipped, which may have drawn random numbers.

        Returns:
            Batches, each with the offset right after it.
        """

    def read_first(self) -> Any:
        """Read the first batch outside any pass; None if only a pass can read it."""
        return None

    @abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """Return the numbers that an offset depends on: offsets are invalid in data with other numbers."""

    def batches_before(self, offset: int) -> int:
        """Return the number of global batches before an offset."""
        return -(-offset // self.stride)

    def rows(self) -> Any:
        """Return all rows of data in memory, else None."""
        return None

    def steps(self) -> int | None:
        """Return the number of batches in a pass, or None if unknown before reading all."""
        return None

    def sizes(self) -> tuple[int, int] | None:
        """Return the rows of a full global batch, and of a pass's shorter last batch or 0; None if unknown."""
        return None

    def objects(self) -> dict[str, Any]:
        """Return the user's objects that a pass runs, by name, except those with a `state_dict`."""
        return {}

    def set_epoch(self, epoch: int) -> None:
        """Call `set_epoch` of the user's objects that have it, before a pass: their order may depend on the epoch."""
        return

    def track_workers(self) -> None:
        """Track the states of worker processes from now on."""
        return

    def state_dict(self) -> dict[str, Any] | None:
        """Return the data's own `state_dict`, if they have one."""
        return None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the data's own `state_dict`; the next pass begins there."""
        raise DataError(
            "the checkpoint has a position of data with a state_dict, but these data have none: pass the same data, or "
            "resume='next_epoch'"
        )


@dataclass(frozen=True)
class BatchPlan:
    """How rows become batches."""

    batch_size: int  # rows per core
    cores: int  # the number of cores that share a batch
    shuffle: bool | str  # a new order in each pass, or with "batch" only within each block of `batch_size` rows
    seed: int  # determines the order, with the pass's number
    name: str  # the data's, in errors
    share: Share | None = None  # the part of a batch that this host reads; None: all

    @property
    def rows(self) -> int:
        """Rows of a full batch."""
        return self.batch_size * self.cores


class _Rows(Source):
    """Reads rows in any order. Offsets count rows."""

    def __init__(self, length: int, plan: BatchPlan) -> None:
        if not length:
            raise DataError(f"{plan.name} is empty: it has no rows")
        self.length = length
        self.plan = plan
        self.batch_size = plan.batch_size
        self.stride = plan.rows
        self._empty_batch: Any = None  # for a short last batch of which this host has no rows

    @abstractmethod
    def take(self, rows: Rows, index: int) -> Any:
        """Return the batch of these rows, in this order, in a pass."""

    def read_first(self) -> Any:
        rows = np.arange(min(self.plan.rows, self.length))
        mine = rows if self.plan.share is None else self.plan.share.rows(len(rows))
        few = (mine if len(mine) else rows)[: self.plan.batch_size]  # one core's: reading more may take long
        return self.take(slice(0, len(few)) if few[-1] == len(few) - 1 else few, 0)

    def steps(self) -> int:
        return self.batches_before(self.length)

    def sizes(self) -> tuple[int, int] | None:
        return _compute_sizes(self.length, self.plan.rows)

    def fingerprint(self) -> dict[str, Any]:
        return {"rows": self.length, "batch_size": self.plan.batch_size, "shuffle": self.plan.shuffle}

    def batches(self, index: int, start: int = 0, skipped: Hook = _do_nothing) -> Batches:
        skipped()
        plan = self.plan
        within = plan.batch_size if plan.shuffle == "batch" else None
        shuffled = permute_rows(self.length, plan.seed, index, within) if plan.shuffle else None
        if plan.share is None:
            yield from self._read_whole(start, shuffled, index)
            return
        for first in range(start, self.length, plan.rows):
            end = min(first + plan.rows, self.length)
            yield end, self._read_local(plan.share, first, end, shuffled, index)

    def _read_whole(self, start: int, shuffled: NDArray[np.int64] | None, index: int) -> Batches:
        """Yield the batches of a pass in which this host reads all rows."""
        for first in range(start, self.length, self.plan.rows):
            end = min(first + self.plan.rows, self.length)
            yield end, self.take(slice(first, end) if shuffled is None else shuffled[first:end], index)

    def _read_local(
        self, share: Share, first: int, end: int, shuffled: NDArray[np.int64] | None, index: int
    ) -> LocalBatch:
        """Read this host's rows of a batch."""
        mine = share.rows(end - first) + first
        if len(mine) or self._empty_batch is None:
            read = mine if len(mine) else np.array([first])
            batch = self.take(read if shuffled is None else shuffled[read], index)
            self._empty_batch = drop_rows(batch) if self._empty_batch is None else self._empty_batch
        return LocalBatch(batch if len(mine) else self._empty_batch, end - first)


class Arrays(_Rows):
    """Tensors with equally many rows, in a nest, with None for missing parts."""

    def __init__(self, nest: Any, plan: BatchPlan, in_memory: bool = True) -> None:
        self.leaves, self.spec = tree_flatten(nest)
        self.in_memory = in_memory  # False if they are memory-mapped files
        super().__init__(next(len(leaf) for leaf in self.leaves if leaf is not None), plan)
        row = sum(leaf[:1].nbytes for leaf in self.leaves if leaf is not None)
        self._at_once = max(1, min(_MOST_AT_ONCE, _BYTES_AT_ONCE // max(1, row * plan.rows)))
        self._is_flat = type(nest) is tuple and is_flat(nest)

    def rows(self) -> Any:
        return tree_unflatten(self.leaves, self.spec)

    def take(self, rows: Rows, index: int) -> Any:
        leaves = [None if leaf is None else select_rows(leaf, rows) for leaf in self.leaves]
        return tree_unflatten(leaves, self.spec)

    def _read_whole(self, start: int, shuffled: NDArray[np.int64] | None, index: int) -> Batches:
        # Several batches are gathered at once and then split: a call takes as long as copying a small batch.
        rows = self.plan.rows
        several = self.plan.rows * self._at_once
        for first in range(start, self.length, several):
            some = slice(first, min(first + several, self.length))
            read: Rows = some if shuffled is None else shuffled[some]
            parts = [repeat(None) if leaf is None else select_rows(leaf, read).split(rows) for leaf in self.leaves]
            for i, batch in enumerate(zip(*parts, strict=False), 1):
                yield min(first + i * rows, some.stop), batch if self._is_flat else tree_unflatten(batch, self.spec)


class Samples(_Rows):
    """A map-style data set or a list of rows, read sample by sample."""

    runs_users_code = True

    def __init__(self, dataset: Any, plan: BatchPlan) -> None:
        super().__init__(len(dataset), plan)
        self.dataset = dataset
        self.device_transform = _find_device_transform(dataset)

    def objects(self) -> dict[str, Any]:
        return {"dataset": self.dataset}

    def set_epoch(self, epoch: int) -> None:
        _set_epoch(self.dataset, epoch)

    def take(self, rows: Rows, index: int) -> Any:
        numbers = list(range(rows.start, rows.stop)) if isinstance(rows, slice) else rows.tolist()
        at_once = getattr(self.dataset, "__getitems__", None)
        samples = at_once(numbers) if at_once else [self._sample(i) for i in numbers]
        try:
            return default_collate(samples)
        except RuntimeError as error:  # PyTorch's message doesn't name the field
            raise DataError(_explain_unequal_samples(samples, self.plan.name, error)) from error
        except TypeError as error:
            raise DataError(
                f"the rows of {self.plan.name} can't be collated into a batch: {error}. Pass a DataLoader with a "
                "collate_fn for these rows"
            ) from error

    def _sample(self, i: int) -> Any:
        try:
            return self.dataset[i]
        except Exception as error:
            if hasattr(error, "add_note"):  # Python 3.11 and later
                error.add_note(f"This was sample {i} of {self.plan.name}.")
            raise


class Cached(_Rows):
    """A data set that reads whole batches at a time, or a subset of such a data set."""

    def __init__(
        self, dataset: CachedDataset | RowsOfTokens, plan: BatchPlan, some: Sequence[int] | None = None
    ) -> None:
        super().__init__(len(dataset) if some is None else len(some), plan)
        self.dataset = dataset
        self.some = None if some is None else np.asarray(some, dtype=np.int64)
        self.device_transform = dataset.device_transform
        self.facts = getattr(dataset, "facts", {})

    def take(self, rows: Rows, index: int) -> Any:
        numbers = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        return self.dataset.get_batch(numbers if self.some is None else self.some[numbers], index)


class Loader(Source):
    """A `DataLoader` with a sampler; `cores` of its batches are joined into one. Offsets count the loader's batches."""

    runs_users_code = True

    def __init__(self, loader: DataLoader[Any], cores: int, share: Share | None = None) -> None:
        self.loader = loader
        self.stride = cores
        self._share = share
        self.batch_size = loader.batch_size
        self.device_transform = _find_device_transform(loader.dataset)
        self.any_thread = _allows_any_thread(loader)
        self.may_overwrite = not _makes_new_memory(loader)
        self.generators = _collect_generators(loader)
        # Our loader over the user's data set and sampler makes the workers collate whole batches. On one core the
        # user's loader is used, which may have workers already.
        self._batches = _JoinedBatches(loader.batch_sampler, cores, share)
        self._joined = loader if cores == 1 else _rebuild(loader, self._batches)
        self._workers: WorkerStates | None = None

    def steps(self) -> int | None:
        return _length(self._joined)

    def read_first(self) -> Any:
        if self._share is not None:  # the first batch may be another host's
            return None
        # Workers that aren't forked take seconds to start.
        batches: Any = self.loader.batch_sampler
        if isinstance(batches, Iterator) or self.loader.multiprocessing_context is not None:
            return None
        if not self.loader.num_workers:
            return next(read_loader(self.loader))
        one = {"num_workers": 1, "persistent_workers": False}  # each worker costs the start of a process
        # Only this batch: a worker that is reading ahead may die while it is shut down, and PyTorch would print that.
        return next(read_loader(_rebuild(self.loader, list(islice(batches, 1)), **one)))

    def sizes(self) -> tuple[int, int] | None:
        batches = self.loader.batch_sampler
        size = self.batch_size
        rows = _length(self.loader.sampler)
        if type(batches) is not BatchSampler or size is None or rows is None:
            return None
        return _compute_sizes(rows // size * size if batches.drop_last else rows, size * self.stride)

    def objects(self) -> dict[str, Any]:
        return _collect_objects(self.loader)

    def set_epoch(self, epoch: int) -> None:
        _set_epoch(self.loader, epoch)

    def track_workers(self) -> None:
        if self.loader.num_workers and self._workers is None:
            self._workers = WorkerStates(self.loader)
            self._joined = _rebuild(self.loader, self._batches, **self._workers.options)

    def state_dict(self) -> dict[str, Any] | None:
        return None if self._workers is None else self._workers.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        before = state.get("count")
        now = self.loader.num_workers
        if self._workers is not None and now == before:
            self._workers.load_state_dict(state)
        else:
            warn(f"the loader had {before} workers, and has {now} now: their random numbers and counters restart")

    def fingerprint(self) -> dict[str, Any]:
        return {"batches": _length(self.loader), "batch_size": self.batch_size}

    def batches(self, index: int, start: int = 0, skipped: Hook = _do_nothing) -> Batches:
        if self._workers is not None:
            yield from self._batches_of_workers(self._workers, start, skipped)
            return
        loader = self._joined
        rows = self._batches.rows
        if start:
            remaining = _JoinedBatches(self.loader.batch_sampler, self.stride, self._share, start, skipped)
            loader = _rebuild(self.loader, remaining)
            rows = remaining.rows
        rows.clear()  # an abandoned pass has read ahead
        for number, batch in enumerate(read_loader(loader), 1):
            yield (
                start + number * self.stride,
                batch if self._share is None else self._read_local(batch, rows.popleft()),
            )

    def _batches_of_workers(self, workers: WorkerStates, start: int, skipped: Hook) -> Batches:
        """Yield the batches of a pass by workers that report their states."""
        # A remainder means that the pass began on another number of cores.
        done, remainder = divmod(start, self.stride)
        whole = 0 if remainder else workers.count_whole_rounds(done)
        first, done = (start, 0) if remainder else (whole * self.stride, done - whole)
        again = workers.begin(whole)
        # PyTorch draws the workers' seed when it starts them, before it draws the order. An uninterrupted training
        # started them in an earlier pass, so the generators are restored to their state before that draw.
        on_begin = partial(RNGState.now(self.generators).restore, self.generators) if again else _do_nothing
        # When the position was recorded, the batches in progress had already been requested, so their indices count as
        # drawn.
        ahead = done + workers.ahead if start else 0
        self._batches.begin(first, on_begin, skipped if start else _do_nothing, ahead)
        for number, received in enumerate(read_loader(self._joined), 1):
            batch = workers.record(received)
            rows = self._batches.rows.popleft() if self._share is not None else 0
            if number > done:
                yield first + number * self.stride, batch if self._share is None else self._read_local(batch, rows)
        workers.end()

    def _read_local(self, batch: Any, rows: int) -> LocalBatch:
        assert self._share is not None
        return LocalBatch(batch if len(self._share.rows(rows)) else drop_rows(batch), rows)


class Iteration(Source):
    """Any iterable of batches, `joined` of which make one batch. Offsets count the iterable's batches."""

    runs_users_code = True

    def __init__(self, batches: Iterable[Any], joined: int, name: str, share: Share | None = None) -> None:
        self._share = share
        self._name = name
        self._join = Joiner(name)
        self._checked_first = False  # the first batch has been checked
        self.per_host = isinstance(batches, PerHost)
        if isinstance(batches, PerHost):
            batches = batches.data
        # A host's batches go to its cores.
        self.stride = len(share.shards) if share is not None and self.per_host and joined > 1 else joined
        self.iterable = batches
        self.batch_size = batches.batch_size if isinstance(batches, DataLoader) else None
        self.device_transform = _find_device_transform(getattr(batches, "dataset", batches))
        self.any_thread = _allows_any_thread(batches)
        self._reuses_memory = not _makes_new_memory(batches)
        self.may_overwrite = self._reuses_memory and self.stride == 1  # joining copies
        self.generators = _collect_generators(batches) if isinstance(batches, DataLoader) else ()
        self._stateful: Any = batches if _is_stateful(batches) else None
        self._at_start = False  # True if the data's `load_state_dict` has moved them to the next pass's start

    def steps(self) -> int | None:
        length = _length(self.iterable)
        return None if length is None else self.batches_before(length)

    def read_first(self) -> Any:
        return self.iterable[0] if isinstance(self.iterable, (list, tuple)) and self.iterable else None

    def sizes(self) -> tuple[int, int] | None:
        if not isinstance(self.iterable, (list, tuple)) or not self.iterable:
            return None
        batches = [tree_leaves(as_tensors(batch)) for batch in self.iterable]
        require_dense(leaf for leaves in batches for leaf in leaves if isinstance(leaf, Tensor))
        rows = [count_rows(leaves) for leaves in batches]
        whole = sum(rows[: self.stride])
        last = sum(rows[(len(rows) - 1) // self.stride * self.stride :])
        return whole, 0 if last == whole else last

    def objects(self) -> dict[str, Any]:
        if self._stateful is not None:
            return {}
        return _collect_objects(self.iterable) if isinstance(self.iterable, DataLoader) else {"data": self.iterable}

    def set_epoch(self, epoch: int) -> None:
        _set_epoch(self.iterable, epoch)

    def fingerprint(self) -> dict[str, Any]:
        return {"batches": _length(self.iterable)}

    def batches(self, index: int, start: int = 0, skipped: Hook = _do_nothing) -> Batches:
        batches = read_loader(self.iterable) if isinstance(self.iterable, DataLoader) else iter(self.iterable)
        if start and not self._at_start:
            _skip(batches, start)  # an iterable's batches can only be read and dropped
        skipped()
        self._at_start = False
        offset = start
        for group in group_batches(map(self._examine, batches), lambda: self.stride, self._reuses_memory):
            offset += len(group)
            batch = group[0] if len(group) == 1 else self._join(group)
            yield offset, batch if self._share is None else self._read_local(batch, self._share)

    def _examine(self, batch: Any) -> Any:
        """Check the first batch, and convert batches that are to be joined."""
        if not self._checked_first:
            self._checked_first = True
            require_batch(batch, self.iterable, self._name)
        return batch if self.stride == 1 else as_tensors(batch)

    def _read_local(self, batch: Any, share: Share) -> LocalBatch:
        if not self.per_host:
            return share.select(batch)
        batch = as_tensors(batch)
        return LocalBatch(batch, count_rows(tree_leaves(batch)) * share.hosts)

    def state_dict(self) -> dict[str, Any] | None:
        return None if self._stateful is None else self._stateful.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._stateful is None:
            super().load_state_dict(state)
        self._stateful.load_state_dict(state)
        self._at_start = True


class _JoinedBatches:
    """A batch sampler that joins `cores` batches of another, whose rules (drop_last, ...) stay in force."""

    def __init__(
        self, batches: Any, cores: int, share: Share | None = None, start: int = 0, skipped: Hook = _do_nothing
    ) -> None:
        self.batch_sampler = batches
        self.cores = cores
        self.start = start
        self.skipped = skipped
        self._share = share
        self._on_begin: Hook = _do_nothing
        self._ahead = 0
        # On a pod: the rows of the batches being read, of which this host reads its part.
        self.rows: deque[int] = deque()

    def begin(self, start: int, on_begin: Hook, skipped: Hook, ahead: int) -> None:
        """Make the next pass skip `start` batches.

        The pass calls `on_begin` first, and `skipped` once the skipped batches and the next `ahead` batches have been
        drawn.
        """
        self.start = start
        self._on_begin = on_begin
        self.skipped = skipped
        self._ahead = ahead
        self.rows.clear()  # an abandoned pass has read ahead

    def __len__(self) -> int:
        return -(-(len(self.batch_sampler) - self.start) // self.cores)

    def __iter__(self) -> Iterator[list[Any]]:
        self._on_begin()
        batches = iter(self.batch_sampler)
        _skip(batches, self.start)
        ahead = self._ahead
        if not ahead:
            self.skipped()
        while group := list(islice(batches, self.cores)):
            rows = [row for batch in group for row in batch]
            if self._share is not None:
                self.rows.append(len(rows))
                # A host without rows needs one row, for its structure and shapes.
                rows = [rows[i] for i in self._share.rows(len(rows))] or rows[:1]
            ahead -= 1
            if not ahead:
                self.skipped()
            yield rows
        if ahead > 0:
            self.skipped()


def make_loader_source(loader: DataLoader[Any], cores: int, name: str, share: Share | None = None) -> Source:
    """Make the source of a user's loader.

    Raises:
        DataError: The loader has no batches.
    """
    if _length(loader) == 0:
        raise DataError(f"{name} is empty: the loader has no batches")
    unchanged = _is_stateful(loader) or loader.batch_sampler is None or isinstance(loader.dataset, IterableDataset)
    return Iteration(loader, cores, name, share) if unchanged else Loader(loader, cores, share)


# The arguments that a loader with other batches keeps.
_KEPT = (
    *("num_workers", "prefetch_factor", "persistent_workers", "multiprocessing_context", "worker_init_fn"),
    *("collate_fn", "timeout", "generator"),
)


def _rebuild(loader: DataLoader[Any], batch_sampler: Any, **others: Any) -> DataLoader[Any]:
    """Rebuild a loader with other batches, and other arguments."""
    kept: dict[str, Any] = {name: getattr(loader, name) for name in _KEPT} | others
    return DataLoader(loader.dataset, batch_sampler=batch_sampler, **kept)


def _skip(batches: Iterator[Any], count: int) -> None:
    """Read and drop `count` batches."""
    next(islice(batches, count, count), None)


def _is_stateful(data: Any) -> bool:
    return hasattr(data, "state_dict") and hasattr(data, "load_state_dict")


def _collect_objects(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the user's objects in a loader."""
    names = ("dataset", "sampler", "batch_sampler", "collate_fn")
    return {name: getattr(loader, name) for name in names}


def _set_epoch(data: Any, epoch: int) -> None:
    parts = [data]
    if isinstance(data, DataLoader):
        batches = data.batch_sampler
        parts += [data.dataset, data.sampler, batches, getattr(batches, "sampler", None)]
    for part in {id(part): part for part in parts}.values():
        set_epoch = getattr(part, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)


def _collect_generators(loader: DataLoader[Any]) -> list[torch.Generator]:
    """Return the random generators of a loader and its sampler."""
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    found = [getattr(part, "generator", None) for part in (loader, sampler)]
    return [generator for i, generator in enumerate(found) if generator is not None and generator not in found[:i]]


def _allows_any_thread(batches: Any) -> bool:
    """False for workers, since only a thread notices that one hangs, and for an iterator, which is a single pass."""
    return not getattr(batches, "num_workers", 0) and not isinstance(batches, Iterator)


def _makes_new_memory(batches: Any) -> bool:
    """True if reading a batch is known not to overwrite the memory of earlier batches."""
    if type(batches) is not DataLoader:
        return isinstance(batches, (list, tuple))
    return batches.num_workers > 0 or batches.collate_fn is default_collate


class Compose:
    """Two transforms, one after the other.

    Example:
        >>> Compose(abs, float)(-1)
        1.0
    """

    def __init__(self, first: Transform, second: Transform) -> None:
        self.first = first
        self.second = second

    def __call__(self, batch: Any) -> Any:
        """Transform a batch."""
        return self.second(self.first(batch))

    def has_same_parts(self, other: object) -> bool:
        """True for a `Compose` of the same two transforms."""
        return isinstance(other, Compose) and self.first is other.first and self.second is other.second


def _find_device_transform(dataset: Any) -> Transform | None:
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return getattr(dataset, "device_transform", None)


def _length(data: Any) -> int | None:
    try:
        return len(data)
    except TypeError:  # an iterable data set without a length
        return None


def _compute_sizes(rows: int, whole: int) -> tuple[int, int]:
    return min(rows, whole), rows % whole if rows > whole else 0


def _explain_unequal_samples(samples: Sequence[Any], name: str, error: Exception) -> str:
    """Explain which samples of a batch can't be stacked, from PyTorch's error."""
    leaves = (tree_leaves(sample) for sample in samples)
    shapes = [[tuple(leaf.shape) for leaf in part if isinstance(leaf, (Tensor, np.ndarray))] for part in leaves]
    other = next((each for each in shapes if each != shapes[0]), None)
    if other is None:
        return (
            f"the samples of {name} can't be stacked into a batch: {error}. Pass a DataLoader with a collate_fn that "
            "makes a batch of them"
        )
    return (
        f"the samples of {name} must have one shape to make a batch, got {shapes[0]} and {other}. Pad them to a "
        "few lengths: DataLoader(..., collate_fn=tpufit.data.PadToBuckets([32, 64, 128]))"
    )
