"""What the device and the host did: graphs compiled and why, waits by reason, operations that fell back, and time."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

ROLES = ("train", "eval", "predict", "init", "transfer", "metric")


@dataclass(frozen=True)
class Compiled:
    """One compilation.

    Attributes:
        role: What it was for, one of `ROLES`.
        cause: Why the graph was needed, e.g. `"the first step"`; nothing where there is but one reason.
        seconds: How long it took.
    """

    role: str
    cause: str
    seconds: float


@dataclass(frozen=True)
class Counts:
    """A snapshot of the counters, since the process began or since an earlier snapshot.

    Attributes:
        graphs: Graphs compiled, by role: `"train"`, `"eval"`, `"predict"`, `"init"`, `"transfer"`, `"metric"`.
        captures: How often a step was captured anew, by what had changed, e.g. `"momentum in ..."`; new shapes apart.
        waits: Waits for the device, by reason, e.g. `"logs"` or `"outputs"`.
        fallbacks: Operations that ran on the host for lack of a lowering, by name, e.g. `"aten::nonzero"`.
        host_reads: Values that a step's own code read, as `.item()` does: each waits for the device.
        compiled: The compilations, in their order.
        lines: Where a traced step has read a value, under `"read"`, or called an operation that fell back, under its
            name, in the user's code: `("aten::nonzero", "train.py:12")`.
        seconds: The host's time by what it did, each without the others inside it: `"compile"`, `"trace"`,
            `"wait: logs"` and the other waits, `"data"`; if somebody measures, `"steps"` and `"callbacks"`; and
            beside these, in the feed's thread, `"read"` and `"prepare"`.
        executing: The time that torch_xla counts as execution, in seconds. Where the device works on its own it is
            only the time to start it.
    """

    graphs: Counter[str] = field(default_factory=Counter)
    captures: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    host_reads: int = 0
    compiled: tuple[Compiled, ...] = ()
    lines: Counter[tuple[str, str]] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)
    executing: float = 0.0

    def __sub__(self, earlier: Counts) -> Counts:
        return Counts(
            self.graphs - earlier.graphs,
            self.captures - earlier.captures,
            self.waits - earlier.waits,
            self.fallbacks - earlier.fallbacks,
            self.host_reads - earlier.host_reads,
            self.compiled[len(earlier.compiled) :],
            self.lines - earlier.lines,
            {phase: t - earlier.seconds.get(phase, 0.0) for phase, t in self.seconds.items()},
            self.executing - earlier.executing,
        )


_graphs: Counter[str] = Counter()
_captures: Counter[str] = Counter()
_waits: Counter[str] = Counter()
_compilations: list[Compiled] = []
_lines: Counter[tuple[str, str]] = Counter()
_seconds: defaultdict[str, float] = defaultdict(float)
_inside = 0.0  # of the time being measured, what has been counted as something else already


def counts() -> Counts:
    """The counters as they stand: take one before and one after, and subtract."""
    fallbacks = fallen()
    executing = 0.0
    if "torch_xla" in sys.modules:
        import torch_xla.debug.metrics as metrics

        executing = (metrics.metric_data("ExecuteTime") or (0, 0.0))[1] / 1e9
    host_reads = fallbacks.pop("aten::_local_scalar_dense", 0)
    return Counts(
        Counter(_graphs),
        Counter(_captures),
        Counter(_waits),
        fallbacks,
        host_reads,
        tuple(_compilations),
        Counter(_lines),
        dict(_seconds),
        executing,
    )


def fallen() -> Counter[str]:
    """How often each operation has run on the host, reads of a value among them."""
    if "torch_xla" not in sys.modules:
        return Counter()
    import torch_xla.debug.metrics as metrics

    names = [name for name in metrics.counter_names() if name.startswith("aten::")]
    return Counter({name: metrics.counter_value(name) for name in names})


def metrics_report() -> str:
    """The report of torch_xla's own counters and timers since the process began, as it writes it."""
    if "torch_xla" not in sys.modules:
        return ""
    import torch_xla.debug.metrics as metrics

    return str(metrics.metrics_report())


@contextmanager
def role(name: str, cause: str = "") -> Iterator[None]:
    """Count the graphs that are compiled inside to this role.

    Args:
        name: One of `ROLES`.
        cause: Why they are needed.
    """
    before, began = _compiled(), perf_counter()
    try:
        yield
    finally:
        new = _compiled() - before
        if new:
            seconds = perf_counter() - began
            _graphs[name] += new
            _compilations.extend([Compiled(name, cause, seconds / new)] * new)
            add_seconds("compile", seconds)


@contextmanager
def timed(phase: str) -> Iterator[None]:
    """Count the time inside to a phase, but for what is counted to another one in there."""
    global _inside
    began, outside, _inside = perf_counter(), _inside, 0.0
    try:
        yield
    finally:
        elapsed = perf_counter() - began
        _seconds[phase] += elapsed - _inside
        _inside = outside + elapsed


def timing(phase: str, function: Callable[P, T]) -> Callable[P, T]:
    """A function that does the same as another and counts its time to a phase, as `timed` does, in half a microsecond.

    Args:
        phase: The phase.
        function: The function.
    """

    def timed_function(*args: P.args, **kwargs: P.kwargs) -> T:
        global _inside
        began, outside, _inside = perf_counter(), _inside, 0.0
        try:
            return function(*args, **kwargs)
        finally:
            elapsed = perf_counter() - began
            _seconds[phase] += elapsed - _inside
            _inside = outside + elapsed

    return timed_function


def add_seconds(phase: str, seconds: float, beside: bool = False) -> None:
    """Count time to a phase that has been measured otherwise, inside of what is being measured.

    Args:
        phase: The phase.
        seconds: The time.
        beside: Whether it passed in another thread, or has been counted otherwise already.
    """
    global _inside
    _seconds[phase] += seconds
    _inside += 0.0 if beside else seconds


@contextmanager
def waiting(reason: str) -> Iterator[None]:
    """Count one wait for the device, which is inside, and its time."""
    _waits[reason] += 1
    with timed(f"wait: {reason}"):
        yield


def note_line(what: str, line: str) -> None:
    """Note a line of the user's, in a step being traced, that reads a value or calls what runs on the host.

    Args:
        what: `"read"`, or the operation's name.
        line: The line, e.g. `train.py:12`.
    """
    _lines[what, line] += 1


def count_capture(change: str) -> None:
    """Count that a step has to be captured anew, because of a change."""
    _captures[change] += 1


def looked_at() -> int:
    """How often anything has been executed or read back: a trace during which it rises was cut in two."""
    import torch_xla.debug.metrics as metrics

    names = ("UncachedCompile", "CachedCompile", "aten::_local_scalar_dense", "xla::_to_cpu")
    return sum(metrics.counter_value(name) or 0 for name in names)


def _compiled() -> int:
    import torch_xla.debug.metrics as metrics

    return metrics.counter_value("UncachedCompile") or 0
