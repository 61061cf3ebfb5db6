"""Metrics that torchmetrics has not, or not such that the device can update them: weighted means and counts."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torchmetrics
from torch import Tensor, nn
from torchmetrics.classification import MulticlassStatScores
from torchmetrics.utilities.compute import normalize_logits_if_needed

from ..errors import ArgumentError
from ..losses import spread
from ..runtime import COUNTS


class WeightedMean(torchmetrics.Metric):
    """The mean of a value of each element, by the elements' weights.

    torchmetrics' own `MeanMetric` reads every batch to look for NaN; if told not to, it leaves out the weights (1.9).

    Example:
        >>> metric = WeightedMean(torch.sub)
        >>> metric.update(torch.tensor([2.0, 4.0]), torch.tensor([1.0, 1.0]), torch.tensor([3.0, 1.0]))
        >>> float(metric.compute())
        1.5
    """

    full_state_update = False
    splits = True
    total: Tensor
    weight: Tensor

    def __init__(self, value: Callable[[Tensor, Tensor], Any], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self._value = value
        self._sum_dtype = dtype
        self.add_state("total", torch.zeros((), dtype=dtype), dist_reduce_fx="sum")
        self.add_state("weight", torch.zeros((), dtype=dtype), dist_reduce_fx="sum")

    def update(self, y_pred: Tensor, y: Tensor, weight: Tensor | None = None) -> None:
        """Add a batch of outputs and targets of one shape; weights are one a row, or one an element of a sequence."""
        if y_pred.shape != y.shape:
            raise ArgumentError(
                "a weighted metric compares an output and a target of one shape, got "
                f"{tuple(y_pred.shape)} and {tuple(y.shape)}"
            )
        dtype = COUNTS if self._sum_dtype is torch.int64 else self._sum_dtype
        values = self._value(y_pred, y).to(dtype)
        weight = torch.ones_like(values) if weight is None else spread(weight, values)
        self.total = self.total + (values * weight).sum(dtype=dtype)
        weight = weight if weight.shape == values.shape else weight.expand_as(values)
        self.weight = self.weight + weight.sum(dtype=dtype)

    def compute(self) -> Tensor:
        """Compute the mean."""
        return self.total / self.weight


class RowMean(WeightedMean):
    """The mean over rows of what a function says of each batch: a value for each row, or one number for all of them.

    If the function returns a pair of values and weights, as that of a loss may, it is the mean by these weights.

    Source: `keras.metrics.MeanMetricWrapper`.

    Example:
        >>> metric = RowMean(lambda y_pred, y: (y_pred - y).abs().max())
        >>> metric.update(torch.tensor([3.0]), torch.zeros(1))
        >>> metric.update(torch.ones(3), torch.zeros(3))
        >>> float(metric.compute())
        1.5

    Source: `keras.metrics.MeanMetricWrapper`.
    """

    splits = False  # the function may do anything

    def __init__(self, value: Callable[[Tensor, Tensor], Any]) -> None:
        # A module is copied with the metric, and moves with its copy. Any other object is the user's: what it counts,
        # it counts in that one, as a function does.
        super().__init__(value if isinstance(value, nn.Module) else lambda y_pred, y: value(y_pred, y))

    def update(self, y_pred: Tensor, y: Tensor, weight: Tensor | None = None) -> None:
        """Add a batch; see `WeightedMean.update`. The weights need a value for each row."""
        found = self._value(y_pred, y)
        values, own = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
        values = torch.as_tensor(values, device=y_pred.device).float()
        if own is not None:
            own = torch.as_tensor(own, device=y_pred.device).float()
            own = spread(own, values).expand_as(values) if values.dim() else own
            own = own if weight is None else own * spread(weight, values)
            self.total = self.total + (values.masked_fill(own == 0, 0) * own).sum()
            self.weight = self.weight + own.sum()
            return
        if values.numel() == 1 and weight is None:
            values = values.reshape(1).expand(len(y_pred))
        if values.dim() == 0 or len(values) != len(y_pred):
            raise ArgumentError(
                f"a metric's function must return one value for each of {len(y_pred)} rows"
                f"{' that weights are for' if weight is not None else ', or one number'}, got shape "
                f"{tuple(values.shape)}"
            )
        weights = torch.ones(len(values), device=values.device) if weight is None else weight
        weights = spread(weights, values).expand_as(values)
        self.total = self.total + (values * weights).reshape(len(values), -1).mean(1).sum()
        self.weight = self.weight + weights.reshape(len(values), -1).mean(1).sum()


def by_class(kind: type[MulticlassStatScores]) -> type[MulticlassStatScores]:
    """Make a variant of a class of torchmetrics that counts for each class, with labels that weigh nothing.

    torchmetrics' own (1.9) pick the labels that count, and on XLA need memory for each row and each pair of classes.
    Its average must be `"macro"` or `"micro"`.
    """
    return type(kind.__name__, (_Counting, kind), {})


class _Counting(MulticlassStatScores):
    splits = True

    def update(self, preds: Tensor, target: Tensor, weight: Tensor | None = None) -> None:
        """Add a batch of classes; those of weight 0 don't count."""
        preds = preds.flatten()
        target = target.flatten()
        count = partial(torch.sum, dtype=COUNTS)
        counts = torch.ones_like(target, dtype=COUNTS) if weight is None else weight.flatten().to(COUNTS)
        if self.average == "micro":
            tp = count((preds == target) * counts)
            fp = fn = count((preds != target) * counts)
            total = counts.sum() * (self.num_classes or 0)  # may be too large for 32 bits
        else:
            classes = torch.arange(self.num_classes or 0, dtype=COUNTS, device=preds.device)
            predicted = preds[:, None] == classes
            labelled = (target[:, None] == classes) * counts[:, None]
            tp = count(predicted * labelled, 0)
            fp = count(predicted * counts[:, None], 0) - tp
            fn = count(labelled, 0) - tp
            total = count(counts)
        self._update_state(tp, fp, total - tp - fp - fn, fn)


def is_correct(y_pred: Tensor, y: Tensor) -> Tensor:
    """Compare predictions with labels: classes, or probabilities or logits of the second of two classes."""
    if y_pred.is_floating_point():
        y_pred = normalize_logits_if_needed(y_pred, "sigmoid") > 0.5
    return y_pred == y


def best_class(scores: Tensor) -> Tensor:
    """Find the class, dimension 1, of the highest score, the first of several, in 32 bits.

    XLA fuses it with the loss of the same logits, which `argmax` goes over once more.

    Example:
        >>> best_class(torch.tensor([[0.1, 0.7, 0.7], [0.9, 0.0, 0.1]])).tolist()
        [1, 0]
    """
    # Where the classes are last, this is how the loss sees them too.
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    scores = scores.movedim(1, -1) if scores.dim() > 2 else scores
    # Sums and maxima of one type go into one pass, so of several the first is the one with most classes from it on.
    classes = scores.shape[-1]
    left = torch.arange(classes, 0, -1, dtype=torch.float32, device=scores.device)
    best = left.masked_fill(scores != scores.amax(-1, keepdim=True), 0).amax(-1)
    return (classes - best).to(COUNTS)
