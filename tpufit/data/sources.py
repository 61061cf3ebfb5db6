"""Where batches come from: one class for each form of data. `batches` makes one pass over it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, default_collate

from ..errors import DataError
from .batches import as_tensors, join
from .cache import CachedDataset
from .sampling import order, rows_of
from .workers import read

Transform = Callable[[Any], Any]


class Source(ABC):
    """Where batches come from.

    Attributes:
        batch_size: Rows per core, or None if the data make their own batches.
        device_transform: What the data want done to each batch on the device, or None.
        any_thread: Whether passes over the data may be made by different threads.
        draws: Whether the user's code runs as they are read, which may draw random numbers.
        generators: The user's own random generators that are drawn from.
        places_a_batch: How far a global batch moves the place.
    """

    batch_size: int | None = None
    device_transform: Transform | None = None
    any_thread: bool = True
    draws: bool = False
    generators: Sequence[torch.Generator] = ()
    places_a_batch: int

    @abstractmethod
    def batches(
        self, index: int, start: int = 0, skipped: Callable[[], object] = lambda: None
    ) -> Iterator[tuple[int, Any]]:
        """One pass over the data.

        Args:
            index: The pass's number, from 0; with the seed it determines the order.
            start: The place to begin at: 0, or one that came with a batch of such a pass.
            skipped: Called when what comes before `start` has been passed over, which may have drawn random numbers.

        Returns:
            Batches, each with the place right after it.
        """

    @abstractmethod
    def form(self) -> dict[str, Any]:
        """What a place depends on, in numbers: it means nothing in data of another form."""

    def batches_before(self, place: int) -> int:
        """How many global batches of a pass come before a place."""
        return -(-place // self.places_a_batch)

    def steps(self) -> int | None:
        """Batches a pass, or None if only reading them all can tell."""
        return None

    def state_dict(self) -> dict[str, Any] | None:
        """The data's own account of their place, for data that keep one."""
        return None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the data go to a place of their own account; the next pass begins there."""
        raise DataError("a place in other data than these: they keep no account of their own")


@dataclass(frozen=True)
class Plan:
    """How rows become batches.

    Attributes:
        batch_size: Rows per core.
        cores: How many cores share a batch.
        shuffle: Whether each pass has another order.
        seed: With the pass's number, what the order is a function of.
        name: What to call the data in errors.
        places: Which of the cores along the mesh are this process's (default: all).
    """

    batch_size: int
    cores: int
    shuffle: bool
    seed: int
    name: str
    places: Sequence[int] | None = None

    @property
    def rows(self) -> int:
        """Rows of a whole batch."""
        return self.batch_size * self.cores


class _Rows(Source):
    """Rows that can be read in any order. A place is a number of rows.

    Args:
        length: How many rows there are.
        plan: How they become batches.
    """

    def __init__(self, length: int, plan: Plan) -> None:
        if not length:
            raise DataError(f"{plan.name} is empty: it has no rows")
        self.length, self.plan, self.batch_size = length, plan, plan.batch_size
        self.places_a_batch = plan.rows

    @abstractmethod
    def take(self, rows: slice | NDArray[np.int64], index: int) -> Any:
        """The batch of these rows, in this order, in a pass."""

    def steps(self) -> int:
        return -(-self.length // self.plan.rows)

    def form(self) -> dict[str, Any]:
        return {"rows": self.length, "batch_size": self.plan.batch_size, "shuffle": self.plan.shuffle}

    def batches(
        self, index: int, start: int = 0, skipped: Callable[[], object] = lambda: None
    ) -> Iterator[tuple[int, Any]]:
        skipped()
        plan = self.plan
        shuffled = order(self.length, plan.seed, index) if plan.shuffle else None
        for first in range(start, self.length, plan.rows):
            end = min(first + plan.rows, self.length)
            rows: slice | NDArray[np.int64] = slice(first, end) if shuffled is None else shuffled[first:end]
            if plan.places is not None and len(plan.places) < plan.cores:
                mine = rows_of(plan.places, plan.cores, end - first)
                rows = mine + first if isinstance(rows, slice) else rows[mine]
                if not len(rows):  # a short last batch has none for the last devices
                    yield end, tree_map(lambda leaf: leaf[:0], self.take(slice(first, end), index))
                    continue
            yield end, self.take(rows, index)


class Arrays(_Rows):
    """Arrays or tensors of equal length, in a nest."""

    def __init__(self, nest: Any, plan: Plan) -> None:
        self.leaves, self.spec = tree_flatten(nest)
        lengths = [len(leaf) for leaf in self.leaves if leaf is not None]
        if len(set(lengths)) > 1:
            raise DataError(
                f"{plan.name} and what goes with it must have equally many rows, got {lengths}; their shapes are "
                f"{[tuple(leaf.shape) for leaf in self.leaves if leaf is not None]}"
            )
        super().__init__(lengths[0], plan)

    def take(self, rows: slice | NDArray[np.int64], index: int) -> Any:
        if isinstance(rows, slice):
            leaves = [None if leaf is None else leaf[rows] for leaf in self.leaves]
        else:
            places = torch.from_numpy(rows)
            leaves = [None if leaf is None else leaf.index_select(0, places) for leaf in self.leaves]
        return tree_unflatten(leaves, self.spec)


class Samples(_Rows):
    """A map-style data set, read a sample at a time."""

    draws = True

    def __init__(self, dataset: Dataset[Any], plan: Plan) -> None:
        super().__init__(len(dataset), plan)  # type: ignore[arg-type]
        self.dataset: Any = dataset
        self.device_transform = _transform_of(dataset)

    def take(self, rows: slice | NDArray[np.int64], index: int) -> Any:
        numbers = range(rows.start, rows.stop) if isinstance(rows, slice) else rows.tolist()
        if hasattr(self.dataset, "__getitems__"):
            samples = self.dataset.__getitems__(list(numbers))
        else:
            samples = [self._sample(i) for i in numbers]
        try:
            return default_collate(samples)
        except RuntimeError as error:  # what PyTorch says names no field
            raise DataError(_unequal(samples, self.plan.name)) from error

    def _sample(self, i: int) -> Any:
        try:
            return self.dataset[i]
        except Exception as error:
            if hasattr(error, "add_note"):  # from Python 3.11 on
                error.add_note(f"This was sample {i} of {self.plan.name}.")
            raise


class Cached(_Rows):
    """A `CachedDataset`, or some rows of one, read a batch at a time."""

    def __init__(self, dataset: CachedDataset, plan: Plan, some: Sequence[int] | None = None) -> None:
        super().__init__(len(dataset) if some is None else len(some), plan)
        self.dataset = dataset
        self.some = None if some is None else np.asarray(some, dtype=np.int64)
        self.device_transform = dataset.device_transform

    def take(self, rows: slice | NDArray[np.int64], index: int) -> Any:
        numbers = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        return self.dataset.get_batch(numbers if self.some is None else self.some[numbers], index)


class Loader(Source):
    """A `DataLoader` with a sampler, `cores` of its batches joined to one. A place is a number of its own batches."""

    draws = True

    def __init__(self, loader: DataLoader[Any], cores: int) -> None:
        self.loader, self.cores = loader, cores
        self.places_a_batch = cores
        self.batch_size = loader.batch_size
        self.device_transform = _transform_of(loader.dataset)
        self.any_thread = _any_thread(loader)
        self.generators = _generators(loader)
        # A loader of ours over the user's data set and sampler lets the workers make whole batches. On one core theirs
        # will do, which may have workers already.
        self._joining = _JoinedBatches(loader.batch_sampler, cores)
        self._joined = loader if cores == 1 else _over(loader, self._joining)

    def steps(self) -> int | None:
        return _length(self._joined)

    def form(self) -> dict[str, Any]:
        return {"batches": _length(self.loader), "batch_size": self.batch_size}

    def batches(
        self, index: int, start: int = 0, skipped: Callable[[], object] = lambda: None
    ) -> Iterator[tuple[int, Any]]:
        loader = self._joined
        if start:
            loader = _over(self.loader, _JoinedBatches(self.loader.batch_sampler, self.cores, start, skipped))
        for place, batch in enumerate(read(loader), 1):
            yield start + place * self.cores, batch


class Iteration(Source):
    """Any iterable of batches, `cores` of them joined to one. A place is a number of its own batches."""

    draws = True

    def __init__(self, batches: Iterable[Any], cores: int) -> None:
        self.iterable, self.cores = batches, cores
        self.places_a_batch = cores
        self.device_transform = _transform_of(getattr(batches, "dataset", batches))
        self.any_thread = _any_thread(batches)
        self.generators = _generators(batches) if isinstance(batches, DataLoader) else ()
        self._stateful: Any = (
            batches if hasattr(batches, "state_dict") and hasattr(batches, "load_state_dict") else None
        )
        self._placed = False

    def steps(self) -> int | None:
        length = _length(self.iterable)
        return None if length is None else -(-length // self.cores)

    def form(self) -> dict[str, Any]:
        return {"batches": _length(self.iterable)}

    def batches(
        self, index: int, start: int = 0, skipped: Callable[[], object] = lambda: None
    ) -> Iterator[tuple[int, Any]]:
        batches = read(self.iterable) if isinstance(self.iterable, DataLoader) else iter(self.iterable)
        if start and not self._placed:
            _skip(batches, start)  # read, and dropped: there is no other way
        skipped()
        self._placed, place = False, start
        while group := list(islice(batches, self.cores)):
            place += len(group)
            yield place, group[0] if len(group) == 1 else join([as_tensors(batch) for batch in group])

    def state_dict(self) -> dict[str, Any] | None:
        return None if self._stateful is None else self._stateful.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._stateful is None:
            super().load_state_dict(state)
        self._stateful.load_state_dict(state)
        self._placed = True


class _JoinedBatches:
    """A batch sampler that joins `cores` of another's batches, so that its own rules (drop_last, ...) stay in force."""

    def __init__(self, batches: Any, cores: int, start: int = 0, skipped: Callable[[], object] = lambda: None) -> None:
        self.batch_sampler, self.cores, self.start, self.skipped = batches, cores, start, skipped

    def __len__(self) -> int:
        return -(-(len(self.batch_sampler) - self.start) // self.cores)

    def __iter__(self) -> Iterator[list[Any]]:
        batches = iter(self.batch_sampler)
        _skip(batches, self.start)
        self.skipped()
        while group := list(islice(batches, self.cores)):
            yield [row for batch in group for row in batch]


def of_loader(loader: DataLoader[Any], cores: int, name: str) -> Source:
    """The source of a user's loader.

    Raises:
        DataError: It has no batches.
    """
    if _length(loader) == 0:
        raise DataError(f"{name} is empty: the loader has no batches")
    stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    if stateful or loader.batch_sampler is None or isinstance(loader.dataset, IterableDataset):
        source = Iteration(loader, cores)
        source.batch_size = loader.batch_size
        return source
    return Loader(loader, cores)


def _over(loader: DataLoader[Any], batch_sampler: Any) -> DataLoader[Any]:
    """The same loader with other batches."""
    workers: dict[str, Any] = {}
    if loader.num_workers:
        workers = {
            "prefetch_factor": loader.prefetch_factor,
            "persistent_workers": loader.persistent_workers,
            "multiprocessing_context": loader.multiprocessing_context,
        }
    return DataLoader(
        loader.dataset,
        batch_sampler=batch_sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        generator=loader.generator,
        **workers,
    )


def _skip(batches: Iterator[Any], count: int) -> None:
    """Take so many, and drop them."""
    next(islice(batches, count, count), None)


def _generators(loader: DataLoader[Any]) -> list[torch.Generator]:
    """The random generators that a loader and its sampler were given."""
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    own = [getattr(part, "generator", None) for part in (loader, sampler)]
    return [generator for i, generator in enumerate(own) if generator is not None and generator not in own[:i]]


def _any_thread(batches: Any) -> bool:
    """Not for workers, whose silence only a thread can notice; nor for an iterator, which is one pass in itself."""
    return not getattr(batches, "num_workers", 0) and not isinstance(batches, Iterator)


def _transform_of(dataset: Any) -> Transform | None:
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return getattr(dataset, "device_transform", None)


def _length(data: Any) -> int | None:
    try:
        return len(data)
    except TypeError:  # an iterable data set without one
        return None


def _unequal(samples: Sequence[Any], name: str) -> str:
    """Which samples of a batch can't be stacked."""
    first = [tuple(leaf.shape) for leaf in tree_leaves(samples[0]) if isinstance(leaf, (Tensor, np.ndarray))]
    for sample in samples:
        shapes = [tuple(leaf.shape) for leaf in tree_leaves(sample) if isinstance(leaf, (Tensor, np.ndarray))]
        if shapes != first:
            return (
                f"the samples of {name} must be of one shape to make a batch, got {first} and {shapes}. Pad them to a "
                "few lengths: DataLoader(..., collate_fn=tpufit.data.PadToBuckets([32, 64, 128]))"
            )
    return f"the samples of {name} can't be stacked to a batch"
