"""The floating-point formats in which a module computes."""

import os
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..errors import ArgumentError, UnknownNameError
from ..runtime import swap_value
from ..utils.hardware import find_retired_variables
from ..utils.text import dtype_name
from ..utils.user_code import warn

PRECISIONS = ("bf16", "bf16-true", "fp32")
# The names in Lightning, Keras, Accelerate and PyTorch.
_MEANT = {
    "bf16": ("bf16-mixed", "mixed_bfloat16", "amp", "mixed"),
    "bf16-true": ("bfloat16", "torch.bfloat16"),
    "fp32": ("32", "32-true", "float32", "torch.float32", "no", "none"),
}
MATMUL_PRECISIONS = ("default", "high", "highest")


@dataclass(frozen=True)
class Formats:
    """The floating-point formats of a training step."""

    products: frozenset[torch.dtype]  # of matrices and of convolutions; empty if the step had none
    weights: frozenset[torch.dtype]
    loss: torch.dtype | None

    def __str__(self) -> str:
        parts = {"matrix products": self.products, "weights": self.weights, "loss": {self.loss} - {None}}
        return ", ".join(f"{name} in {_names(formats)}" for name, formats in parts.items() if formats)

    def fault(self, name: str) -> str:
        """Explain how the formats contradict a precision; empty if they don't.

        Example:
            >>> seen = Formats(frozenset({torch.float32}), frozenset({torch.float32}), torch.float32)
            >>> seen.fault("fp32"), seen.fault("bf16")[:53]
            ('', "precision='bf16', but the first step computed its mat")
        """
        if name != "fp32" and self.products and torch.bfloat16 not in self.products:
            return (
                f"precision={name!r}, but the first step computed its matrix products in {_names(self.products)}: does "
                "the module switch autocast off, or cast its inputs?"
            )
        if self.loss is torch.bfloat16:
            return "the loss is computed in bfloat16, which has three digits: compute it in float32 in train_step"
        return ""


def check(name: str) -> str:
    """Check and return the name of a precision; an error says what to use instead.

    `"fp32"`; `"bf16"`, mixed precision: matrix products in bfloat16 by autocast, weights and loss in float32; or
    `"bf16-true"`: everything in bfloat16 except the loss.

    Raises:
        ArgumentError: float16, which TPUs have no arithmetic for, or another library's name of a precision.
        UnknownNameError: Any other name.

    Example:
        >>> check("bf16")
        'bf16'
    """
    set_here = find_retired_variables(os.environ)
    if set_here:
        warn(
            f"the environment sets {', '.join(set_here)}, a retired way to choose a precision, which changes tensors "
            "behind PyTorch's back or does nothing. Unset it, and pass precision='bf16' to compile",
        )
    if isinstance(name, str) and name in PRECISIONS:
        return name
    if str(name).lower() in ("fp16", "float16", "half", "16", "16-mixed", "16-true", "mixed_float16"):
        raise ArgumentError(
            f"precision={name!r}: TPUs have no float16 arithmetic. Use precision='bf16', which has the range of "
            "float32 and so needs no loss scaling"
        )
    meant = next((known for known, names in _MEANT.items() if str(name).lower() in names), None)
    if meant is not None:
        raise ArgumentError(f"precision must be 'bf16', 'bf16-true' or 'fp32', got {name!r}: write {meant!r} instead")
    raise UnknownNameError("precision", name, PRECISIONS)


def check_matmul(name: str) -> str:
    """Check and return the name of a precision of float32 matrix products.

    Example:
        >>> check_matmul("highest")
        'highest'
    """
    if not isinstance(name, str) or name not in MATMUL_PRECISIONS:
        raise UnknownNameError("matmul_precision", name, MATMUL_PRECISIONS)
    return name


def autocast(name: str, device: torch.device) -> AbstractContextManager[object]:
    """Return the context of the module's forward pass."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=name == "bf16")


def warn_of_emulation(name: str, device: torch.device) -> None:
    """Warn if the GPU has no bfloat16 units, as Kaggle's T4 doesn't."""
    if name != "fp32" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        warn(
            f"precision={name!r}: {torch.cuda.get_device_name(device)} has no bfloat16 units and imitates them, which "
            "is slower than precision='fp32'"
        )


def to_bfloat16(tensors: Iterable[Tensor]) -> None:
    """Convert float32 tensors to bfloat16 in place, so that ties and optimizers keep the same tensor objects."""
    for tensor in tensors:
        if tensor.dtype is torch.float32:
            tensor.grad = None
            swap_value(tensor, tensor.detach().to(torch.bfloat16))


def cast_inputs(name: str, x: Any) -> Any:
    """Return a module's inputs in the dtype that the precision needs."""
    if name != "bf16-true":
        return x
    return tree_map(lambda leaf: leaf.bfloat16() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, x)


def _names(formats: Iterable[torch.dtype | None]) -> str:
    return " and ".join(sorted(dtype_name(dtype) for dtype in formats))
