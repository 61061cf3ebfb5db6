"""Positions in the data: noted for each batch that is read, kept in checkpoints, and gone back to."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ..errors import few
from ..utils.kept import Kept
from ..utils.random import RNGState
from ..utils.users_code import warn
from .batches import as_tensors
from .per_host import map_batch
from .sources import Source

# How far behind the batches read one may ask for a position: more than are ever read ahead.
_KEPT = 1024


@dataclass  # not frozen: that takes longer to make, and there is one for each batch
class Position:
    """A position between two batches."""

    batches: int = 0  # of the epoch, that come before
    number: int = 0  # of the pass over the data
    offset: int = 0  # in that pass, as the source counts
    own: dict[str, Any] | None = None  # the data's own account of their position, if they keep one
    begun: RNGState | None = None  # the random numbers' state when the pass began, where it is kept
    draws: RNGState | None = None  # the random numbers' state here, with nothing more read, where it is kept
    kept_begun: dict[str, Any] | None = None  # what the data's objects kept when the pass began, see `Kept`
    kept: dict[str, Any] | None = None  # what they keep here, with nothing more read

    def state_dict(self) -> dict[str, Any]:
        """The same as plain values, which JSON can hold."""
        states = {"begun": self.begun, "draws": self.draws}
        plain = vars(self) | {name: state and state.state_dict() for name, state in states.items()}
        return plain | {"place": plain.pop("offset")}  # its name in checkpoints

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Position:
        """Make a position of the plain values that `state_dict` gave."""
        known = {name: state[name] for name in ("batches", "number", "own", "kept_begun", "kept") if name in state}
        random: dict[str, Any] = {name: RNGState.of(state[name]) for name in ("begun", "draws") if state.get(name)}
        return cls(**known, offset=state.get("place", 0), **random)


def at_next_pass(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the position, as plain values, of the pass after one in the middle of an epoch: the data begin anew.

    They come in an order of their own.
    """
    position = Position.of(state)
    return Position(number=position.number + 1, begun=position.draws, kept_begun=position.kept).state_dict()


class PositionLog:
    """Notes the position after each batch of an epoch. It never holds a batch: a cache uses its memory again."""

    def __init__(self, source: Source) -> None:
        self.resumed: Position | None = None  # where the next epoch is to begin, after a resumption
        self.passes = 0  # that have been read to their end
        self.kept: Kept | None = None  # what the data's objects keep, if that is to be noted too
        self._source = source
        self._begun: RNGState | None = None  # the random numbers' state when the pass began
        self._kept_begun: dict[str, Any] | None = None
        self._positions: deque[Position] = deque([Position()], maxlen=_KEPT)  # of this epoch

    @property
    def last(self) -> Position:
        """The position after the last batch that was read."""
        return self._positions[-1]

    def after(self, batches: int) -> Position | None:
        """The position after so many batches of the epoch, or None if they were not read."""
        positions = tuple(self._positions)  # the prefetcher's thread may be adding to them
        return next((position for position in positions if position.batches == batches), None)

    def begin_epoch(self, usual: Position) -> Position:
        """Begin an epoch, and return the position where it does so: the usual one, if it isn't resumed."""
        begin = self.resumed or usual
        self.resumed = None
        self._positions.clear()
        self._positions.append(begin)
        return begin

    def read(self, begin: Position, keeps_draws: bool) -> Iterator[Any]:
        """Read a pass over the data with the random numbers that it had, and note the position after each batch.

        If it `keeps_draws`, the random numbers' state is kept with the positions.
        """
        source = self._source
        if begin.begun is not None:
            begin.begun.restore(source.generators)  # the batches to skip are drawn again, as a loader's order is
        self.set_kept(begin.kept_begun)
        self._begun = RNGState.now(source.generators) if keeps_draws and source.runs_users_code else None
        self._kept_begun = self.now_kept()
        if begin is self.last:  # nothing has been read yet, and what is read ahead may never be used
            draws = begin.draws or self._begun
            kept = begin.kept or self._kept_begun
            self._positions[-1] = replace(begin, begun=self._begun, draws=draws, kept_begun=self._kept_begun, kept=kept)
        return map(
            partial(self._note, begin.number),
            source.batches(begin.number, begin.offset, partial(self.go_to, begin)),
        )

    def now_kept(self) -> dict[str, Any] | None:
        """What the data's objects keep now; None if that isn't noted."""
        return None if self.kept is None else self.kept.state_dict()

    def set_kept(self, state: dict[str, Any] | None) -> None:
        """Set back what the data's objects kept, if that was noted."""
        if state is not None and self.kept is not None and (homeless := self.kept.load_state_dict(state)):
            warn(f"the checkpoint has values of objects that the data no longer have: {few(homeless)}")

    def go_to(self, begin: Position) -> None:
        """Set back what was noted at a position, where the batches before it are skipped, or none is read any more."""
        if begin.draws is not None:
            begin.draws.restore(self._source.generators)
        self.set_kept(begin.kept)

    def _note(self, number: int, located: tuple[int, Any]) -> Any:
        offset, batch = located
        draws = None if self._begun is None else RNGState.now(self._source.generators)
        own = self._source.state_dict()
        last = self.last.batches + 1
        kept = self.now_kept()
        self._positions.append(Position(last, number, offset, own, self._begun, draws, self._kept_begun, kept))
        return map_batch(as_tensors, batch)
