"""Dtypes that PyTorch refuses in one operation. torch_xla promotes them, and would train on bytes as they are."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_NARROW = {torch.bfloat16, torch.float16, torch.float32}


def one_dtype(name: str, *operands: Any) -> None:
    """Refuse operands of a product or a convolution that differ in their dtype.

    Raises:
        RuntimeError: They do; the words are like PyTorch's own.
    """
    given = [operand.dtype for operand in operands if isinstance(operand, Tensor)]
    if any(dtype is not given[0] for dtype in given):
        raise RuntimeError(f"{name} takes tensors of one dtype, but got {' and '.join(map(str, given))}")


def floating(name: str, *operands: Any) -> None:
    """Refuse inputs of a norm that aren't floating-point, or in float64 beside weights that aren't.

    Formats of 32 bits and fewer go together.

    Raises:
        RuntimeError: They are; the words are like PyTorch's own.
    """
    input, *others = (operand.dtype for operand in operands if isinstance(operand, Tensor))
    allowed = _NARROW if input in _NARROW else {input}
    if not input.is_floating_point or any(dtype not in allowed for dtype in others):
        given = " and ".join(map(str, [input, *others]))
        raise RuntimeError(f"{name} takes floating-point tensors of one dtype, but got {given}")


# The check of an operation's arguments, by its name, and the places of the operands among them.
_CHECKS: dict[str, tuple[Callable[..., None], tuple[int, ...]]] = {
    "linear": (one_dtype, (0, 1, 2)),
    "matmul": (one_dtype, (0, 1)),
    **{f"conv{kind}{n}d": (one_dtype, (0, 1, 2)) for kind in ("", "_transpose") for n in (1, 2, 3)},
    "batch_norm": (floating, (0, 1, 2, 3, 4)),
    "instance_norm": (floating, (0, 1, 2, 3, 4)),
    "layer_norm": (floating, (0, 2, 3)),
    "group_norm": (floating, (0, 2, 3)),
}


def check(name: str, args: tuple[Any, ...]) -> None:
    """Check the dtypes of an operation's arguments, see `one_dtype` and `floating`."""
    if name in _CHECKS:
        refuse, places = _CHECKS[name]
        refuse(name, *(args[i] for i in places if i < len(args)))
