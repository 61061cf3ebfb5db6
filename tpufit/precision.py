"""In which floating-point format a module computes."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from .errors import ArgumentError, UnknownNameError

PRECISIONS = ("bf16", "fp32")


def check(name: str) -> str:
    """The precision's name, or an error that says what to use instead.

    Args:
        name: `"fp32"`, or `"bf16"`: matrix products in bfloat16 by autocast, weights and loss in float32.

    Returns:
        The same name.

    Raises:
        ArgumentError: float16, which a TPU doesn't compute in.
        UnknownNameError: Any other name.

    Example:
        >>> check("bf16")
        'bf16'
    """
    if name in PRECISIONS:
        return name
    if str(name).lower() in ("fp16", "float16", "half", "16", "16-mixed", "16-true", "mixed_float16"):
        raise ArgumentError(
            f"precision={name!r}: TPUs have no float16 arithmetic. Use precision='bf16', which has float32's range and "
            "so needs no loss scaling either"
        )
    raise UnknownNameError("precision", name, PRECISIONS)


def autocast(name: str, device: torch.device) -> AbstractContextManager[object]:
    """The context in which the module's forward pass runs.

    Args:
        name: A precision.
        device: Where the module computes.
    """
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=name == "bf16")
