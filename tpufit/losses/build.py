"""`build`: the loss of a model, from the arguments of `compile`."""

from collections.abc import Mapping, Sequence

from ..errors import ArgumentError, NotCompiledError
from .by_output import LossByOutput, LossByOutputArgument, LossWeightsArgument
from .loss import Loss, OneLoss

LossArgument = OneLoss | LossByOutputArgument


def build(loss: LossArgument | None, weights: LossWeightsArgument = None) -> Loss | LossByOutput | None:
    """Build the loss of a model.

    Args:
        loss: A loss, or one for each output in a dict or list.
        weights: The weights of several losses.

    Raises:
        UnknownNameError, ArgumentError: See `Loss` and `LossByOutput`.

    Example:
        >>> build(["mse_loss", "l1_loss"]).outputs
        [0, 1]
    """
    if isinstance(loss, (Mapping, Sequence)) and not isinstance(loss, str):
        return LossByOutput(loss, weights)
    if weights is not None:
        raise ArgumentError(
            f"loss_weights go with a loss for each output, in a dict or a list, got loss={loss!r} and "
            f"loss_weights={weights!r}. If these are metrics: compile(..., metrics={weights!r})"
        )
    return None if loss is None else Loss(loss)


def required(loss: Loss | LossByOutput | None, method: str) -> Loss | LossByOutput:
    """Return the loss, which a method needs, or raise `NotCompiledError` if `compile` was given none."""
    if loss is None:
        raise NotCompiledError(
            f"{method} needs a loss: call model.compile(optimizer=..., loss='cross_entropy'), or override "
            "compute_loss in a subclass of tpufit.Model"
        )
    return loss
