"""`RunsAhead`: the back-pressure of steps that run on the device, over all roles and models."""

from contextlib import suppress
from time import perf_counter
from weakref import WeakSet

from torch import Tensor

from ..backend import InFlight
from ..utils.counters import waiting
from .driver import driver

# The number of steps between two waits from which the pace is measured; fewer steps may include compilations.
_LONG_RUN = 16
# If a role's limit is small, the limit for all roles and models together is this multiple of it.
_ALL_ROLES_FACTOR = 3
_SMALL_LIMIT = 32


class RunsAhead(InFlight):
    """Lets steps run ahead of the device, and waits for an older step when too many are pending.

    Many short steps may be pending, because a wait takes as long as the call of a step. Only two long steps may be
    pending, because a signal waits for all of them, and each keeps its batch in memory. The seconds, the bytes of
    batches and the number of steps are limits for all pending steps, see `Placement.max_in_flight`.
    """

    def __init__(self, seconds: float = 0.1, nbytes: int = 1 << 28, *, max_pending: int) -> None:
        self._seconds = seconds
        self._nbytes = nbytes
        self._max_pending = max_pending
        self._has_small_limit = max_pending < _SMALL_LIMIT
        self.pace: float | None = None  # current seconds per step; None before a long run of steps was measured
        self._limit = 4  # until the time of a step is known
        self.started: list[Tensor] = []  # a result of each step that may be pending
        self._steps_since_wait = 0
        self._last_wait = perf_counter()
        _all.add(self)

    def add(self, result: Tensor, nbytes: int) -> Tensor | None:
        """Record a started step. At the limit, **this waits** for the older half of the pending steps."""
        if self._has_small_limit:
            self._make_room()
        self.started.append(result)
        self._steps_since_wait += 1
        if len(self.started) < self._limit:
            return None
        half = self._limit // 2
        with waiting("throttle"):
            reached = driver().read_one(self.started[half - 1])
        del self.started[:half]
        now = perf_counter()
        seconds_per_step = (now - self._last_wait) / self._steps_since_wait
        # Grow the limit at most fourfold at a time: without waits, a short pass would never measure its pace.
        limits = (
            self._max_pending,
            4 * self._limit,
            int(self._seconds / seconds_per_step),
            self._nbytes // max(nbytes, 1),
        )
        self._limit = max(2, min(limits))
        if self._steps_since_wait >= _LONG_RUN:
            self.pace = seconds_per_step
        self._steps_since_wait = 0
        self._last_wait = now
        return reached

    def finish(self) -> None:
        """Wait for all steps that may be pending. The error of a failed step is raised elsewhere."""
        with waiting("throttle"):
            while self.started:
                with suppress(RuntimeError):  # the error is raised where its model reads a result
                    driver().read_one(self.started[0])
                del self.started[0]

    def _make_room(self) -> None:
        """Wait for the steps of other roles and models if too many are pending in total."""
        others = [other for other in _all if other is not self and other.started]
        pending = len(self.started) + sum(len(other.started) for other in others)
        if others and pending >= _ALL_ROLES_FACTOR * self._max_pending:
            for other in others:
                other.finish()


_all: WeakSet[RunsAhead] = WeakSet()
