"""The driver for torch_xla. Only this package imports torch_xla.

| file | content |
| --- | --- |
| `driver` | implements the engine's interface to a runtime |
| `cpp_bindings` | torch_xla's C++ bindings |
| `start` | imports and starts torch_xla |
| `placement` | one core or a mesh, and absent cores |
| `copy_to_host` | copies tensors from the device to the host, which waits |
| `host_rows` | the rows of a batch on this host's cores |
| `trace_seeds` | the random numbers of a trace |
| `graph_hash` | adds to a graph's hash what it omits: settings, and which operands an operation takes |
| `user_reads`, `sync_functions` | make reads by user code, and torch_xla's own functions, use this hash |
| `narrow_indices` | 32-bit indices, where several cores share rows |
| `dropout_bits` | the random bits of a dropout |
| `kernels` | replaces kernels of torch_xla that crash, don't compile, or differ from PyTorch's |
| `activations`, `comparisons`, `complexes`, `fourier`, `gathers`, `pooling` | further replacements, by kind |
| `dtype_promotion` | replacements for operations on several dtypes |
| `xla_counters` | torch_xla's counters |
| `start_errors` | explains why torch_xla can't be imported or started |
| `release_differences` | the differences between torch_xla 2.8 and 2.9 |
| `profiler` | records profiles, and names traced operations |
| `jax_calls` | JAX functions as parts of a graph |
"""

from .driver import XlaDriver

DRIVER = XlaDriver()
