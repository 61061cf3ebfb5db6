"""TorchTPU: everything that names torch_tpu is in this package.

| file | its idea |
| --- | --- |
| `driver` | the engine's `Driver` for TorchTPU |
| `private_names` | the private names of torch_tpu that tpufit uses, and the tested releases |
| `start` | imports and starts torch_tpu without output |
| `placement` | a placement on one core, or on several that act as one |
| `one_core` | tensors and programs of one core |
| `absent_cores` | absent cores, for a preflight |
| `core_group` | tensors and programs of several cores, each driven by its own process |
| `core_tensors` | the tensors that all cores have, by number |
| `core_connections` | the other cores' processes, and the connections to them |
| `core_process` | the process of another core |
| `messages` | the messages between the processes of the cores |
| `rewrite_indices` | 32-bit indices, which several cores need |
| `host` | this host's number, and the number of hosts |
| `core_environments` | the cores of this host, and the environment variables that select them |
| `compute_modes` | whether operations are computed, or only recorded |
| `tensor_identity` | the identity of a tensor's memory |
| `trace_session` | a trace: its inputs, new tensors and changes |
| `programs` | compiles and runs the text of a trace's graph |
| `compile_cache` | compiled programs of earlier processes, in the user's cache folder |
| `core_layouts` | how a graph's tensors are split over the cores |
| `graph_marks` | what a trace can't record, and the graph's text gets afterwards |
| `jax_calls` | JAX functions as parts of a graph, such as the kernel of flash attention |
| `rewrite_products` | rewrites a graph's text so that matrix products keep their dimensions |
| `rewrite_slices` | rewrites a graph's text so that slices take tensors before dimensions are merged |
| `graph_shapes` | shapes in a graph's text, and the operations that have changed them |
| `trace_seeds` | the random numbers of a trace |
| `kernels` | replacements for kernels that TorchTPU lacks, or that read a value on the host |
| `user_reads` | values that user code reads |
| `dropout_bits` | the random bits of a dropout |
"""

from .driver import TorchTpuDriver

DRIVER = TorchTpuDriver()
