"""Operations on complex numbers that torch_xla computes on the host, or wrongly.

The functions in `KERNELS` take an operation's arguments; the others first take the native kernel and the dispatcher's
keys.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...runtime.ops.native import Native, broadcast, operation

_conjugate = operation("_conj_copy")


def _complex(real: Tensor, imag: Tensor) -> Tensor:
    torch.complex(real.new_empty((), device="meta"), imag.new_empty((), device="meta"))  # raises PyTorch's errors
    return torch.view_as_complex_copy(torch.stack(torch.broadcast_tensors(real, imag), -1))


def _polar(length: Tensor, angle: Tensor) -> Tensor:
    torch.polar(length.new_empty((), device="meta"), angle.new_empty((), device="meta"))
    return _complex(length * angle.cos(), length * angle.sin())


def _angle(tensor: Tensor) -> Tensor:
    """`angle`, which is pi for negative numbers, and NaN for NaN."""
    if tensor.is_complex():
        return torch.atan2(_part(tensor, 1), _part(tensor, 0))
    if not tensor.is_floating_point():
        tensor = tensor.to(torch.get_default_dtype())
    pi = torch.full_like(tensor, torch.pi)
    return torch.where(tensor.isnan(), tensor, torch.where(tensor < 0, pi, torch.zeros_like(tensor)))


def _part(tensor: Tensor, number: int) -> Tensor:
    return torch.select_copy(torch.view_as_real_copy(tensor), -1, number)


def _divide(first: Any, second: Any) -> Tensor:
    """`div`, for which torch_xla drops the imaginary part. The overload with a mode divides real numbers."""
    result: Tensor
    if _is_complex(second):
        result = first * (second.reciprocal() if isinstance(second, Tensor) else 1 / second)
    elif _is_complex(first):
        divisor = torch.unsqueeze_copy(second, -1) if isinstance(second, Tensor) and second.dim() else second
        result = torch.view_as_complex_copy(torch.view_as_real_copy(first) / divisor)
    else:
        if not torch.result_type(first, second).is_floating_point:  # torch_xla would divide uint8 by 253, not -3
            first = first.to(torch.get_default_dtype())
        result = torch.ops.aten.div.Tensor_mode(first, second, rounding_mode=None)
    return result


def _is_complex(number: Any) -> bool:
    return number.is_complex() if isinstance(number, Tensor) else isinstance(number, complex)


KERNELS: dict[str, Callable[..., Tensor]] = {
    "_conj_physical": _conjugate,
    "angle": _angle,
    "complex": _complex,
    "div.Tensor": _divide,
    "polar": _polar,
}


def view_as_real(native: Native, keys: Any, tensor: Tensor) -> Tensor:
    """`view_as_real`. torch_xla records the result without its last dimension, and crashes if that dimension moves."""
    both = native(keys, tensor)
    return torch.stack([torch.select_copy(both, -1, number) for number in (0, 1)], -1)


def gradient_of_result(native: Native, keys: Any, gradient: Tensor, result: Tensor) -> Tensor:
    """The gradient of `tanh` and `sigmoid`, from the conjugate of the result, which torch_xla doesn't conjugate."""
    value: Tensor = broadcast(native, keys, gradient, _conjugate(result) if result.is_complex() else result)
    return value


def acosh(native: Native, keys: Any, tensor: Tensor) -> Tensor:
    """`acosh`, whose real part must not be negative."""
    result: Tensor = native(keys, tensor)
    return torch.where(_part(result, 0) < 0, -result, result) if tensor.is_complex() else result


def hide_origin(native: Native, keys: Any, tensor: Tensor, *args: Any) -> Tensor:
    """`log`, `sqrt` and `pow` of numbers whose origin is hidden from XLA.

    Otherwise XLA would compute log(exp(z)) as z, sqrt(z * z) as |z|, and pow(exp(z), w) as exp(z * w), which is correct
    only for positive numbers.
    """
    if args and isinstance(args[0], complex):
        args = (torch.full((), args[0], dtype=torch.result_type(tensor, args[0]), device=tensor.device),)
        return torch.pow(tensor, *args)  # torch_xla takes a tensor, not a complex number
    result: Tensor = native(keys, torch.where(tensor == 0, 0, tensor) if tensor.is_complex() else tensor, *args)
    return result


def power_of_number(native: Native, keys: Any, number: Any, exponent: Tensor) -> Tensor:
    """`pow` of a Python number, which torch_xla refuses if it is complex."""
    if not isinstance(number, complex):
        return native(keys, number, exponent)  # type: ignore[no-any-return]
    dtype = torch.result_type(exponent, number)
    return torch.pow(torch.full((), number, dtype=dtype, device=exponent.device), exponent)


def as_real(matrix: Tensor) -> Tensor:
    """A real matrix of twice the size, whose products and inverse are those of the complex matrix."""
    real, imag = _part(matrix, 0), _part(matrix, 1)
    return torch.cat([torch.cat([real, -imag], -1), torch.cat([imag, real], -1)], -2)


def from_real(matrix: Tensor) -> Tensor:
    """The complex matrix that `as_real` has made real."""
    rows, columns = (size // 2 for size in matrix.shape[-2:])
    left = torch.narrow_copy(matrix, -1, 0, columns)
    return _complex(*(torch.narrow_copy(left, -2, start, rows) for start in (0, rows)))


def absolute(tensor: Tensor) -> Tensor:
    """`abs` of complex numbers, which is real. torch_xla's result claims to be complex."""
    first, second = (_part(tensor, number).abs() for number in (0, 1))
    larger, smaller = torch.maximum(first, second), torch.minimum(first, second)
    ratio = smaller / torch.where(larger == 0, torch.ones_like(larger), larger)  # without overflow
    return larger * (1 + ratio * ratio).sqrt()


def mean(tensor: Tensor, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """`mean` of complex numbers, which torch_xla can't compile."""
    tensor = tensor.to(dtype or tensor.dtype)
    total = tensor.sum(tuple(dim or range(tensor.dim())), keepdim)
    return total / (tensor.numel() / max(total.numel(), 1))


def vector_norm(
    tensor: Tensor, order: float = 2, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    """`linalg.vector_norm` of complex numbers, which torch_xla refuses."""
    result: Tensor = torch.linalg.vector_norm(absolute(tensor.to(dtype or tensor.dtype)), order, dim, keepdim)
    return result


def _variance(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`var` of complex numbers, which torch_xla can't compile."""
    first, second = (torch.var(_part(tensor, number), *args, **kwargs) for number in (0, 1))
    return first + second


def _deviation(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return _variance(tensor, *args, **kwargs).sqrt()


def _with_mean(
    function: Callable[..., Tensor], tensor: Tensor, dim: Any = None, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    return function(tensor, dim, **kwargs), mean(tensor, dim, kwargs.get("keepdim", False))


def _add_product(added: Tensor, first: Tensor, second: Tensor, *, beta: complex = 1, alpha: complex = 1) -> Tensor:
    """`addmm`, for which torch_xla refuses complex factors."""
    product = torch.mm(first, second) * alpha
    return added * beta + product if beta else product


def _pad(tensor: Tensor, padding: Sequence[int], value: complex = 0) -> Tensor:
    """`constant_pad_nd`, for which torch_xla refuses complex values."""
    values = complex(value).real, complex(value).imag
    return _complex(*(torch.constant_pad_nd(_part(tensor, i), padding, v) for i, v in enumerate(values)))


def _logsumexp(tensor: Tensor, dim: Sequence[int], keepdim: bool = False) -> Tensor:
    """`logsumexp` of complex numbers, which torch_xla refuses."""
    over = list(dim) or list(range(tensor.dim()))
    most = _part(tensor, 0).amax(over, True)
    most = torch.where(most.isinf(), 0, most)
    result = (tensor - most).exp().sum(over, True).log() + most
    return result if keepdim else torch.squeeze_copy(result, over)


def _is_nan(tensor: Tensor) -> Tensor:
    return _part(tensor, 0).isnan() | _part(tensor, 1).isnan()


def _is_infinite(tensor: Tensor) -> Tensor:
    return _part(tensor, 0).isinf() | _part(tensor, 1).isinf()


# These take only an operation's arguments, and replace the native kernel for complex numbers.
COMPLEX_KERNELS: dict[str, Callable[..., Any]] = {
    "abs": absolute,
    "addmm": _add_product,
    "constant_pad_nd": _pad,
    "div.Scalar": _divide,
    "isinf": _is_infinite,
    "isnan": _is_nan,
    "linalg_vector_norm": vector_norm,
    "logsumexp": _logsumexp,
    "mean": mean,
    "mean.dim": mean,
    "std.correction": _deviation,
    "std_mean.correction": partial(_with_mean, _deviation),
    "var.correction": _variance,
    "var_mean.correction": partial(_with_mean, _variance),
}
