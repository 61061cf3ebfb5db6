"""The driver for torch_xla. Only this package imports torch_xla.

| file | content |
| --- | --- |
| `driver` | implements the engine's interface to a runtime |
| `bindings` | torch_xla's C++ bindings |
| `start` | imports and starts torch_xla |
| `placement` | one core or a mesh, and absent cores |
| `reading` | copies tensors from the device to the host, which waits |
| `rows` | the rows of a batch on this host's cores |
| `seeds` | the random numbers of a trace |
| `lowering` | adds to a graph's hash what it omits: settings, and which operands an operation takes |
| `reads`, `syncs` | make reads by user code, and torch_xla's own functions, use this hash |
| `indices` | 32-bit indices, where several cores share rows |
| `bits` | the random bits of a dropout |
| `kernels` | replaces kernels of torch_xla that crash, don't compile, or differ from PyTorch's |
| `activations`, `comparisons`, `complexes`, `fourier`, `gathers`, `pools` | further replacements, by kind |
| `promotion` | replacements for operations on several dtypes |
| `counts` | torch_xla's counters |
| `start_errors` | explains why torch_xla can't be imported or started |
| `release` | the differences between torch_xla 2.8 and 2.9 |
| `profiler` | records profiles, and names traced operations |
| `jax_calls` | JAX functions as parts of a graph |
"""

from .driver import XlaDriver

DRIVER = XlaDriver()
