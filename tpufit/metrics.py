"""Metrics: torchmetrics', by name or as objects, and the running values of a pass, kept on the device.

Sums stay on the device, inside the step's graph; they are read once a pass, or when somebody looks at a batch's logs.
torchmetrics then computes on the host, from sums over exactly the rows that were seen.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
import torchmetrics
from torch import Tensor

from .errors import ArgumentError, UnknownNameError
from .runtime import Layout, Placement, move, to_device, to_host

MetricArgument = str | torchmetrics.Metric
MetricsArgument = Sequence[MetricArgument] | Mapping[str, MetricArgument] | MetricArgument | None

_BY_TASK: dict[str, Callable[..., torchmetrics.Metric]] = {
    "accuracy": torchmetrics.Accuracy,
    "auroc": torchmetrics.AUROC,
    "f1_score": torchmetrics.F1Score,
    "precision": torchmetrics.Precision,
    "recall": torchmetrics.Recall,
    "specificity": torchmetrics.Specificity,
}
_PLAIN: dict[str, Callable[..., torchmetrics.Metric]] = {
    "mean_absolute_error": torchmetrics.MeanAbsoluteError,
    "mean_squared_error": torchmetrics.MeanSquaredError,
    "r2_score": torchmetrics.R2Score,
}
_ALIASES = {"acc": "accuracy", "f1": "f1_score", "mae": "mean_absolute_error", "mse": "mean_squared_error"}
NAMES = sorted({*_BY_TASK, *_PLAIN, *_ALIASES})

# Those of the named metrics that get better as they fall; the others get better as they rise.
_LOWER_IS_BETTER = ("mean_absolute_error", "mean_squared_error")


class LazyLogs(MutableMapping[str, Any]):
    """A batch's logs: a dict whose numbers are on the device until one is read, which fetches them all at once.

    Names, length and membership cost nothing. What a callback writes into it is kept as in a dict. It holds the values
    of its own batch, also when it is read later.

    Args:
        names: The names of the logs.
        read: Waits for the device and returns their values.

    Example:
        >>> logs = LazyLogs(["loss"], lambda: {"loss": 0.5})
        >>> len(logs), logs["loss"], dict(logs)
        (1, 0.5, {'loss': 0.5})
    """

    def __init__(self, names: Sequence[str], read: Callable[[], dict[str, Any]]) -> None:
        self._values: dict[str, Any] = dict.fromkeys(names, _UNREAD)
        self._read: Callable[[], dict[str, Any]] | None = read

    def __getitem__(self, name: str) -> Any:
        if self._values[name] is _UNREAD and self._read is not None:
            read, self._read = self._read, None
            for key, value in read().items():
                if self._values.get(key) is _UNREAD:
                    self._values[key] = value
        return self._values[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._values[name] = value

    def __delitem__(self, name: str) -> None:
        del self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, name: object) -> bool:
        return name in self._values  # the inherited one would read the value

    def __repr__(self) -> str:
        return repr(self._values if self._read is None else f"LazyLogs({', '.join(self._values)}: not read yet)")


_UNREAD = object()


class Metric:
    """One metric: a torchmetrics object, updated on the device and computed on the host.

    Args:
        metric: A name, resolved by the shapes of the first batch, or a torchmetrics object, which is cloned.

    Raises:
        UnknownNameError: Nothing goes by that name.
        ArgumentError: Neither a name nor a torchmetrics object.
    """

    def __init__(self, metric: MetricArgument, name: str | None = None) -> None:
        self._object: torchmetrics.Metric | None = None  # computes, on the host; None until a name is resolved
        self._traced: torchmetrics.Metric | None = None  # its twin that updates, at the place of the steps
        self._traced_at: Placement | None = None
        if isinstance(metric, str):
            resolved = _ALIASES.get(metric, metric)
            if resolved not in _BY_TASK and resolved not in _PLAIN:
                raise UnknownNameError("metric", metric, NAMES)
            self.name = name or metric
            self._resolved = resolved
            self.higher_is_better: bool | None = resolved not in _LOWER_IS_BETTER
        elif isinstance(metric, torchmetrics.Metric):
            self.name = name or _snake_case(type(metric).__name__)
            self._resolved = ""
            self.higher_is_better = metric.higher_is_better
            self._adopt(metric.clone())
        else:
            raise ArgumentError(
                f"a metric must be a name or a torchmetrics object (an instance, not the class), got {metric!r}"
            )

    def update(self, running: Running, slot: int, y_pred: Tensor, y: Tensor) -> None:
        """Add a batch, inside a traced step.

        Args:
            running: The sums of the pass.
            slot: Which of its metrics this is.
            y_pred: The module's output, e.g. of shape `(batch, classes)`.
            y: The targets.
        """
        place = running.place
        y_pred = y_pred.detach()
        y_pred = y_pred.float() if y_pred.dtype is torch.bfloat16 else y_pred
        metric = self._at(place, y_pred, y)
        y_pred, y = _comparable(self._resolved, y_pred, y)
        # Split over the cores, some metrics' graphs end the process in the partitioner; whole inputs never did.
        y_pred, y = place.gather(y_pred), place.gather(y)
        if self._keeps_batches:
            running.keep(slot, y_pred, y)
            return
        for key, default in metric._defaults.items():
            # A clone, so that a sum which somebody still holds keeps its value.
            setattr(metric, key, running.get((slot, key), torch.as_tensor(default)).clone())
        metric.update(y_pred, y)
        for key, default in metric._defaults.items():
            # Some metrics' sums change their shape with the first batch, from () to (1,). A graph's inputs may not.
            like = torch.as_tensor(default)
            running.set((slot, key), getattr(metric, key).reshape(like.shape).to(like.dtype))
            setattr(metric, key, default)

    def compute(self, sums: dict[str, Tensor], kept: Sequence[tuple[Tensor, Tensor]]) -> Any:
        """The metric's value, from host tensors: a float, or an array if it has several numbers."""
        if self._object is None:
            return float("nan")
        metric = self._object.clone()
        metric.reset()
        for y_pred, y in kept:
            metric.update(y_pred, y)
        for key, value in sums.items():
            setattr(metric, key, value)
            metric._update_count = 1  # else torchmetrics warns that nothing was added
        value = metric.compute()
        if isinstance(value, Tensor):
            return float(value) if value.numel() == 1 else value.numpy()
        return value

    def _adopt(self, metric: torchmetrics.Metric) -> None:
        metric.reset()
        if hasattr(metric, "validate_args"):
            metric.validate_args = False  # it would read every batch back to the host; labels are checked there anyway
        self._object = metric
        # Without sums of its own (it collects whole batches, or wraps other metrics) it is updated on the host.
        own_sums = bool(metric._defaults) and not any(isinstance(v, list) for v in metric._defaults.values())
        self._keeps_batches = not own_sums or any(isinstance(m, torchmetrics.Metric) for m in metric.children())

    def _at(self, place: Placement, y_pred: Tensor, y: Tensor) -> torchmetrics.Metric:
        """The twin that updates at this place; its buffers (thresholds and the like) live there."""
        if self._object is None:
            self._adopt(_by_shapes(self._resolved, y_pred, y))
        if self._traced is None or self._traced_at != place:
            assert self._object is not None
            self._traced, self._traced_at = self._object.clone(), place
            move(self._traced.buffers(), place)
        return self._traced


class Running:
    """The running values of a pass over the data: means of what its steps returned, and metrics.

    Its sums are one flat list of device tensors. Which sums there are shows as the first step is traced.

    Args:
        metrics: The metrics of the pass.
        place: Where its steps run.

    Attributes:
        tensors: The sums as they stand.
        begun: The sums that the step being traced began with, those that it made itself among them.
        kept: What metrics without sums of their own keep of the step being traced: nests of tensors.
    """

    def __init__(self, metrics: Sequence[Metric], place: Placement) -> None:
        self.place = place
        self.tensors: list[Tensor] = []
        self.begun: list[Tensor] = []
        self.kept: list[tuple[Tensor, Tensor]] = []
        self._metrics = list(metrics)
        self._places: dict[Any, int] = {}  # where each sum is in the lists; those of a mean go by its name
        self._defaults: list[Tensor] = []
        self._means: list[str] = []
        self._keepers: list[int] = []  # the metrics that keep batches, in the order of `kept`
        self._batches: list[list[tuple[Tensor, Tensor]]] = [[] for _ in metrics]
        self._updated = False
        self._rows = 0

    @property
    def names(self) -> list[str]:
        """The names of the logs that there are so far."""
        return [*self._means, *(m.name for m in self._metrics if self._updated)]

    def reset(self) -> None:
        """Begin a new pass."""
        self._rows = 0
        self._batches = [[] for _ in self._metrics]
        self.tensors = to_device([default.clone() for default in self._defaults], self.place, Layout.WHOLE)

    def begin(self) -> None:
        """A step is about to be traced."""
        self.begun = self.tensors
        self.tensors = list(self.tensors)  # lists that somebody keeps as a batch's logs stay as they are
        self.kept, self._keepers = [], []

    def get(self, key: Any, default: Tensor) -> Tensor:
        """A sum, inside a step; a new one begins with its default."""
        if key not in self._places:
            self._places[key] = len(self._defaults)
            self._defaults.append(default.detach().clone())
            (tensor,) = to_device([default.clone()], self.place, Layout.WHOLE)
            self.tensors.append(tensor)
            self.begun = [*self.begun, tensor]
        return self.tensors[self._places[key]]

    def set(self, key: Any, value: Tensor) -> None:
        """Replace a sum, inside a step."""
        self.tensors[self._places[key]] = self.place.pin(value)

    def keep(self, slot: int, y_pred: Tensor, y: Tensor) -> None:
        """Keep a batch for a metric, inside a step."""
        self._keepers.append(slot)
        self.kept.append((y_pred, y))

    def add_means(self, logs: Mapping[str, Any], rows: int) -> None:
        """Add the scalars that a step returned, each the mean over its batch, inside that step.

        Args:
            logs: The step's scalars by name.
            rows: How many rows the batch has.
        """
        for name, value in logs.items():
            if not isinstance(value, Tensor) or value.numel() != 1:
                what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
                raise ArgumentError(f"a step must return scalar tensors by name, got {name!r}: {what}")
            if name not in self._means:
                self._means.append(name)
            # Kahan's summation, with what rounding has taken from the sum so far: a plain float32 sum would be off in
            # the fifth digit after some ten thousand batches.
            total, lost = self.get((name, "total"), torch.zeros(())), self.get((name, "lost"), torch.zeros(()))
            addend = value.detach().float().reshape(()) * rows - lost
            new = total + addend
            self.set((name, "total"), new)
            self.set((name, "lost"), (new - total) - addend)

    def update_metrics(self, y_pred: Any, y: Any) -> None:
        """Add a batch to every metric, inside a step."""
        if not self._metrics:
            return
        if not isinstance(y_pred, Tensor) or not isinstance(y, Tensor):
            raise ArgumentError(
                f"metrics compare one output tensor with one target tensor, got {type(y_pred).__name__} and "
                f"{type(y).__name__}. Override update_metrics to pick them"
            )
        for slot, metric in enumerate(self._metrics):
            metric.update(self, slot, y_pred, y)
        self._updated = True

    def count(self, rows: int, kept: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Note a step that has been started.

        Args:
            rows: How many rows it has.
            kept: What it gave of `kept`, in their order.
        """
        self._rows += rows
        for slot, batch in zip(self._keepers, kept, strict=True):
            self._batches[slot].append(batch)

    def results(self, reason: str) -> dict[str, Any]:
        """The means and metrics over all rows so far. This waits for the device, once."""
        return self._snapshot()(reason)

    def take(self) -> tuple[dict[str, Tensor], int]:
        """The sums behind the means so far, by name and on the device, with the number of rows; a new pass begins."""
        taken = {name: self.tensors[self._places[name, "total"]] for name in self._means}, self._rows
        self.reset()
        return taken

    def lazy(self) -> LazyLogs:
        """The same, fetched only if one is read."""
        snapshot = self._snapshot()
        return LazyLogs(self.names, lambda: snapshot("batch logs"))

    def _snapshot(self) -> Callable[[str], dict[str, Any]]:
        rows, sums, kept = self._rows, self.tensors, self._batches
        sizes = [len(batches) for batches in kept]

        def read(reason: str) -> dict[str, Any]:
            batches = [b[:n] for b, n in zip(kept, sizes, strict=True)]
            flat = [tensor for b in batches for pair in b for tensor in pair]
            host = to_host([*sums, *flat], reason)
            rest = iter(host[len(sums) :])
            values: dict[str, Any] = {
                name: float(np.float64(host[self._places[name, "total"]].item()) / rows) for name in self._means
            }
            for slot, metric in enumerate(self._metrics if self._updated else ()):
                pairs = [(next(rest), next(rest)) for _ in batches[slot]]
                own = {key[1]: host[i] for key, i in self._places.items() if key[0] == slot}
                values[metric.name] = metric.compute(own, pairs)
            return values

        return read


def build(metrics: MetricsArgument) -> list[Metric]:
    """The metrics of a model.

    Args:
        metrics: Names and torchmetrics objects in a list, or by the name they shall have in a dict; or just one.

    Example:
        >>> [m.name for m in build(["accuracy", torchmetrics.MeanSquaredError()])]
        ['accuracy', 'mean_squared_error']
    """
    if metrics is None:
        return []
    if isinstance(metrics, (str, torchmetrics.Metric)):
        metrics = [metrics]
    if isinstance(metrics, (Mapping, torchmetrics.MetricCollection)):
        return [Metric(metric, name) for name, metric in metrics.items()]
    built = [Metric(metric) for metric in metrics]
    names = [metric.name for metric in built]
    doubled = sorted({name for name in names if names.count(name) > 1 or name == "loss"})
    if doubled:
        raise ArgumentError(
            f"each metric needs a name of its own, but {doubled} is taken more than once. Pass a dict: "
            "metrics={'top1': ..., 'top5': ...}"
        )
    return built


def _by_shapes(name: str, y_pred: Tensor, y: Tensor) -> torchmetrics.Metric:
    """The torchmetrics object that a name means for an output and a target of these shapes."""
    if name in _PLAIN:
        return _PLAIN[name]()
    make = _BY_TASK[name]
    if y_pred.dim() == y.dim() + 1 and y_pred.shape[1] > 1:
        return make(task="multiclass", num_classes=y_pred.shape[1])
    if y_pred.dim() == y.dim() and y.is_floating_point() and y.shape[1:] == y_pred.shape[1:] and y.dim() == 2:
        if y.shape[1] > 1:
            return make(task="multilabel", num_labels=y.shape[1])
        return make(task="binary")
    if y_pred.shape[1:].numel() == y.shape[1:].numel() == 1:
        return make(task="binary")
    raise ArgumentError(
        f"{name!r} can't tell its task from an output of shape {tuple(y_pred.shape)} and a target of shape "
        f"{tuple(y.shape)} ({y.dtype}). Expected (batch, classes, ...) with integer targets (batch, ...), or equal "
        "shapes for binary and multilabel. Pass a torchmetrics object instead, e.g. "
        "torchmetrics.classification.MulticlassAccuracy(num_classes=10)"
    )


def _comparable(name: str, y_pred: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """What torchmetrics compares, made small and of its shapes before it is gathered from the cores."""
    if name in _BY_TASK:
        if y_pred.dim() == y.dim() + 1 and y_pred.shape[1] > 1:
            if name != "auroc":  # the class is all that counts; the logits of a language model would be huge
                y_pred = y_pred.argmax(1)
        else:
            y_pred, y = y_pred.reshape(y.shape[0], *y.shape[1:]), y.long()
    return y_pred, y


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()  # MulticlassAUROC -> multiclass_auroc
