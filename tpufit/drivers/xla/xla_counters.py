"""torch_xla's counters."""

import sys
from collections import Counter
from typing import Any

_COPIES = ("xla::clone", "xla::_copy_from", "xla::_to_copy")
_READ_COUNTERS = (
    "UncachedCompile",
    "CachedCompile",
    "aten::_local_scalar_dense",
    "xla::_to_cpu",
)  # torch_xla's counters


def xla_metrics() -> Any:
    """Return torch_xla's module of counters; None before torch_xla is imported."""
    metrics = sys.modules.get("torch_xla.debug.metrics")  # not imported here: another thread may be importing it
    return metrics if hasattr(metrics, "executed_fallback_ops") else None  # the module's last name, so it is complete


def count_fallbacks() -> Counter[str]:
    """Return how often each operation has run on the host, including reads of a value."""
    metrics = xla_metrics()
    names = [name for name in metrics.counter_names() if name.startswith("aten::")] if metrics else []
    return Counter({name: metrics.counter_value(name) for name in names})


def count_reads() -> tuple[int | None, ...]:
    """Return counts of executions and reads. If one rises during a trace, the trace was interrupted."""
    import torch_xla.debug.metrics as metrics

    return tuple(map(metrics.counter_value, _READ_COUNTERS))


def count_copies() -> tuple[int | None, ...]:
    """Return counts of copies of tensors on the device."""
    metrics = xla_metrics()
    return tuple(map(metrics.counter_value, _COPIES)) if metrics else ()


def count_live_tensors() -> int:
    """Return the number of tensors on the device that Python or a pending graph references."""
    metrics = xla_metrics()
    if metrics is None:
        return 0
    created, destroyed = (int(metrics.counter_value(f"{event}XlaTensor") or 0) for event in ("Create", "Destroy"))
    return created - destroyed
