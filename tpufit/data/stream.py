"""`stream`: turns arrays, data sets, loaders and iterables into one `Stream` of global batches.

A global batch has the rows of all cores. It is a nest (tuples, lists, dicts) of host tensors, as the data have it. A
pass's last batch may be shorter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from torch import Generator
from torch.utils.data import DataLoader, Dataset, Subset

from ..errors import ArgumentError, DataError, require_choice, require_count_or_share, require_whole
from ..utils.random import RNGState, state_from_hex, state_to_hex
from ..utils.saved_attributes import SavedAttributes
from ..utils.user_code import warn
from .data_position import Position, PositionLog
from .inline_reader import Pace
from .nan_watch import NaNWatch
from .padding import pad_batch
from .per_host import PerHost, Share
from .sources import Arrays, BatchPlan, Cached, Iteration, Samples, Source, Transform, make_loader_source
from .to_tensors import as_tensors
from .user_data import Form, UserData, recognize

DEFAULT_BATCH_SIZE = 32  # Keras's
GLOBAL = "global"  # the batch size of data whose batches are for all cores together
SHUFFLES = (True, False, "batch")


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
        y: Targets, with arrays only (default: none): the other forms yield them with `x`.
        sample_weight: One weight per row, with arrays only (default: none).
        batch_size: Rows per core (default 32). Loaders and iterables make their own batches, one per core, or with
            `"global"` one for all cores together.
        cores: The number of cores that share a global batch of `batch_size * cores` rows (default 1).
        shuffle: True shuffles arrays and map-style data sets each epoch, `"batch"` only within each `batch_size` rows,
            False (default) never; loaders and iterables are never shuffled.
        seed: The seed, which with the epoch's number determines the order (default 0).
        steps: Global batches per epoch (default: as many as the data have). Required for endless data.
        restart: With `steps`: True begins each epoch with the first batch (evaluation), False (default) continues where
            the previous epoch ended (training).
        local_shards: The shards of a batch that this process reads, one per core (default: all). With fewer, batches
            are `LocalBatch`s, and only iterables other than `PerHost` are read whole.
        name: The data's name in errors (default `"x"`).

    Returns:
        The stream, from which nothing has been read yet.

    Raises:
        ArgumentError: An argument doesn't go with this form of data.
        DataError: There are no rows, the numbers of rows differ, or the data can't be batched.

    Example:
        >>> import numpy as np
        >>> data = stream(np.arange(10.0), np.arange(10), batch_size=2, cores=2)
        >>> data.steps, [len(x) for x, y in data.epoch(0)]
        (3, [4, 4, 2])
    """
    require_choice("shuffle", shuffle, *SHUFFLES)
    return make_stream(
        recognize(x, y, sample_weight, name),
        batch_size=require_batch_size("batch_size", batch_size, GLOBAL),
        cores=cores,
        shuffle=shuffle,
        seed=seed,
        steps=None if steps is None else require_whole("steps", steps),
        restart=restart,
        local_shards=local_shards,
    )


def make_stream(
    data: UserData,
    *,
    batch_size: int | str | None = None,
    cores: int = 1,
    shuffle: bool | str = False,
    seed: int = 0,
    steps: int | None = None,
    restart: bool = False,
    local_shards: Sequence[int] | None = None,
) -> Stream:
    """Make a stream of recognized data, see `stream`; the caller has checked the arguments."""
    whole = batch_size == GLOBAL
    rows = batch_size if isinstance(batch_size, int) else None
    share = None if local_shards is None or len(local_shards) == cores else Share(tuple(local_shards), cores)
    plan = BatchPlan(rows or DEFAULT_BATCH_SIZE, cores, shuffle, seed, data.name, share)
    return Stream(_make_source(data, plan, rows, whole), steps, restart, data.name, cores, whole)


def require_batch_size(name: str, value: Any, *names: str) -> int | str | None:
    """Return a batch size: a whole number, one of some names, or None. Raise an `ArgumentError` for other values."""
    if value is None or (isinstance(value, str) and value in names):
        return value
    return require_whole(name, value, otherwise=" or ".join(map(repr, names)))


def require_limit(name: str, value: object) -> int | float:
    """Return a limit on the batches of an epoch: their number or share. Raise an `ArgumentError` for other values."""
    return require_count_or_share(name, value, "a whole number of batches of at least 1, or a share such as 0.1")


def _make_source(data: UserData, plan: BatchPlan, batch_size: int | None, whole: bool) -> Source:
    """Make the source of the data's batches. If the data make their own, each is for all cores (`whole`) or for one."""
    x: Any = data.x
    name = data.name
    if whole and data.has_rows:
        raise ArgumentError(
            f"batch_size={GLOBAL!r} goes with a DataLoader or an iterable of batches, and {name} has rows: give the "
            "number of rows per core"
        )
    if data.form is Form.ARRAYS:
        return Arrays(data.arrays, plan, data.in_memory)
    if data.form is Form.CACHED:
        some = x.indices if isinstance(data.x, Subset) else None
        return Cached(x if some is None else x.dataset, plan, some)
    if data.form is Form.SAMPLES:
        return Samples(x, plan)
    joined = 1 if whole else plan.cores
    if data.form is Form.ROW_ITERABLE and not whole:
        return make_loader_source(DataLoader(x, batch_size=plan.batch_size), joined, name, plan.share)
    if batch_size is not None and data.form is Form.LOADER:
        raise ArgumentError(
            f"batch_size={batch_size} given, but {name} is a DataLoader, whose own batch_size "
            f"({x.batch_size}) is the size of a batch per core. Leave batch_size out, or pass batch_size={GLOBAL!r} "
            "if its batches are for all cores together"
        )
    if data.form is Form.LOADER:
        return make_loader_source(x, joined, name, plan.share)
    if batch_size is not None and not isinstance(x, PerHost):
        warn(f"batch_size={batch_size} has no effect: {name} is an iterable, which makes its own batches")
    return Iteration(x, joined, name, plan.share)


def train_validation_split(x: Any, y: Any, sample_weight: Any, share: float) -> tuple[Any, Any, Any, Any]:
    """Split off the last rows for validation, before any shuffling.

    Args:
        x: Arrays, or a map-style dataset.
        y: Targets, with arrays.
        sample_weight: One weight per row, with arrays.
        share: The share of the rows to split off, between 0 and 1.

    Returns:
        `(x, y, sample_weight, validation_data)`.

    Raises:
        ArgumentError: The share is out of range, or the data's rows can't be counted.
        DataError: A part would have no rows.

    Example:
        >>> import numpy as np
        >>> x, y, _, (x_val, y_val) = train_validation_split(np.arange(10.0), np.arange(10), None, 0.2)
        >>> y_val
        tensor([8, 9])

    Source: `validation_split` of `keras.Model.fit`.
    """
    if not 0 < share < 1:
        raise ArgumentError(f"validation_split must be between 0 and 1, got {share!r}")
    train, rest = recognize(x, y, sample_weight).split(share)
    weight = () if rest.sample_weight is None else (rest.sample_weight,)
    held_out = rest.x if isinstance(rest.x, Dataset) else (rest.x, rest.y, *weight)
    return train.x, train.y, train.sample_weight, held_out


class Stream:
    """Yields global batches, epoch by epoch.

    Attributes:
        steps: The number of batches in an epoch, or None if unknown before reading all.
        batch_size: Rows per core, or None if the data make their own batches.
        is_global: True if each of the data's batches is for all cores together.
        device_transform: The data's function of a batch, which runs on the device; or None.
        pace: Decides whether the data are read without a thread.
        keeps_draws: True to record the host's random state in positions, if reading the data may draw.

    Example:
        >>> import numpy as np
        >>> data = stream(np.arange(10.0), batch_size=4)
        >>> data.steps, [x.tolist() for (x,) in data.epoch(0)]
        (3, [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0], [8.0, 9.0]])
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
        self._continues = steps is not None and not restart
        self.pace = Pace(source.in_memory, source.any_thread and not self._continues)
        self.keeps_draws = False
        self._padding: tuple[int, int] | None = None  # the rows to pad a short batch to, and the ignored label
        self._nan = NaNWatch(name)
        self._log = PositionLog(source)
        self._unfinished: Iterator[Any] | None = None  # of the pass that an epoch of `steps` left incomplete

    @property
    def generators(self) -> Sequence[Generator]:
        """The user's random generators that the data draw from."""
        return self._source.generators

    @property
    def facts(self) -> Mapping[str, str]:
        """Facts about the data for a report, by name."""
        return self._source.facts

    @property
    def per_host(self) -> bool:
        """True if batches, and their number, may differ by host."""
        return self._source.per_host

    @property
    def may_overwrite(self) -> bool:
        """True if reading a batch may overwrite the memory of earlier batches."""
        return self._source.may_overwrite

    @property
    def foreseen(self) -> bool:
        """True if all batch shapes are known in advance: `sizes` is known, and no user code makes the rows."""
        return self.sizes() is not None and not self.per_host and not self._source.runs_users_code

    @property
    def passed(self) -> bool:
        """True once there has been a pass."""
        return self.pace.passed

    def epoch(self, index: int) -> Iterator[Any]:
        """Yield the batches of one epoch as host tensors; after `load_state_dict` the remaining batches.

        Args:
            index: The epoch's number, from 0. With the seed it determines the order.

        Raises:
            DataError: The data yielded no batches, or ended before the epoch did and can't be read again.
        """
        begin = self._log.begin_epoch(replace(self._log.last, batches=0) if self._continues else Position(0, index))
        batches = self._next_batches(begin) if self._continues else self._one_pass(begin)
        if not self._nan.finished and self._source.in_memory:
            self._nan.check_arrays(self._source.rows())
        batches = batches if self._nan.finished else self._nan.check_batches(batches)
        return batches if self._padding is None else (pad_batch(batch, *self._padding) for batch in batches)

    def track_objects(self) -> None:
        """Record from now on the state of the user's objects that read the data: counters, random generators, ..."""
        if self._log.attributes is None and self._source.runs_users_code:
            self._log.attributes = SavedAttributes(self._source.objects())
            self._source.track_workers()

    def list_lost_values(self) -> list[str]:
        """Return the names of values that these objects have changed and positions can't save."""
        return [] if self._log.attributes is None else self._log.attributes.list_unsaved()

    def read_first(self) -> Any:
        """Read the first batch without side effects; None if only an epoch can read it."""
        before = RNGState.now(self._source.generators)
        try:
            return as_tensors(self._source.read_first())
        finally:
            before.restore(self._source.generators)

    def sizes(self) -> tuple[int, int] | None:
        """Return the rows of a full global batch, and of an epoch's shorter last batch or 0.

        Returns:
            Both numbers, or None if unknown before reading all batches.
        """
        sizes = self._source.sizes()
        steps = self._source.steps()
        if self._padding is not None:
            return self._padding[0], 0
        if sizes is None or self._limit is None or steps is None or (self._continues and self._limit % steps):
            return sizes
        return sizes if self._limit >= steps else (sizes[0], 0)

    def pad(self, label: int) -> None:
        """Pad a short last batch with rows of an ignored label, see `pad_batch`. `sizes` must be known."""
        whole, _ = self.sizes() or (0, 0)
        self._padding = whole, label

    def drop_short(self) -> None:
        """Drop the short last batch of each epoch. `sizes` must be known.

        Raises:
            ArgumentError: With `steps_per_epoch` the short batch may be inside an epoch.
        """
        if self._continues or self.steps is None:
            raise ArgumentError(
                "last_batch='drop' drops the last batch of an epoch, but with steps_per_epoch the short batch may be "
                "inside an epoch: pass only one of steps_per_epoch and last_batch"
            )
        self.limit(self.steps - 1)

    def limit(self, limit: int | float, name: str = "limit") -> None:
        """Read only the first batches of each epoch.

        Args:
            limit: The number of batches, or as a float their share.
            name: The name of the argument, for errors (default `"limit"`).

        Raises:
            ArgumentError: The limit is neither a number of at least 1 nor a share between 0 and 1; or it is a share,
                but the number of batches is unknown.
        """
        limit = require_limit(name, limit)
        if isinstance(limit, float):
            if self.steps is None:
                raise ArgumentError(f"{name}={limit}: {self._name} doesn't say how many batches it has; give a number")
            limit = max(1, round(limit * self.steps))
        self._limit = limit if self.steps is None else min(limit, self.steps)
        self.steps = self.steps and self._limit  # None if the data may have fewer

    def state_dict(self, batches: int | None) -> dict[str, Any]:
        """Return the position after some batches of this epoch; more may have been read ahead.

        Args:
            batches: The number of the epoch's batches that have been used, including those before a resumption. None:
                the epoch is over, and the position is the next epoch's start.

        Returns:
            Numbers, lists of numbers, and the data's own `state_dict`, if they have one.

        Raises:
            ArgumentError: Fewer batches have been read.
        """
        position = None if batches is None else self._log.position_after(batches)
        if batches is None:
            own = self._source.state_dict()
            if not self._continues:
                generators = [state_to_hex(generator.get_state()) for generator in self.generators]
                return {"own": own, "generators": generators, "objects": self._log.current_state()}
            position = replace(self._log.last, batches=0, own=own)
        if position is None:
            raise ArgumentError(f"{self._name} was not read up to batch {batches} in this epoch")
        return position.state_dict() | {"form": self._fingerprint(), "cores": self._cores}

    def load_state_dict(self, state: Mapping[str, Any]) -> int:
        """Begin the next epoch at a position.

        Arrays and data sets seek to the row in constant time; a loader's sampler repeats its indices; an iterable's
        batches are read and dropped, unless it has `load_state_dict`.

        Args:
            state: The state that `state_dict` returned, of a stream over the same data with the same seed. The number
                of cores may differ.

        Returns:
            The number of the epoch's batches before the position, on these cores.

        Raises:
            DataError: The position is in other data.
        """
        position = Position.of(state)
        if position.offset:
            self._check_fingerprint(state.get("form") or {})
        elif position.begun is not None and len(position.begun.own) != len(self.generators):
            position = replace(position, begun=replace(position.begun, own=()))  # recorded with other data
        if state.get("cores", self._cores) != self._cores and not self._continues:
            position = replace(position, batches=self._source.batches_before(position.offset))
        if "number" in state:
            self._log.resumed = position
        else:  # between two passes
            self._log.restore_objects(position.objects)
            for generator, given in zip(self.generators, state.get("generators", []), strict=False):
                generator.set_state(state_from_hex(given))
        self._unfinished = None
        if position.own is not None:
            self._source.load_state_dict(position.own)
        return position.batches

    def _fingerprint(self) -> dict[str, Any]:
        return self._source.fingerprint() | {"generators": len(self.generators)}

    def _check_fingerprint(self, recorded: Mapping[str, Any]) -> None:
        now = self._fingerprint()
        others = [
            f"{name} {then!r} then, {now.get(name)!r} now" for name, then in recorded.items() if then != now.get(name)
        ]
        if others:
            raise DataError(
                f"{self._name} can't be resumed in the middle of an epoch, because the data have changed: "
                f"{', '.join(others)}"
            )

    def _one_pass(self, begin: Position) -> Iterator[Any]:
        remaining = None if self._limit is None else self._limit - begin.batches
        if remaining == 0:  # resumed after the last batch: nothing is read
            self._log.restore(begin)
            return
        yield from islice(self._log.read(begin, self.keeps_draws), remaining)
        if self._log.last.batches == 0 and not begin.offset:
            again = " this time: an iterator can be read only once" if self._log.passes else ""
            raise DataError(f"{self._name} yielded no batches{again}")
        self._warn_if_short()
        self._log.passes += 1

    def _next_batches(self, position: Position) -> Iterator[Any]:
        """Continue the data where the last epoch ended, until the data end, as with Keras's `steps_per_epoch`.

        A new pass begins only if the epoch would have no batch at all.
        """
        assert self._limit is not None
        before = position.batches
        for begin in (position, Position(before, position.number + 1)):
            begins = self._unfinished is None and not begin.offset
            self._unfinished = self._unfinished or self._log.read(begin, self.keeps_draws)
            yield from islice(self._unfinished, self._limit - before)
            if self._log.last.batches:
                break
            self._unfinished = None
            if begins:
                raise DataError(
                    f"{self._name} yielded no batches for this epoch, and can't be read again. Pass fewer epochs or "
                    "steps, or data that can be iterated again"
                )
        self._warn_if_short()

    def _warn_if_short(self) -> None:
        """Warn if the data ended before the epoch had all requested steps."""
        taken = self._log.last.batches
        if self._limit is not None and self.steps == self._limit > taken:
            warn(
                f"{self._name} ran out of data after {taken} of {self._limit} steps, so this epoch ends early. "
                "Request fewer steps, or pass data with more batches"
            )
