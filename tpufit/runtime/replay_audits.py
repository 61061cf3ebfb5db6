"""`Audits`: decides which steps are audited.

A replayed step runs none of its Python, and what the Python may read can't be listed completely: a list that a callback
has changed in place, a file, the time. So now and then a step is traced again before it is replayed, and its graph is
compared. An audited step is always right: if the graph differs, the step is captured again.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from time import perf_counter

# The pause between two audits of a pass, as a multiple of an audit's duration, so that audits take at most 1 %.
_PAUSE_FACTOR = 100

# The replays before the first audit inside a pass; each audit that agrees doubles their number.
_FIRST_INTERVAL = 4


@dataclass
class _Since:
    """The counts since the last audit of a graph."""

    user_code_runs: int = 0  # how often user code had run before the audit
    steps: int = 0  # since the audit
    steps_after_user_code: int = 0  # of these steps
    interval: int = _FIRST_INTERVAL  # steps to replay until the next audit inside a pass


class Audits:
    """Decides which steps of one role are audited, and counts the steps since the last audit."""

    def __init__(self, in_lockstep: bool = False) -> None:
        self._in_lockstep = in_lockstep  # all hosts must decide the same, so no clock may be read
        self._since: dict[Hashable, _Since] = {}  # by the graph's key
        self._audited: set[Hashable] = set()  # graphs that need no audit before their next replay
        self._user_code_runs = 0  # how often user code has run
        # Of the last audit, in seconds.
        self._cost = 0.0  # its duration
        self._ended = perf_counter()

    def begin_pass(self) -> None:
        """Begin a pass, in which each graph is audited when it is first replayed."""
        self._audited.clear()
        for since in self._since.values():
            since.interval = _FIRST_INTERVAL

    def note_user_code(self, every_batch: bool) -> None:
        """Note that user code has run between steps; unless it runs at `every_batch`, all graphs become due."""
        self._user_code_runs += 1
        if not every_batch:
            self._audited.clear()

    def is_due(self, key: Hashable, remaining: int | None) -> bool:
        """True if the next replay of a graph is to be an audit; `remaining` groups come after it in the pass."""
        if key not in self._audited:
            return True
        since = self._since[key]
        affordable = self._in_lockstep or perf_counter() - self._ended > _PAUSE_FACTOR * self._cost
        # The last two groups, because a short last batch has a different graph.
        if remaining is not None and remaining < 2:
            return since.user_code_runs < self._user_code_runs or (affordable and since.steps > 0)
        return affordable and since.steps >= since.interval

    def note_replay(self, key: Hashable, steps: int) -> None:
        """Note steps that have been replayed by one graph."""
        since = self._since[key]
        since.steps += steps
        since.steps_after_user_code += steps if since.user_code_runs < self._user_code_runs else 0

    def count_doubtful_steps(self, key: Hashable) -> int:
        """Return the number of steps that may have missed a change that an audit of their graph has found.

        A change comes from user code between two steps. If none has run, it happened while steps ran, like a change of
        the time.
        """
        since = self._since[key]
        return since.steps_after_user_code if since.user_code_runs < self._user_code_runs else since.steps

    def note_capture(self, key: Hashable, seconds: float | None = None) -> None:
        """Note that a step has just been traced to a new graph.

        `seconds` is the time of the trace, if nothing was compiled; an audit will take as long.
        """
        self._audited.add(key)
        self._since[key] = _Since(self._user_code_runs)
        if seconds is not None:
            self._cost = seconds
            self._ended = perf_counter()

    def note_disturbed_audit(self, key: Hashable) -> None:
        """Note an audit that couldn't compare the graphs, so that the next audit is due as soon as the time allows."""
        self._since[key].interval = 0
        self._audited.add(key)
        self._ended = perf_counter()

    def note_audit(self, key: Hashable, seconds: float, agreed: bool) -> None:
        """Note an audit. If its graph differs from the replayed one, all other graphs are due for an audit too."""
        interval = 2 * self._since[key].interval if key in self._audited else _FIRST_INTERVAL
        if not agreed:
            self._audited.clear()
        self.note_capture(key)
        self._since[key].interval = interval if agreed else _FIRST_INTERVAL
        self._cost = seconds
        self._ended = perf_counter()
