"""Weights of samples: shaped for the values that they multiply, and picked for an output."""

from typing import Any

from torch import Tensor

from ..errors import ArgumentError
from .outputs import Output, described, pick


def spread(weight: Any, each: Tensor) -> Tensor:
    """Shape weights so that they multiply a value for each element, shape `(batch, ...)` or `(batch, time, ...)`.

    They are one a row, shape `(batch,)` or `(batch, 1)`, or one for each element of a sequence, shape `(batch, time)`.

    Raises:
        ArgumentError: The weights are of another shape.

    Example:
        >>> from torch import ones
        >>> spread(ones(2), ones(2, 3)).shape
        torch.Size([2, 1])
    """
    if not isinstance(weight, Tensor):
        raise ArgumentError(
            f"sample_weight must be one tensor for one output, got {described(weight)}. Weights by output go with a "
            "loss for each output"
        )
    if weight.dim() > 1 and weight.shape[1:].numel() == 1:
        weight = weight.reshape(-1)
    if weight.shape != each.shape[: weight.dim()]:
        raise ArgumentError(
            f"sample_weight of shape {tuple(weight.shape)} doesn't fit losses of shape {tuple(each.shape)}: one weight "
            "a row, shape (batch,), or one for each element of a sequence, shape (batch, time)"
        )
    shaped: Tensor = weight.to(each.dtype)
    return shaped.reshape(*shaped.shape, *[1] * further) if (further := each.dim() - shaped.dim()) else shaped


def weight_of(sample_weight: Any, output: Output) -> Any:
    """Pick the weights of an output; one tensor is for all outputs."""
    return sample_weight if isinstance(sample_weight, Tensor) else pick(sample_weight, output)
