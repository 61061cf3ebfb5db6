"""All changes that tpufit makes to its process outside tpufit: why, and until when. `tests/test_house.py` verifies the lists.

Changes to what Python or PyTorch run:

| where | what | why | until |
| --- | --- | --- | --- |
| `runtime/ops/kernels.py` | kernels of the device for norms, products, attention, dropout, classes and their losses | torch_xla's kernels gather rows over the cores, or are slow | permanent, because another thread may be running one; outside `replace_kernels` they call the native ones |
| `runtime/ops/lowerings.py` | kernels of the device for Huber's loss, `nll_loss`, packed sequences and `linear_algebra` | torch_xla has none, or ends the process, as for a single sample | permanent, for the same reason |
| `drivers/xla/kernels.py` | kernels of the device, such as `randperm`, `sort` and `.item()` | torch_xla's kernels end the process, don't compile, or give wrong results | permanent, for the same reason |
| `drivers/xla/sync_functions.py` | `_xla_sync_multi` and `_xla_step_marker` of torch_xla's bindings | `torch_xla.sync`, which calls them, may run another graph's program, see `drivers/xla/graph_hash.py` | permanent: another thread may be inside one |
| `drivers/xla/narrow_indices.py` | kernels of the device for operations that take indices | XLA ends the process for some 64-bit indices, on several cores | permanent, for the same reason, in processes on several cores; with torch 2.8 they run before the choice of a device |
| `drivers/torchtpu/user_reads.py` | kernels of the device for `.item()` and `.cpu()` | they wait forever once a core of several is lost | permanent, for the same reason, in processes on several cores |
| `runtime/ops/multihead.py` | `torch.nn.functional.multi_head_attention_forward` | PyTorch's version merges rows with other dimensions | the end of `replace_multihead`, around a traced step |
| `runtime/ops/addmm.py` | `torch.addmm` | rows flattened for it are gathered over the cores, as in transformers' `Conv1D` | the end of `replace_addmm`, around a traced step |
| `runtime/ops/embedding.py` | `embedding` and `embedding_bag` of `torch.nn.functional` | a TPU emulates 64-bit numbers; XLA has no sparse gradients | the end of `replace_embedding`, around a traced step |
| `runtime/ops/encoder.py` | the `forward` of `torch.nn.TransformerEncoder` | in evaluation PyTorch uses nested tensors, which XLA lacks | the end of `replace_encoder`, around a traced step and `model(x)` |
| `runtime/ops/dropout.py` | `torch.Tensor.bernoulli_` | torch_xla draws 7 bits in bfloat16, as for stochastic depth | the end of `replace_bernoulli`, around a traced step |
| `drivers/xla/start.py` | `torch.nn.GRU` | torch_xla replaces it by its own, which needs JAX; this restores PyTorch's | permanent: it undoes torch_xla's patch |
| `drivers/xla/driver.py` | `torch.xla` | `torch.utils.checkpoint` looks for a module by the device's name | the end of the context, around a traced step |
| `runtime/jax_export.py` | JAX's setting `jax_platforms`, and its devices; in `jax._src.tpu_custom_call` the version of kernels | JAX would start the TPU too, which the runtime uses; libtpu 0.0.17 can't read the kernels of JAX 0.7 | the end of `export`; if JAX had devices before, they remain |
| `runtime/trace_seeds.py` | `torch.manual_seed` | it also seeds the device, with a constant | the end of `seeded_by_torch`, around a traced step |
| `drivers/torchtpu/compute_modes.py` | `torch.Tensor.__repr__` | PyTorch disables modes while it prints, and a traced tensor has no value yet | the end of `printing`, around a traced step |
| `runtime/trace_watch.py` | `sys.setprofile`, and the functions of `numpy.random` | to see what a step's Python reads and draws | the end of `Watch`, around a traced step; an existing profiler remains |
| `runtime/thread_guard.py` | the class of the step's tensors | other threads wait while a step is traced again | the end of `guarding` |
| `runtime/transfer.py` | how a tensor is pickled, by `copyreg` | a tensor on the device is pickled as a tensor on the host | permanent, only for tensors on the device |
| `runtime/forks.py` | the device's copies of tensors | they would wait forever in a process that is forked after the device's start | permanent, only in that process |
| `utils/garbage_collector.py` | the garbage collector is paused | to list the created tensors, and to read frames of other threads | the end of `pausing` |
| `optimizers/build.py` | the class of the user's optimizer, to a subclass of the same name | Keras's `optimizer.learning_rate` is a property | permanent: the class is otherwise the same |
| `utils/is_compiling.py` | the result of `torch.compiler.is_compiling()`; `torch.compile`'s stance, if it is imported | modules then choose code that can be traced, and functions made by `torch.compile` run their Python | the end of `compiling` |
| `utils/defer_import.py` | a finder in `sys.meta_path`; the class of the module that it finds | torch_xla and torch_tpu import half of PyTorch's compiler | the end of `defer_import`; the first use of the module |

Changes to the process, or to its end:

| where | what | why | until |
| --- | --- | --- | --- |
| `drivers/torchtpu/kernels.py` | kernels of the device for `masked_fill` and `smooth_l1_loss` | they read an argument that is a tensor; the host computes it | permanent, because another thread may be running one |
| `utils/torch_import.py` | PyTorch's autoload of backends, in the environment | torch_tpu prints and warns while it is imported | the end of the import |
| `drivers/torchtpu/start.py` | the level of XLA's log, and PyTorch's autoload, in the environment; torch_tpu's warnings are hidden | it prints and warns while it starts | permanent, except the autoload: the end of the import |
| `drivers/torchtpu/core_environments.py` | `RANK`, `WORLD_SIZE` and the like, in the environment | TorchTPU starts as one core of several | the end of `setting_variables`, when the cores run |
| `drivers/xla/start.py` | `CPU_NUM_DEVICES`, the level of XLA's log and on a CPU two flags in `XLA_FLAGS`, in the environment; no warnings by `logging` | virtual cores; XLA's notes at every compilation; XLA's CPU backend would ignore NaN in maxima, and compile longer; torch_xla warns while it is imported | permanent, because XLA may read them at any time; the end of the import |
| `utils/hardware.py` | environment variables for runs of several processes, on Kaggle; `TPU_SKIP_MDS_QUERY`, without a TPU | a TPU would wait for missing processes; libtpu would query the cloud for minutes | permanent: libtpu reads them when it is loaded |
| `hosts/group.py` | `TPUFIT_HOST` in the environment; an exit handler | for workers that read a host's rows; to inform the other hosts | permanent |
| `runtime/forks.py` | a fork handler; in the forked process, torch_xla's exit handler and C++ destructors don't run | it lacks the threads that they wait for | permanent |
| `drivers/xla/graph_hash.py` | the environment variable that torch_xla hashes | its hash of a graph ignores the precision | the next graph with another lowering |
| `runtime/program_recorder.py` | `PJRT_DEVICE` | operations are traced as for a TPU | the end of `tracing_for` |
| `drivers/xla/release_differences.py` | torch_xla's exit handler is removed | in 2.8, it would start a runtime if none has started | permanent |
| `trainer/interruption.py` | the handlers of SIGINT and SIGTERM, if they are the defaults | `fit` saves before it returns | the first signal, or the end of `fit` |
| `utils/defer_interrupt.py` | the handler of SIGINT | half an import of torch_tpu can't be done again | the end of `defer_interrupt`; then the usual handler gets the signal |
| `utils/files.py` | a fork handler | a child that outlives its parent mustn't keep the locks on the parent's folders | permanent, one per process |
| `data/read_loader.py` | PyTorch's handler of SIGCHLD; the garbage collector's generations; SIGINT is blocked in a worker | it raises in any running code; a worker mustn't touch the device's objects; the parent ends its workers | the end of a pass; the start of the workers; in the worker's own process |
| `data/prefetch.py` | an exit handler | threads that read must end before the device's | permanent, one per process |
| `data/cache/maker.py` | PyTorch's number of threads | a sum's last digits depend on it | the end of `isolated` |
| `data/cache/build.py` | SIGINT and the number of threads of a worker | the parent handles Ctrl-C | in the worker's own process |
| `preflight/run_script.py` | `sys.argv`, `sys.path`, `PJRT_DEVICE`, and `fit` and the like of `Model` | a script runs without training | the end of `run_script`; the variable is permanent |
| `preflight/copied_folder.py` | the working directory and the directory of temporary files; `open`, the functions of `os` that take paths, `torch.save`, `serialize_file` of safetensors and `sqlite3.connect`; an audit hook | a preflight must not replace the files of a training | the end of `copied_folder`; the hook is permanent, but then does nothing |
| `verification/check_process.py` | the handler of SIGINT | a shell's background jobs ignore it, and Ctrl-C is checked | in a check's own process |
| `preflight/compiling.py` | the environment | libtpu runs without a TPU | in the compiler's own process |
"""  # noqa: E501
