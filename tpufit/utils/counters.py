"""Counters of what runs, and of the host's time: graphs and why, waits by reason, captures, and time by phase.

They are the process's: another model that trains meanwhile counts here too. The device counts the rest itself, see
`runtime/counters.py`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

ROLES = ("train", "eval", "predict", "init", "transfer", "metric")


@dataclass(frozen=True)
class Compiled:
    """One compilation."""

    role: str  # one of `ROLES`
    cause: str  # of the graph, e.g. "the first step"; nothing where there is but one
    seconds: float


@dataclass(frozen=True)
class Counts:
    """A snapshot of the counters, since the process began or since an earlier snapshot.

    Attributes:
        graphs: Graphs compiled, by role: `"train"`, `"eval"`, `"predict"`, `"init"`, `"transfer"`, `"metric"`.
        captures: Steps captured again, by the change that made it necessary, e.g. `"momentum in ..."`. New shapes
            are not among them.
        waits: Waits for the device, by reason, e.g. `"logs"` or `"outputs"`.
        fallbacks: Operations that ran on the host for lack of a lowering, by name, e.g. `"aten::nonzero"`.
        host_reads: Values that a step's own code read, as `.item()` does: each waits for the device.
        compiled: The compilations, in their order.
        lines: Lines of user code where a traced step has read a value, under `"read"`, or called an operation that
            fell back, under its name: `("aten::nonzero", "train.py:12")`.
        seconds: The host's time by phase, each without the others inside it: `"compile"`, `"trace"`, `"wait: logs"`
            and the other waits, `"data"`; if somebody measures, `"steps"` and `"callbacks"`; and beside these, in the
            prefetcher's thread, `"read"` and `"prepare"`.
        executing: The time that the device's runtime counts as execution, in seconds. Where the device works on its
            own it is only the time to start it.
    """

    graphs: Counter[str] = field(default_factory=Counter)
    captures: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    host_reads: int = 0
    compiled: list[Compiled] = field(default_factory=list)
    lines: Counter[tuple[str, str]] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)
    executing: float = 0.0

    def __sub__(self, earlier: Counts) -> Counts:
        counters = ("graphs", "captures", "waits", "fallbacks", "host_reads", "lines", "executing")
        since: dict[str, Any] = {name: getattr(self, name) - getattr(earlier, name) for name in counters}
        seconds = {phase: t - earlier.seconds.get(phase, 0.0) for phase, t in self.seconds.items()}
        return Counts(**since, compiled=self.compiled[len(earlier.compiled) :], seconds=seconds)


_totals = Counts(seconds=defaultdict(float))  # of this process
_inside = 0.0  # of the time that is being measured, the part that has been counted to another phase already


def totals() -> Counts:
    """The counters as they stand, without those of the device's own."""
    return Counts(*map(copy, vars(_totals).values()))


def note_compiled(role: str, cause: str, graphs: int, seconds: float) -> None:
    """Note graphs that were compiled, in so many seconds all together; the role is one of `ROLES`."""
    _totals.graphs[role] += graphs
    _totals.compiled.extend([Compiled(role, cause, seconds / graphs)] * graphs)
    add_seconds("compile", seconds)


@contextmanager
def timed(phase: str) -> Iterator[None]:
    """Count the time inside to a phase, without the time that is counted to another one in there."""
    global _inside
    began = perf_counter()
    outside = _inside
    _inside = 0.0
    try:
        yield
    finally:
        elapsed = perf_counter() - began
        _totals.seconds[phase] += elapsed - _inside
        _inside = outside + elapsed


def timing(phase: str, function: Callable[P, T]) -> Callable[P, T]:
    """Wrap a function to count its time to a phase, as `timed` does, in half a microsecond."""

    def timed_function(*args: P.args, **kwargs: P.kwargs) -> T:
        global _inside
        began = perf_counter()
        outside = _inside
        _inside = 0.0
        try:
            return function(*args, **kwargs)
        finally:
            elapsed = perf_counter() - began
            _totals.seconds[phase] += elapsed - _inside
            _inside = outside + elapsed

    return timed_function


def add_seconds(phase: str, seconds: float, beside: bool = False) -> None:
    """Count time to a phase that was measured otherwise, inside of what is being measured.

    If it passed `beside` that, in another thread, or has been counted otherwise already, it isn't taken off.
    """
    global _inside
    _totals.seconds[phase] += seconds
    _inside += 0.0 if beside else seconds


@contextmanager
def waiting(reason: str) -> Iterator[None]:
    """Count one wait for the device, which happens inside, and its time."""
    _totals.waits[reason] += 1
    with timed(f"wait: {reason}"):
        yield


def note_line(what: str, line: str) -> None:
    """Note a line such as `train.py:12` that reads a value (`"read"`), or calls an operation that runs on the host."""
    _totals.lines[what, line] += 1


def count_capture(change: str) -> None:
    """Count that a step has to be captured again, because of a change."""
    _totals.captures[change] += 1
