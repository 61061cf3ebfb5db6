"""Preflight: a training compiled for a TPU by the TPU's own compiler, libtpu, on a machine that needs no TPU.

| file | its idea |
| --- | --- |
| `runs` | from a compiled model and its data to a report |
| `plan` | the steps that `fit` would run, without values |
| `pickling` | a training on its way to another process, without the values of its weights |
| `tracing` | the process that traces the steps on virtual cores |
| `scopes` | names operations by the user's layer and line |
| `compiling` | the process that compiles programs by libtpu; it imports nothing of tpufit |
| `children` | runs these processes, whose end is a sentence |
| `hlo` | reads the text of a program |
| `analysis` | what a compiled program does |
| `slices` | TPUs by their names in the cloud |
| `report` | the result, for people and as JSON |
| `script` | a user's script, each `fit` of which is compiled instead of run |
"""

from .report import Comparison, PreflightReport
from .runs import largest_batch, run_preflight
