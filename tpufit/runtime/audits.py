"""`Audits`: decides which steps are audited.

A replayed step runs none of its Python, and what that may read can't be listed in full: a list that a callback has
changed in place, a file, the time. So now and then a step is traced once more before it is replayed, and its graph
compared. An audited step is right in any case: if the graph is another one, the step is captured anew.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from time import perf_counter

# Between two audits of a pass lie at least so many times the duration of the first one: a share of 1 %.
_SHARE = 100

# The replays before the first audit inside a pass; after each audit that agrees it takes twice as many.
_FIRST = 4


@dataclass
class _Since:
    """What has been since the last audit of a graph."""

    code: int = 0  # the times that user code had run then
    replayed: int = 0  # steps since
    after: int = 0  # of those steps, the ones that ran after user code
    interval: int = _FIRST  # steps to be replayed until the next audit inside a pass


class Audits:
    """Decides which steps of one role are audited, and counts those that have run since the last audit."""

    def __init__(self, in_lockstep: bool = False) -> None:
        self._in_lockstep = in_lockstep  # other hosts must decide the same: then no clock is asked
        self._since: dict[Hashable, _Since] = {}  # by the graph's key
        self._audited: set[Hashable] = set()  # the graphs that need no audit before their next replay
        self._code = 0  # the times that user code has run
        # Of the last audit, in seconds.
        self._cost = 0.0  # its duration
        self._ended = perf_counter()

    def begin_pass(self) -> None:
        """Begin a pass, in which each graph is audited when it is first replayed."""
        self._audited.clear()
        for since in self._since.values():
            since.interval = _FIRST

    def note_users_code(self, seldom: bool) -> None:
        """Note that user code has run between steps; if `seldom`, each graph can be audited before its next replay."""
        self._code += 1
        if seldom:
            self._audited.clear()

    def due(self, key: Hashable, remaining: int | None) -> bool:
        """True if the next replay of a graph is to be an audit; `remaining` groups come after it in the pass."""
        if key not in self._audited:
            return True
        since = self._since[key]
        affordable = self._in_lockstep or perf_counter() - self._ended > _SHARE * self._cost
        # The last two: a short batch at the end has a graph of its own.
        if remaining is not None and remaining < 2:
            return since.code < self._code or (affordable and since.replayed > 0)
        return affordable and since.replayed >= since.interval

    def replayed(self, key: Hashable, steps: int) -> None:
        """Note steps that have been replayed by one graph."""
        since = self._since[key]
        since.replayed += steps
        since.after += steps if since.code < self._code else 0

    def doubtful(self, key: Hashable) -> int:
        """The number of steps that may have run without a change that an audit of their graph finds now.

        Whatever changes is changed by user code between two steps; if there was none, then while steps ran, as by time.
        """
        since = self._since[key]
        return since.after if since.code < self._code else since.replayed

    def captured(self, key: Hashable, seconds: float | None = None) -> None:
        """Note that a step has just been traced to a graph of its own.

        If nothing was compiled, the seconds that it took are known: an audit will take as long.
        """
        self._audited.add(key)
        self._since[key] = _Since(self._code)
        if seconds is not None:
            self._cost = seconds
            self._ended = perf_counter()

    def disturbed(self, key: Hashable) -> None:
        """Note an audit that couldn't compare. Another one follows as soon as it can be afforded."""
        self._since[key].interval = 0
        self._audited.add(key)
        self._ended = perf_counter()

    def ended(self, key: Hashable, seconds: float, agreed: bool) -> None:
        """Note an audit. If it hasn't found the graph that is replayed, the others are in doubt too."""
        interval = 2 * self._since[key].interval if key in self._audited else _FIRST
        if not agreed:
            self._audited.clear()
        self.captured(key)
        self._since[key].interval = interval if agreed else _FIRST
        self._cost = seconds
        self._ended = perf_counter()
