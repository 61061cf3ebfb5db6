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
| `profile` | a profile of chosen steps |
| `report` | counters of compilations, waits and fallbacks |
"""

from .devices import (
    Cores,
    CoresArgument,
    agree,
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
from .report import Counts, count_capture, counts
from .transfer import InFlight, exchange, move, overwrite, to_device, to_host

__all__ = [
    "HOST",
    "Cores",
    "CoresArgument",
    "Counts",
    "InFlight",
    "Layout",
    "Load",
    "Placement",
    "Program",
    "State",
    "agree",
    "capture_began",
    "count_capture",
    "counts",
    "device_memory",
    "exchange",
    "init",
    "launch",
    "move",
    "overwrite",
    "platform",
    "set_matmul_precision",
    "settled",
    "sharded_norms",
    "start",
    "start_profile",
    "stop_profile",
    "to_device",
    "to_host",
    "tracing",
    "translate",
    "versions",
]
