"""The device: everything that names torch_xla is in this package, so that another backend replaces it and nothing else.

| file | its idea |
| --- | --- |
| `devices` | find and start the cores |
| `faults` | errors of the runtime, in a sentence |
| `mesh` | where rows and parameters live |
| `graph` | trace a step once, then replay its graph |
| `transfer` | host to device and back; the one function that waits |
| `lowered` | operations that torch_xla lacks, made of those that it has |
| `norms` | normalisation layers that don't gather the batch |
| `report` | counters of compilations, waits and fallbacks, and time |
| `profile` | a profile of chosen steps |
| `watch` | what a traced step reads, draws and leaves to the host |
"""

from .devices import (
    Cores,
    CoresArgument,
    agree,
    available,
    device_memory,
    init,
    platform,
    set_matmul_precision,
    settled,
    start,
    versions,
)
from .faults import Load, translate
from .graph import Program, State, capture_began, launch, tracing
from .mesh import HOST, Layout, Placement
from .norms import sharded_norms
from .profile import start_profile, stop_profile
from .report import Compiled, Counts, add_seconds, count_capture, counts, metrics_report, timing
from .transfer import InFlight, exchange, move, overwrite, to_device, to_host
from .watch import cure_of, users_line

__all__ = [
    "HOST",
    "Compiled",
    "Cores",
    "CoresArgument",
    "Counts",
    "InFlight",
    "Layout",
    "Load",
    "Placement",
    "Program",
    "State",
    "add_seconds",
    "agree",
    "available",
    "capture_began",
    "count_capture",
    "counts",
    "cure_of",
    "device_memory",
    "exchange",
    "init",
    "launch",
    "metrics_report",
    "move",
    "overwrite",
    "platform",
    "set_matmul_precision",
    "settled",
    "sharded_norms",
    "start",
    "start_profile",
    "stop_profile",
    "timing",
    "to_device",
    "to_host",
    "tracing",
    "translate",
    "users_line",
    "versions",
]
