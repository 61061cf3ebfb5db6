"""All that tpufit changes in its process outside itself: why, and who takes it back. `tests/test_house.py` compares.

What Python itself runs otherwise, or PyTorch:

| where | what | why | until |
| --- | --- | --- | --- |
| `runtime/ops/kernels.py` | kernels of the device for norms, products, attention, dropout, classes and their losses | torch_xla's gather rows over the cores, or are slow | for good, as another thread may be in one; outside `own_kernels` they call the native ones |
| `runtime/ops/lowerings.py` | kernels of the device for Huber's loss, `nll_loss`, `randperm`, `roll` and `linear_algebra` | torch_xla has none, or ends the process: at one sample, at rows that cores share, at an empty tensor | for good, for the same reason |
| `runtime/ops/indices.py` | kernels of the device for operations that take indices | XLA ends the process at some of 64 bits, on several cores | for good, for the same reason, in processes on several cores; with torch 2.8 they go before the choice of a device |
| `runtime/ops/multihead.py` | `torch.nn.functional.multi_head_attention_forward` | PyTorch's merges rows with other dimensions | the end of `own_multihead`, around a traced step |
| `runtime/ops/flattened.py` | `torch.addmm` | rows that were flattened for it are gathered over the cores, as in transformers' `Conv1D` | the end of `own_addmm`, around a traced step |
| `runtime/ops/embedding.py` | `embedding` and `embedding_bag` of `torch.nn.functional` | a TPU emulates numbers of 64 bits; XLA has no sparse gradients | the end of `int32_embedding`, around a traced step |
| `runtime/ops/magnitude.py` | `abs` and `absolute` of `torch` and `torch.Tensor`, for complex numbers | torch_xla's are complex | the end of `real_abs`, around a traced step |
| `runtime/ops/dropout.py` | `torch.Tensor.bernoulli_` | torch_xla draws 7 bits in bfloat16, as for stochastic depth | the end of `float32_bernoulli`, around a traced step |
| `runtime/devices.py` | `torch.nn.GRU` | torch_xla puts its own there, which needs JAX; this is PyTorch's again | for good: it takes back torch_xla's patch |
| `runtime/recompute.py` | `torch.xla`, the `forward` of blocks, and what `torch.utils.checkpoint` calls | it looks for a module by the device's name, and the compiler would find that it has the first result already | the end of the context, around a traced step |
| `runtime/jax_calls.py` | JAX's setting `jax_platforms`, and its devices; in `jax._src.tpu_custom_call` the version of kernels | torch_xla has the TPU, which JAX would start too; libtpu 0.0.17 reads none of JAX 0.7's | the end of `lower`; if JAX has devices before, they stay |
| `runtime/trace_seeds.py` | `torch.manual_seed` | it seeds the device too, by a constant | the end of `seeded_by_torch`, around a traced step |
| `runtime/trace_watch.py` | `sys.setprofile`, and the functions of `numpy.random` | to see what a step's Python reads and draws | the end of `Watch`, around a traced step; a profiler that is there stays |
| `runtime/own_thread.py` | the class of the step's tensors | other threads wait while a step is traced again | the end of `for_this_thread` |
| `runtime/transfer.py` | how a tensor is pickled, by `copyreg` | a tensor of the device is pickled as one of the host | for good, and for tensors of the device only |
| `runtime/forks.py` | the device's copies of tensors | they would wait for ever in a process that is forked once the device runs | for good, in that process only |
| `runtime/lazy.py` | the garbage collector stands still | to list the tensors that were made | the end of `noting_new` |
| `optimizers/build.py` | the class of the user's optimizer, to a subclass of the same name | Keras's `optimizer.learning_rate` is a property | for good: it is the same class but for that |
| `utils/compiling.py` | what `torch.compiler.is_compiling()` answers | modules choose the way that can be traced | the end of `compiling` |
| `utils/deferred.py` | a finder in `sys.meta_path`; the class of the module that it found | torch_xla imports half of PyTorch's compiler | the end of `deferred`; the first use of the module |

What the process is, or how it ends:

| where | what | why | until |
| --- | --- | --- | --- |
| `runtime/devices.py` | `CPU_NUM_DEVICES` and the level of XLA's log, in the environment; no warnings by `logging` | virtual cores; XLA's notes at every compilation; torch_xla's while it is imported | for good, as XLA reads them when it likes; the end of the import |
| `utils/hardware.py` | variables of the environment that a run of several processes has left, on Kaggle; `TPU_SKIP_MDS_QUERY`, without a TPU | a TPU would wait for processes that aren't there; libtpu would ask the cloud for minutes | for good: libtpu reads them when it is loaded |
| `hosts/group.py` | `TPUFIT_HOST` in the environment; a handler for the exit | for workers that read a host's rows; to tell the other hosts | for good |
| `runtime/forks.py` | a handler for forks; in the forked process no end of torch_xla's, and none of C++ objects | it has none of the threads that these wait for | for good |
| `runtime/lowering.py` | the variable of the environment that torch_xla hashes | its hash of a graph leaves the precision out | the next graph that is lowered otherwise |
| `runtime/recorder.py` | `PJRT_DEVICE` | operations are traced as for a TPU | the end of `tracing_for` |
| `runtime/release.py` | torch_xla's handler for the exit is taken out | of 2.8, where no runtime has started: it would start one | for good |
| `trainer/interruption.py` | the handlers of SIGINT and SIGTERM, where they are the usual ones | `fit` saves before it leaves | the first signal, or the end of `fit` |
| `utils/files.py` | a handler for forks | a child that lives on mustn't keep the locks on its parent's folders | for good, one for all |
| `data/workers.py` | PyTorch's handler of SIGCHLD; the garbage collector's generations | it raises in whatever runs; a worker mustn't touch the device's objects | the end of a pass; the start of the workers |
| `data/prefetch.py` | a handler for the exit | threads that read must end before the device's | for good, one for all |
| `data/cache/maker.py` | PyTorch's number of threads | a sum's last digits depend on it | the end of `alone` |
| `data/cache/build.py` | SIGINT and the number of threads of a worker | Ctrl-C is the parent's | it is the worker's own process |
| `preflight/script.py` | `sys.argv`, `sys.path`, `PJRT_DEVICE`, and `fit` and the like of `Model` | a script runs without training | the end of `run_script`; the variable for good |
| `preflight/copied_folder.py` | the working directory and that for temporary files; `open`, the functions of `os` that take paths, `torch.save`, `serialize_file` of safetensors and `sqlite3.connect`; an audit hook | a script that isn't trained must not replace what a training has written | the end of `copied_folder`; the hook, which then does nothing, for good |
| `verification/process.py` | the handler of SIGINT | a shell's background jobs ignore it, and Ctrl-C is checked | it is a check's own process |
| `preflight/compiling.py` | the environment | libtpu runs without a TPU | it is the compiler's own process |
"""  # noqa: E501
