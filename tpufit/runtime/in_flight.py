"""`RunsAhead`: the back-pressure of steps that run on the device, of all roles and models together."""

from contextlib import suppress
from time import perf_counter
from weakref import WeakSet

from torch import Tensor

from ..backend import InFlight
from ..utils.counters import waiting
from .bindings import xla

# The number of steps between two waits that tells how long one takes; fewer may be those that compile.
_LONG_RUN = 16
# Where a role may have only a few steps under way, all roles and models together may have so many times as many.
_OF_ALL = 3
_MANY = 32


class RunsAhead(InFlight):
    """Lets steps run ahead of the device, and waits for an older one when they are too many.

    Many short steps may be under way, because a wait costs as much as the call of one. Of long steps only two may be,
    because a signal waits for all of them, and each keeps its batch in memory. The seconds, the bytes of batches and
    the number of steps are limits for all steps under way, see `Placement.most_in_flight`.
    """

    def __init__(self, seconds: float = 0.1, nbytes: int = 1 << 28, *, most: int) -> None:
        self._seconds = seconds
        self._nbytes = nbytes
        self._most = most
        self._few = most < _MANY
        self.pace: float | None = None  # seconds a step by now; None before a long run of steps was measured
        self._limit = 4  # until it is known how long they take
        self.started: list[Tensor] = []  # a result of each step that may be under way
        self._new = 0
        self._last_wait = perf_counter()
        _all.add(self)

    def add(self, result: Tensor, nbytes: int) -> Tensor | None:
        """Note a step that was just started. **This may wait** for a step as old as half the limit."""
        if self._few:
            self._make_room()
        self.started.append(result)
        self._new += 1
        if len(self.started) < self._limit:
            return None
        half = self._limit // 2
        with waiting("throttle"):
            reached: Tensor = xla()._xla_get_cpu_tensors([self.started[half - 1]])[0]
        del self.started[:half]
        now = perf_counter()
        each = (now - self._last_wait) / self._new
        # Fourfold at most, so that a short pass has a long run too, which tells the pace.
        limits = self._most, 4 * self._limit, int(self._seconds / each), self._nbytes // max(nbytes, 1)
        self._limit = max(2, min(limits))
        if self._new >= _LONG_RUN:
            self.pace = each
        self._new = 0
        self._last_wait = now
        return reached

    def finish(self) -> None:
        """Wait for all steps that may be under way. One that has failed has no room either, and is told elsewhere."""
        with waiting("throttle"):
            while self.started:
                with suppress(RuntimeError):  # it comes out where its own model reads a result
                    xla()._xla_get_cpu_tensors(self.started[:1])
                del self.started[0]

    def _make_room(self) -> None:
        """Wait for the steps of other roles and models, if there would be too many with them."""
        others = [one for one in _all if one is not self and one.started]
        if others and sum(len(one.started) for one in others) + len(self.started) >= _OF_ALL * self._most:
            for one in others:
                one.finish()


_all: WeakSet[RunsAhead] = WeakSet()


class NothingRuns(InFlight):
    """Of cores that are absent."""

    def add(self, result: Tensor, nbytes: int) -> Tensor | None:
        return None
