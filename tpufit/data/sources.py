"""The sources of batches: one class for each form of data. `batches` makes one pass over it.

An offset says how far a pass has come, as the source counts: in rows where any row can be read, else in the data's own
batches.
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
from ..utils.users_code import warn
from .batches import as_tensors, count_rows, is_flat, require_dense, rows_in
from .cache import CachedDataset
from .forms import require_batch
from .joining import Joiner
from .per_host import LocalBatch, PerHost, Share, without_rows
from .sampling import order
from .texts import RowsOfTokens
from .worker_states import WorkerStates
from .workers import read

Transform = Callable[[Any], Any]
Rows = slice | NDArray[np.int64]
Batches = Iterator[tuple[int, Any]]
Hook = Callable[[], object]

# The batches of arrays that are looked up at once, and the memory that they may take.
_MOST_AT_ONCE = 64
_BYTES_AT_ONCE = 1 << 20


def _nothing() -> None: ...


class Source(ABC):
    """Gives the batches of some data, pass after pass.

    Attributes:
        batch_size: Rows per core, or None if the data make their own batches.
        device_transform: The data's own function of a batch, to be run on the device; or None.
        any_thread: True if different threads may make passes over the data.
        in_memory: True if the rows lie in memory, so that nothing is gained by a thread that reads ahead.
        runs_users_code: True if reading the data runs the user's code, which may draw random numbers.
        generators: The user's own random generators that are drawn from.
        stride: The offsets between two global batches.
        per_host: True if each host has batches of its own.
        facts: What a report says of the data, by name.
    """

    batch_size: int | None = None
    device_transform: Transform | None = None
    any_thread: bool = True
    in_memory: bool = False
    runs_users_code: bool = False
    generators: Sequence[torch.Generator] = ()
    stride: int
    per_host: bool = False
    facts: Mapping[str, str] = {}

    @abstractmethod
    def batches(self, index: int, start: int = 0, skipped: Hook = _nothing) -> Batches:
        """Make one pass over the data, whose index determines the order with the seed.

        Args:
            start: The offset to begin at: 0, or one that came with a batch of such a pass.
            skipped: Called when all before `start` has been skipped, which may have drawn random numbers.

        Returns:
            Batches, each with the offset right after it.
        """

    def first(self) -> Any:
        """Read the first batch aside from any pass; None if only a pass can give it."""
        return None

    @abstractmethod
    def form(self) -> dict[str, Any]:
        """The numbers that give an offset its meaning: it has none in data of another form."""

    def batches_before(self, offset: int) -> int:
        """The number of global batches of a pass before an offset."""
        return -(-offset // self.stride)

    def rows(self) -> Any:
        """All rows, of data that are in memory."""
        return None

    def steps(self) -> int | None:
        """The number of batches in a pass, or None if only reading them all can tell."""
        return None

    def sizes(self) -> tuple[int, int] | None:
        """The rows of a whole global batch, and of the shorter last one of a pass or 0; None if only reading tells."""
        return None

    def objects(self) -> dict[str, Any]:
        """The user's objects that a pass runs, by name, but those that keep an account of their own."""
        return {}

    def keep(self) -> None:
        """Note from now on what cannot be seen in this process."""
        return

    def state_dict(self) -> dict[str, Any] | None:
        """The data's own account of their position, for data that keep one."""
        return None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the data go to a position of their own account; the next pass begins there."""
        raise DataError("this is a position in other data: these keep no account of their own")


@dataclass(frozen=True)
class BatchPlan:
    """The way from rows to batches."""

    batch_size: int  # rows per core
    cores: int  # that share a batch
    shuffle: bool | str  # another order in each pass, or with "batch" one within each block of `batch_size` rows
    seed: int  # determines the order, with the pass's number
    name: str  # of the data in errors
    share: Share | None = None  # of this host in a batch, which alone it reads; None: all

    @property
    def rows(self) -> int:
        """Rows of a whole batch."""
        return self.batch_size * self.cores


class _Rows(Source):
    """Reads rows in any order. Its offsets count rows."""

    def __init__(self, length: int, plan: BatchPlan) -> None:
        if not length:
            raise DataError(f"{plan.name} is empty: it has no rows")
        self.length = length
        self.plan = plan
        self.batch_size = plan.batch_size
        self.stride = plan.rows
        self._form: Any = None  # of a batch, for a short last one of which this host has no rows

    @abstractmethod
    def take(self, rows: Rows, index: int) -> Any:
        """The batch of these rows, in this order, in a pass."""

    def first(self) -> Any:
        rows = np.arange(min(self.plan.rows, self.length))
        own = rows if self.plan.share is None else self.plan.share.rows(len(rows))
        few = (own if len(own) else rows)[: self.plan.batch_size]  # one core's: to read more may take long
        return self.take(slice(0, len(few)) if few[-1] == len(few) - 1 else few, 0)

    def steps(self) -> int:
        return self.batches_before(self.length)

    def sizes(self) -> tuple[int, int] | None:
        return _sizes(self.length, self.plan.rows)

    def form(self) -> dict[str, Any]:
        return {"rows": self.length, "batch_size": self.plan.batch_size, "shuffle": self.plan.shuffle}

    def batches(self, index: int, start: int = 0, skipped: Hook = _nothing) -> Batches:
        skipped()
        plan = self.plan
        within = plan.batch_size if plan.shuffle == "batch" else None
        shuffled = order(self.length, plan.seed, index, within) if plan.shuffle else None
        if plan.share is None:
            yield from self._whole(start, shuffled, index)
            return
        for first in range(start, self.length, plan.rows):
            end = min(first + plan.rows, self.length)
            yield end, self._local(plan.share, first, end, shuffled, index)

    def _whole(self, start: int, shuffled: NDArray[np.int64] | None, index: int) -> Batches:
        """The batches of a pass where this host reads all of their rows."""
        for first in range(start, self.length, self.plan.rows):
            end = min(first + self.plan.rows, self.length)
            yield end, self.take(slice(first, end) if shuffled is None else shuffled[first:end], index)

    def _local(self, share: Share, first: int, end: int, shuffled: NDArray[np.int64] | None, index: int) -> LocalBatch:
        """A host's own rows of a batch."""
        mine = share.rows(end - first) + first
        if len(mine) or self._form is None:
            read = mine if len(mine) else np.array([first])
            batch = self.take(read if shuffled is None else shuffled[read], index)
            self._form = without_rows(batch) if self._form is None else self._form
        return LocalBatch(batch if len(mine) else self._form, end - first)


class Arrays(_Rows):
    """Tensors with equally many rows, in a nest, with None where a part is left out."""

    def __init__(self, nest: Any, plan: BatchPlan, in_memory: bool = True) -> None:
        self.leaves, self.spec = tree_flatten(nest)
        self.in_memory = in_memory  # False if they are mapped from files
        super().__init__(next(len(leaf) for leaf in self.leaves if leaf is not None), plan)
        row = sum(leaf[:1].nbytes for leaf in self.leaves if leaf is not None)
        self._at_once = max(1, min(_MOST_AT_ONCE, _BYTES_AT_ONCE // max(1, row * plan.rows)))
        self._is_flat = type(nest) is tuple and is_flat(nest)

    def rows(self) -> Any:
        return tree_unflatten(self.leaves, self.spec)

    def take(self, rows: Rows, index: int) -> Any:
        leaves = [None if leaf is None else rows_in(leaf, rows) for leaf in self.leaves]
        return tree_unflatten(leaves, self.spec)

    def _whole(self, start: int, shuffled: NDArray[np.int64] | None, index: int) -> Batches:
        # Several batches are looked up at once, and then parted: each call takes as long as to copy a small batch.
        rows = self.plan.rows
        several = self.plan.rows * self._at_once
        for first in range(start, self.length, several):
            some = slice(first, min(first + several, self.length))
            read: Rows = some if shuffled is None else shuffled[some]
            parts = [repeat(None) if leaf is None else rows_in(leaf, read).split(rows) for leaf in self.leaves]
            for i, batch in enumerate(zip(*parts, strict=False), 1):
                yield min(first + i * rows, some.stop), batch if self._is_flat else tree_unflatten(batch, self.spec)


class Samples(_Rows):
    """A map-style data set or a list of rows, read a sample at a time."""

    runs_users_code = True

    def __init__(self, dataset: Any, plan: BatchPlan) -> None:
        super().__init__(len(dataset), plan)
        self.dataset = dataset
        self.device_transform = _transform_of(dataset)

    def objects(self) -> dict[str, Any]:
        return {"dataset": self.dataset}

    def take(self, rows: Rows, index: int) -> Any:
        numbers = list(range(rows.start, rows.stop)) if isinstance(rows, slice) else rows.tolist()
        at_once = getattr(self.dataset, "__getitems__", None)
        samples = at_once(numbers) if at_once else [self._sample(i) for i in numbers]
        try:
            return default_collate(samples)
        except RuntimeError as error:  # PyTorch's message names no field
            raise DataError(_unequal(samples, self.plan.name)) from error
        except TypeError as error:
            raise DataError(f"the rows of {self.plan.name} can't be made a batch: {error}") from error

    def _sample(self, i: int) -> Any:
        try:
            return self.dataset[i]
        except Exception as error:
            if hasattr(error, "add_note"):  # from Python 3.11 on
                error.add_note(f"This was sample {i} of {self.plan.name}.")
            raise


class Cached(_Rows):
    """A data set that reads a batch at a time, or some rows of one."""

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
    """A `DataLoader` with a sampler, `cores` of its batches joined to one. Its offsets count its own batches."""

    runs_users_code = True

    def __init__(self, loader: DataLoader[Any], cores: int, share: Share | None = None) -> None:
        self.loader = loader
        self.stride = cores
        self._share = share
        self.batch_size = loader.batch_size
        self.device_transform = _transform_of(loader.dataset)
        self.any_thread = _any_thread(loader)
        self.generators = _generators(loader)
        # A loader of ours over the user's data set and sampler lets the workers make whole batches. On one core theirs
        # will do, which may have workers already.
        self._batches = _JoinedBatches(loader.batch_sampler, cores, share)
        self._joined = loader if cores == 1 else _over(loader, self._batches)
        self._workers: WorkerStates | None = None

    def steps(self) -> int | None:
        return _length(self._joined)

    def first(self) -> Any:
        if self._share is not None:  # it may be another host's
            return None
        # A worker that isn't forked takes seconds to start.
        batches: Any = self.loader.batch_sampler
        if isinstance(batches, Iterator) or self.loader.multiprocessing_context is not None:
            return None
        if not self.loader.num_workers:
            return next(read(self.loader))
        one = {"num_workers": 1, "persistent_workers": False}  # each worker is a process to start
        # Of this batch alone: a worker that reads on may die while it is being ended, and PyTorch prints that.
        return next(read(_over(self.loader, list(islice(batches, 1)), **one)))

    def sizes(self) -> tuple[int, int] | None:
        batches = self.loader.batch_sampler
        size = self.batch_size
        rows = _length(self.loader.sampler)
        if type(batches) is not BatchSampler or size is None or rows is None:
            return None
        return _sizes(rows // size * size if batches.drop_last else rows, size * self.stride)

    def objects(self) -> dict[str, Any]:
        return _objects(self.loader)

    def keep(self) -> None:
        if self.loader.num_workers and self._workers is None:
            self._workers = WorkerStates(self.loader)
            self._joined = _over(self.loader, self._batches, **self._workers.options)

    def state_dict(self) -> dict[str, Any] | None:
        return None if self._workers is None else self._workers.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        before = state.get("count")
        now = self.loader.num_workers
        if self._workers is not None and now == before:
            self._workers.load_state_dict(state)
        else:
            warn(f"the loader had {before} workers, and has {now} now: what they draw and count begins anew")

    def form(self) -> dict[str, Any]:
        return {"batches": _length(self.loader), "batch_size": self.batch_size}

    def batches(self, index: int, start: int = 0, skipped: Hook = _nothing) -> Batches:
        if self._workers is not None:
            yield from self._batches_of_workers(self._workers, start, skipped)
            return
        loader = self._joined
        rows = self._batches.rows
        if start:
            rest = _JoinedBatches(self.loader.batch_sampler, self.stride, self._share, start, skipped)
            loader = _over(self.loader, rest)
            rows = rest.rows
        rows.clear()  # a pass that was left has read ahead
        for number, batch in enumerate(read(loader), 1):
            yield start + number * self.stride, batch if self._share is None else self._local(batch, rows.popleft())

    def _batches_of_workers(self, workers: WorkerStates, start: int, skipped: Hook) -> Batches:
        """The batches of a pass of workers that tell their states."""
        done, rest = divmod(start, self.stride)  # with a rest it was begun on another number of cores
        whole = 0 if rest else workers.whole(done)
        first, done = (start, 0) if rest else (whole * self.stride, done - whole)
        again = workers.begin(whole)
        # The order comes after what PyTorch draws for workers that it starts, and they were started earlier.
        begun = partial(RNGState.now(self.generators).restore, self.generators) if again else _nothing
        # A position is noted when the batches that are ready or being made have been asked for, too.
        ahead = done + workers.ahead if start else 0
        self._batches.begin(first, begun, skipped if start else _nothing, ahead)
        for number, came in enumerate(read(self._joined), 1):
            batch = workers.note(came)
            rows = self._batches.rows.popleft() if self._share is not None else 0
            if number > done:
                yield first + number * self.stride, batch if self._share is None else self._local(batch, rows)
        workers.end()

    def _local(self, batch: Any, rows: int) -> LocalBatch:
        assert self._share is not None
        return LocalBatch(batch if len(self._share.rows(rows)) else without_rows(batch), rows)


class Iteration(Source):
    """Any iterable of batches, some of them joined to one. Its offsets count its own batches."""

    runs_users_code = True

    def __init__(self, batches: Iterable[Any], joined: int, name: str, share: Share | None = None) -> None:
        self._share = share
        self._name = name
        self._join = Joiner(name)
        self._looked = False  # at the first batch
        self.per_host = isinstance(batches, PerHost)
        if isinstance(batches, PerHost):
            batches = batches.data
        # Batches of its own go to a host's own cores.
        self.stride = len(share.shards) if share is not None and self.per_host and joined > 1 else joined
        self.iterable = batches
        self.batch_size = batches.batch_size if isinstance(batches, DataLoader) else None
        self.device_transform = _transform_of(getattr(batches, "dataset", batches))
        self.any_thread = _any_thread(batches)
        self.generators = _generators(batches) if isinstance(batches, DataLoader) else ()
        self._stateful: Any = batches if _is_stateful(batches) else None
        self._at_start = False  # True if the data have gone to the start of the next pass by themselves

    def steps(self) -> int | None:
        length = _length(self.iterable)
        return None if length is None else self.batches_before(length)

    def first(self) -> Any:
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
        return _objects(self.iterable) if isinstance(self.iterable, DataLoader) else {"data": self.iterable}

    def form(self) -> dict[str, Any]:
        return {"batches": _length(self.iterable)}

    def batches(self, index: int, start: int = 0, skipped: Hook = _nothing) -> Batches:
        batches = read(self.iterable) if isinstance(self.iterable, DataLoader) else iter(self.iterable)
        if start and not self._at_start:
            _skip(batches, start)  # there is no other way than to read and drop them
        skipped()
        self._at_start = False
        offset = start
        while group := list(islice(batches, self.stride)):
            offset += len(group)
            if not self._looked:
                self._looked = True
                require_batch(group[0], self.iterable, self._name)
            batch = group[0] if len(group) == 1 else self._join(group)
            yield offset, batch if self._share is None else self._local(batch, self._share)

    def _local(self, batch: Any, share: Share) -> LocalBatch:
        if not self.per_host:
            return share.of(batch)
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
    """A batch sampler that joins `cores` of another's batches, so that its own rules (drop_last, ...) stay in force."""

    def __init__(
        self, batches: Any, cores: int, share: Share | None = None, start: int = 0, skipped: Hook = _nothing
    ) -> None:
        self.batch_sampler = batches
        self.cores = cores
        self.start = start
        self.skipped = skipped
        self._share = share
        self._begun: Hook = _nothing
        self._ahead = 0
        # On a pod, of the batches that are being read, of which this host reads its own.
        self.rows: deque[int] = deque()

    def begin(self, start: int, begun: Hook, skipped: Hook, ahead: int) -> None:
        """Let the next pass begin at an offset, in batches to leave out.

        It calls `begun` when it begins, and `skipped` when they are left out, and `ahead` more have been given.
        """
        self.start = start
        self._begun = begun
        self.skipped = skipped
        self._ahead = ahead
        self.rows.clear()  # a pass that was left has read ahead

    def __len__(self) -> int:
        return -(-(len(self.batch_sampler) - self.start) // self.cores)

    def __iter__(self) -> Iterator[list[Any]]:
        self._begun()
        batches = iter(self.batch_sampler)
        _skip(batches, self.start)
        ahead = self._ahead
        if not ahead:
            self.skipped()
        while group := list(islice(batches, self.cores)):
            rows = [row for batch in group for row in batch]
            if self._share is not None:
                self.rows.append(len(rows))
                # One that has none needs the form of a row.
                rows = [rows[i] for i in self._share.rows(len(rows))] or rows[:1]
            ahead -= 1
            if not ahead:
                self.skipped()
            yield rows
        if ahead > 0:
            self.skipped()


def of_loader(loader: DataLoader[Any], cores: int, name: str, share: Share | None = None) -> Source:
    """The source of a user's loader.

    Raises:
        DataError: It has no batches.
    """
    if _length(loader) == 0:
        raise DataError(f"{name} is empty: the loader has no batches")
    as_it_is = _is_stateful(loader) or loader.batch_sampler is None or isinstance(loader.dataset, IterableDataset)
    return Iteration(loader, cores, name, share) if as_it_is else Loader(loader, cores, share)


# The arguments of a loader that one with other batches keeps.
_KEPT = (
    *("num_workers", "prefetch_factor", "persistent_workers", "multiprocessing_context", "worker_init_fn"),
    *("collate_fn", "timeout", "generator"),
)


def _over(loader: DataLoader[Any], batch_sampler: Any, **others: Any) -> DataLoader[Any]:
    """The same loader with other batches, and other arguments."""
    kept: dict[str, Any] = {name: getattr(loader, name) for name in _KEPT} | others
    return DataLoader(loader.dataset, batch_sampler=batch_sampler, **kept)


def _skip(batches: Iterator[Any], count: int) -> None:
    """Take so many, and drop them."""
    next(islice(batches, count, count), None)


def _is_stateful(data: Any) -> bool:
    return hasattr(data, "state_dict") and hasattr(data, "load_state_dict")


def _objects(loader: DataLoader[Any]) -> dict[str, Any]:
    """The user's objects in a loader."""
    names = ("dataset", "sampler", "batch_sampler", "collate_fn")
    return {name: getattr(loader, name) for name in names}


def _generators(loader: DataLoader[Any]) -> list[torch.Generator]:
    """The random generators that a loader and its sampler were given."""
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    own = [getattr(part, "generator", None) for part in (loader, sampler)]
    return [generator for i, generator in enumerate(own) if generator is not None and generator not in own[:i]]


def _any_thread(batches: Any) -> bool:
    """Not for workers, whose silence only a thread can notice; nor for an iterator, which is one pass in itself."""
    return not getattr(batches, "num_workers", 0) and not isinstance(batches, Iterator)


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

    def is_of(self, other: object) -> bool:
        """True for one of the same two."""
        return isinstance(other, Compose) and self.first is other.first and self.second is other.second


def _transform_of(dataset: Any) -> Transform | None:
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return getattr(dataset, "device_transform", None)


def _length(data: Any) -> int | None:
    try:
        return len(data)
    except TypeError:  # an iterable data set without one
        return None


def _sizes(rows: int, whole: int) -> tuple[int, int]:
    return min(rows, whole), rows % whole if rows > whole else 0


def _unequal(samples: Sequence[Any], name: str) -> str:
    """Say which samples of a batch can't be stacked."""
    leaves = (tree_leaves(sample) for sample in samples)
    shapes = [[tuple(leaf.shape) for leaf in part if isinstance(leaf, (Tensor, np.ndarray))] for part in leaves]
    other = next((found for found in shapes if found != shapes[0]), None)
    if other is None:
        return f"the samples of {name} can't be stacked to a batch"
    return (
        f"the samples of {name} must be of one shape to make a batch, got {shapes[0]} and {other}. Pad them to a "
        "few lengths: DataLoader(..., collate_fn=tpufit.data.PadToBuckets([32, 64, 128]))"
    )
