"""`real_abs`: the absolute value of complex numbers, which is real. That of torch_xla says that it is complex."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_NAMES = ("abs", "absolute")


@contextmanager
def real_abs() -> Iterator[None]:
    """A context in which `abs` of complex tensors is real, as in PyTorch: for `torch.fft`, `torch.stft` and their like.

    Example:
        >>> with real_abs():
        ...     abs(torch.tensor([3 + 4j])), torch.abs(torch.tensor([-2.0]))
        (tensor([5.]), tensor([2.]))
    """
    native = torch.abs

    def absolute(input: Tensor, *, out: Tensor | None = None) -> Tensor:
        if not input.is_complex() or out is not None:
            return native(input, out=out)
        return _Magnitude.apply(input)  # type: ignore[no-untyped-call, no-any-return]

    def absolute_of(self: Tensor) -> Tensor:
        return absolute(self)

    inherited = [name for name in (*_NAMES, "__abs__") if name not in vars(Tensor)]
    before = {name: getattr(torch, name) for name in _NAMES}
    for name in _NAMES:
        setattr(torch, name, absolute)
        setattr(Tensor, name, absolute_of)
    Tensor.__abs__ = absolute_of  # type: ignore[assignment]
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(torch, name, function)
        for name in inherited:  # the native ones are those of its base
            delattr(Tensor, name)


class _Magnitude(torch.autograd.Function):
    """Without overflow, and with the gradient 0 at 0, as PyTorch's."""

    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        real, imag = (torch.where(part < 0, -part, part) for part in (input.real, input.imag))
        larger = torch.maximum(real, imag)
        smaller = torch.minimum(real, imag)
        ratio = smaller / torch.where(larger == 0, torch.ones_like(larger), larger)
        value = larger * (1 + ratio * ratio).sqrt()
        ctx.save_for_backward(input, value)
        return value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        input, value = ctx.saved_tensors
        scale = gradient / torch.where(value == 0, torch.ones_like(value), value)
        result: Tensor = input * scale
        return result
