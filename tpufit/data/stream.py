"""`stream`: arrays, data sets, loaders and iterables become one `Stream` of global batches.

A global batch holds the rows of all cores. It is a nest (tuples, lists, dicts) of host tensors as the data gave it; the
last one of a pass is as short as it must be, and is never dropped, padded or filled up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Generator
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from ..errors import ArgumentError, DataError, counted, require_choice, require_whole
from ..utils.kept import Kept
from ..utils.random import RNGState
from ..utils.users_code import warn
from .batches import as_tensors, count_rows, host_array, kind_of
from .cache import CachedDataset
from .forms import host_arrays, is_arrays, is_keras_dataset, is_map_style, is_sparse_matrix
from .inline import Pace
from .nan import NaNWatch
from .per_host import PerHost, Share
from .position import Position, PositionLog
from .sources import Arrays, BatchPlan, Cached, Iteration, Samples, Source, Transform, of_loader
from .texts import RowsOfTokens

DEFAULT_BATCH_SIZE = 32  # Keras's
GLOBAL = "global"  # the batch size of data whose batches are for all cores together


def stream(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int | str | None = None,
    cores: int = 1,
    shuffle: bool | str = False,
    seed: int = 0,
    steps: int | None = None,
    restart: bool = False,
    local_shards: Sequence[int] | None = None,
    name: str = "x",
) -> Stream:
    """Make a stream of global batches from any data.

    Args:
        x: Arrays, tensors or tables (or a nest of them), a map-style or iterable `Dataset`, another object with
            `__len__` and `__getitem__`, a list of rows, a `DataLoader`, or any iterable of batches.
        y: Targets, with arrays only: the other forms yield them with `x`.
        sample_weight: One weight a row, with arrays only.
        batch_size: Rows per core (default 32). Loaders and iterables bring their own batches, one for each core, or
            with `"global"` one for all cores together.
        cores: The number of cores that share a global batch of `batch_size * cores` rows.
        shuffle: True to put arrays and map-style data sets in a new order each epoch, `"batch"` to do so only within
            each `batch_size` rows; loaders and iterables never are.
        seed: Determines the order, with the epoch's number.
        steps: Global batches an epoch (default: as many as the data have). Must be given for endless data.
        restart: With `steps`, True to begin each epoch with the first batch (an evaluation), False to go on where the
            epoch before left off (training).
        local_shards: The shards of a batch that this process reads, one a core (default: all). With fewer, batches are
            `LocalBatch`s. Only iterables are read whole, unless they are `PerHost`.
        name: The data's name in errors.

    Returns:
        The stream; nothing has been read from it yet.

    Raises:
        ArgumentError: An argument doesn't go with this form of data.
        DataError: There are no rows, or their numbers differ, or the data can't be batched.

    Example:
        >>> import numpy as np
        >>> data = stream(np.arange(10.0), np.arange(10), batch_size=2, cores=2)
        >>> data.steps, [len(x) for x, y in data.epoch(0)]
        (3, [4, 4, 2])
    """
    whole = isinstance(batch_size, str) and batch_size == GLOBAL
    rows = None if isinstance(batch_size, str) and whole else batch_size
    if rows is not None:
        rows = require_whole("batch_size", rows, otherwise=repr(GLOBAL))
    steps = None if steps is None else require_whole("steps", steps)
    require_choice("shuffle", shuffle, True, False, "batch")
    share = None if local_shards is None or len(local_shards) == cores else Share(tuple(local_shards), cores)
    plan = BatchPlan(rows or DEFAULT_BATCH_SIZE, cores, shuffle, seed, name, share)
    source: Source
    if whole and (is_arrays(x, y) or is_map_style(x)):
        raise ArgumentError(
            f"batch_size={GLOBAL!r} goes with a DataLoader or an iterable of batches, and {name} is "
            f"{kind_of(x)}: give the number of rows per core"
        )
    if isinstance(x, TensorDataset) and y is None:  # collating its rows one by one would give the same, slower
        source = Arrays(tree_map(host_array, x.tensors), plan)
    elif is_arrays(x, y):
        if y is None and sample_weight is None:
            nest: tuple[Any, ...] = (x,)
        else:
            nest = (x, y) if sample_weight is None else (x, y, sample_weight)
        in_memory = not any(isinstance(leaf, np.memmap) for leaf in tree_leaves(nest))
        source = Arrays(host_arrays(nest, name), plan, in_memory)
    elif is_keras_dataset(x):
        raise DataError(
            f"{name} is a {type(x).__name__} of Keras, whose items are batches: pass a generator of them, or a Dataset "
            "or a DataLoader of its rows"
        )
    elif is_sparse_matrix(x):
        raise DataError(f"{name} is a sparse matrix ({type(x).__name__}): pass {name}.toarray()")
    elif y is not None or sample_weight is not None:
        raise ArgumentError(
            f"y and sample_weight go with arrays; {name} is a {type(x).__name__}, which must yield them itself, "
            "as (x, y) or (x, y, sample_weight)"
        )
    elif isinstance(x, (CachedDataset, RowsOfTokens)):
        source = Cached(x, plan)
    elif isinstance(x, Subset) and isinstance(x.dataset, (CachedDataset, RowsOfTokens)):
        source = Cached(x.dataset, plan, x.indices)
    elif is_map_style(x):
        source = Samples(x, plan)
    else:
        source = _of_batches(x, rows, plan, whole)
    return Stream(source, steps, restart, name, cores, whole)


def train_validation_split(x: Any, y: Any, sample_weight: Any, share: float) -> tuple[Any, Any, Any, Any]:
    """Keep the last rows back for validation, before any shuffling.

    Args:
        x: Arrays, or a map-style dataset.
        y: Targets, with arrays.
        sample_weight: One weight a row, with arrays.
        share: The share of the rows to keep back, between 0 and 1.

    Returns:
        `(x, y, sample_weight, validation_data)`.

    Raises:
        ArgumentError: The share is out of range, or the data have no rows to count.

    Source: `validation_split` of `keras.Model.fit`.
    """
    if not 0 < share < 1:
        raise ArgumentError(f"validation_split must be between 0 and 1, got {share!r}")
    if y is None and is_map_style(x):
        rows = len(x)
        first = _rows_to_train_on(rows, share)
        return Subset(x, range(first)), None, None, Subset(x, range(first, rows))
    if not is_arrays(x, y):
        raise ArgumentError(
            f"validation_split needs arrays or a map-style dataset, got {type(x).__name__}; use validation_data"
        )
    nest = host_arrays((x, y, sample_weight), "x")
    first = _rows_to_train_on(count_rows(tree_leaves(nest)), share)
    train = tree_map(lambda leaf: None if leaf is None else leaf[:first], nest)
    held = tree_map(lambda leaf: None if leaf is None else leaf[first:], nest)
    return *train, held if held[2] is not None else held[:2]


class Stream:
    """Gives global batches, epoch by epoch.

    Attributes:
        steps: The number of batches in an epoch, or None if only reading them all can tell.
        batch_size: Rows per core, or None if the data make their own batches.
        is_global: True if each batch of the data is for all cores together.
        device_transform: The data's own function of a batch, to be run on the device; or None.
        pace: Decides if the data are read without a thread.
        keeps_draws: True to keep the host's random numbers in positions, if reading the data may draw some.
    """

    def __init__(
        self, source: Source, steps: int | None, restart: bool, name: str, cores: int = 1, is_global: bool = False
    ) -> None:
        self.batch_size = None if is_global else source.batch_size
        self.is_global = is_global
        self.device_transform: Transform | None = source.device_transform
        self.steps = steps if steps is not None else source.steps()
        self._source = source
        self._limit = steps
        self._name = name
        self._cores = cores
        self._goes_on = steps is not None and not restart
        self.pace = Pace(source.in_memory, source.any_thread and not self._goes_on)
        self.keeps_draws = False
        self._nan = NaNWatch(name)
        self._log = PositionLog(source)
        self._rest: Iterator[Any] | None = None  # of the pass that an epoch of `steps` left unfinished

    @property
    def generators(self) -> Sequence[Generator]:
        """The user's own random generators that the data draw from."""
        return self._source.generators

    @property
    def facts(self) -> Mapping[str, str]:
        """What a report says of the data, by name."""
        return self._source.facts

    @property
    def per_host(self) -> bool:
        """True if each host has batches of its own, whose number may differ."""
        return self._source.per_host

    @property
    def foreseen(self) -> bool:
        """True if the shapes of all batches are known: `sizes`, and no code of the user's makes the rows."""
        return self.sizes() is not None and not self.per_host and not self._source.runs_users_code

    @property
    def passed(self) -> bool:
        """True once there has been a pass."""
        return self.pace.passed

    def epoch(self, index: int) -> Iterator[Any]:
        """Give the batches of one epoch, as host tensors; after `load_state_dict` those that are left of it.

        Args:
            index: The epoch's number, from 0. With the seed it determines the order.

        Raises:
            DataError: The data gave nothing at all, or ended for good before the epoch did.
        """
        begin = self._log.begin_epoch(replace(self._log.last, batches=0) if self._goes_on else Position(0, index))
        batches = self._next_batches(begin) if self._goes_on else self._one_pass(begin)
        if not self._nan.over and self._source.in_memory:
            self._nan.look_at(self._source.rows())
        return batches if self._nan.over else self._nan.through(batches)

    def keep(self) -> None:
        """Note from now on what the user's objects that read the data keep: counts, random generators and the like."""
        if self._log.kept is None and self._source.runs_users_code:
            self._log.kept = Kept(self._source.objects())
            self._source.keep()

    def lost(self) -> list[str]:
        """The names of what those objects have changed, and no position can hold."""
        return [] if self._log.kept is None else self._log.kept.lost()

    def first(self) -> Any:
        """Read the first batch aside from any epoch, which changes nothing; None if only an epoch can give it."""
        before = RNGState.now(self._source.generators)
        try:
            return as_tensors(self._source.first())
        finally:
            before.restore(self._source.generators)

    def sizes(self) -> tuple[int, int] | None:
        """Return the rows of a whole global batch, and of an epoch's shorter last one or 0.

        Returns:
            Both numbers, or None if only reading all batches can tell.
        """
        sizes = self._source.sizes()
        steps = self._source.steps()
        if sizes is None or self._limit is None or steps is None or (self._goes_on and self._limit % steps):
            return sizes
        return sizes if self._limit >= steps else (sizes[0], 0)

    def limit(self, limit: int | float, name: str = "limit") -> None:
        """Read only the first batches of each epoch.

        Args:
            limit: Their number, or as a float their share.
            name: The name of the argument, for errors (default `"limit"`).

        Raises:
            ArgumentError: The limit is neither a number of at least 1 nor a share between 0 and 1, or it is a share of
                an unknown number.
        """
        if isinstance(limit, float) and 0 < limit <= 1:
            if self.steps is None:
                raise ArgumentError(f"{name}={limit}: {self._name} doesn't say how many batches it has; give a number")
            limit = max(1, round(limit * self.steps))
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise ArgumentError(f"{name} must be a number of batches from 1, or a share such as 0.1, got {limit!r}")
        self._limit = limit if self.steps is None else min(limit, self.steps)
        self.steps = self.steps and self._limit  # of data that may have fewer, nobody knows

    def state_dict(self, batches: int | None) -> dict[str, Any]:
        """The position after some batches of this epoch, which may be fewer than have been read ahead.

        Args:
            batches: The number of batches that have been used, of those that `epoch` gave, with those before a
                resumption. None: the epoch is over, and the position is where the next one begins.

        Returns:
            Numbers and lists of them, and the data's own account of their position if they keep one.

        Raises:
            ArgumentError: So many have not been read.
        """
        position = None if batches is None else self._log.after(batches)
        if batches is None:
            own = self._source.state_dict()
            if not self._goes_on:
                generators = [generator.get_state().numpy().tobytes().hex() for generator in self.generators]
                return {"own": own, "generators": generators, "kept": self._log.now_kept()}
            position = replace(self._log.last, batches=0, own=own)
        if position is None:
            raise ArgumentError(f"{self._name} was not read as far as batch {batches} in this epoch")
        return position.state_dict() | {"form": self._form(), "cores": self._cores}

    def load_state_dict(self, state: Mapping[str, Any]) -> int:
        """Begin the next epoch at a position.

        Rows of arrays and data sets are found in constant time; a loader's sampler is asked for the numbers that it
        would have given; batches of an iterable are read and dropped, unless it has `load_state_dict` itself.

        Args:
            state: The state that `state_dict` gave, of a stream over the same data with the same seed. The number of
                cores may be another.

        Returns:
            The number of batches of the epoch that come before, on these cores.

        Raises:
            DataError: It is a position in other data.
        """
        position = Position.of(state)
        if position.offset:
            self._check_form(state.get("form") or {})
        elif position.begun is not None and len(position.begun.own) != len(self.generators):
            position = replace(position, begun=replace(position.begun, own=()))  # of other data
        if state.get("cores", self._cores) != self._cores and not self._goes_on:
            position = replace(position, batches=self._source.batches_before(position.offset))
        if "number" in state:
            self._log.resumed = position
        else:  # between two passes
            self._log.set_kept(position.kept)
            for generator, given in zip(self.generators, state.get("generators", []), strict=False):
                generator.set_state(torch.frombuffer(bytearray.fromhex(given), dtype=torch.uint8))
        self._rest = None
        if position.own is not None:
            self._source.load_state_dict(position.own)
        return position.batches

    def _form(self) -> dict[str, Any]:
        return self._source.form() | {"generators": len(self.generators)}

    def _check_form(self, form: Mapping[str, Any]) -> None:
        now = self._form()
        others = [
            f"{name} {then!r} then, {now.get(name)!r} now" for name, then in form.items() if then != now.get(name)
        ]
        if others:
            raise DataError(
                f"{self._name} can't be gone on with in the middle of an epoch, because it isn't what it was: "
                f"{', '.join(others)}"
            )

    def _one_pass(self, begin: Position) -> Iterator[Any]:
        left = None if self._limit is None else self._limit - begin.batches
        if left == 0:  # resumed after the last batch: nothing is read that would skip to there
            self._log.go_to(begin)
            return
        yield from islice(self._log.read(begin, self.keeps_draws), left)
        if self._log.last.batches == 0 and not begin.offset:
            again = " this time: an iterator can be read only once" if self._log.passes else ""
            raise DataError(f"{self._name} gave no batches{again}")
        self._warn_if_short()
        self._log.passes += 1

    def _next_batches(self, position: Position) -> Iterator[Any]:
        """Take up the data where the last epoch left off. The epoch ends with them, as with Keras's `steps_per_epoch`.

        Only an epoch that would have no batch at all begins another pass.
        """
        assert self._limit is not None
        before = position.batches
        for begin in (position, Position(before, position.number + 1)):
            begins = self._rest is None and not begin.offset
            self._rest = self._rest or self._log.read(begin, self.keeps_draws)
            yield from islice(self._rest, self._limit - before)
            if self._log.last.batches:
                break
            self._rest = None
            if begins:
                raise DataError(
                    f"{self._name} gave no batches for this epoch, and can't be read again. Pass fewer epochs or "
                    "steps, or data that can be iterated again"
                )
        self._warn_if_short()

    def _warn_if_short(self) -> None:
        """Warn if the data ended before the epoch had the steps that were asked for."""
        taken = self._log.last.batches
        if self._limit is not None and self.steps == self._limit > taken:
            warn(
                f"{self._name} ran out of data after {taken} of {self._limit} steps, with which this epoch ends. Ask "
                "for fewer steps, or pass data with more batches"
            )


def _of_batches(data: Any, batch_size: int | str | None, plan: BatchPlan, whole: bool) -> Source:
    """The source of data that bring their own batches: `whole` ones, or one for each core."""
    joined = 1 if whole else plan.cores
    name = plan.name
    share = plan.share
    if isinstance(data, PerHost):
        return Iteration(data, joined, name, share)
    if isinstance(data, DataLoader) and batch_size is not None:
        raise ArgumentError(
            f"batch_size={batch_size} given, but {name} is a DataLoader, whose own batch_size "
            f"({data.batch_size}) is the size of a batch per core. Leave batch_size out, or pass batch_size={GLOBAL!r} "
            "if its batches are for all cores together"
        )
    if isinstance(data, IterableDataset) and not whole:  # by PyTorch's convention it yields rows
        data = DataLoader(data, batch_size=plan.batch_size)
    if isinstance(data, DataLoader):
        return of_loader(data, joined, name, share)
    if isinstance(data, Iterable) and not isinstance(data, (str, bytes, dict)):
        if batch_size is not None:
            warn(
                f"batch_size={batch_size} has no effect: {name} is an iterable, which makes its own batches",
            )
        return Iteration(data, joined, name, share)
    raise DataError(
        f"{name} must be arrays, tensors, a Dataset, a DataLoader or an iterable of batches, got {kind_of(data)}"
    )


def _rows_to_train_on(rows: int, share: float) -> int:
    first = int(rows * (1 - share))
    if not 0 < first < rows:
        raise DataError(
            f"validation_split={share} of {counted(rows, 'row')} leaves none to train on, or none to validate on"
        )
    return first
