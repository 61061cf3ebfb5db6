"""Fourier transforms by XLA's operation. torch_xla has no lowering for it, and would compute them on the host.

torch_xla accepts a computation as a serialized `HloModuleProto`; `_module` writes one with a single operation.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from ...runtime.ops.native import operation
from .cpp_bindings import xla

_FORWARD, _INVERSE, _OF_REAL, _TO_REAL = range(4)  # XLA's `FftType`
_TYPES = {False: (11, 15), True: (12, 18)}  # XLA's `PrimitiveType` of real and complex numbers; True: of 64 bits


def complex_to_complex(tensor: Tensor, dim: Sequence[int], normalization: int, forward: bool) -> Tensor:
    """`_fft_c2c`, which `torch.fft.fft`, `ifft` and related functions call."""
    if tensor.dtype not in (torch.complex64, torch.complex128) or not tensor.numel():
        return _on_host("_fft_c2c", tensor, dim, normalization, forward)
    result = tensor
    for d in dim:
        result = _transform_along(result, d, _FORWARD if forward else _INVERSE, tensor.shape[d])
    count = prod(tensor.shape[d] for d in dim)
    return _normalize(result, count, normalization, 1 if forward else count)


def real_to_complex(tensor: Tensor, dim: Sequence[int], normalization: int, onesided: bool) -> Tensor:
    """`_fft_r2c`, which `rfft` and `stft` call."""
    if tensor.dtype not in (torch.float32, torch.float64) or not tensor.numel():
        return _on_host("_fft_r2c", tensor, dim, normalization, onesided)
    *others, last = dim
    if onesided:
        result = _transform_along(tensor, last, _OF_REAL, tensor.shape[last])
    else:
        result = _transform_along(tensor.to(tensor.dtype.to_complex()), last, _FORWARD, tensor.shape[last])
    for d in others:
        result = _transform_along(result, d, _FORWARD, tensor.shape[d])
    return _normalize(result, prod(tensor.shape[d] for d in dim), normalization, 1)


def complex_to_real(tensor: Tensor, dim: Sequence[int], normalization: int, last_dim_size: int) -> Tensor:
    """`_fft_c2r`, which `irfft` and `istft` call."""
    if tensor.dtype not in (torch.complex64, torch.complex128) or not tensor.numel():
        return _on_host("_fft_c2r", tensor, dim, normalization, last_dim_size)
    *others, last = dim
    result = tensor
    for d in others:
        result = _transform_along(result, d, _INVERSE, tensor.shape[d])
    size = last_dim_size // 2 + 1
    if result.shape[last] != size:
        result = torch.slice_copy(result, last, 0, size)
    result = _transform_along(result, last, _TO_REAL, last_dim_size)
    count = prod(tensor.shape[d] for d in others) * last_dim_size
    return _normalize(result, count, normalization, count)


KERNELS: dict[str, Callable[..., Tensor]] = {
    "_fft_c2c": complex_to_complex,
    "_fft_c2r": complex_to_real,
    "_fft_r2c": real_to_complex,
}


def _on_host(name: str, tensor: Tensor, *args: Any) -> Tensor:
    """Compute on the host what XLA doesn't accept, such as empty tensors, or raise PyTorch's error."""
    result: Tensor = operation(name)(tensor.cpu(), *args)
    return result.to(tensor.device)


def _normalize(result: Tensor, count: int, normalization: int, divisor: int) -> Tensor:
    """Scale a transform by PyTorch's code of normalization: 0 none, 1 by the root of the count, 2 by the count.

    Args:
        divisor: The number by which XLA has already divided.
    """
    factor = divisor / (1, count**0.5, count)[normalization]
    return result if factor == 1 else result * factor


def _transform_along(tensor: Tensor, dim: int, kind: int, length: int) -> Tensor:
    """Transform one dimension; `length` is the number of real elements, or of all elements."""
    dim %= tensor.dim()
    order = [i for i in range(tensor.dim()) if i != dim] + [dim]
    is_last = dim == tensor.dim() - 1
    moved = tensor if is_last else torch.permute_copy(tensor, order)
    is_double = tensor.dtype in (torch.float64, torch.complex128)
    computation = _computation(kind, tuple(moved.shape), length, is_double)
    results = xla()._xla_user_computation("xla::fft", [moved], computation)
    result: Tensor = results[0] if isinstance(results, list) else results
    return result if is_last else torch.permute_copy(result, sorted(range(len(order)), key=order.__getitem__))


@cache
def _computation(kind: int, shape: tuple[int, ...], length: int, is_double: bool) -> Any:
    from torch_xla.core.xla_builder import computation_from_module_proto

    name = f"fft{kind}_{'x'.join(map(str, shape))}_{length}_{32 << is_double}"
    return computation_from_module_proto(name, _module(name, kind, shape, length, is_double))


def _module(name: str, kind: int, shape: tuple[int, ...], length: int, is_double: bool) -> bytes:
    """Return a serialized `HloModuleProto` that transforms the last dimension; the integers are field numbers."""
    last = {_OF_REAL: length // 2 + 1, _TO_REAL: length}.get(kind, shape[-1])
    real, complex_ = _TYPES[is_double]
    argument = _shape(real if kind == _OF_REAL else complex_, shape)
    result = _shape(real if kind == _TO_REAL else complex_, (*shape[:-1], last))
    program = _text(1, argument) + _text(2, result) + _text(3, b"x")
    parameter = _text(1, b"x.1") + _text(2, b"parameter") + _text(3, argument) + _number(9, 0) + _number(35, 1)
    transform = _text(1, b"y.2") + _text(2, b"fft") + _text(3, result) + _number(31, kind)
    transform += _pack(32, [length]) + _number(35, 2) + _pack(36, [1])
    computation = _text(1, b"main.3") + _text(2, parameter) + _text(2, transform) + _text(4, program)
    computation += _number(5, 3) + _number(6, 2)  # the ids of computations and operations must differ
    return _text(1, name.encode()) + _text(2, b"main.3") + _text(3, computation) + _text(4, program) + _number(6, 3)


def _shape(kind: int, sizes: Sequence[int]) -> bytes:
    layout = _pack(1, reversed(range(len(sizes))))
    return _number(2, kind) + _pack(3, sizes) + _text(5, layout) + _pack(6, [0] * len(sizes))


def _text(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _pack(field: int, values: Iterable[int]) -> bytes:
    return _text(field, b"".join(map(_varint, values)))


def _varint(value: int) -> bytes:
    digits = bytearray()
    while value > 127:
        digits.append(value & 127 | 128)
        value >>= 7
    return bytes([*digits, value])
