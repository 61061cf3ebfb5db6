"""Sample weights: shaping them for the values that they multiply, and picking them for an output."""

from typing import Any

from torch import Tensor

from ..errors import ArgumentError
from .outputs import Output, describe_nest, pick


def spread_weights(weight: Any, each: Tensor) -> Tensor:
    """Reshape weights so that they multiply values of shape `(batch, ...)` or `(batch, time, ...)`.

    Weights are for rows, shape `(batch,)` or `(batch, 1)`, or for each element of a sequence, shape `(batch, time)`.

    Raises:
        ArgumentError: The weights have another shape.

    Example:
        >>> from torch import ones
        >>> spread_weights(ones(2), ones(2, 3)).shape
        torch.Size([2, 1])
    """
    if not isinstance(weight, Tensor):
        raise ArgumentError(
            f"sample_weight must be one tensor for one output, got {describe_nest(weight)}. Weights by output need a "
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


def pick_weight(sample_weight: Any, output: Output) -> Any:
    """Pick the weights of an output; a single tensor is for all outputs."""
    return sample_weight if isinstance(sample_weight, Tensor) else pick(sample_weight, output)
