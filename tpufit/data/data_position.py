"""Positions in the data: recorded after each batch, saved in checkpoints, and restored."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ..errors import join_few
from ..utils.random import RNGState
from ..utils.saved_attributes import SavedAttributes
from ..utils.user_code import warn
from .per_host import map_batch
from .sources import Source
from .to_tensors import as_tensors

# The number of past positions to keep: more batches than are ever read ahead.
_KEPT = 1024


@dataclass  # not frozen, which would be slower to create for each batch
class Position:
    """A position between two batches."""

    batches: int = 0  # of the epoch, before this position
    number: int = 0  # of the pass over the data
    offset: int = 0  # in that pass, in the source's unit
    own: dict[str, Any] | None = None  # the data's `state_dict`, if they have one
    begun: RNGState | None = None  # the random state when the pass began, if recorded
    draws: RNGState | None = None  # the random state at this position, if recorded
    # The state of the data's objects, see `SavedAttributes`: when the pass began, and at this position.
    objects_at_begin: dict[str, Any] | None = None
    objects: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain values for JSON."""
        states = {"begun": self.begun, "draws": self.draws}
        return vars(self) | {name: state and state.state_dict() for name, state in states.items()}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Position:
        """Make a position from the plain values that `state_dict` returned."""
        plain = ("batches", "number", "offset", "own", "objects_at_begin", "objects")
        known = {name: state[name] for name in plain if name in state}
        random: dict[str, Any] = {name: RNGState.of(state[name]) for name in ("begun", "draws") if state.get(name)}
        return cls(**known, **random)


def start_of_next_pass(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the start of the pass after a position in an epoch, as plain values, like the position.

    The next pass has its own order.
    """
    position = Position.of(state)
    return Position(number=position.number + 1, begun=position.draws, objects_at_begin=position.objects).state_dict()


class PositionLog:
    """Records the position after each batch of an epoch. It keeps no batch alive, since a cache reuses the memory."""

    def __init__(self, source: Source) -> None:
        self.resumed: Position | None = None  # where the next epoch begins, after a resumption
        self.passes = 0  # the number of complete passes
        self.attributes: SavedAttributes | None = None  # the state of the data's objects, if it is recorded
        self._source = source
        self._draws_at_begin: RNGState | None = None  # the random state when the pass began
        self._objects_at_begin: dict[str, Any] | None = None
        self._positions: deque[Position] = deque([Position()], maxlen=_KEPT)  # of this epoch

    @property
    def last(self) -> Position:
        """The position after the last batch read."""
        return self._positions[-1]

    def position_after(self, batches: int) -> Position | None:
        """Return the position after a number of batches of the epoch, or None if they weren't read."""
        positions = tuple(self._positions)  # a copy: the prefetcher's thread may be appending
        return next((position for position in positions if position.batches == batches), None)

    def begin_epoch(self, usual: Position) -> Position:
        """Begin an epoch, and return its start: `usual`, or after a resumption the resumed position."""
        begin = self.resumed or usual
        self.resumed = None
        self._positions.clear()
        self._positions.append(begin)
        return begin

    def read(self, begin: Position, keeps_draws: bool) -> Iterator[Any]:
        """Read a pass over the data with its original random numbers, and record the position after each batch.

        With `keeps_draws`, positions include the random state.
        """
        source = self._source
        if begin.begun is not None:
            begin.begun.restore(source.generators)  # the skipped batches are drawn again, such as a loader's order
        self.restore_objects(begin.objects_at_begin)
        source.set_epoch(begin.number)
        self._draws_at_begin = RNGState.now(source.generators) if keeps_draws and source.runs_users_code else None
        self._objects_at_begin = self.current_state()
        if begin is self.last:  # nothing has been read yet, and batches read ahead may never be used
            draws = begin.draws or self._draws_at_begin
            objects = begin.objects or self._objects_at_begin
            self._positions[-1] = replace(
                begin, begun=self._draws_at_begin, draws=draws, objects_at_begin=self._objects_at_begin, objects=objects
            )
        return map(
            partial(self._record, begin.number),
            source.batches(begin.number, begin.offset, partial(self.restore, begin)),
        )

    def current_state(self) -> dict[str, Any] | None:
        """Return the current state of the data's objects; None if it isn't recorded."""
        return None if self.attributes is None else self.attributes.state_dict()

    def restore_objects(self, state: dict[str, Any] | None) -> None:
        """Restore the state of the data's objects, if it was recorded."""
        if state is not None and self.attributes is not None and (missing := self.attributes.load_state_dict(state)):
            warn(f"the checkpoint has values for objects that the data no longer have: {join_few(missing)}")

    def restore(self, begin: Position) -> None:
        """Restore the state at a position, after the batches before it are skipped, or if no more are read."""
        if begin.draws is not None:
            begin.draws.restore(self._source.generators)
        self.restore_objects(begin.objects)

    def _record(self, number: int, located: tuple[int, Any]) -> Any:
        offset, batch = located
        draws = None if self._draws_at_begin is None else RNGState.now(self._source.generators)
        own = self._source.state_dict()
        last = self.last.batches + 1
        objects = self.current_state()
        self._positions.append(
            Position(last, number, offset, own, self._draws_at_begin, draws, self._objects_at_begin, objects)
        )
        return map_batch(as_tensors, batch)
