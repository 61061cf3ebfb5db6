"""The device: everything that names torch_xla is in this package, so that another backend replaces it and nothing else.

These names are all that the rest of tpufit asks of it, and all that another one needs:

| name | what it is, or does |
| --- | --- |
| `Cores`, `CoresArgument` | the cores that the process computes on; the type of `cores=` |
| `Placement`, `HOST` | a place to compute at: cores, or the host; it makes, pins and gathers shardings |
| `Sharding` | how a tensor lies over the cores |
| `Program` | a step, which is traced and compiled, and then replayed |
| `DeviceState` | the tensors that programs change, and their values meanwhile |
| `InFlight` | lets steps run ahead of the device, but not too far |
| `Counts`, `Compiled` | a snapshot of the counters; one compilation |
| `Load` | the load of a step on the device, for errors |
| `Strict`, `LENIENT` | the policy of `fit(strict=True)`; the one that lets everything pass |
| `init`, `start` | settle the cores of the process, before any step; make sure that it runs on these |
| `settled`, `platform` | the cores of the process, if they are settled; the kind of device that `"auto"` means |
| `available`, `device_memory` | the number of cores that this host's device has; a core's memory, if it is known |
| `set_matmul_precision` | sets the precision of float32 matrix products |
| `agree` | the value that all hosts go by |
| `versions` | the versions that the last digits of a training depend on |
| `to_device`, `to_host` | copy tensors there, without waiting, and back, which waits |
| `fetch`, `copies` | copy a nest to the host; copy tensors to host memory of their own; each waits once |
| `move` | moves tensors in place |
| `swap_value`, `copy_into` | give a tensor object another value; give tensors new values in place, without waiting |
| `launch` | starts everything that is pending |
| `tracing`, `capture_began` | true while a step is being traced; when the capture under way began |
| `sharded_norms` | a context in which norms are computed where their rows are |
| `has_lowering`, `cure_of` | true if the device computes an operation itself; the cure if it doesn't |
| `facts` | the values that the user's Python keeps |
| `translate` | the error of tpufit for one of the runtime |
| `counts`, `metrics_report` | the counters as they stand; the runtime's own report |
| `count_capture`, `add_seconds` | count a step that has to be captured again, and time to a phase |
| `timed` | a context, or a decorator of a function, whose time is counted to a phase |
| `users_line` | the user's line that is running |
| `start_profile`, `stop_profile` | record a profile |

| file | its idea |
| --- | --- |
| `bindings` | torch_xla's own bindings |
| `devices` | find and start the cores |
| `placement` | the host, one core or a mesh, and how tensors lie over it |
| `transfer` | host to device and back, where the waits are |
| `lazy` | tensors that wait to be computed, and their memory |
| `device_state` | the tensors that training changes |
| `graph` | a compiled step: its inputs and outputs |
| `capture` | one trace of a step, its proof, and its undoing |
| `program` | trace a step once, then replay its graph |
| `trace_watch` | sees what a traced step reads, draws and leaves to the host |
| `python_state` | the numbers and flags that user code keeps between steps |
| `counters` | compilations, waits, fallbacks and time |
| `faults` | errors of the runtime, in a sentence |
| `profiler` | a profile of chosen steps |
| `strict` | the policy of `fit(strict=True)` |
| `ops` | operations that torch_xla lacks or does badly |
"""

from .capture import capture_began, tracing
from .counters import Compiled, Counts, add_seconds, count_capture, counts, metrics_report, timed
from .device_state import DeviceState
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
from .lazy import launch
from .ops.lowerings import has_lowering
from .ops.norms import sharded_norms
from .placement import HOST, Placement, Sharding
from .profiler import start_profile, stop_profile
from .program import Program
from .python_state import facts
from .strict import LENIENT, Strict
from .trace_watch import cure_of, users_line
from .transfer import InFlight, copies, copy_into, fetch, move, swap_value, to_device, to_host
