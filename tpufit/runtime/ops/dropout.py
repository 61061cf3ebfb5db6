"""`dropout`: what is dropped is told by the place of each number, so that each core draws for its own rows alone.

torch_xla draws the random bits of all rows on every core, and each takes those of its own. In bfloat16 it draws 7 bits,
so that a rate of 0.02 drops 0.0158, and one of 0.005 nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..bindings import xla

_MOST = 1 << 32  # values of a word, and numbers in a row


def dropout(input: Tensor, p: float, train: bool) -> Tensor | None:
    """`torch.dropout`."""
    return _dropped(input, tuple(input.shape), p) if train and _takes(p) else None


def feature_dropout(input: Tensor, p: float, train: bool) -> Tensor | None:
    """`torch.feature_dropout`, as `nn.Dropout2d` has it: of whole channels."""
    if not train or not _takes(p) or input.dim() < 2:
        return None
    return _dropped(input, (*input.shape[:2], *(1,) * (input.dim() - 2)), p)


@contextmanager
def float32_bernoulli() -> Iterator[None]:
    """A context in which `Tensor.bernoulli_` of narrow formats draws in float32, as stochastic depth needs it."""
    native = Tensor.bernoulli_

    def bernoulli_(self: Tensor, p: Any = 0.5, *, generator: torch.Generator | None = None) -> Tensor:
        if self.device.type != "xla" or self.dtype not in (torch.bfloat16, torch.float16):
            return native(self, p, generator=generator)
        return self.copy_(native(torch.empty(self.shape, device=self.device), p, generator=generator))

    Tensor.bernoulli_ = bernoulli_  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del Tensor.bernoulli_  # the native one is that of its base


def _takes(p: float) -> bool:
    """True for a rate that drops some; one that cannot be is PyTorch's error, which its decomposition leaves out."""
    if not 0 <= p <= 1:
        torch.dropout(torch.empty(0), p, True)
    return 0 < p < 1


def _dropped(input: Tensor, shape: tuple[int, ...], p: float) -> Tensor | None:
    if input.device.type != "xla" or not input.is_floating_point() or not input.numel() or not shape:
        return None
    if math.prod(shape[1:]) > _MOST:
        return None
    y: Tensor = _Dropout.apply(input, shape, p)  # type: ignore[no-untyped-call]
    return y


class _Dropout(torch.autograd.Function):
    """Some numbers dropped and the others scaled: in float32, as in CUDA's kernel. What is kept takes a byte each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, ...], p: float) -> Tensor:
        left = held(draw(shape, p, x.device))
        ctx.save_for_backward(left)
        ctx.p = p
        return scaled(x, left, p)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (left,) = ctx.saved_tensors
        return scaled(gradient, left, ctx.p), None, None


def scaled(x: Tensor, left: Tensor, p: float) -> Tensor:
    """Multiply what is left by 1 / (1 - p), and the rest by 0."""
    factors = left.to(torch.promote_types(x.dtype, torch.float32)) * (1 / (1 - p))
    return (x * factors).to(x.dtype)


def draw(shape: tuple[int, ...], p: float, device: torch.device) -> Tensor:
    """Draw which numbers of a shape are left, if a share of `p` is dropped."""
    if device.type != "xla":
        return torch.empty(shape, device=device).bernoulli_(1 - p).bool()
    # torch_xla numbers what a step draws, and begins with the same number where a part of it is computed again. Whole
    # numbers it draws by a remainder in 64 bits, of which a TPU's compiler makes thousands of operations.
    return left(torch.rand(4, device=device), shape, min(max(round(p * _MOST), 1), _MOST - 1))


def left(key: Tensor, shape: tuple[int, ...], limit: int) -> Tensor:
    """Tell which numbers of a shape are left: those whose 32 bits aren't below the limit.

    The bits are the same on any number of cores. Those of a number are a permutation of its place in its row, by two
    words that are permutations of the row's number; the key, the bits of four numbers from 0 to 1, tells which.
    """
    (words,) = xla()._xla_user_computation("xla::tpufit_words", [key], _words(shape[0]))
    # Or the compiler would compute them again in each part of the step that takes what is left, and need gigabytes.
    (found,) = xla()._xla_user_computation("xla::tpufit_dropout", [held(words)], _left(shape, limit))
    return found  # type: ignore[no-any-return]


def held(tensor: Tensor) -> Tensor:
    """A tensor that is computed once, and lies in memory for all that take it."""
    if tensor.device.type == "xla":
        xla()._xla_optimization_barrier_([tensor])
    return tensor


@lru_cache(maxsize=64)
def _words(rows: int) -> Any:
    from torch_xla.core import xla_builder as xb

    def compute(key: xb.Op) -> xb.Op:
        return _Builder(xb, key.builder()).words(key, rows)

    return xb.create_computation("tpufit_words", compute, (xb.mkshape(xb.Type.F32, (4,)),))


@lru_cache(maxsize=256)
def _left(shape: tuple[int, ...], limit: int) -> Any:
    from torch_xla.core import xla_builder as xb

    def compute(words: xb.Op) -> xb.Op:
        return _Builder(xb, words.builder()).left(words, shape, limit)

    return xb.create_computation("tpufit_dropout", compute, (xb.mkshape(xb.Type.S32, (2, shape[0])),))


class _Builder:
    """Builds XLA's operations on words of 32 bits by torch_xla's module for it: as one operation of a step's graph."""

    def __init__(self, xb: Any, builder: Any) -> None:
        self._xb = xb
        self._builder = builder

    def words(self, key: Any, rows: int) -> Any:
        """Two words of each row. Threefry would be the usual way; a TPU's compiler takes 0.2 GB for each."""
        parts = key.bitcast(self._xb.Type.U32)
        low, high = (parts.slice_in_dim(i, i + 2, 0) for i in (0, 2))
        keys = low ^ (high << self._word(9))  # 23 bits of each number are random
        # As one array: each operation takes a TPU 2,000 cycles, however small.
        shape = 2, rows
        keys, row, second = keys.broadcast_in_dim(shape, (0,)), self._iota(shape, 1), self._iota(shape, 0)
        first = second ^ self._word(1)
        return self._mixed((row + keys * first) ^ (keys * second)).bitcast(self._xb.Type.S32)

    def left(self, words: Any, shape: tuple[int, ...], limit: int) -> Any:
        """Which numbers are left, by the words of their rows."""
        added, flipped = (self._of_rows(words.slice_in_dim(i, i + 1, 0), shape) for i in range(2))
        return self._mixed(self._mixed(self._places(shape) + added) ^ flipped) >= self._word(limit)

    def _of_rows(self, words: Any, shape: tuple[int, ...]) -> Any:
        return words.reshape(shape[:1]).broadcast_in_dim(shape, (0,)).bitcast(self._xb.Type.U32)

    def _places(self, shape: tuple[int, ...]) -> Any:
        """The place of each number in its row."""
        place, stride = self._iota(shape, 0) * self._word(0), 1
        for dim in range(len(shape) - 1, 0, -1):
            place = place + self._iota(shape, dim) * self._word(stride)
            stride *= shape[dim]
        return place

    def _mixed(self, x: Any) -> Any:
        """A permutation in which each bit depends on each (`lowbias32`, https://nullprogram.com/blog/2018/07/31/)."""
        x = (x ^ self._right(x, 16)) * self._word(0x7FEB352D)
        x = (x ^ self._right(x, 15)) * self._word(0x846CA68B)
        return x ^ self._right(x, 16)

    def _right(self, x: Any, by: int) -> Any:
        return x / self._word(1 << by)  # it has no shift to the right; the compiler makes one of this

    def _iota(self, shape: tuple[int, ...], dim: int) -> Any:
        return self._xb.Op.iota(self._builder, self._xb.mkshape(self._xb.Type.U32, shape), dim)

    def _word(self, value: int) -> Any:
        return self._xb.Op.scalar(self._builder, value, dtype=self._xb.Type.U32)
