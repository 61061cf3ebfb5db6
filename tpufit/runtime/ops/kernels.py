"""`replace_kernels`: replaces PyTorch's kernels by reformulations that a TPU runs faster, while a step is traced."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..driver import driver
from ..trace_context import trace_context, tracing_with
from .addmm import replace_addmm
from .attention import attention
from .cross_entropy import cross_entropy, one_hot
from .dropout import dropout, feature_dropout, replace_bernoulli
from .dtypes import check
from .embedding import replace_embedding
from .encoder import replace_encoder
from .multihead import replace_multihead
from .native import operation, transforming, with_fallback
from .norms import batch_norm, batch_norm_in_autocast, group_norm, instance_norm, layer_norm, weight_norm
from .products import linear, matmul
from .rrelu import rrelu, rrelu_in_place
from .views import chunks

# Each kernel takes the arguments of its native operation. It returns None to leave a call to the native kernel, e.g.
# for arguments that PyTorch refuses, so that the error is PyTorch's.
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
    "rrelu": rrelu,
    "rrelu_": rrelu_in_place,
    "scaled_dot_product_attention": attention,
    "unsafe_chunk": chunks,
}

# Convolutions keep their native kernels; only the dtypes of their operands are checked.
_CONVOLUTIONS = [f"conv{n}d{form}" for n in (1, 2, 3) for form in ("", ".padding")]
_CONVOLUTIONS += ["conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input"]

_libraries: dict[str, torch.library.Library] = {}


@contextmanager
def replace_kernels(backend: str | None = None) -> Iterator[None]:
    """A context in which norms, products, attention, cross-entropy and dropout run on tpufit's kernels.

    Results, gradients, running statistics, dtypes and errors equal PyTorch's, up to rounding. The kernels are
    registered with the dispatcher, so modules, functions, scripted code and recomputations in autograd's threads use
    them; a `TorchFunctionMode` or a patched `torch.nn.functional` wouldn't reach all of these. Transforms of
    `torch.func`, such as `vmap` and `grad`, keep PyTorch's kernels, except for attention. The backend is the dispatch
    key of the tensors, by default the device's key; tests pass `"CPU"`.

    Example:
        >>> import torch
        >>> norm, x = torch.nn.LayerNorm(4), torch.randn(2, 4)
        >>> with replace_kernels("CPU"):
        ...     y = norm(x)
        >>> torch.allclose(y, norm(x), atol=1e-6)
        True
    """
    backend = backend or driver().dispatch_key
    if backend not in _libraries:  # permanent: removing a kernel while another thread runs it would crash
        library = torch.library.Library("aten", "IMPL")
        for name, own in (_KERNELS | dict.fromkeys(_CONVOLUTIONS, _native)).items():
            packet = name.partition(".")[0]
            kernel = with_fallback(name, _in_steps(packet if backend == "XLA" else "", own))
            library.impl(name, kernel, f"Autograd{backend}")
            library.impl(name, kernel, backend)  # for torch.inference_mode
        if backend == "XLA":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PyTorch warns that a kernel is replaced
                library.impl("batch_norm", batch_norm_in_autocast, "AutocastXLA")
        _libraries[backend] = library  # last, so that the next call retries after an error
    with (
        tracing_with(uses_kernels=True),
        replace_multihead(),
        replace_addmm(),
        replace_embedding(),
        replace_encoder(),
        replace_bernoulli(),
    ):
        yield


def _attend_by_definition(*args: Any, **kwargs: Any) -> Tensor:
    """PyTorch's definition of attention. TorchTPU's kernel refuses transforms."""
    result: Tensor = operation("_scaled_dot_product_attention_math")(*args, **kwargs)[0]
    return result


def _native(*args: Any, **kwargs: Any) -> None: ...


def _in_steps(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        if transforming():
            return _attend_by_definition(*args, **kwargs) if own is attention else None
        if not trace_context().uses_kernels:
            return None
        check(name, args)
        return own(*args, **kwargs)

    return kernel
