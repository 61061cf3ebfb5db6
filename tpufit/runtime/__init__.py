"""The device: everything that names torch_xla is in this package, so that another backend replaces it and nothing else.

It fulfils the contract in `tpufit/backend/`: the classes there are what the rest of tpufit sees.

| file | its idea |
| --- | --- |
| `bindings` | torch_xla's own bindings |
| `devices` | find and start the cores |
| `forks` | refuse the device to a forked process |
| `kinds` | the kind of core that a step is traced for |
| `release` | what differs between torch_xla 2.8 and 2.9 |
| `placement` | one core or a mesh, and cores that aren't there |
| `make` | the state and the programs of a placement |
| `transfer` | host to device and back, where the waits are |
| `in_flight` | how many steps may run ahead of the device |
| `rows` | a host's own rows of a batch |
| `lazy` | tensors that wait to be computed, and their memory |
| `lowering` | what is read only while a graph is lowered, and its part in the graph's identity |
| `device_state` | the tensors that training changes |
| `aliases` | tensors that share memory |
| `unsharding` | whole weights where a step computes with split ones |
| `packing` | the shapes in which a TPU keeps weights |
| `graph` | a compiled step: its inputs and outputs |
| `capture` | one trace of a step, its proof, and its undoing |
| `program` | trace a step once, then replay its graph |
| `trace_seeds` | the random numbers of a trace |
| `numbers` | what optimizers, metrics and losses must know of the device's numbers |
| `recompute` | blocks that are computed again in the backward pass |
| `trace_watch` | sees what a traced step reads, draws and leaves to the host |
| `recorder` | takes the place of a device that isn't there |
| `counters` | what torch_xla counts itself: compilations, fallbacks, tensors |
| `faults` | errors of the runtime, in a sentence |
| `profiler` | a profile of chosen steps, and names for what is traced |
| `kernel_work` | what a kernel computes, which no compiler counts |
| `jax_calls` | functions of JAX's as parts of a graph |
| `ops` | operations that torch_xla lacks or does badly |
"""

from .capture import tracing, tracing_since
from .counters import counts, live_tensors, metrics_report
from .devices import (
    available,
    device_memory,
    init,
    memory_used,
    platform,
    process_count,
    process_index,
    settled,
    start,
    versions,
)
from .faults import translate
from .kernel_work import KernelWork, work_in
from .kinds import has_flash, keeps_bfloat16
from .lowering import set_matmul_precision
from .make import program_at, state_at
from .numbers import COUNTS, keeps_count
from .ops.lowerings import falls_back, has_kernel
from .placement import placement_on
from .profiler import scope, start_profile, stop_profile
from .recompute import recomputing
from .recorder import Recorded, Recorder, tracing_for
from .release import message_of
from .rows import fetch_rows, gather_rows, send_rows, value_of
from .trace_watch import cure_for
from .transfer import copies, copy_into, fetch, fetch_each, move, reshard, swap_value, to_device, to_host
from .unsharding import without_unsharding
