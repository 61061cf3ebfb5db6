"""`build`: builds the loss of a model from the arguments of `compile`."""

from collections.abc import Mapping, Sequence

from torch import nn

from ..errors import ArgumentError, NotCompiledError
from .by_output import LossByOutput, LossByOutputArgument, LossWeightsArgument, SharedLoss
from .loss import Loss, OneLoss
from .module_loss import ModuleLoss, computes_loss

LossArgument = OneLoss | LossByOutputArgument
AnyLoss = Loss | LossByOutput | ModuleLoss


def build(
    loss: LossArgument | None, weights: LossWeightsArgument = None, module: nn.Module | None = None
) -> AnyLoss | None:
    """Build the loss of a model, or a loss for each output in a nest; a module that takes labels computes its loss.

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
            f"loss_weights need a dict or a list of losses, one for each output, got loss={loss!r} and "
            f"loss_weights={weights!r}. If these are metrics: compile(..., metrics={weights!r})"
        )
    if (isinstance(loss, str) and loss == "module") or (loss is None and module is not None and computes_loss(module)):
        return ModuleLoss()
    if loss is None:
        return None
    compares_tensors = isinstance(loss, str) or type(loss).__module__ == nn.modules.loss.__name__
    return SharedLoss(loss) if compares_tensors else Loss(loss)


def require_loss(loss: AnyLoss | None, method: str) -> AnyLoss:
    """Return the loss that a method needs, or raise `NotCompiledError` if `compile` got none."""
    if loss is None:
        raise NotCompiledError(
            f"{method} needs a loss: call model.compile(optimizer=..., loss='cross_entropy'), or override "
            "compute_loss in a subclass of tpufit.Model"
        )
    return loss
