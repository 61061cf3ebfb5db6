"""The engine: a step is traced, compiled as one graph, and replayed.

`driver` defines what the engine needs from a runtime for TPUs, and the packages in `drivers/` implement it. The engine
implements the contract in `tpufit/backend/`, whose classes are what the rest of tpufit sees.

| file | its idea |
| --- | --- |
| `driver` | what the engine needs from a runtime, and which runtime is installed |
| `devices` | which cores a process computes on |
| `forks` | refuses the device to forked processes |
| `core_kind` | the kind of core that a step is traced for |
| `placement` | one core or a mesh, as the engine sees it |
| `factory` | the placement of cores, its state and its programs |
| `transfer` | host to device and back, where the waits are |
| `in_flight` | how many steps may run ahead of the device |
| `host_rows` | a host's rows of a batch |
| `pending_tensors` | pending tensors, and their memory |
| `device_state` | the tensors that training changes |
| `aliases` | tensors that share memory |
| `state_aliases` | tensors outside of the state that share memory with it |
| `unsharding` | gathers split weights where a step uses them |
| `weight_packing` | the shapes in which a TPU keeps weights |
| `graph` | a compiled step: its inputs and outputs |
| `trace_target` | what the traces of a program run on |
| `capture` | one trace of a step, its checks, and its undoing |
| `donation` | which inputs a graph may write its outputs over |
| `traced_graph` | the graph of a trace, to be compiled and started |
| `program` | trace a step once, then replay its graph |
| `replay_audits` | which replays are compared with a new trace |
| `trace_context` | what the operations of a step need to know about its trace |
| `trace_seeds` | the random numbers of a trace |
| `device_numbers` | what optimizers, metrics and losses need to know about the device's numbers |
| `recompute` | blocks that are rematerialized in the backward pass |
| `trace_view` | the state's tensors in a trace, and what it changes in them |
| `trace_watch` | sees what a traced step reads, draws and leaves to the host |
| `slow_steps` | why a step is slow, and the change of the user's code that cures it |
| `thread_guard` | other threads wait while a trace has the tensors |
| `absent_cores` | cores that aren't there, for a preflight |
| `program_recorder` | stands in for a device that isn't there |
| `device_counters` | what the runtime counts: compilations, fallbacks, tensors |
| `device_errors` | turns errors of the device into sentences |
| `profiler` | a profile of chosen steps, and names for traced operations |
| `operation_count` | counts the operations of a program |
| `jax_export` | lowers JAX functions for the graph of a step |
| `kernel_work` | the operations of a kernel, which no compiler counts |
| `interface_check` | lets mypy compare this package with `tpufit/backend` |
| `ops` | operations that a runtime lacks, or computes slowly or wrongly |
"""

from .core_kind import has_flash, keeps_bfloat16, repeats_bits
from .device_counters import count_live_tensors, counts, metrics_report
from .device_errors import extract_message, translate
from .device_numbers import COUNTS, keeps_count
from .devices import (
    count_available_cores,
    device_memory,
    get_settled_cores,
    init,
    may_have_hosts,
    memory_used,
    platform,
    process_count,
    process_index,
    start,
    start_absent,
    versions,
)
from .factory import make_placement, make_program, make_state, set_matmul_precision
from .host_rows import fetch_rows, gather_rows, read_value, send_rows
from .kernel_work import KernelWork, find_kernel_work
from .ops.encoder import replace_encoder
from .ops.lowerings import falls_back, has_kernel
from .profiler import scope, start_profile
from .program_recorder import Recorded, Recorder, tracing_for
from .recompute import recomputing
from .slow_steps import explain_slowness, find_cure
from .thread_guard import unguarding
from .trace_context import assuming_finite, tracing, tracing_since, without_unsharding
from .transfer import copy_into, copy_to_host, fetch, fetch_each, move, reshard, swap_value, to_device, to_host
