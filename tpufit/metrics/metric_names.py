"""Metrics by name: one table, and `MetricName`, which resolves a name by the shapes of a batch."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torchmetrics
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import classification

from ..errors import ArgumentError, UnknownNameError
from ..losses import log_cosh, percentage_error, squared_log_error
from ..runtime import COUNTS
from ..utils.text import find_answer, match_known_name
from .extra_metrics import (
    ConfusionMatrix,
    MeanIoU,
    WeightedMean,
    compute_cosine,
    find_best_class,
    is_correct,
    is_in_top,
    make_per_class,
    to_two_classes,
)
from .keras_names import NEAREST


@dataclass(frozen=True)
class NamedMetric:
    """A row of the table."""

    make: Callable[..., torchmetrics.Metric]  # the class of torchmetrics
    alias: str = ""  # another name for the same metric
    by_task: bool = True  # the class takes a task, such as "multiclass", which a batch's shapes determine
    higher_is_better: bool | None = True
    # The function of each element whose weighted mean is the metric; None if it takes no weights.
    value: Callable[[Tensor, Tensor], Tensor] | None = None
    # The class of torchmetrics for several classes, if the metric is computed from counts for each class.
    of_classes: Callable[..., torchmetrics.Metric] | None = None
    # The average over classes: "macro", the mean of the classes, or "micro", of all counts; "" if there is no choice.
    average: str = ""
    # The required targets: "one-hot", "classes" or "elements", each 0 or 1; "" if the shapes determine them.
    targets: str = ""
    of_elements: bool = False  # targets of 0 and 1 in the output's shape are two classes


_error = partial(NamedMetric, by_task=False, higher_is_better=False)
_counts = partial(NamedMetric, average="macro")
_accuracy = partial(NamedMetric, torchmetrics.Accuracy, value=is_correct)
_in_top_5 = partial(NamedMetric, torchmetrics.Accuracy, value=is_in_top)
_two = partial(NamedMetric, torchmetrics.Metric, of_elements=True)


def _mean(value: Callable[[Tensor, Tensor], Tensor], alias: str = "", rises: bool = False) -> NamedMetric:
    """Make a row for the mean of a value that torchmetrics lacks, or computes differently from Keras."""
    return NamedMetric(partial(WeightedMean, value), alias, by_task=False, higher_is_better=rises, value=value)


def _mean_iou(num_classes: int) -> torchmetrics.Metric:
    return make_per_class(MeanIoU)(num_classes=num_classes, average="macro")


_l1 = partial(F.l1_loss, reduction="none")
_l2 = partial(F.mse_loss, reduction="none")
TABLE = {
    "accuracy": _accuracy(alias="acc"),
    "auroc": NamedMetric(torchmetrics.AUROC, alias="auc"),
    "binary_accuracy": _accuracy(targets="elements"),
    "categorical_accuracy": _accuracy(targets="one-hot"),
    "confusion_matrix": _two(of_classes=ConfusionMatrix, higher_is_better=None),
    "cosine_similarity": _mean(compute_cosine, rises=True),
    "f1_score": _counts(torchmetrics.F1Score, alias="f1", of_classes=make_per_class(classification.MulticlassF1Score)),
    "log_cosh_error": _mean(log_cosh, "log_cosh"),
    "mean_absolute_error": _error(torchmetrics.MeanAbsoluteError, alias="mae", value=_l1),
    "mean_absolute_percentage_error": _mean(percentage_error, "mape"),
    "mean_iou": _two(alias="mean_io_u", of_classes=_mean_iou),
    "mean_squared_error": _error(torchmetrics.MeanSquaredError, alias="mse", value=_l2),
    "mean_squared_logarithmic_error": _mean(squared_log_error, "msle"),
    "precision": _counts(torchmetrics.Precision, of_classes=make_per_class(classification.MulticlassPrecision)),
    "r2_score": NamedMetric(torchmetrics.R2Score, by_task=False),
    "recall": _counts(torchmetrics.Recall, of_classes=make_per_class(classification.MulticlassRecall)),
    "root_mean_squared_error": _error(partial(torchmetrics.MeanSquaredError, squared=False), alias="rmse"),
    "sparse_categorical_accuracy": _accuracy(targets="classes"),
    "sparse_top_k_categorical_accuracy": _in_top_5(targets="classes"),
    "specificity": _counts(torchmetrics.Specificity, of_classes=make_per_class(classification.MulticlassSpecificity)),
    "top_k_categorical_accuracy": _in_top_5(targets="one-hot"),
}
_ROWS = TABLE | {row.alias: row for row in TABLE.values() if row.alias}
_ROWS |= {f"{name}_micro": replace(row, average="micro") for name, row in _ROWS.items() if row.average}
NAMES = sorted(_ROWS)


class MetricName:
    """A metric by name, resolved for a training's outputs and targets.

    Args:
        name: A name in the table, or of Keras's class.
        weighted: True if the metric takes sample weights.
        ignored: The label that the loss ignores, and so the metric; None if the loss has no classes.

    Attributes:
        name: The name in the table.
        row: The row in the table.

    Raises:
        UnknownNameError: No metric has this name.
    """

    def __init__(self, name: str, weighted: bool, ignored: int | None) -> None:
        name = match_known_name(name, NAMES)
        if name not in _ROWS:
            short = [row.alias or full for full, row in TABLE.items()]  # all names would be too long
            near = difflib.get_close_matches(name.lower(), NAMES, n=2)
            raise UnknownNameError("metric", name, {*short, *near}, find_answer(name, NEAREST))
        self.row = _ROWS[name]
        self.name = name
        self._weighted = weighted
        self._ignored = ignored
        self._ignored_label = ignored  # None for probabilities, which have no label to ignore
        self._masks = False  # True if weights of 0 leave out ignored labels
        self._classes_at: int | None = None  # the dimension of an output's classes, once known

    def resolve(self, y_pred: Tensor, y: Tensor) -> torchmetrics.Metric:
        """Make the torchmetrics object for the name by the first batch, whose classes are in dimension 1.

        Raises:
            ArgumentError: The shapes don't determine a task.
        """
        row = self.row
        classes = _count_classes(y_pred, y)
        # torchmetrics would select the labels that count, which the device can't. Here weights of 0 leave out the rest.
        self._masks = bool(classes) and self._ignored is not None and (self._compares_classes or row.value is is_in_top)
        if classes and row.of_classes is not None:
            return row.of_classes(num_classes=classes, **({"average": row.average} if row.average else {}))
        if row.of_classes is not None and row.of_elements:
            if y_pred.shape != y.shape:
                raise self._task_error(y_pred, y)
            return row.of_classes(num_classes=2)
        # torchmetrics' accuracy needs all rows on each core. Sums of whole numbers are exact.
        if row.value in (is_correct, is_in_top) and (classes or row.targets == "elements"):
            dtype = torch.float32 if self._weighted else torch.int64
            return WeightedMean(row.value, dtype, of_scores=row.value is is_in_top)
        metric = row.make(**self._find_task(y_pred, y)) if row.by_task else row.make()
        return WeightedMean(row.value) if self._weighted and row.value is not None else metric

    @property
    def leaves_out(self) -> bool:
        """True if the label that the loss ignores isn't counted."""
        return self._ignored is not None and self.row.by_task

    @property
    def _compares_classes(self) -> bool:
        """True if the metric compares the best class with the label, without scores."""
        return self.row.value is is_correct or self.row.of_classes is not None

    def arrange(self, y_pred: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Turn one-hot targets and probabilities into labels, and move classes to dimension 1, as PyTorch expects.

        Only the loss distinguishes one-hot from multilabel targets. The first batch determines whether an output's
        classes are in dimension 1 or last, because a later batch may have a sequence as long as the number of classes.
        """
        if not self.row.by_task:
            return y_pred, y
        if self.row.targets:
            self._require_targets(y_pred, y)
        if self.row.targets == "one-hot":
            self._ignored_label = None
            return y_pred, y.argmax(1)
        if self._ignored is not None and y.is_floating_point() and y.shape == y_pred.shape and y[:1].numel() > 1:
            self._ignored_label = None
            return y_pred, y.argmax(1)
        if y_pred.dim() != y.dim() + 1:
            return y_pred, y
        candidates = [at for at in (1, y_pred.dim() - 1) if _count_classes(y_pred, y, at)]
        if self._classes_at is None:
            if not candidates:
                return y_pred, y
            self._classes_at = candidates[0]
        if self._classes_at not in candidates:
            raise self._task_error(y_pred, y)
        return y_pred.movedim(self._classes_at, 1), y

    def make_comparable(self, y_pred: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Reduce an output and its targets to the shapes and the small dtypes that the metric compares.

        Raises:
            ArgumentError: The metric is an error of numbers, and output and target differ in shape.
        """
        if not self.row.by_task:
            if y_pred.shape != y.shape:
                raise ArgumentError(
                    f"{self.name!r} compares numbers of one shape, got an output of shape {tuple(y_pred.shape)} and a "
                    f"target of shape {tuple(y.shape)}. For classes: 'accuracy' or 'f1'"
                )
            return y_pred, y.to(y_pred.dtype)
        if not _count_classes(y_pred, y):
            y_pred = y_pred.reshape(y.shape)
            return to_two_classes(y_pred) if self.row.of_elements else y_pred, y.long()
        if not self._compares_classes:  # the metric needs all scores
            return y_pred, y
        # Only the best class is kept, because the gathered logits of a language model would be huge.
        fits = not y.is_floating_point() and abs(self._ignored or 0) < torch.iinfo(COUNTS).max
        return find_best_class(y_pred), y.to(COUNTS) if fits else y

    def mask_ignored(self, y: Tensor) -> Tensor | None:
        """Return a mask that is False at ignored labels, if weights of 0 leave them out; None for probabilities."""
        ignored = self._ignored if self._masks and not y.is_floating_point() else None
        return None if ignored is None else torch.ne(y, y.new_full((), ignored))

    def _require_targets(self, y_pred: Tensor, y: Tensor) -> None:
        """Raise an `ArgumentError` unless the targets have the form that the name requires."""
        same = y_pred.shape == y.shape
        wanted, fits = {
            "one-hot": ("one-hot targets, or probabilities, in the output's shape (batch, classes, ...)", same),
            "classes": (
                "an output (batch, classes, ...) and integer targets (batch, ...)",
                y_pred.dim() == y.dim() + 1,
            ),
            "elements": ("an output and targets of one shape, each target 0 or 1", same),
        }[self.row.targets]
        if not fits or (self.row.targets == "one-hot" and y.dim() < 2):
            raise ArgumentError(
                f"{self.name!r} takes {wanted}, got an output of shape {tuple(y_pred.shape)} and a target of shape "
                f"{tuple(y.shape)} ({y.dtype}). 'accuracy' chooses the right kind by the shapes"
            )

    def _find_task(self, y_pred: Tensor, y: Tensor) -> dict[str, object]:
        """Return the arguments of the metric's class that the shapes determine."""
        classes = _count_classes(y_pred, y)
        if classes:
            return {"task": "multiclass", "num_classes": classes, "ignore_index": self._ignored_label}
        if y.dim() == 2 and y.is_floating_point() and y_pred.dim() == 2 and y.shape[1] == y_pred.shape[1] > 1:
            average = {"average": self.row.average} if self.row.average else {}
            return {"task": "multilabel", "num_labels": y.shape[1], **average}
        if y_pred.shape[1:].numel() == y.shape[1:].numel() == 1:
            return {"task": "binary"}
        raise self._task_error(y_pred, y)

    def _task_error(self, y_pred: Tensor, y: Tensor) -> ArgumentError:
        return ArgumentError(
            f"{self.name!r} can't tell its task from an output of shape {tuple(y_pred.shape)} and a target of shape "
            f"{tuple(y.shape)} ({y.dtype}). Expected (batch, classes, ...) with integer targets (batch, ...), as "
            "PyTorch's cross_entropy does; (batch, time, classes) if the first batch isn't ambiguous; or equal shapes "
            "for binary and multilabel. Pass a torchmetrics object instead, e.g. "
            "torchmetrics.classification.MulticlassAccuracy(num_classes=10)"
        )


def _count_classes(y_pred: Tensor, y: Tensor, at: int = 1) -> int:
    """Return the number of classes in a dimension of an output; 0 unless the targets lack exactly that dimension."""
    shape = y_pred.shape
    has = len(shape) > 1 and shape[at] > 1 and (*shape[:at], *shape[at + 1 :]) == tuple(y.shape)
    return shape[at] if has else 0
