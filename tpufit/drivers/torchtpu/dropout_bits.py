"""`compute_keep_mask`: the random bits of a dropout as 32-bit operations; the same bits as in `drivers/xla`."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...runtime.ops.dropout import WORD_VALUES
from ...utils.random import step_seed

_HALF = 1 << 31


def compute_keep_mask(words: Sequence[Tensor], shape: tuple[int, ...], limit: int, number: int) -> Tensor:
    """Return a mask, True for the elements whose 32 bits are at or above the limit; `words` is a seed in two words."""
    device = words[0].device
    draw_seed = step_seed(0, number)
    added = words[0] ^ _word(draw_seed)
    flipped = words[1] ^ _word(draw_seed // WORD_VALUES)
    row_size = math.prod(shape[1:])
    row = torch.arange(shape[0], dtype=torch.int32, device=device)
    group_rows = WORD_VALUES // row_size  # the number of rows in a group, whose indices fit in 32 bits
    if group_rows < shape[0]:
        group = torch.div(row, group_rows, rounding_mode="floor")
        row = row - group * group_rows
        flipped = flipped ^ _mix(group)
    index = (row * _word(row_size)).view(-1, *(1,) * (len(shape) - 1))
    stride = 1
    for dim in range(len(shape) - 1, 0, -1):
        steps = torch.arange(shape[dim], dtype=torch.int32, device=device) * _word(stride)
        index = index + steps.view(-1, *(1,) * (len(shape) - 1 - dim))
        stride *= shape[dim]
    if flipped.dim():
        flipped = flipped.view(-1, *(1,) * (len(shape) - 1))
    bits = _mix(_mix(index + added) ^ flipped)
    # With the first bit flipped, signed numbers compare as unsigned numbers.
    return (bits ^ _word(_HALF)) >= _word(limit ^ _HALF)


def _mix(x: Tensor) -> Tensor:
    """Permute numbers so that each bit depends on all bits (`lowbias32`, see
    https://nullprogram.com/blog/2018/07/31/)."""
    x = (x ^ _shift_right(x, 16)) * _word(0x7FEB352D)
    x = (x ^ _shift_right(x, 15)) * _word(0x846CA68B)
    return x ^ _shift_right(x, 16)


def _shift_right(x: Tensor, by: int) -> Tensor:
    """Shift bits to the right, and fill with zeros."""
    return torch.bitwise_right_shift(x, by) & ((1 << (32 - by)) - 1)


def _word(value: int) -> int:
    """Return a number as a signed 32-bit integer."""
    return (value + _HALF) % WORD_VALUES - _HALF
