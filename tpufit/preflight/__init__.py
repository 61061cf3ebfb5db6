"""Preflight: compiles a training for a TPU with libtpu, the TPU's compiler, on a machine without a TPU.

| file | content |
| --- | --- |
| `run_preflight` | from a compiled model and its data to a report |
| `preflight_plan` | the steps that `fit` would run, without values |
| `pickling` | pickles a training for another process, without the values of its weights |
| `tracing` | the process that traces the steps on virtual cores |
| `layer_scopes` | names operations by the user's layer and line |
| `compiling` | the process that compiles programs with libtpu; it doesn't import tpufit |
| `children` | runs these processes, and explains their failures |
| `hlo` | parses the text of a program |
| `loop_counts` | counts the iterations of a program's loops |
| `analysis` | analyzes a compiled program |
| `tpu_slices` | TPU slices by their names in the cloud |
| `report` | the result, as tables and as JSON |
| `copied_folder` | a copy of the user's folder, which the script may write into |
| `run_script` | runs a user's script, and compiles each `fit` instead of running it |
"""

from .report import Comparison, PreflightReport
from .run_preflight import find_largest_batch, run_preflight
