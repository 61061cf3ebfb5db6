"""`WeightedMean`: metrics that are means over elements, by the elements' weights."""

from collections.abc import Callable

import torch
import torchmetrics
from torch import Tensor
from torchmetrics.utilities.compute import normalize_logits_if_needed

from ..errors import ArgumentError
from ..losses import spread


class WeightedMean(torchmetrics.Metric):
    """The mean of a value of each element, by the elements' weights.

    torchmetrics' own `MeanMetric` reads every batch to look for NaN; if told not to, it leaves out the weights (1.9).

    Args:
        value: `value(y_pred, y)`: the value of each element, shape `(batch, ...)`.
        dtype: The dtype of the sums (default: float32).
        finish: Makes the result of the mean (default: it is the mean).

    Example:
        >>> metric = WeightedMean(torch.sub)
        >>> metric.update(torch.tensor([2.0, 4.0]), torch.tensor([1.0, 1.0]), torch.tensor([3.0, 1.0]))
        >>> float(metric.compute())
        1.5
    """

    full_state_update = False
    total: Tensor
    weight: Tensor

    def __init__(
        self,
        value: Callable[[Tensor, Tensor], Tensor],
        dtype: torch.dtype = torch.float32,
        finish: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self._value, self._sum_dtype, self._finish = value, dtype, finish
        self.add_state("total", torch.zeros((), dtype=dtype), dist_reduce_fx="sum")
        self.add_state("weight", torch.zeros((), dtype=dtype), dist_reduce_fx="sum")

    def update(self, y_pred: Tensor, y: Tensor, weight: Tensor) -> None:
        """Add a batch.

        Args:
            y_pred: The output, shape `(batch, ...)`.
            y: The targets, of the same shape.
            weight: One weight a row, shape `(batch,)`, or one for each element of a sequence, shape `(batch, time)`.
        """
        if y_pred.shape != y.shape:
            raise ArgumentError(
                "a weighted metric compares an output and a target of one shape, got "
                f"{tuple(y_pred.shape)} and {tuple(y.shape)}"
            )
        values = self._value(y_pred, y).to(self._sum_dtype)
        weight = spread(weight, values)
        self.total = self.total + (values * weight).sum()
        self.weight = self.weight + weight.expand_as(values).sum()

    def compute(self) -> Tensor:
        """Compute the result."""
        mean = self.total / self.weight
        return mean if self._finish is None else self._finish(mean)


def is_correct(y_pred: Tensor, y: Tensor) -> Tensor:
    """Compare predictions with labels: 1 where they are equal, else 0.

    Args:
        y_pred: Classes, or probabilities or logits of the second of two classes.
        y: The labels, of the same shape.
    """
    if y_pred.is_floating_point():
        y_pred = normalize_logits_if_needed(y_pred, "sigmoid") > 0.5
    return (y_pred == y).float()
