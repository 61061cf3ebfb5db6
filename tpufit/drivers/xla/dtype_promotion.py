"""Operations on operands of several dtypes, which torch_xla often computes in the dtype of one operand.

Each function takes the native kernel and the dispatcher's keys, then the operation's arguments.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...runtime.ops.native import Native
from . import complexes

# The operations whose operands torch_xla leaves in several dtypes.
_MIXED = (
    *("addcdiv", "addcmul", "clamp.Tensor", "fmod.Tensor", "maximum", "minimum"),
    *("bitwise_and.Tensor", "bitwise_or.Tensor", "bitwise_xor.Tensor"),
    *("eq.Tensor", "ge.Tensor", "gt.Tensor", "le.Tensor", "lt.Tensor", "ne.Tensor"),
)
_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
_INTEGERS = (torch.uint8, *_SIGNED)
# The operations that return floating-point numbers for integers, too: converted by `promote`, and by `make_floating`.
_FLOATING = ("atan2", "reciprocal", "xlogy.Tensor")
FLOATING_FOR_INTEGERS = (
    *("acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "expm1"),
    *("isnan", "isneginf", "log", "log10", "log1p", "log2", "logsumexp", "rsqrt", "sigmoid", "sin", "sinh", "sqrt"),
    *("tan", "tanh"),
)


def find_dtype(*operands: Any) -> torch.dtype:
    """Return the operands' common dtype. PyTorch ranks tensors first, then tensors without dimensions, then numbers."""
    if all(isinstance(operand, Tensor) for operand in operands) and len({t.dtype for t in operands}) == 1:
        return operands[0].dtype  # type: ignore[no-any-return]
    ranked = sorted(operands, key=lambda operand: 2 if not isinstance(operand, Tensor) else int(not operand.dim()))
    common = ranked[0]
    for operand in ranked[1:]:
        shape = (1,) if common.dim() else ()
        common = torch.empty(shape, dtype=torch.result_type(common, operand), device="meta")
    dtype: torch.dtype = common.dtype
    return dtype


def promote(native: Native, keys: Any, *operands: Any, floating: bool = False, **kwargs: Any) -> Any:
    """Call an operation on tensors of the operands' common dtype."""
    return native(keys, *_convert(operands, floating), **kwargs)


def make_floating(kernel: Native, native: Native, keys: Any, tensor: Tensor, *args: Any) -> Any:
    """Convert integers and bools to floating point, as PyTorch does, and call a kernel."""
    if not tensor.is_floating_point() and not tensor.is_complex():
        tensor = tensor.to(torch.get_default_dtype())
    return kernel(native, keys, tensor, *args)


def _where(native: Native, keys: Any, condition: Tensor, *operands: Any) -> Any:
    return native(keys, condition, *_convert(operands))


def _clamp(native: Native, keys: Any, tensor: Tensor, lower: float | None, upper: float | None = None) -> Any:
    """`clamp` by numbers. torch_xla replaces a missing bound by the largest finite number, which clamps infinity."""
    dtype = find_dtype(tensor, *(bound for bound in (lower, upper) if bound is not None))
    if dtype.is_floating_point:
        lower = -math.inf if lower is None else lower
        upper = math.inf if upper is None else upper
    return native(keys, tensor.to(dtype), lower, upper)


def _clamp_max(_: Native, __: Any, tensor: Tensor, upper: float) -> Any:
    return tensor.clamp(max=upper)


def _clamp_min(_: Native, __: Any, tensor: Tensor, lower: float) -> Any:
    return tensor.clamp(min=lower)


def _clamp_to_tensors(native: Native, keys: Any, *operands: Any) -> Any:
    """`clamp_max` and `clamp_min`, also of tensors of different ranks, which torch_xla refuses."""
    return native(keys, *torch.broadcast_tensors(*_convert(operands)))


def _convert(operands: Sequence[Any], floating: bool = False) -> list[Any]:
    """Convert tensors and numbers to tensors of their common dtype; None stays."""
    present = [operand for operand in operands if operand is not None]
    dtype = find_dtype(*present)
    if floating and not dtype.is_floating_point and not dtype.is_complex:
        dtype = torch.get_default_dtype()
    device = next(operand.device for operand in present if isinstance(operand, Tensor))
    return [
        operand.to(dtype)
        if isinstance(operand, Tensor)
        else None
        if operand is None
        else torch.full((), operand, dtype=dtype, device=device)
        for operand in operands
    ]


def _remainder(_: Native, __: Any, tensor: Tensor, divisor: Any) -> Tensor:
    """`remainder`, which has the sign of the divisor. torch_xla's is wrong for int8, and for a divisor of 0."""
    if find_dtype(tensor, divisor) is torch.bool:
        raise NotImplementedError("'remainder' isn't implemented for bool: convert one operand to an integer dtype")
    tensor, divisor = _convert((tensor, divisor))
    rest = torch.fmod(tensor, divisor)
    return torch.where((rest != 0) & ((rest < 0) != (divisor < 0)), rest + divisor, rest)


def _divide(native: Native, keys: Any, tensor: Tensor, divisor: Any, *, rounding_mode: str | None) -> Tensor:
    """`div` with a rounding mode. torch_xla rounds a quotient in float32: 6 // 0.3 is 20, and large integers differ."""
    if rounding_mode is not None:
        tensor, divisor = _convert((tensor, divisor))
        if tensor.dtype in _INTEGERS:
            return _divide_integers(tensor, divisor, rounding_mode)
    if rounding_mode == "floor" and tensor.is_floating_point():
        wide = torch.promote_types(tensor.dtype, torch.float32)
        return _divide_exactly(tensor.to(wide), divisor.to(wide)).to(tensor.dtype)
    result: Tensor = native(keys, tensor, divisor, rounding_mode=rounding_mode)
    return result


def _floor_divide(_: Native, __: Any, tensor: Tensor, divisor: Any) -> Tensor:
    return torch.div(tensor, divisor, rounding_mode="floor")


def _divide_integers(tensor: Tensor, divisor: Tensor, rounding_mode: str) -> Tensor:
    """Divide integers. `addcdiv` is the operation in which torch_xla divides integers as integers."""
    quotient = torch.addcdiv(torch.zeros_like(tensor), tensor, divisor)
    if rounding_mode == "trunc" or tensor.dtype not in _SIGNED:
        return quotient
    rest = torch.fmod(tensor, divisor)
    return torch.where((rest != 0) & ((rest < 0) != (divisor < 0)), quotient - 1, quotient)


def _divide_exactly(tensor: Tensor, divisor: Tensor) -> Tensor:
    """Return the floor of a quotient of real numbers, as Python does: by the remainder."""
    rest = torch.fmod(tensor, divisor)
    quotient = (tensor - rest) / divisor  # a whole number, but for its rounding
    quotient = torch.where((rest != 0) & ((rest < 0) != (divisor < 0)), quotient - 1, quotient).round()
    rounded = tensor / divisor
    return torch.where(divisor == 0, rounded, torch.where(quotient == 0, rounded * 0, quotient))


def _shift_right(native: Native, keys: Any, tensor: Tensor, bits: Any) -> Tensor:
    """`>>`, which keeps the sign. torch_xla shifts zeros into negative numbers."""
    tensor, bits = _convert((tensor, bits))
    shifted: Tensor = native(keys, tensor, bits)
    return torch.where(tensor < 0, ~native(keys, ~tensor, bits), shifted) if tensor.dtype in _SIGNED else shifted


def _shift_left(native: Native, keys: Any, tensor: Tensor, bits: Any) -> Any:
    return native(keys, *_convert((tensor, bits)))


def _shift(operation: Callable[..., Tensor], _: Native, __: Any, tensor: Tensor, bits: Any) -> Tensor:
    """`<<` or `>>`, also by a number, which torch_xla takes for an int64."""
    return operation(*_convert((tensor, bits)))


def _power(native: Native, keys: Any, tensor: Any, exponent: Any) -> Tensor:
    """`pow`, which is -1 for -1 and an odd exponent; torch_xla's is 0 if an integer exponent is negative."""
    tensor, exponent = _convert((tensor, exponent))
    result: Tensor = complexes.hide_origin(native, keys, tensor, exponent)
    if tensor.dtype not in _SIGNED:
        return result
    return torch.where((tensor == -1) & (exponent % 2 == 1), -1, result)


def _power_by_number(native: Native, keys: Any, tensor: Tensor, exponent: Any) -> Tensor:
    if tensor.dtype is torch.bool:  # torch_xla has no power of bools by a number
        return tensor | (not exponent) if isinstance(exponent, bool) else torch.pow(*_convert((tensor, exponent)))
    return complexes.hide_origin(native, keys, tensor, exponent)


def _mean(native: Native, keys: Any, tensor: Tensor, *, dtype: torch.dtype | None = None) -> Any:
    """`mean`, also of integers in another dtype, which torch_xla would compute in integers."""
    return native(keys, tensor if dtype is None else tensor.to(dtype), dtype=dtype)


def _cumulate(native: Native, keys: Any, tensor: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """`cumsum` and `cumprod` of integers as int64, not in their dtype; and of no elements, which doesn't compile."""
    if dtype is None and not tensor.is_floating_point() and not tensor.is_complex():
        dtype = torch.int64
    tensor = tensor if dtype is None else tensor.to(dtype)
    result: Tensor = native(keys, tensor, dim) if tensor.numel() else tensor.clone()
    return result


KERNELS: dict[str, Callable[..., Any]] = dict.fromkeys(_MIXED, promote)
KERNELS |= dict.fromkeys(_FLOATING, partial(promote, floating=True))
KERNELS |= {"clamp": _clamp, "clamp_max": _clamp_max, "clamp_min": _clamp_min, "where.self": _where}
KERNELS |= dict.fromkeys(("clamp_max.Tensor", "clamp_min.Tensor"), _clamp_to_tensors)
KERNELS |= dict.fromkeys(("remainder.Scalar", "remainder.Tensor"), _remainder)
KERNELS |= {"cumprod": _cumulate, "cumsum": _cumulate, "div.Tensor_mode": _divide, "floor_divide": _floor_divide}
KERNELS |= {"mean": _mean, "pow.Tensor_Scalar": _power_by_number, "pow.Tensor_Tensor": _power}
KERNELS |= {"bitwise_left_shift.Tensor": _shift_left, "bitwise_right_shift.Tensor": _shift_right}
for _overload in ("Scalar", "Tensor"):
    KERNELS[f"__lshift__.{_overload}"] = partial(_shift, torch.bitwise_left_shift)
    KERNELS[f"__rshift__.{_overload}"] = partial(_shift, torch.bitwise_right_shift)
