"""Metrics by name: one table, a row a name; and `MetricName`, which resolves a name by the shapes of a batch."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torchmetrics
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import classification

from ..errors import ArgumentError, UnknownNameError
from ..runtime import COUNTS
from .weighted import WeightedMean, best_class, by_class, is_correct


@dataclass(frozen=True)
class NamedMetric:
    """A row of the table."""

    make: Callable[..., torchmetrics.Metric]  # the class of torchmetrics
    alias: str = ""  # another name for the same metric
    by_task: bool = True  # the class takes a task, such as "multiclass", which the shapes of a batch tell
    higher_is_better: bool = True
    # Of each element, whose weighted mean the metric is; None if it takes no weights.
    value: Callable[[Tensor, Tensor], Tensor] | None = None
    # The class of torchmetrics for several classes, if it is made of counts for each.
    of_classes: Callable[..., torchmetrics.Metric] | None = None
    average: str = "macro"  # of these: "macro", the mean of the classes, or "micro", of all together


_error = partial(NamedMetric, by_task=False, higher_is_better=False)
_l1 = partial(F.l1_loss, reduction="none")
_l2 = partial(F.mse_loss, reduction="none")
TABLE = {
    "accuracy": NamedMetric(torchmetrics.Accuracy, alias="acc", value=is_correct),
    "auroc": NamedMetric(torchmetrics.AUROC),
    "f1_score": NamedMetric(torchmetrics.F1Score, alias="f1", of_classes=by_class(classification.MulticlassF1Score)),
    "mean_absolute_error": _error(torchmetrics.MeanAbsoluteError, alias="mae", value=_l1),
    "mean_squared_error": _error(torchmetrics.MeanSquaredError, alias="mse", value=_l2),
    "precision": NamedMetric(torchmetrics.Precision, of_classes=by_class(classification.MulticlassPrecision)),
    "r2_score": NamedMetric(torchmetrics.R2Score, by_task=False),
    "recall": NamedMetric(torchmetrics.Recall, of_classes=by_class(classification.MulticlassRecall)),
    "specificity": NamedMetric(torchmetrics.Specificity, of_classes=by_class(classification.MulticlassSpecificity)),
}
_ROWS = TABLE | {row.alias: row for row in TABLE.values() if row.alias}
_ROWS |= {f"{name}_micro": replace(row, average="micro") for name, row in _ROWS.items() if row.of_classes is not None}
NAMES = sorted(_ROWS)


class MetricName:
    """A metric by name, for the outputs and targets that a training has.

    It leaves out the label that the loss ignores; that is None if the loss is none of classes.

    Raises:
        UnknownNameError: Nothing goes by that name.
    """

    def __init__(self, name: str, weighted: bool, ignored: int | None) -> None:
        if name not in _ROWS:
            raise UnknownNameError("metric", name, NAMES)
        self.row = _ROWS[name]
        self._name = name
        self._weighted = weighted
        self._ignored = ignored
        self._ignored_label = ignored  # for labels; in probabilities there is none to ignore
        self._masks = False  # True if ignored labels are left out by weights of 0
        self._classes_at: int | None = None  # the dimension of an output's classes, once a batch has shown it

    def resolve(self, y_pred: Tensor, y: Tensor) -> torchmetrics.Metric:
        """Make the torchmetrics object that the name means, by the first batch, whose classes are in dimension 1.

        Raises:
            ArgumentError: The shapes tell no task.
        """
        row = self.row
        classes = _classes(y_pred, y)
        # torchmetrics would pick the labels that count, which the device can't; here the others weigh nothing.
        self._masks = bool(classes) and self._ignored is not None and self._compares_classes
        if classes and row.of_classes is not None:
            return row.of_classes(num_classes=classes, average=row.average)
        if classes and row.value is is_correct:  # torchmetrics' own needs the rows of all cores on each
            return WeightedMean(is_correct, torch.float32 if self._weighted else torch.int64)  # whole numbers are exact
        metric = row.make(**self._task(y_pred, y)) if row.by_task else row.make()
        return WeightedMean(row.value) if self._weighted and row.value is not None else metric

    @property
    def _compares_classes(self) -> bool:
        """True if the metric compares the best class with the label, and takes no scores."""
        return self.row.value is is_correct or self.row.of_classes is not None

    def arranged(self, y_pred: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Make labels of one-hot targets and probabilities, and move classes to dimension 1, where PyTorch has them.

        Only the loss tells one-hot targets from those of several labels. The first batch settles where an output's
        classes are, in dimension 1 or last: a later one may be as long as there are classes.
        """
        if not self.row.by_task:
            return y_pred, y
        if self._ignored is not None and y.is_floating_point() and y.shape == y_pred.shape and y[:1].numel() > 1:
            self._ignored_label = None
            return y_pred, y.argmax(1)
        if y_pred.dim() != y.dim() + 1:
            return y_pred, y
        found = [at for at in (1, y_pred.dim() - 1) if _classes(y_pred, y, at)]
        if self._classes_at is None:
            if not found:
                return y_pred, y
            self._classes_at = found[0]
        if self._classes_at not in found:
            raise self._no_task(y_pred, y)
        return y_pred.movedim(self._classes_at, 1), y

    def comparable(self, y_pred: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Make an output and its targets small, and of the shapes that torchmetrics compares."""
        if not self.row.by_task:
            return y_pred, y.to(y_pred.dtype)
        if not _classes(y_pred, y):
            return y_pred.reshape(y.shape), y.long()
        if not self._compares_classes:  # scores can't be told from the best class
            return y_pred, y
        # The gathered logits of a language model would be huge.
        fits = not y.is_floating_point() and abs(self._ignored or 0) < torch.iinfo(COUNTS).max
        return best_class(y_pred), y.to(COUNTS) if fits else y

    def counted(self, y: Tensor) -> Tensor | None:
        """The mask of the labels that count, where weights of 0 leave out the others; probabilities all count."""
        left_out = self._ignored if self._masks and not y.is_floating_point() else None
        return None if left_out is None else torch.ne(y, y.new_full((), left_out))

    def _task(self, y_pred: Tensor, y: Tensor) -> dict[str, object]:
        """The arguments of the metric's class that the shapes tell."""
        classes = _classes(y_pred, y)
        if classes:
            return {"task": "multiclass", "num_classes": classes, "ignore_index": self._ignored_label}
        if y.dim() == 2 and y.is_floating_point() and y_pred.dim() == 2 and y.shape[1] == y_pred.shape[1] > 1:
            average = {} if self.row.of_classes is None else {"average": self.row.average}
            return {"task": "multilabel", "num_labels": y.shape[1], **average}
        if y_pred.shape[1:].numel() == y.shape[1:].numel() == 1:
            return {"task": "binary"}
        raise self._no_task(y_pred, y)

    def _no_task(self, y_pred: Tensor, y: Tensor) -> ArgumentError:
        return ArgumentError(
            f"{self._name!r} can't tell its task from an output of shape {tuple(y_pred.shape)} and a target of shape "
            f"{tuple(y.shape)} ({y.dtype}). Expected (batch, classes, ...) with integer targets (batch, ...), as "
            "PyTorch's cross_entropy does; (batch, time, classes) where the first batch can't be taken for that; or "
            "equal shapes for binary and multilabel. Pass a torchmetrics object instead, e.g. "
            "torchmetrics.classification.MulticlassAccuracy(num_classes=10)"
        )


def _classes(y_pred: Tensor, y: Tensor, at: int = 1) -> int:
    """The number of classes in a dimension of an output; 0 if the targets don't lack just that dimension."""
    shape = y_pred.shape
    has = len(shape) > 1 and shape[at] > 1 and (*shape[:at], *shape[at + 1 :]) == tuple(y.shape)
    return shape[at] if has else 0
