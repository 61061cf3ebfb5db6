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
| `strict` | the policy of `fit(strict=True)` |
| `watch` | what a traced step reads, draws and leaves to the host |
"""

from .counters import Compiled, Counts, add_seconds, count_capture, counts, metrics_report, timing
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
from .ops.norms import sharded_norms
from .placement import HOST, Layout, Placement
from .profiler import start_profile, stop_profile
from .program import DeviceState, Program, capture_began, launch, tracing
from .python_state import facts
from .strict import LENIENT, Strict
from .trace_watch import cure_of, users_line
from .transfer import InFlight, copies, copy_into, fetch, move, swap_value, to_device, to_host

__all__ = [
    "HOST",
    "LENIENT",
    "Compiled",
    "Cores",
    "CoresArgument",
    "Counts",
    "DeviceState",
    "InFlight",
    "Layout",
    "Load",
    "Placement",
    "Program",
    "Strict",
    "add_seconds",
    "agree",
    "available",
    "capture_began",
    "copies",
    "copy_into",
    "count_capture",
    "counts",
    "cure_of",
    "device_memory",
    "facts",
    "fetch",
    "init",
    "launch",
    "metrics_report",
    "move",
    "platform",
    "set_matmul_precision",
    "settled",
    "sharded_norms",
    "start",
    "start_profile",
    "stop_profile",
    "swap_value",
    "timing",
    "to_device",
    "to_host",
    "tracing",
    "translate",
    "users_line",
    "versions",
]
