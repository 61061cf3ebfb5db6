"""`dropout`: random bits are a function of each element's index, so that a core draws only for its own rows.

torch_xla draws the random bits of all rows on every core. In bfloat16 it draws 7 bits, so that a rate of 0.02 drops
0.0158 of the elements, and a rate of 0.005 none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..driver import driver, on_device
from ..trace_context import trace_context
from ..trace_seeds import Draw

WORD_VALUES = 1 << 32  # the number of values of a 32-bit word, and the largest number of elements in a row


def dropout(input: Tensor, p: float, train: bool) -> Tensor | None:
    """`torch.dropout`."""
    return _drop(input, tuple(input.shape), p) if train and _takes(p) else None


def feature_dropout(input: Tensor, p: float, train: bool) -> Tensor | None:
    """`torch.feature_dropout`, which drops whole channels, as in `nn.Dropout2d`."""
    if not train or not _takes(p) or input.dim() < 2:
        return None
    return _drop(input, (*input.shape[:2], *(1,) * (input.dim() - 2)), p)


@contextmanager
def replace_bernoulli() -> Iterator[None]:
    """A context in which `Tensor.bernoulli_` of bfloat16 and float16 draws in float32, e.g. for stochastic depth."""
    native = Tensor.bernoulli_

    def bernoulli_(self: Tensor, p: Any = 0.5, *, generator: torch.Generator | None = None) -> Tensor:
        if not on_device(self) or self.dtype not in (torch.bfloat16, torch.float16):
            return native(self, p, generator=generator)
        return self.copy_(native(torch.empty(self.shape, device=self.device), p, generator=generator))

    Tensor.bernoulli_ = bernoulli_  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del Tensor.bernoulli_  # the native method belongs to the base class


def _takes(p: float) -> bool:
    """True for a rate between 0 and 1; raises PyTorch's error for an invalid rate, which its decomposition omits."""
    if not 0 <= p <= 1:
        torch.dropout(torch.empty(0), p, True)
    return 0 < p < 1


def _drop(input: Tensor, shape: tuple[int, ...], p: float) -> Tensor | None:
    if not on_device(input) or trace_context().draw is None:
        return None
    if not input.is_floating_point() or not input.numel() or not shape:
        return None
    if math.prod(shape[1:]) > WORD_VALUES:
        return None
    y: Tensor = _Dropout.apply(input, shape, p)  # type: ignore[no-untyped-call]
    return y


class _Dropout(torch.autograd.Function):
    """Drops some elements and scales the others in float32, as CUDA's kernel does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, ...], p: float) -> Tensor:
        keep = draw_keep_mask(shape, p, x.device)
        ctx.save_for_backward(keep)
        ctx.p = p
        # Only a copy gets a barrier: the backward pass may recompute the mask, which is faster than storing it.
        return scale_kept(x, compute_once(keep.clone()), p)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (keep,) = ctx.saved_tensors
        return scale_kept(gradient, keep, ctx.p), None, None


def scale_kept(x: Tensor, keep: Tensor, p: float) -> Tensor:
    """Multiply kept elements by 1 / (1 - p), and the others by 0."""
    factors = keep.to(torch.promote_types(x.dtype, torch.float32)) * (1 / (1 - p))
    return (x * factors).to(x.dtype)


def draw_keep_mask(shape: tuple[int, ...], p: float, device: torch.device) -> Tensor:
    """Draw a mask, True for the elements that a dropout with rate `p` keeps."""
    draws = trace_context().draw
    if device.type != driver().device_type or draws is None:
        return torch.empty(shape, device=device).bernoulli_(1 - p).bool()
    return compute_keep_mask(draws(), shape, min(max(round(p * WORD_VALUES), 1), WORD_VALUES - 1))


def compute_keep_mask(draw: Draw, shape: tuple[int, ...], limit: int) -> Tensor:
    """Return a mask, True for the elements whose 32 random bits are at or above the limit.

    The bits are the same on any number of cores. An element's bits are a permutation of its index in the array, keyed
    by the draw; in an array of more than 2^32 elements, of its index in a group of rows.
    """
    words = [draw.seed.to(torch.int32), torch.bitwise_right_shift(draw.seed, 32).to(torch.int32)]
    return driver().compute_keep_mask(words, shape, limit, draw.number)


def compute_once(tensor: Tensor) -> Tensor:
    """Compute a tensor once, and store it in memory for all operations that read it."""
    return driver().compute_once(tensor) if on_device(tensor) else tensor
