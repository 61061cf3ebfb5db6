"""`own_kernels`: operations that a TPU does better in other words than torch_xla's, for the time of a step's trace."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .attention import attention
from .classes import cross_entropy, one_hot
from .dropout import dropout, feature_dropout, float32_bernoulli
from .dtypes import check
from .embedding import int32_embedding
from .flattened import own_addmm
from .magnitude import real_abs
from .multihead import own_multihead
from .norms import batch_norm, group_norm, instance_norm, layer_norm, weight_norm
from .products import linear, matmul
from .views import chunks

# Each takes the arguments of its native operation. It returns None for those that it leaves to the native one, such as
# all that PyTorch refuses: the error is then PyTorch's own.
_KERNELS: dict[str, Callable[..., Tensor | list[Tensor] | None]] = {
    "_weight_norm": weight_norm,
    "batch_norm": batch_norm,
    "cross_entropy_loss": cross_entropy,
    "dropout": dropout,
    "feature_dropout": feature_dropout,
    "group_norm": group_norm,
    "instance_norm": instance_norm,
    "layer_norm": layer_norm,
    "linear": linear,
    "matmul": matmul,
    "one_hot": one_hot,
    "scaled_dot_product_attention": attention,
    "unsafe_chunk": chunks,
}

# The native ones are good enough; only the dtypes of their operands are checked.
_CONVOLUTIONS = [f"conv{n}d{form}" for n in (1, 2, 3) for form in ("", ".padding")]
_CONVOLUTIONS += ["conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input"]

_depth = 0
_libraries: dict[str, torch.library.Library] = {}


@contextmanager
def own_kernels(backend: str = "XLA", forms: AbstractContextManager[None] | None = None) -> Iterator[None]:
    """A context in which norms, products, attention and the loss of classes are computed in our own words.

    Results, gradients, running statistics, dtypes and errors are the native ones', but for rounding. The kernels are
    the dispatcher's, so they hold for modules, functions, scripted code and the parts that autograd computes again in
    its own threads, which a `TorchFunctionMode` or a patched `torch.nn.functional` would miss. The backend is the
    dispatch key of the tensors; tests take `"CPU"`. `forms` chooses the form of each attention, see `choosing`.

    Example:
        >>> import torch
        >>> norm, x = torch.nn.LayerNorm(4), torch.randn(2, 4)
        >>> with own_kernels("CPU"):
        ...     y = norm(x)
        >>> torch.allclose(y, norm(x), atol=1e-6)
        True
    """
    global _depth
    if backend not in _libraries:  # for good: taking a kernel back while another thread is in it would be a crash
        library = _libraries[backend] = torch.library.Library("aten", "IMPL")
        for name, own in (_KERNELS | dict.fromkeys(_CONVOLUTIONS, _native)).items():
            packet, _, form = name.partition(".")
            native = getattr(getattr(torch.ops.aten, packet), form or "default")
            kernel = _kernel(packet if backend == "XLA" else "", native, own)
            library.impl(name, kernel, f"Autograd{backend}")
            library.impl(name, kernel, backend)  # of torch.inference_mode
        if backend == "XLA":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PyTorch says that it is replaced
                library.impl("batch_norm", _batch_norm_in_autocast, "AutocastXLA")
    _depth += 1
    try:
        with own_multihead(), own_addmm(), int32_embedding(), float32_bernoulli(), real_abs(), forms or nullcontext():
            yield
    finally:
        _depth -= 1


def _native(*args: Any, **kwargs: Any) -> None: ...


def _kernel(name: str, native: Any, own: Callable[..., Tensor | list[Tensor] | None]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        if _depth:
            check(name, args)
        result = own(*args, **kwargs) if _depth else None
        return native.decompose(*args, **kwargs) if result is None else result

    return kernel


def _batch_norm_in_autocast(*args: Any) -> Tensor:
    """Batch norm as CUDA's autocast has it: in the format of its input, with statistics in float32.

    XLA's autocast makes the input float32 first, which doubles what a network of convolutions reads and writes.
    """
    if not _depth:
        args = tuple(a.float() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)
    with torch.autocast("xla", enabled=False):
        result: Tensor = torch.ops.aten.batch_norm(*args)
        return result
