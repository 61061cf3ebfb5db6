"""What the device did, in counts: graphs compiled by role, waits by reason, operations that fell back to the host."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

ROLES = ("train", "eval", "predict", "gradients", "init", "transfer", "metric")


@dataclass(frozen=True)
class Counts:
    """A snapshot of the counters, since the process began or since an earlier snapshot.

    Attributes:
        graphs: Graphs compiled, by role: `"train"`, `"eval"`, `"predict"`, `"gradients"`, `"init"`, `"transfer"`,
            `"metric"`.
        captures: How often a step was captured anew, by what had changed, e.g. `"momentum in ..."`; new shapes apart.
        waits: Waits for the device, by reason, e.g. `"logs"` or `"outputs"`.
        fallbacks: Operations that ran on the host for lack of a lowering, by name, e.g. `"aten::nonzero"`.
        host_reads: Values that a step's own code read, as `.item()` does: each waits for the device.
    """

    graphs: Counter[str] = field(default_factory=Counter)
    captures: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    host_reads: int = 0

    def __sub__(self, earlier: Counts) -> Counts:
        return Counts(
            self.graphs - earlier.graphs,
            self.captures - earlier.captures,
            self.waits - earlier.waits,
            self.fallbacks - earlier.fallbacks,
            self.host_reads - earlier.host_reads,
        )


_graphs: Counter[str] = Counter()
_captures: Counter[str] = Counter()
_waits: Counter[str] = Counter()


def counts() -> Counts:
    """The counters as they stand: take one before and one after, and subtract."""
    fallbacks: Counter[str] = Counter()
    if "torch_xla" in sys.modules:
        import torch_xla.debug.metrics as metrics

        for name in metrics.counter_names():
            if name.startswith("aten::"):
                fallbacks[name] = metrics.counter_value(name)
    host_reads = fallbacks.pop("aten::_local_scalar_dense", 0)
    return Counts(Counter(_graphs), Counter(_captures), Counter(_waits), fallbacks, host_reads)


@contextmanager
def role(name: str) -> Iterator[None]:
    """Count the graphs that are compiled inside to this role, one of `ROLES`."""
    before = _compiled()
    try:
        yield
    finally:
        _graphs[name] += _compiled() - before


def count_capture(change: str) -> None:
    """Count that a step has to be captured anew, because of a change."""
    _captures[change] += 1


def count_wait(reason: str) -> None:
    """Count one wait for the device."""
    _waits[reason] += 1


def looked_at() -> int:
    """How often anything has been executed or read back: a trace during which it rises was cut in two."""
    import torch_xla.debug.metrics as metrics

    names = ("UncachedCompile", "CachedCompile", "aten::_local_scalar_dense", "xla::_to_cpu")
    return sum(metrics.counter_value(name) or 0 for name in names)


def _compiled() -> int:
    import torch_xla.debug.metrics as metrics

    return metrics.counter_value("UncachedCompile") or 0
