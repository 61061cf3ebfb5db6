"""Pooling operations that torch_xla computes differently from PyTorch, or accepts where PyTorch raises an error.

Each function takes the operation's name, the native kernel and the dispatcher's keys, then the operation's arguments.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...runtime.ops.derivatives import with_second_derivative
from ...runtime.ops.native import Native, operation, transforming


def avg_pool(
    name: str,
    native: Native,
    keys: Any,
    tensor: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """`avg_pool2d` and `avg_pool3d`. torch_xla ignores `divisor_override`, and accepts sizes with an empty result."""
    options = (kernel_size, stride, padding, ceil_mode)
    _check(name, tensor, *options, count_include_pad, divisor_override)
    result: Tensor
    if divisor_override is None:
        result = native(keys, tensor, *options, count_include_pad, None)
    elif ceil_mode:
        raise RuntimeError(
            f"{name}: torch_xla can't combine divisor_override and ceil_mode=True; pass only one of them"
        )
    else:
        window = math.prod(kernel_size) if len(kernel_size) > 1 else kernel_size[0] ** int(name[-2])
        result = native(keys, tensor, *options, True, None) * (window / divisor_override)
    return result


def max_pool(
    name: str,
    native: Native,
    keys: Any,
    tensor: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> Tensor:
    """`max_pool1d`, `max_pool2d` and `max_pool3d`.

    torch_xla's gradient ignores `dilation`, has no gradient, and is wrong in some transforms of `torch.func`: it finds
    the largest elements again, in a tensor that a transform may have replaced by zeros.
    """
    options = (kernel_size, stride, padding, dilation, ceil_mode)
    sizes = _check(name, tensor, *options)[-int(name[-2]) :]
    is_native = all(step == 1 for step in dilation) and not transforming()
    # PyTorch composes max_pool1d from other operations.
    if not tensor.is_floating_point() or (is_native and name == "max_pool1d"):
        return native(keys, tensor, *options)  # type: ignore[no-any-return]
    if is_native:
        return with_second_derivative(partial(native, keys), operation(name).decompose, tensor, *options)
    result = tensor
    arguments = (_repeat(one, len(sizes)) for one in (sizes, kernel_size, stride or kernel_size, padding, dilation))
    # The first of equal elements in row-major order gets the gradient, so the last dimension is reduced first.
    for dim, (size, kernel, by, pad, step) in enumerate(reversed(list(zip(*arguments, strict=True))), 1):
        span = (size - 1) * by + 1
        after = max(0, span + (kernel - 1) * step - pad - result.shape[-dim])
        padded = F.pad(result, [0, 0] * (dim - 1) + [pad, after], value=-math.inf)
        starts = (padded.narrow(-dim, i * step, span).movedim(-dim, -1)[..., ::by] for i in range(kernel))
        result = torch.stack(list(starts), -1).max(-1).values.movedim(-1, -dim)
    return result


def max_pool_with_indices(name: str, native: Native, keys: Any, tensor: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """`max_pool2d` and others with `return_indices=True`, whose gradient differs in transforms as in `max_pool`."""
    if not transforming():
        return native(keys, tensor, *options)  # type: ignore[no-any-return]
    indices: Tensor = native(keys, tensor.detach(), *options)[1]
    image = -3 if "3d" in name else -2
    return tensor.flatten(image).gather(-1, indices.flatten(image)).view_as(indices), indices


def _check(name: str, tensor: Tensor, *options: Any) -> torch.Size:
    """Return the shape of the result, or raise PyTorch's error."""
    result: Tensor = getattr(torch.ops.aten, name)(torch.empty_like(tensor, device="meta"), *options)
    return result.shape


def _repeat(sizes: Sequence[int], dimensions: int) -> Sequence[int]:
    return list(sizes) * dimensions if len(sizes) == 1 else sizes
