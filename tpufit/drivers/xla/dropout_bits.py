"""`compute_keep_mask`: the random bits of a dropout, as one operation of a step's graph."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor

from ...runtime.ops.dropout import WORD_VALUES
from ...utils.random import step_seed
from .cpp_bindings import xla


def compute_keep_mask(words: Sequence[Tensor], shape: tuple[int, ...], limit: int, number: int) -> Tensor:
    """Return a mask, True for the elements whose 32 bits are at or above the limit; `words` is a seed in two words."""
    (mask,) = xla()._xla_user_computation("xla::tpufit_dropout", list(words), _computation(shape, limit, number))
    return mask  # type: ignore[no-any-return]


@lru_cache(maxsize=1024)
def _computation(shape: tuple[int, ...], limit: int, number: int) -> Any:
    from torch_xla.core import xla_builder as xb

    def compute(*words: xb.Op) -> xb.Op:
        builder = _Builder(xb, words[0].builder(), shape)
        return builder.bits(words, number) >= builder.word(limit)

    return xb.create_computation("tpufit_dropout", compute, (xb.mkshape(xb.Type.S32, ()),) * 2)


class _Builder:
    """Builds XLA operations on 32-bit words with torch_xla's builder, as one operation of a step's graph."""

    def __init__(self, xb: Any, builder: Any, shape: tuple[int, ...]) -> None:
        self._xb = xb
        self._builder = builder
        self._shape = shape

    def bits(self, words: Sequence[Any], number: int) -> Any:
        """Return the random bits of each element, from the words of the seed and the number of the draw.

        Threefry would be the usual generator, but a TPU's compiler takes 0.2 GB for each call.
        """
        # The words stay scalars: an operation on an array takes at least 2,000 cycles of a TPU.
        draw_seed = step_seed(0, number)
        added, flipped = (
            (word.bitcast(self._xb.Type.U32) ^ self.word(part)).broadcast_in_dim(self._shape, ())
            for word, part in zip(words, (draw_seed, draw_seed // WORD_VALUES), strict=True)
        )
        row = self._iota(0)
        row_size = math.prod(self._shape[1:])
        group_rows = WORD_VALUES // row_size  # the number of rows in a group, whose indices fit in 32 bits
        if group_rows < self._shape[0]:
            group = row / self.word(group_rows)
            row = row - group * self.word(group_rows)
            flipped = flipped ^ self._mix(group)
        index = row * self.word(row_size) + self._index_in_row()
        return self._mix(self._mix(index + added) ^ flipped)

    def word(self, value: int) -> Any:
        """Return a 32-bit constant."""
        return self._xb.Op.scalar(self._builder, value % WORD_VALUES, dtype=self._xb.Type.U32)

    def _index_in_row(self) -> Any:
        index = self.word(0)
        stride = 1
        for dim in range(len(self._shape) - 1, 0, -1):
            index = self._iota(dim) * self.word(stride) + index
            stride *= self._shape[dim]
        return index

    def _mix(self, x: Any) -> Any:
        """Permute numbers so that each bit depends on all bits (`lowbias32`, see
        https://nullprogram.com/blog/2018/07/31/)."""
        x = (x ^ self._shift_right(x, 16)) * self.word(0x7FEB352D)
        x = (x ^ self._shift_right(x, 15)) * self.word(0x846CA68B)
        return x ^ self._shift_right(x, 16)

    def _shift_right(self, x: Any, by: int) -> Any:
        return x / self.word(1 << by)  # the builder has no right shift; the compiler turns this division into one

    def _iota(self, dim: int) -> Any:
        return self._xb.Op.iota(self._builder, self._xb.mkshape(self._xb.Type.U32, self._shape), dim)
