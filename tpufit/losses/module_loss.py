"""`ModuleLoss`: the loss that a module computes itself, as Hugging Face's models do for batches with labels."""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..errors import ArgumentError
from .outputs import describe_nest


class ModuleLoss:
    """The loss that a module returns along with its logits.

    Example:
        >>> import torch
        >>> float(ModuleLoss()({"loss": torch.tensor(2.0), "logits": torch.zeros(3)}))
        2.0
    """

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.user_code: Any = None
        self.ignored: dict[Any, int] = {None: -100}  # the label that Hugging Face's losses ignore

    def __call__(self, y_pred: Any, y: Any = None, sample_weight: Any = None) -> Tensor:
        """Pick the loss from the dict that the module returned, which had the targets in its inputs.

        Raises:
            ArgumentError: There is no loss, or there are sample weights.
        """
        loss = y_pred.get("loss") if isinstance(y_pred, Mapping) else None
        if not isinstance(loss, Tensor):
            raise ArgumentError(
                "loss='module' takes the loss that the module returns, as a Hugging Face model does if the batch is a "
                f"dict with 'labels', but it returns {describe_nest(y_pred)}. Put the labels into x, or compile with a "
                "loss such as 'cross_entropy'"
            )
        if sample_weight is not None:
            raise ArgumentError(
                "sample_weight can't be applied to the loss that the module computes, which is one number: compile "
                "with a loss such as 'cross_entropy'"
            )
        return loss if loss.dim() == 0 else loss.mean()

    def label_range(self, y: Any) -> None:
        """Do nothing: only the module knows its labels."""

    def forget_classes(self) -> None:
        """Do nothing."""

    def check_labels(self, found: Any, y_pred: Any = None) -> None:
        """Do nothing."""


def computes_loss(module: nn.Module) -> bool:
    """True if a module's forward has a parameter `labels`."""
    return "labels" in inspect.signature(module.forward).parameters
