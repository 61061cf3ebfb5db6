"""Maxima, minima and sorting: torch_xla and TorchTPU ignore NaN in some operations, or take infinity for a number.

Each function takes the native kernel and the dispatcher's keys, then the operation's arguments.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..trace_context import trace_context
from .native import Native


def arg_extreme(native: Native, keys: Any, tensor: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """`argmax` and `argmin`, which return the index of the first NaN, if there is one."""
    if not tensor.numel():
        torch.argmax(torch.empty(tensor.shape, device="meta"), dim, keepdim)  # raises PyTorch's error
    index: Tensor = native(keys, tensor, dim, keepdim)
    if not tensor.is_floating_point():
        return index
    is_nan = tensor.isnan()
    has_nan = is_nan.any() if dim is None else is_nan.any(dim, keepdim)
    return torch.where(has_nan, is_nan.int().argmax(dim, keepdim), index)


def extreme(native: Native, keys: Any, tensor: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """`max` and `min` along a dimension. The index is that of the first NaN, if there is one.

    The device's maximum starts from the lowest finite number, and so returns this number where all numbers are minus
    infinity. Here the device compares the halves of the numbers, and the result is doubled: twice the lowest finite
    number is minus infinity, and no other halves are so low. Minima likewise.
    """
    if not tensor.is_floating_point():
        values, indices = native(keys, tensor, dim, keepdim)
        return values, indices + 0  # as in `ordered`
    values, indices = native(keys, tensor * 0.5, dim, keepdim)
    return values * 2, torch.where(values.isnan(), tensor.isnan().int().argmax(dim, keepdim), indices)


def extreme_of(native: Native, keys: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`amax`, `amin`, and `max` and `min` of a whole tensor, correct for infinite numbers as in `extreme`."""
    halved = tensor.is_floating_point() and not trace_context().finite
    result: Tensor = native(keys, tensor * 0.5 if halved else tensor, *args, **kwargs)
    return result * 2 if halved else result


def logsumexp(native: Native, keys: Any, tensor: Tensor, dim: Sequence[int], keepdim: bool = False) -> Tensor:
    """`logsumexp`, infinite where the maximum is. torch_xla returns NaN there, and for large bfloat16 numbers."""
    if not tensor.is_floating_point() or trace_context().finite:
        return native(keys, tensor, dim, keepdim)  # type: ignore[no-any-return]
    dim = list(dim) or list(range(tensor.dim()))
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    most = wide.amax(dim, keepdim)
    infinite = most.abs() == most.new_full((), math.inf)  # `isinf` compares in 64 bits, which a TPU emulates
    return torch.where(infinite, most, native(keys, wide, dim, keepdim)).to(tensor.dtype)


def ordered(native: Native, keys: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """`sort`, `topk` and `kthvalue`. NaN is larger than all numbers. A stable sort treats -0 and 0 as equal."""
    if tensor.is_floating_point():
        tensor = tensor.masked_fill(tensor.isnan(), torch.nan)
        if kwargs.get("stable"):
            tensor = tensor.masked_fill(tensor == 0, 0)
    values, indices = native(keys, tensor, *args, **kwargs)
    return values, indices + 0  # torch_xla ends the process if `index_select` takes the second result of an operation


def cumulative(largest: bool, native: Native, keys: Any, tensor: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """`cummax` and `cummin`. The index is that of the last equal number, and all results after a NaN are NaN.

    torch_xla returns the first equal number, skips NaN, and doesn't compile for some shapes. Here each pass combines
    the extremes of windows, and doubles the length of a window.
    """
    torch.cummax(torch.empty(tensor.shape, device="meta"), dim)  # raises PyTorch's errors
    values, size = tensor, tensor.shape[dim] if tensor.dim() else 1
    along = [size if i == dim % tensor.dim() else 1 for i in range(tensor.dim())]
    indices = torch.arange(size, device=tensor.device).view(along).expand(tensor.shape)
    step = 1
    while step < size:
        left, right = values.narrow(dim, 0, size - step), values.narrow(dim, step, size - step)
        later = right >= left if largest else right <= left
        if tensor.is_floating_point():
            later = right.isnan() | (later & ~left.isnan())
        values, indices = (_combine(x, step, later, dim) for x in (values, indices))
        step *= 2
    return values, indices


def _combine(tensor: Tensor, step: int, later: Tensor, dim: int) -> Tensor:
    """Select each element where `later`, else the element `step` positions earlier; the first `step` stay."""
    size = tensor.shape[dim]
    both = torch.where(later, tensor.narrow(dim, step, size - step), tensor.narrow(dim, 0, size - step))
    return torch.cat([tensor.narrow(dim, 0, step), both], dim)
