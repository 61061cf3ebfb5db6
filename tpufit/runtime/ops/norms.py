"""Batch, instance, group and layer norm as means and variances, which stay split over the cores.

XLA has one operation for all four, for which every core first gathers all rows. Sums over rows are computed where the
rows are: for batch norm a few numbers per channel travel between cores, for the others nothing.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

_depth = 0
_libraries: dict[str, torch.library.Library] = {}


@contextmanager
def sharded_norms(backend: str = "XLA") -> Iterator[None]:
    """A context in which the norms of the device's tensors are computed where their rows are.

    The kernels are the dispatcher's, so they hold for modules, functions, scripted code and the parts that autograd
    computes again in its own threads, which a `TorchFunctionMode` or a patched `torch.nn.functional` would miss.
    Results, gradients, running statistics, dtypes and errors are the native ones'. Statistics are of the whole batch,
    and computed in float32 at least.

    Args:
        backend: The dispatch key of the tensors (default: `"XLA"`); tests take `"CPU"`.

    Example:
        >>> import torch
        >>> norm, x = torch.nn.LayerNorm(4), torch.randn(2, 4)
        >>> with sharded_norms("CPU"):
        ...     y = norm(x)
        >>> torch.allclose(y, norm(x), atol=1e-6)
        True
    """
    global _depth
    if backend not in _libraries:  # for good: taking a kernel back while another thread is in it would be a crash
        library = _libraries[backend] = torch.library.Library("aten", "IMPL")
        for name, arithmetic in _ARITHMETIC.items():
            kernel = _kernel(getattr(torch.ops.aten, name).default, arithmetic)
            library.impl(name, kernel, f"Autograd{backend}")
            library.impl(name, kernel, backend)  # of torch.inference_mode
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


def _kernel(native: Any, arithmetic: Callable[..., Tensor | None]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        result = arithmetic(*args, **kwargs) if _depth else None
        return native.decompose(*args, **kwargs) if result is None else result

    return kernel


# Each takes the arguments of its native operation. It returns None for those that the native one refuses, which then
# raises its own error.


def _channel_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
    over_rows: bool,
) -> Tensor | None:
    """Batch norm, or instance norm, whose statistics are not over the rows."""
    if input.dim() < 2 or not _fit(input, (input.shape[1],), running_mean, running_var, weight, bias):
        return None
    if (running_mean is None) != (running_var is None):
        return None
    dims = (*([0] if over_rows else []), *range(2, input.dim()))
    count = math.prod(input.shape[i] for i in dims)
    x = _widened(input)
    over_channels = (-1, *(1,) * (input.dim() - 2))
    if training:
        if count < 2:
            return None
        mean, deviation, variance = _moments(x, dims)
        with torch.no_grad():
            for running, now in ((running_mean, mean), (running_var, variance * (count / (count - 1)))):
                if running is not None:
                    # Of instances it is the mean over the batch; a batch's own first dimension is 1 here.
                    running.copy_(momentum * now.mean(0).flatten() + (1 - momentum) * running)
    else:
        if running_mean is None or running_var is None:
            return None
        deviation = x - running_mean.view(over_channels)
        variance = running_var.view(over_channels)
    y = _scaled(deviation, variance, eps, weight, bias, over_channels)
    # Autocast has a batch norm in float32, also the one that instance norm natively is.
    return y if torch.is_autocast_enabled(input.device.type) else y.to(input.dtype)


def _group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor | None:
    if input.dim() < 2 or num_groups < 1 or input.shape[1] % num_groups or input.numel() <= num_groups:
        return None
    if not _fit(input, (input.shape[1],), weight, bias):
        return None
    x = _widened(input).unflatten(1, (num_groups, -1))
    _, deviation, variance = _moments(x, tuple(range(2, x.dim())))
    y = _scaled(deviation, variance, eps, weight, bias, (num_groups, -1, *(1,) * (input.dim() - 2)))
    return y.flatten(1, 2).to(_promoted(input, weight, bias))


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor | None:
    shape = tuple(normalized_shape)
    if not shape or tuple(input.shape[-len(shape) :]) != shape or not _fit(input, shape, weight, bias):
        return None
    _, deviation, variance = _moments(_widened(input), tuple(range(-len(shape), 0)))
    y = _scaled(deviation, variance, eps, weight, bias, shape)
    return y.to(_promoted(input, weight, bias))


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor | None:
    """The norm of a weight. torch_xla has no lowering for the native operation, and runs it on the host."""
    return v * (g / torch.norm_except_dim(v, 2, dim))


_ARITHMETIC: dict[str, Callable[..., Tensor | None]] = {
    "batch_norm": partial(_channel_norm, over_rows=True),
    "instance_norm": partial(_channel_norm, over_rows=False),
    "group_norm": _group_norm,
    "layer_norm": _layer_norm,
    "_weight_norm": _weight_norm,
}


def _moments(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, deviations and variance, in two passes: E[x^2] - E[x]^2 would cancel."""
    mean = x.mean(dims, keepdim=True)
    deviation = x - mean
    return mean, deviation, deviation.square().mean(dims, keepdim=True)


def _scaled(
    deviation: Tensor, variance: Tensor, eps: float, weight: Tensor | None, bias: Tensor | None, shape: tuple[int, ...]
) -> Tensor:
    scale = (variance + eps).rsqrt()
    y = deviation * (scale if weight is None else scale * weight.view(shape))
    return y if bias is None else y + bias.view(shape)


def _fit(input: Tensor, shape: tuple[int, ...], *parameters: Tensor | None) -> bool:
    return input.is_floating_point() and all(p is None or tuple(p.shape) == shape for p in parameters)


def _widened(input: Tensor) -> Tensor:
    return input.to(torch.promote_types(input.dtype, torch.float32))


def _promoted(*tensors: Tensor | None) -> torch.dtype:
    return reduce(torch.promote_types, [t.dtype for t in tensors if t is not None])
