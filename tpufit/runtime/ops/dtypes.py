"""Refuses combinations of dtypes as PyTorch does. torch_xla promotes them, and would train on raw bytes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_NARROW = {torch.bfloat16, torch.float16, torch.float32}


def check_one_dtype(name: str, *operands: Any) -> None:
    """Refuse operands of a product or a convolution with different dtypes.

    Raises:
        RuntimeError: The dtypes differ; the message resembles PyTorch's.
    """
    given = [operand.dtype for operand in operands if isinstance(operand, Tensor)]
    if any(dtype is not given[0] for dtype in given):
        raise RuntimeError(f"{name} takes tensors of one dtype, but got {' and '.join(map(str, given))}")


def check_floating(name: str, *operands: Any) -> None:
    """Refuse inputs of a norm that aren't floating-point, and float64 mixed with other dtypes.

    Dtypes of at most 32 bits can be mixed.

    Raises:
        RuntimeError: The operands don't fit; the message resembles PyTorch's.
    """
    input, *others = (operand.dtype for operand in operands if isinstance(operand, Tensor))
    allowed = _NARROW if input in _NARROW else {input}
    if not input.is_floating_point or any(dtype not in allowed for dtype in others):
        given = " and ".join(map(str, [input, *others]))
        raise RuntimeError(f"{name} takes floating-point tensors of one dtype, but got {given}")


# By operation: the check of its arguments, and the positions of the operands.
_CHECKS: dict[str, tuple[Callable[..., None], tuple[int, ...]]] = {
    "linear": (check_one_dtype, (0, 1, 2)),
    "matmul": (check_one_dtype, (0, 1)),
    **{f"conv{kind}{n}d": (check_one_dtype, (0, 1, 2)) for kind in ("", "_transpose") for n in (1, 2, 3)},
    "batch_norm": (check_floating, (0, 1, 2, 3, 4)),
    "instance_norm": (check_floating, (0, 1, 2, 3, 4)),
    "layer_norm": (check_floating, (0, 2, 3)),
    "group_norm": (check_floating, (0, 2, 3)),
}


def check(name: str, args: tuple[Any, ...]) -> None:
    """Check the dtypes of an operation's arguments, see `check_one_dtype` and `check_floating`."""
    if name in _CHECKS:
        refuse, places = _CHECKS[name]
        refuse(name, *(args[i] for i in places if i < len(args)))
