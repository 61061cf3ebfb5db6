"""Counters of the device: what torch_xla counts itself, beside the process's own."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import Any

from ..utils.counters import Counts, note_compiled, totals

_LOOKS = ("UncachedCompile", "CachedCompile", "aten::_local_scalar_dense", "xla::_to_cpu")  # torch_xla's counters


def _xla_metrics() -> Any:
    """torch_xla's own counters, or None as long as nothing has imported torch_xla."""
    metrics = sys.modules.get("torch_xla.debug.metrics")  # no import, which would meet that of another thread
    return metrics if hasattr(metrics, "executed_fallback_ops") else None  # its last one, while it is being imported


def counts() -> Counts:
    """The counters as they stand: take one before and one after, and subtract."""
    fallbacks = fallback_counts()
    metrics = _xla_metrics()
    return replace(
        totals(),
        host_reads=fallbacks.pop("aten::_local_scalar_dense", 0),
        fallbacks=fallbacks,
        executing=(metrics.metric_data("ExecuteTime") or (0, 0.0))[1] / 1e9 if metrics else 0.0,
    )


def fallback_counts() -> Counter[str]:
    """The number of times that each operation has run on the host, reads of a value among them."""
    metrics = _xla_metrics()
    names = [name for name in metrics.counter_names() if name.startswith("aten::")] if metrics else []
    return Counter({name: metrics.counter_value(name) for name in names})


def live_tensors() -> int:
    """The number of tensors on the device that Python, or a graph that waits, still holds."""
    metrics = _xla_metrics()
    if metrics is None:
        return 0
    made, ended = (int(metrics.counter_value(f"{what}XlaTensor") or 0) for what in ("Create", "Destroy"))
    return made - ended


def metrics_report() -> str:
    """The runtime's own report of its counters and timers since the process began."""
    metrics = _xla_metrics()
    return str(metrics.metrics_report()) if metrics else ""


@contextmanager
def role(name: str, cause: str = "") -> Iterator[None]:
    """Count the graphs that are compiled inside to one of the `ROLES`, with their cause."""
    before = _compiled()
    began = perf_counter()
    try:
        yield
    finally:
        new = _compiled() - before
        if new:
            note_compiled(name, cause, new, perf_counter() - began)


def looked_at() -> tuple[int | None, ...]:
    """The numbers of times that anything was executed or read back: a trace during which one rises was cut in two."""
    import torch_xla.debug.metrics as metrics

    return tuple(map(metrics.counter_value, _LOOKS))


def _compiled() -> int:
    import torch_xla.debug.metrics as metrics

    return metrics.counter_value("UncachedCompile") or 0
