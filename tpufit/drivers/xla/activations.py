"""Activations whose gradients on torch_xla are wrong at their bounds, or that turn NaN into 0.

Each function takes the native kernel and the dispatcher's keys, then the operation's arguments.
"""

from typing import Any

import torch
from torch import Tensor

from ...runtime.ops.native import Native


def elu_backward(
    native: Native,
    keys: Any,
    gradient: Tensor,
    alpha: float,
    scale: float,
    input_scale: float,
    is_result: bool,
    x: Tensor,
) -> Tensor:
    """The gradient of `elu` and `celu`, from the input `x`, which torch_xla mistakes for the result."""
    result: Tensor
    if is_result:
        result = native(keys, gradient, alpha, scale, input_scale, is_result, x)
    else:
        below = torch.exp(x.clamp(max=0) * input_scale) * (alpha * scale * input_scale)
        result = gradient * torch.where(x > 0, scale, below)
    return result


def hardtanh_backward(_: Native, __: Any, gradient: Tensor, x: Tensor, lower: float, upper: float) -> Tensor:
    """The gradient of `hardtanh` and `relu6`, which is 0 at the bounds."""
    return torch.where((x > lower) & (x < upper), gradient, 0)


def hardsigmoid_backward(_: Native, __: Any, gradient: Tensor, x: Tensor) -> Tensor:
    """The gradient of `hardsigmoid`, which is 0 at the bounds."""
    return torch.where((x > -3) & (x < 3), gradient / 6, 0)


def hardswish_backward(_: Native, __: Any, gradient: Tensor, x: Tensor) -> Tensor:
    """The gradient of `hardswish`, which is 0 at the lower bound and 1 at the upper bound."""
    slope = torch.where(x < 3, gradient * (x / 3 + 0.5), gradient)
    return slope.masked_fill(x <= -3, 0)


def propagate_nan(native: Native, keys: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`threshold` and `softshrink`, for which torch_xla turns NaN into 0."""
    return torch.where(x.isnan(), x, native(keys, x, *args, **kwargs))


def logsigmoid(_: Native, __: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """`logsigmoid`, which is NaN for minus infinity in torch_xla; and a buffer for its gradient, unused here."""
    return torch.where(x < 0, x, torch.where(x.isnan(), x, 0)) - (-x.abs()).exp().log1p(), x


def logsigmoid_backward(_: Native, __: Any, gradient: Tensor, x: Tensor, buffer: Tensor) -> Tensor:
    """The gradient of `logsigmoid`, from the input."""
    return gradient * torch.sigmoid(-x)
