"""Arrays, tensors, datasets, loaders and iterables: whatever a user has becomes one `Stream` of global batches.

A global batch holds the rows of all cores. It is a nest (tuples, lists, dicts) of host tensors as the data gave it; the
last one of a pass is as short as it must be, and is never dropped, padded or filled up.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from ..errors import ArgumentError, DataError
from .sampling import order

DEFAULT_BATCH_SIZE = 32  # Keras's


def stream(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int | None = None,
    cores: int = 1,
    shuffle: bool = False,
    seed: int = 0,
    steps: int | None = None,
    restart: bool = False,
    name: str = "x",
) -> Stream:
    """One stream of global batches from any data.

    Args:
        x: Arrays or tensors (or a nest of them), a map-style or iterable `Dataset`, a `DataLoader`, or any iterable
            of batches.
        y: Targets, with arrays only: the other forms yield them with `x`.
        sample_weight: One weight a row, with arrays only.
        batch_size: Rows per core (default 32). Loaders and iterables bring their own.
        cores: How many cores share a global batch of `batch_size * cores` rows.
        shuffle: Whether arrays and map-style datasets are put in a new order each epoch. Loaders and iterables never.
        seed: With the epoch's number, what the order is a function of.
        steps: Global batches an epoch (default: as many as the data have). Must be given for endless data.
        restart: With `steps`, whether each epoch begins the data anew (an evaluation) or goes on where the one before
            left off (training).
        name: What to call the data in errors.

    Returns:
        The stream; nothing has been read from it yet.

    Raises:
        ArgumentError: An argument that doesn't go with this form of data.
        DataError: No rows, unequal lengths, or something that can't be batched.

    Example:
        >>> import numpy as np
        >>> data = stream(np.arange(10.0), np.arange(10), batch_size=2, cores=2)
        >>> data.steps, [len(x) for x, y in data.epoch(0)]
        (3, [4, 4, 2])
    """
    for argument, value in (("batch_size", batch_size), ("steps", steps)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ArgumentError(f"{argument} must be a whole number of at least 1, got {value!r}")
    per_core: int | None = batch_size or DEFAULT_BATCH_SIZE
    rows = (batch_size or DEFAULT_BATCH_SIZE) * cores
    source: _Source
    if isinstance(x, TensorDataset) and y is None:  # collating its rows one by one would give the same, slower
        source = _Arrays(tuple(x.tensors), rows, shuffle, seed, name)
    elif _is_arrays(x, y):
        if y is None and sample_weight is None:
            nest: tuple[Any, ...] = (x,)
        else:
            nest = (x, y) if sample_weight is None else (x, y, sample_weight)
        source = _Arrays(tree_map(_host_array, nest), rows, shuffle, seed, name)
    else:
        if y is not None or sample_weight is not None:
            raise ArgumentError(
                f"y and sample_weight go with arrays; {name} is a {type(x).__name__}, which must yield them itself, "
                "as (x, y) or (x, y, sample_weight)"
            )
        source = _source_of_batches(x, batch_size, rows, cores, shuffle, seed, name)
        if isinstance(x, DataLoader):
            per_core = x.batch_size
        elif isinstance(source, _Iterable):
            per_core = None
    return Stream(source, steps, restart, name, per_core)


def unpack(batch: Any) -> tuple[Any, Any, Any]:
    """Split a batch into x, y and sample_weight, as Keras does.

    Args:
        batch: `(x,)`, `(x, y)` or `(x, y, sample_weight)` as a tuple or list; anything else is an x by itself.

    Returns:
        `(x, y, sample_weight)`, with None for what the batch doesn't have.

    Raises:
        DataError: A tuple or list of more than three.

    Example:
        >>> unpack((1, 2)), unpack({"tokens": 1})
        ((1, 2, None), ({'tokens': 1}, None, None))

    Source: `keras.utils.unpack_x_y_sample_weight`.
    """
    if type(batch) not in (tuple, list):
        return batch, None, None
    if not 1 <= len(batch) <= 3:
        raise DataError(
            f"a batch must be (x,), (x, y) or (x, y, sample_weight), got {len(batch)} items. Several inputs go "
            "together as one x: ((a, b), y)"
        )
    x, y, sample_weight = (*batch, None, None)[:3]
    return x, y, sample_weight


def count_rows(leaves: Iterable[Any]) -> int:
    """How many rows a batch of these leaves has: the length of its first tensor that has dimensions, or 1."""
    return next((leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), 1)


def hold_out(x: Any, y: Any, sample_weight: Any, share: float) -> tuple[Any, Any, Any, Any]:
    """Keep the last rows back for validation, before any shuffling.

    Args:
        x: Arrays, or a map-style dataset.
        y: Targets, with arrays.
        sample_weight: One weight a row, with arrays.
        share: The share of the rows to keep back, between 0 and 1.

    Returns:
        `(x, y, sample_weight, validation_data)`.

    Raises:
        ArgumentError: A share out of range, or data without rows to count.

    Source: `validation_split` of `keras.Model.fit`.
    """
    if not 0 < share < 1:
        raise ArgumentError(f"validation_split must be between 0 and 1, got {share!r}")
    if y is None and isinstance(x, Dataset) and not isinstance(x, IterableDataset):
        rows = len(x)  # type: ignore[arg-type]
        first = _rows_to_train_on(rows, share)
        return Subset(x, range(first)), None, None, Subset(x, range(first, rows))
    if not _is_arrays(x, y):
        raise ArgumentError(
            f"validation_split needs arrays or a map-style dataset, got {type(x).__name__}; use validation_data"
        )
    nest = tree_map(_host_array, (x, y, sample_weight))
    first = _rows_to_train_on(count_rows(tree_leaves(nest)), share)
    train = tree_map(lambda leaf: None if leaf is None else leaf[:first], nest)
    held = tree_map(lambda leaf: None if leaf is None else leaf[first:], nest)
    return *train, held if held[2] is not None else held[:2]


def _rows_to_train_on(rows: int, share: float) -> int:
    first = int(rows * (1 - share))
    if not 0 < first < rows:
        raise DataError(f"validation_split={share} of {rows} rows leaves none to train on, or none to validate on")
    return first


class Stream:
    """Global batches, epoch by epoch.

    Attributes:
        steps: Batches an epoch, or None if only reading them all can tell.
        batch_size: Rows per core, or None if the data make their own batches.
    """

    def __init__(
        self, source: _Source, steps: int | None, restart: bool, name: str, batch_size: int | None = None
    ) -> None:
        self.batch_size = batch_size
        self._source = source
        self._limit = steps
        self._restart = restart
        self._name = name
        self._passes = 0
        self._running: Iterator[Any] | None = None  # the pass that an epoch of `steps` left unfinished
        self.steps = steps if steps is not None else source.steps()

    def epoch(self, index: int) -> Iterator[Any]:
        """The batches of one epoch, as host tensors.

        Args:
            index: The epoch's number, from 0. With the seed it determines the order.

        Raises:
            DataError: The data gave nothing at all, or ended for good before the epoch did.
        """
        if self._limit is None or self._restart:
            return self._one_pass(index)
        return self._next_batches(self._limit)

    def _one_pass(self, index: int) -> Iterator[Any]:
        empty = True
        for batch in islice(self._source.batches(index), self._limit):
            empty = False
            yield as_tensors(batch)
        if empty:
            again = " this time: an iterator can be read only once" if self._passes else ""
            raise DataError(f"{self._name} gave no batches{again}")
        self._passes += 1

    def _next_batches(self, steps: int) -> Iterator[Any]:
        """Keras's rule for `steps_per_epoch`: take up where the last epoch left off, begin anew when the data end."""
        taken = 0
        while taken < steps:
            if self._running is None:
                self._running = self._source.batches(self._passes)
                self._passes += 1
            before = taken
            for batch in islice(self._running, steps - taken):
                taken += 1
                yield as_tensors(batch)
            if taken < steps:
                self._running = None
                if taken == before:
                    raise DataError(
                        f"{self._name} gave only {taken} of the {steps} batches of this epoch and can't be read again. "
                        "Pass fewer steps, or data that can be iterated anew"
                    )


class _Source(ABC):
    """Where batches come from: `batches(index)` makes one pass over the data."""

    @abstractmethod
    def batches(self, index: int) -> Iterator[Any]: ...

    def steps(self) -> int | None:
        return None


class _Arrays(_Source):
    """Arrays or tensors of equal length, cut into batches here."""

    def __init__(self, nest: Any, rows: int, shuffle: bool, seed: int, name: str) -> None:
        self.leaves, self.spec = tree_flatten(nest)
        self.rows, self.shuffle, self.seed = rows, shuffle, seed
        lengths = [len(leaf) for leaf in self.leaves if leaf is not None]
        if len(set(lengths)) > 1:
            raise DataError(
                f"{name} and what goes with it must have equally many rows, got {lengths}; their shapes are "
                f"{[tuple(leaf.shape) for leaf in self.leaves if leaf is not None]}"
            )
        self.length = lengths[0]
        if not self.length:
            raise DataError(f"{name} is empty: it has no rows")

    def steps(self) -> int:
        return -(-self.length // self.rows)

    def batches(self, index: int) -> Iterator[Any]:
        shuffled = torch.from_numpy(order(self.length, self.seed, index)) if self.shuffle else None
        for start in range(0, self.length, self.rows):
            cut = slice(start, start + self.rows)
            if shuffled is None:
                leaves = [None if leaf is None else leaf[cut] for leaf in self.leaves]
            else:
                leaves = [None if leaf is None else leaf.index_select(0, shuffled[cut]) for leaf in self.leaves]
            yield tree_unflatten(leaves, self.spec)


class _Loader(_Source):
    """A `DataLoader`: ours over a dataset, or the user's, re-batched to global batches."""

    def __init__(self, loader: DataLoader[Any], sampler: _Order | None = None) -> None:
        self.loader, self.sampler = loader, sampler

    def steps(self) -> int | None:
        try:
            return len(self.loader)
        except TypeError:  # an iterable dataset without a length
            return None

    def batches(self, index: int) -> Iterator[Any]:
        if self.sampler is not None:
            self.sampler.epoch = index
        return iter(self.loader)


class _Iterable(_Source):
    """Any iterable of batches, `cores` of them joined to a global one."""

    def __init__(self, batches: Iterable[Any], cores: int) -> None:
        self.iterable, self.cores = batches, cores

    def steps(self) -> int | None:
        try:
            return -(-len(self.iterable) // self.cores)  # type: ignore[arg-type]
        except TypeError:
            return None

    def batches(self, index: int) -> Iterator[Any]:
        batches = iter(self.iterable)
        while group := list(islice(batches, self.cores)):
            yield group[0] if len(group) == 1 else _join([as_tensors(batch) for batch in group])


class _Order:
    """The sampler of our own loaders: rows in the order of (seed, epoch)."""

    def __init__(self, rows: int, shuffle: bool, seed: int) -> None:
        self.rows, self.shuffle, self.seed, self.epoch = rows, shuffle, seed, 0

    def __len__(self) -> int:
        return self.rows

    def __iter__(self) -> Iterator[int]:
        return iter(order(self.rows, self.seed, self.epoch).tolist() if self.shuffle else range(self.rows))


class _JoinedBatches:
    """A batch sampler that joins `cores` of another's batches, so that its own rules (drop_last, ...) stay in force."""

    def __init__(self, batches: Any, cores: int) -> None:
        self.batch_sampler, self.cores = batches, cores

    def __len__(self) -> int:
        return -(-len(self.batch_sampler) // self.cores)

    def __iter__(self) -> Iterator[list[Any]]:
        batches = iter(self.batch_sampler)
        while group := list(islice(batches, self.cores)):
            yield [row for batch in group for row in batch]


def _source_of_batches(
    data: Any, batch_size: int | None, rows: int, cores: int, shuffle: bool, seed: int, name: str
) -> _Source:
    if isinstance(data, DataLoader):
        if batch_size is not None:
            raise ArgumentError(
                f"batch_size={batch_size} given, but {name} is a DataLoader, whose own batch_size "
                f"({data.batch_size}) is the size of a batch per core. Leave batch_size out"
            )
        return _loader_source(data, cores, name)
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        length = len(data)  # type: ignore[arg-type]
        if not length:
            raise DataError(f"{name} is empty: the dataset has no rows")
        sampler = _Order(length, shuffle, seed)
        return _Loader(DataLoader(data, batch_size=rows, sampler=sampler), sampler)
    if isinstance(data, IterableDataset):  # by PyTorch's convention it yields rows, not batches
        return _Loader(DataLoader(data, batch_size=rows))
    if isinstance(data, Iterable) and not isinstance(data, (str, bytes, dict)):
        if batch_size is not None:
            warnings.warn(
                f"batch_size={batch_size} has no effect: {name} is an iterable, which makes its own batches",
                stacklevel=4,
            )
        return _Iterable(data, cores)
    raise DataError(
        f"{name} must be arrays, tensors, a Dataset, a DataLoader or an iterable of batches, got {type(data).__name__}"
    )


def _loader_source(loader: DataLoader[Any], cores: int, name: str) -> _Source:
    if _is_empty(loader):
        raise DataError(f"{name} is empty: the loader has no batches")
    if cores == 1:
        return _Loader(loader)
    if loader.batch_sampler is None or isinstance(loader.dataset, IterableDataset):
        return _Iterable(loader, cores)
    workers: dict[str, Any] = {}
    if loader.num_workers:
        workers = {
            "prefetch_factor": loader.prefetch_factor,
            "persistent_workers": loader.persistent_workers,
            "multiprocessing_context": loader.multiprocessing_context,
        }
    joined: Any = _JoinedBatches(loader.batch_sampler, cores)
    return _Loader(
        DataLoader(
            loader.dataset,
            batch_sampler=joined,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            generator=loader.generator,
            **workers,
        )
    )


def _is_empty(loader: DataLoader[Any]) -> bool:
    try:
        return len(loader) == 0
    except TypeError:
        return False


def _is_arrays(x: Any, y: Any) -> bool:
    """Whether these are arrays rather than something that yields batches."""
    if isinstance(x, (Tensor, np.ndarray)) or _is_numbers(x):
        return True
    if isinstance(x, dict) or type(x) is tuple or (isinstance(x, (tuple, list)) and y is not None):
        return True
    return isinstance(x, list) and bool(x) and all(isinstance(leaf, (Tensor, np.ndarray)) for leaf in x)


def _is_numbers(x: Any) -> bool:
    return isinstance(x, list) and bool(x) and all(isinstance(leaf, (int, float)) for leaf in x)


def _host_array(leaf: Any) -> Any:
    """A tensor with rows, from an array; it shares the array's memory where it can."""
    if leaf is None:
        return None
    try:
        tensor = leaf if isinstance(leaf, Tensor) else torch.from_numpy(np.array(leaf, copy=None, order="C"))
    except (TypeError, ValueError) as error:
        raise DataError(f"arrays of numbers are needed, got {type(leaf).__name__}: {error}") from error
    if not tensor.dim():
        raise DataError(f"arrays must have rows, got a single number ({leaf!r})")
    return tensor.detach().cpu()


def as_tensors(batch: Any) -> Any:
    """The batch with its arrays and numbers as tensors. Strings and other objects stay as they are."""
    if is_plain(batch):
        return tuple(map(_as_tensor, batch))
    return tree_map(_as_tensor, batch)


def is_plain(batch: Any) -> bool:
    """Whether a batch is a tuple of tensors, as most are. Walking any nest takes longer than sending a small batch."""
    return type(batch) is tuple and all(type(leaf) is Tensor for leaf in batch)


def _as_tensor(leaf: Any) -> Any:
    if isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype.kind in "biufc":
        leaf = torch.from_numpy(np.ascontiguousarray(leaf)) if isinstance(leaf, np.ndarray) else torch.tensor(leaf)
    elif isinstance(leaf, (bool, int, float)):
        leaf = torch.tensor(leaf)
    if isinstance(leaf, Tensor) and leaf.dtype is torch.float64:
        return leaf.float()  # NumPy's default, and a TPU has no float64
    return leaf


def _join(parts: Sequence[Any]) -> Any:
    """One batch of the rows of several, which must be alike but for their rows."""
    first = parts[0]
    if any(type(part) is not type(first) for part in parts):
        raise DataError(
            f"batches must all be of one structure, got {[type(part).__name__ for part in parts]} in one place"
        )
    if isinstance(first, Tensor):
        return torch.cat([part if part.dim() else part[None] for part in parts])
    if isinstance(first, dict):
        return type(first)((key, _join([part[key] for part in parts])) for key in first)
    if isinstance(first, list) and not any(isinstance(leaf, Tensor) for leaf in tree_leaves(first)):
        return [item for part in parts for item in part]  # a list of strings or objects, one a row
    if isinstance(first, (tuple, list)):
        columns = [_join(column) for column in zip(*parts, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)
    return first
