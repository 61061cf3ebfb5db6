"""`dropout`: what is dropped is told by the place of each number, so that each core draws for its own rows alone.

torch_xla draws the random bits of all rows on every core, and each takes those of its own. In bfloat16 it draws 7 bits,
so that a rate of 0.02 drops 0.0158, and one of 0.005 nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...utils.random import step_seed
from ..bindings import xla
from ..trace_seeds import Draw

_MOST = 1 << 32  # values of a word, and numbers in a row

_draws: Callable[[], Draw] | None = None


@contextmanager
def drawing(draws: Callable[[], Draw]) -> Iterator[None]:
    """A context in which this gives each dropout its own draw. Elsewhere dropout is PyTorch's."""
    global _draws
    before = _draws
    _draws = draws
    try:
        yield
    finally:
        _draws = before


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
    if input.device.type != "xla" or _draws is None or not input.is_floating_point() or not input.numel() or not shape:
        return None
    if math.prod(shape[1:]) > _MOST:
        return None
    y: Tensor = _Dropout.apply(input, shape, p)  # type: ignore[no-untyped-call]
    return y


class _Dropout(torch.autograd.Function):
    """Some numbers dropped and the others scaled: in float32, as in CUDA's kernel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, ...], p: float) -> Tensor:
        left = draw(shape, p, x.device)
        ctx.save_for_backward(left)
        ctx.p = p
        # A copy is held here alone: the backward pass may compute it anew, which takes less than to keep and read it.
        return scaled(x, held(left.clone()), p)

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
    if device.type != "xla" or _draws is None:
        return torch.empty(shape, device=device).bernoulli_(1 - p).bool()
    return left(_draws(), shape, min(max(round(p * _MOST), 1), _MOST - 1))


def left(draw: Draw, shape: tuple[int, ...], limit: int) -> Tensor:
    """Tell which numbers of a shape are left: those whose 32 bits aren't below the limit.

    The bits are the same on any number of cores. Those of a number are a permutation of its place in the array, which
    the draw tells; in an array of more than 2^32 numbers, of its place in a group of rows.
    """
    words = [draw.seed.to(torch.int32), torch.bitwise_right_shift(draw.seed, 32).to(torch.int32)]
    (found,) = xla()._xla_user_computation("xla::tpufit_dropout", words, _left(shape, limit, draw.number))
    return found  # type: ignore[no-any-return]


def held(tensor: Tensor) -> Tensor:
    """Have a tensor computed once: it lies in memory for all that take it."""
    if tensor.device.type == "xla":
        xla()._xla_optimization_barrier_([tensor])
    return tensor


@lru_cache(maxsize=1024)
def _left(shape: tuple[int, ...], limit: int, number: int) -> Any:
    from torch_xla.core import xla_builder as xb

    def compute(*words: xb.Op) -> xb.Op:
        builder = _Builder(xb, words[0].builder(), shape)
        return builder.bits(words, number) >= builder.word(limit)

    return xb.create_computation("tpufit_dropout", compute, (xb.mkshape(xb.Type.S32, ()),) * 2)


class _Builder:
    """Builds XLA's operations on words of 32 bits by torch_xla's module for it: as one operation of a step's graph."""

    def __init__(self, xb: Any, builder: Any, shape: tuple[int, ...]) -> None:
        self._xb = xb
        self._builder = builder
        self._shape = shape

    def bits(self, words: Sequence[Any], number: int) -> Any:
        """The bits of each number, by the words of the seed and the number of the draw.

        Threefry would be the usual way; a TPU's compiler takes 0.2 GB for each.
        """
        # The words stay scalars: an operation on an array takes a TPU 2,000 cycles, however small.
        of_draw = step_seed(0, number)
        added, flipped = (
            (word.bitcast(self._xb.Type.U32) ^ self.word(part)).broadcast_in_dim(self._shape, ())
            for word, part in zip(words, (of_draw, of_draw // _MOST), strict=True)
        )
        row = self._iota(0)
        in_a_row = math.prod(self._shape[1:])
        rows = _MOST // in_a_row  # that the places of one group suffice for
        if rows < self._shape[0]:
            group = row / self.word(rows)
            row = row - group * self.word(rows)
            flipped = flipped ^ self._mixed(group)
        place = row * self.word(in_a_row) + self._place_in_row()
        return self._mixed(self._mixed(place + added) ^ flipped)

    def word(self, value: int) -> Any:
        """A number of 32 bits."""
        return self._xb.Op.scalar(self._builder, value % _MOST, dtype=self._xb.Type.U32)

    def _place_in_row(self) -> Any:
        place = self.word(0)
        stride = 1
        for dim in range(len(self._shape) - 1, 0, -1):
            place = self._iota(dim) * self.word(stride) + place
            stride *= self._shape[dim]
        return place

    def _mixed(self, x: Any) -> Any:
        """A permutation in which each bit depends on each (`lowbias32`, https://nullprogram.com/blog/2018/07/31/)."""
        x = (x ^ self._right(x, 16)) * self.word(0x7FEB352D)
        x = (x ^ self._right(x, 15)) * self.word(0x846CA68B)
        return x ^ self._right(x, 16)

    def _right(self, x: Any, by: int) -> Any:
        return x / self.word(1 << by)  # it has no shift to the right; the compiler makes one of this

    def _iota(self, dim: int) -> Any:
        return self._xb.Op.iota(self._builder, self._xb.mkshape(self._xb.Type.U32, self._shape), dim)
