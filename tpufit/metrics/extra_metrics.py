"""Metrics that torchmetrics lacks, or that the device can't update in torchmetrics: weighted means and counts."""

from collections.abc import Callable
from functools import partial
from numbers import Real
from typing import Any

import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics.classification import MulticlassStatScores
from torchmetrics.utilities.compute import normalize_logits_if_needed

from ..errors import ArgumentError
from ..losses import spread_weights
from ..runtime import COUNTS, assuming_finite, repeats_bits


class WeightedMean(torchmetrics.Metric):
    """The weighted mean of a value of each element.

    torchmetrics' `MeanMetric` (1.9) reads every batch to find NaN, and without this search it ignores the weights.

    Args:
        value: A function of (output, target) that returns the values.
        dtype: The dtype of the sums (default float32).
        of_scores: True for outputs with an additional dimension of scores; values then have the shape of the targets
            (default False).

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

    def __init__(
        self, value: Callable[[Tensor, Tensor], Any], dtype: torch.dtype = torch.float32, of_scores: bool = False
    ) -> None:
        super().__init__()
        self._of_scores = of_scores
        self._value = value
        self._sum_dtype = dtype
        self.add_state("total", torch.zeros((), dtype=dtype), dist_reduce_fx="sum")
        self.add_state("weight", torch.zeros((), dtype=dtype), dist_reduce_fx="sum")

    def update(self, y_pred: Tensor, y: Tensor, weight: Tensor | None = None) -> None:
        """Add a batch of outputs and targets of one shape, with a weight for each row or each element of a sequence."""
        if y_pred.shape != y.shape and not self._of_scores:
            raise ArgumentError(
                "the metric compares an output and a target of one shape, got "
                f"{tuple(y_pred.shape)} and {tuple(y.shape)}"
            )
        dtype = COUNTS if self._sum_dtype is torch.int64 else self._sum_dtype
        values = self._value(y_pred, y).to(dtype)
        weight = torch.ones_like(values) if weight is None else spread_weights(weight, values)
        self.total = self.total + (values * weight).sum(dtype=dtype)
        weight = weight if weight.shape == values.shape else weight.expand_as(values)
        self.weight = self.weight + weight.sum(dtype=dtype)

    def compute(self) -> Tensor:
        """Compute the mean."""
        return self.total / self.weight


class RowMean(WeightedMean):
    """The mean over rows of a function that returns a value for each row of a batch, or one number for all rows.

    If the function returns a pair of values and weights, it is the mean weighted by these.

    Attributes:
        function_name: The function's name.
        of_host: True if the function returned a number of Python or NumPy for the last batch.

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
        # A module is cloned with the metric and moves with the clone. Any other object isn't cloned, thanks to the
        # lambda, so that its state stays in the user's object.
        self.function_name = getattr(value, "__name__", type(value).__name__).strip("<>")
        self.of_host = False
        super().__init__(value if isinstance(value, nn.Module) else lambda y_pred, y: value(y_pred, y))

    def update(self, y_pred: Tensor, y: Tensor, weight: Tensor | None = None) -> None:
        """Add a batch; see `WeightedMean.update`. The weights need a value for each row."""
        returned = self._value(y_pred, y)
        values, factors = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
        self.of_host = isinstance(values, Real)
        values = torch.as_tensor(values, device=y_pred.device).float()
        if factors is not None:
            factors = torch.as_tensor(factors, device=y_pred.device).float()
            factors = spread_weights(factors, values).expand_as(values) if values.dim() else factors
            factors = factors if weight is None else factors * spread_weights(weight, values)
            self.total = self.total + (values.masked_fill(factors == 0, 0) * factors).sum()
            self.weight = self.weight + factors.sum()
            return
        if values.numel() == 1 and weight is None:
            values = values.reshape(1).expand(len(y_pred))
        if values.dim() == 0 or len(values) != len(y_pred):
            raise ArgumentError(
                f"a metric's function must return one value for each of {len(y_pred)} rows"
                f"{', as there are sample weights' if weight is not None else ', or one number'}, got shape "
                f"{tuple(values.shape)}"
            )
        weights = torch.ones_like(values) if weight is None else weight
        weights = spread_weights(weights, values).expand_as(values)
        self.total = self.total + (values * weights).reshape(len(values), -1).mean(1).sum()
        self.weight = self.weight + weights.reshape(len(values), -1).mean(1).sum()


def make_per_class(kind: type[MulticlassStatScores]) -> type[MulticlassStatScores]:
    """Make a variant of a torchmetrics class that counts for each class, and ignores labels by weights of 0.

    torchmetrics' classes (1.9) select the labels that count, and on XLA need memory for each row and pair of classes.
    The average must be `"macro"` or `"micro"`.
    """
    return type(kind.__name__, (_Counting, kind), {})


class _Counting(MulticlassStatScores):
    splits = True

    def update(self, preds: Tensor, target: Tensor, weight: Tensor | None = None) -> None:
        """Add a batch of classes; classes of weight 0 don't count."""
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
            labeled = (target[:, None] == classes) * counts[:, None]
            tp = count(predicted * labeled, 0)
            fp = count(predicted * counts[:, None], 0) - tp
            fn = count(labeled, 0) - tp
            total = count(counts)
        self._update_state(tp, fp, total - tp - fp - fn, fn)


class MeanIoU(MulticlassStatScores):
    """The mean of the intersection over union over the classes that occur."""

    def compute(self) -> Tensor:
        """Compute the mean."""
        tp, fp, _, fn = (count.double() for count in self._final_state())
        union = tp + fp + fn
        return (tp / union)[union > 0].mean()


class ConfusionMatrix(torchmetrics.Metric):
    """Counts rows by true class (the matrix's rows) and predicted class (its columns).

    torchmetrics' class (1.9) counts by indexing with each element, which the device can't do.

    Example:
        >>> metric = ConfusionMatrix(num_classes=2)
        >>> metric.update(torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1]))
        >>> metric.compute().tolist()
        [[1, 1], [0, 1]]
    """

    full_state_update = False
    splits = True
    matrix: Tensor

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self._classes = num_classes
        self.add_state("matrix", torch.zeros((num_classes, num_classes), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, preds: Tensor, target: Tensor, weight: Tensor | None = None) -> None:
        """Add a batch of classes; classes of weight 0 don't count."""
        classes = torch.arange(self._classes, dtype=COUNTS, device=preds.device)
        predicted = (preds.flatten()[:, None] == classes).float()
        labeled = (target.flatten()[:, None] == classes).float()
        labeled = labeled if weight is None else labeled * weight.flatten()[:, None].float()
        self.matrix = self.matrix + (labeled.T @ predicted).to(COUNTS)  # exact up to 2**24 rows in float32

    def compute(self) -> Tensor:
        """Return the counts."""
        return self.matrix


def is_correct(y_pred: Tensor, y: Tensor) -> Tensor:
    """Compare predictions with labels: classes, or probabilities or logits of the second of two classes."""
    return to_two_classes(y_pred) == y


def find_best_class(scores: Tensor) -> Tensor:
    """Find the class (dimension 1) of the highest score, the first among equal scores, in 32 bits.

    On a TPU, XLA fuses it with the loss of the same logits, which `argmax` would read again. On other devices scores
    and their maximum may be rounded differently, so that no score would equal the maximum.

    Example:
        >>> find_best_class(torch.tensor([[0.1, 0.7, 0.7], [0.9, 0.0, 0.1]])).tolist()
        [1, 0]
    """
    if not repeats_bits(scores.device):
        return scores.argmax(1).to(COUNTS)
    # With the classes last, the loss uses the same layout.
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    scores = scores.movedim(1, -1) if scores.dim() > 2 else scores
    # XLA fuses sums and maxima of one dtype, so the first of equals is found as the maximum of `classes - index`.
    classes = scores.shape[-1]
    ranks = torch.arange(classes, 0, -1, dtype=torch.float32, device=scores.device)
    with assuming_finite():
        best = ranks.masked_fill(scores != scores.amax(-1, keepdim=True), 0).amax(-1)
    return (classes - best).to(COUNTS)


def is_in_top(y_pred: Tensor, y: Tensor, k: int = 5) -> Tensor:
    """Say whether fewer than k classes (dimension 1) have a higher score than the label.

    Example:
        >>> scores = torch.tensor([[0.1, 0.7, 0.2], [0.9, 0.0, 0.1]])
        >>> is_in_top(scores, torch.tensor([2, 1]), k=2).tolist()
        [True, False]
    """
    classes = torch.arange(y_pred.shape[1], device=y.device).view(-1, *[1] * (y.dim() - 1))
    labeled = y.unsqueeze(1) == classes
    label_scores = torch.where(labeled, y_pred, 0).sum(1, keepdim=True)
    # The label's score isn't compared with itself, because a CPU may round the two differently.
    return ((y_pred > label_scores) & ~labeled).sum(1) < k


def to_two_classes(y_pred: Tensor) -> Tensor:
    """Turn predictions into classes 0 or 1: from classes, or from probabilities or logits of class 1."""
    if y_pred.is_floating_point():
        return (normalize_logits_if_needed(y_pred, "sigmoid") > 0.5).to(COUNTS)
    return y_pred


def compute_cosine(y_pred: Tensor, y: Tensor) -> Tensor:
    """Compute the cosine similarity of outputs and targets along the last dimension."""
    return F.cosine_similarity(y_pred, y, -1) if y.dim() > 1 else y_pred.sign() * y.sign()
