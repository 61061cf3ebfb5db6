"""Batch, instance, group and layer norm as means and variances, which stay split over the cores.

XLA has one operation for all four norms, for which every core first gathers all rows. Here each core sums over its own
rows: for batch norm, cores exchange a few numbers per channel; for the other norms, nothing.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from ..trace_context import trace_context

_Update = Callable[[Tensor, Tensor], None]


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
    """Batch norm; instance norm if the statistics aren't computed over the rows."""
    if input.dim() < 2 or not _fit(input, (input.shape[1],), running_mean, running_var, weight, bias):
        return None
    if (running_mean is None) != (running_var is None):
        return None
    dims = (*([0] if over_rows else []), *range(2, input.dim()))
    count = math.prod(input.shape[i] for i in dims)
    over_channels = (-1, *(1,) * (input.dim() - 2))
    if training:
        if count < 2:
            return None

        def update(mean: Tensor, variance: Tensor) -> None:
            for running, current in ((running_mean, mean), (running_var, variance * (count / (count - 1)))):
                if running is not None:
                    current = current if over_rows else current.mean(0)  # instance norm averages over the batch
                    running.copy_(momentum * current.flatten() + (1 - momentum) * running)

        y = _normalize(input, dims, eps, weight, bias, over_channels, update)
    else:
        if running_mean is None or running_var is None:
            return None
        scale = (running_var.view(over_channels) + eps).rsqrt()
        scale = scale if weight is None else scale * weight.view(over_channels)
        y = (_widen(input) - running_mean.view(over_channels)) * scale
        y = y if bias is None else y + bias.view(over_channels)
    return y.to(input.dtype)


def group_norm(
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
    x = input.unflatten(1, (num_groups, -1))
    shape = (num_groups, -1, *(1,) * (input.dim() - 2))
    y = _normalize(x, tuple(range(2, x.dim())), eps, weight, bias, shape)
    return y.flatten(1, 2).to(_promote(input, weight, bias))


def layer_norm(
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
    y = _normalize(input, tuple(range(-len(shape), 0)), eps, weight, bias, shape)
    return y.to(_promote(input, weight, bias))


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor | None:
    """Weight normalization. torch_xla has no lowering for the native operation, and runs it on the host."""
    return v * (g / torch.norm_except_dim(v, 2, dim))


batch_norm = partial(_channel_norm, over_rows=True)
instance_norm = partial(_channel_norm, over_rows=False)


def batch_norm_in_autocast(*args: Any) -> Tensor:
    """Batch norm as in CUDA's autocast: in the dtype of its input, with statistics in float32.

    XLA's autocast first converts the input to float32, which doubles the bytes that a convolutional network moves.
    """
    if not trace_context().uses_kernels:
        args = tuple(a.float() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)
    with torch.autocast("xla", enabled=False):
        result: Tensor = torch.ops.aten.batch_norm(*args)
        return result


class _Normalized(torch.autograd.Function):
    """Returns a normalized tensor; the backward pass keeps only the input.

    Calls `update` with the mean and the variance before it saves tensors for the backward pass: a recomputation by
    `torch.utils.checkpoint` stops at the last saved tensor, and must have updated the statistics, as with a native
    batch norm.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        dims: tuple[int, ...],
        eps: float,
        weight: Tensor | None,
        bias: Tensor | None,
        update: _Update | None,
    ) -> Tensor:
        mean, variance = _moments(input, dims)
        if update is not None:
            update(mean, variance)
        scale = (variance + eps).rsqrt()
        y = (_widen(input) - mean) * (scale if weight is None else scale * weight)
        y = y if bias is None else y + bias
        ctx.save_for_backward(input, weight, bias, mean, scale)
        ctx.dims = dims
        ctx.eps = eps
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        input, weight, bias, mean, scale = ctx.saved_tensors
        dims = ctx.dims
        if torch.is_grad_enabled():  # a second derivative goes through the moments too
            mean, variance = _moments(input, dims)
            scale = (variance + ctx.eps).rsqrt()
        gradient = _widen(gradient)
        normal = (_widen(input) - mean) * scale
        # If parameters are constant along `dims`, e.g. one number per channel, they need the same sums as the moments.
        constant = all(p is None or all(p.shape[i] == 1 for i in dims) for p in (weight, bias))
        inner = gradient if constant or weight is None else gradient * weight
        mean_of_inner = inner.mean(dims, keepdim=True)
        mean_of_both = (inner * normal).mean(dims, keepdim=True)
        input_gradient = (inner - mean_of_inner - normal * mean_of_both) * scale
        input_gradient = input_gradient * weight if constant and weight is not None else input_gradient
        count = math.prod(input.shape[i] for i in dims)
        weight_gradient = mean_of_both * count if constant else gradient * normal
        bias_gradient = mean_of_inner * count if constant else gradient
        return (
            input_gradient.to(input.dtype),
            None,
            None,
            None if weight is None else weight_gradient.sum_to_size(weight.shape).to(weight.dtype),
            None if bias is None else bias_gradient.sum_to_size(bias.shape).to(bias.dtype),
            None,
        )


def _normalize(
    input: Tensor,
    dims: tuple[int, ...],
    eps: float,
    weight: Tensor | None,
    bias: Tensor | None,
    shape: tuple[int, ...],
    update: _Update | None = None,
) -> Tensor:
    """Normalize over `dims`. `update` gets the mean and the variance, in which these dimensions have size 1.

    Weight and bias have `shape`, aligned with the last dimensions of the input. `eps` is added to the variance.
    """
    shape = (1,) * (input.dim() - len(shape)) + shape
    weight, bias = (None if p is None else p.view(shape) for p in (weight, bias))
    result: Tensor = _Normalized.apply(input, dims, eps, weight, bias, update)  # type: ignore[no-untyped-call]
    return result


def _moments(input: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return mean and variance, at least in float32.

    E[x^2] - E[x]^2 takes one pass, but loses digits by cancellation. For half-precision inputs the loss is smaller than
    their rounding: about 2^-12 of the mean in float32, against 2^-9 in bfloat16.
    """
    x = _widen(input)
    mean = x.mean(dims, keepdim=True)
    if input.dtype is x.dtype:
        return mean, (x - mean).square().mean(dims, keepdim=True)
    return mean, (x.square().mean(dims, keepdim=True) - mean.square()).clamp_min(0)


def _fit(input: Tensor, shape: tuple[int, ...], *parameters: Tensor | None) -> bool:
    return input.is_floating_point() and all(p is None or tuple(p.shape) == shape for p in parameters)


def _widen(input: Tensor) -> Tensor:
    return input.to(torch.promote_types(input.dtype, torch.float32))


def _promote(*tensors: Tensor | None) -> torch.dtype:
    return reduce(torch.promote_types, [t.dtype for t in tensors if t is not None])
