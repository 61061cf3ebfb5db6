"""Counters of the process: compiled graphs and their causes, waits by reason, captures, and the host's time by phase.

They are global to the process: another model that trains at the same time counts here, too. The device counts the rest,
see `runtime/device_counters.py`.
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
    cause: str  # of the graph, e.g. "the first step"; "" if there can be only one
    seconds: float


@dataclass(frozen=True)
class Counts:
    """A snapshot of the counters since the process began, or since an earlier snapshot.

    Attributes:
        graphs: Graphs compiled, by role: `"train"`, `"eval"`, `"predict"`, `"init"`, `"transfer"`, `"metric"`.
        captures: Steps captured again, by the change that required it, e.g. `"momentum in ..."`, except new shapes.
        waits: Waits for the device, by reason, e.g. `"logs"` or `"outputs"`.
        fallbacks: Operations that ran on the host because the device lacks them, by name, e.g. `"aten::nonzero"`.
        host_reads: Values that a step's code read, e.g. by `.item()`: each waits for the device.
        compiled: The compilations, in order.
        lines: Lines of user code where a traced step read a value, under `"read"`, or called an operation that ran on
            the host, under its name: `("aten::nonzero", "train.py:12")`.
        seconds: The host's time by phase, each without nested phases: `"compile"`, `"trace"`, `"wait: logs"` and the
            other waits, `"data"`; `"steps"` and `"callbacks"`, if they are measured; and in the prefetcher's thread, at
            the same time, `"read"` and `"prepare"`.
        executing: The seconds that the device's runtime counts as execution: on an asynchronous device only the time to
            start it.
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
_inside = 0.0  # the part of the time being measured that another phase has already counted


def totals() -> Counts:
    """Return a snapshot of the counters, without the device's."""
    return Counts(*map(copy, vars(_totals).values()))


def note_compiled(role: str, cause: str, graphs: int, seconds: float) -> None:
    """Record compiled graphs, and the seconds for all of them; the role is one of `ROLES`."""
    _totals.graphs[role] += graphs
    _totals.compiled.extend([Compiled(role, cause, seconds / graphs)] * graphs)
    add_seconds("compile", seconds)


@contextmanager
def timed(phase: str) -> Iterator[None]:
    """Return a context that counts its time for a phase, except time counted for nested phases."""
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


def time_function(phase: str, function: Callable[P, T]) -> Callable[P, T]:
    """Wrap a function to count its time for a phase, as `timed` does, in half a microsecond."""

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


def add_seconds(phase: str, seconds: float, parallel: bool = False) -> None:
    """Count time, measured otherwise, for a phase nested in the one being measured.

    With `parallel`, it passed in another thread, or is counted elsewhere, and isn't subtracted from the outer phase.
    """
    global _inside
    _totals.seconds[phase] += seconds
    _inside += 0.0 if parallel else seconds


@contextmanager
def waiting(reason: str) -> Iterator[None]:
    """Return a context that counts one wait for the device, and its time."""
    _totals.waits[reason] += 1
    with timed(f"wait: {reason}"):
        yield


def note_line(what: str, line: str) -> None:
    """Count a line such as `train.py:12` that reads a value (`"read"`), or calls an operation that runs on the host."""
    _totals.lines[what, line] += 1


def count_capture(change: str) -> None:
    """Count that a change requires a step to be captured again."""
    _totals.captures[change] += 1
