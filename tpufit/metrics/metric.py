"""Metrics: torchmetrics', by name or as objects, and the running values of a pass, kept on the device.

Sums stay on the device, inside the step's graph; they are read once a pass, or when somebody looks at a batch's logs.
torchmetrics then computes on the host, from sums over exactly the rows that were seen.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
import torchmetrics
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torchmetrics.utilities.compute import normalize_logits_if_needed

from ..errors import ArgumentError, DataError, UnknownNameError
from ..losses import Output, check_form, described, output_name, part, spread, weight_of
from ..runtime import Placement, facts, has_lowering, move, to_device, to_host
from ..utils.text import dtype_name

MetricArgument = str | torchmetrics.Metric
OneOutputs = Sequence[MetricArgument] | Mapping[str, MetricArgument] | MetricArgument | None
MetricsArgument = OneOutputs | Mapping[str, OneOutputs] | Sequence[OneOutputs]

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

# What torchmetrics' classes call the weights that some of their `update`s take.
_WEIGHTS = ("sample_weight", "sample_weights", "weight", "weights")

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
        name: What to call it (default: its own name).
        output: Which of the module's outputs it is for (default: the only one).
        weighted: Whether it takes `sample_weight` into account.
        ignored: The label that its output's loss leaves out, if that has classes. A metric by name leaves it out too.

    Raises:
        UnknownNameError: Nothing goes by that name.
        ArgumentError: Neither a name nor a torchmetrics object, or one that can't be weighted.
    """

    def __init__(
        self,
        metric: MetricArgument,
        name: str | None = None,
        output: Output | None = None,
        weighted: bool = False,
        ignored: int | None = None,
    ) -> None:
        self.output, self._ignored = output, ignored
        self._prefix = "" if output is None else f"{output_name(output)}_"
        self._seen: tuple[Tensor, Tensor] | None = None  # the forms of what a name was resolved by
        self._object: torchmetrics.Metric | None = None  # computes, on the host; None until a name is resolved
        self._traced: torchmetrics.Metric | None = None  # its twin that updates, at the place of the steps
        self._traced_at: Placement | None = None
        self._classes_at: int | None = None  # the dimension of an output's classes, once it is known
        self._weighted = weighted
        self._weight = ""  # what its `update` calls the weights, if it takes them
        self._masks = False  # whether labels are left out by weights of 0
        if isinstance(metric, str):
            resolved = _ALIASES.get(metric, metric)
            if resolved not in _BY_TASK and resolved not in _PLAIN:
                raise UnknownNameError("metric", metric, NAMES)
            self._resolved = resolved
            self.higher_is_better: bool | None = resolved not in _LOWER_IS_BETTER
            if weighted and resolved in _VALUES:
                self._weight = "weight"
        elif isinstance(metric, torchmetrics.Metric):
            self._resolved = ""
            self.higher_is_better = metric.higher_is_better
            if weighted:
                self._weight = _weight_argument(metric)
            self._adopt(metric.clone())
        else:
            raise ArgumentError(
                f"a metric must be a name or a torchmetrics object (an instance, not the class), got {metric!r}"
            )
        if weighted and not self._weight:
            raise ArgumentError(
                f"weighted_metrics can't have {metric!r}, which has no weights. Those that have: "
                f"{', '.join(map(repr, _VALUES))}, and torchmetrics objects whose update takes {' or '.join(_WEIGHTS)} "
                "after the output and the target"
            )
        own = metric if isinstance(metric, str) else _snake_case(type(metric).__name__)
        self.name = f"{self._prefix}{name or own}"

    def mark_weighted(self) -> None:
        """Take another name, as Keras does where an unweighted metric has this one."""
        self.name = f"{self._prefix}weighted_{self.name.removeprefix(self._prefix)}"

    def update(self, running: PassMetrics, slot: int, y_pred: Any, y: Any, sample_weight: Any = None) -> None:
        """Add a batch, inside a traced step.

        Args:
            running: The sums of the pass.
            slot: Which of its metrics this is.
            y_pred: What the module returned, e.g. of shape `(batch, classes)`.
            y: The targets.
            sample_weight: One weight a row, or one for each element of a sequence; for several outputs as in the loss.
        """
        place = running.place
        y_pred, y = self._one_pair(y_pred, y)
        y_pred = y_pred.detach()
        y_pred = y_pred.float() if y_pred.dtype is torch.bfloat16 else y_pred
        y_pred = self._with_classes_first(y_pred, y)
        if self._object is None:
            self._resolve(y_pred, y)
        arguments = [*_comparable(self._resolved, y_pred, y), *self._weights(sample_weight, y)]
        # Split over the cores, some metrics' graphs end the process in the partitioner; whole inputs never did.
        arguments = [place.gather(argument) for argument in arguments]
        metric = self._at(place, arguments)
        if self._keeps_batches:
            running.keep(slot, tuple(arguments))
            return
        for key, default in metric._defaults.items():
            # A clone, so that a sum which somebody still holds keeps its value.
            setattr(metric, key, running.get((slot, key), torch.as_tensor(default)).clone())
        self._add(metric, arguments)
        for key, default in metric._defaults.items():
            # Some metrics' sums change their shape with the first batch, from () to (1,). A graph's inputs may not.
            like = torch.as_tensor(default)
            running.set((slot, key), getattr(metric, key).reshape(like.shape).to(like.dtype))
            setattr(metric, key, default)

    def compute(self, sums: dict[str, Tensor], kept: Sequence[Sequence[Tensor]]) -> Any:
        """The metric's value, from host tensors: a float, or an array if it has several numbers."""
        if self._object is None:
            return float("nan")
        metric = self._object.clone()
        metric.reset()
        for arguments in kept:
            self._add(metric, arguments)
        for key, value in sums.items():
            setattr(metric, key, value)
            metric._update_count = 1  # else torchmetrics warns that nothing was added
        value = metric.compute()
        if isinstance(value, Tensor):
            return float(value) if value.numel() == 1 else value.numpy()
        return value

    def state_dict(self) -> dict[str, Any]:
        """Its name, and what a named metric has been resolved by."""
        form = self._seen and [(list(t.shape), dtype_name(t.dtype)) for t in self._seen]
        return {"name": self.name, "seen": form}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Be resolved as before, so that sums mean something even if no batch comes any more."""
        if self._object is None and state["seen"]:
            y_pred, y = (torch.empty(s, dtype=getattr(torch, d), device="meta") for s, d in state["seen"])
            self._resolve(y_pred, y)

    def _resolve(self, y_pred: Tensor, y: Tensor) -> None:
        """Find out what a name means, by an output and a target."""
        self._adopt(self._named(y_pred, y))
        self._seen = (torch.empty_like(y_pred, device="meta"), torch.empty_like(y, device="meta"))

    def _adopt(self, metric: torchmetrics.Metric) -> None:
        metric.reset()
        if hasattr(metric, "validate_args"):
            metric.validate_args = False  # it would read every batch back to the host; labels are checked there anyway
        self._object = metric
        # Without sums of its own (it collects whole batches, or wraps other metrics) it is updated on the host.
        own_sums = bool(metric._defaults) and not any(isinstance(v, list) for v in metric._defaults.values())
        self._keeps_batches = not own_sums or any(isinstance(m, torchmetrics.Metric) for m in metric.children())

    def _at(self, place: Placement, arguments: Sequence[Tensor]) -> torchmetrics.Metric:
        """The twin that updates at this place; its buffers (thresholds and the like) live there."""
        if self._traced is None or self._traced_at != place:
            assert self._object is not None
            if not (self._resolved or self._keeps_batches or place.on_host):
                self._keeps_batches = not self._can_be_traced(arguments)
            self._traced, self._traced_at = self._object.clone(), place
            move(self._traced.buffers(), place)
        return self._traced

    def _can_be_traced(self, arguments: Sequence[Tensor]) -> bool:
        """Whether the device can do its update, and nothing stays in Python: it is tried on tensors without values."""
        assert self._object is not None
        trial = self._object.clone().to("meta")
        before = facts({"metric": trial})
        try:
            with _OnlyLowered():  # type: ignore[no-untyped-call]
                self._add(trial, [torch.empty(a.shape, dtype=a.dtype, device="meta") for a in arguments])
        except (RuntimeError, TypeError):  # PyTorch has no error of its own for a value that isn't there
            # On the host wrong shapes are said now, and not only when the epoch is over; wrong values are but these.
            with warnings.catch_warnings(), suppress(ValueError):
                warnings.simplefilter("ignore")
                self._add(self._object.clone(), [torch.zeros(a.shape, dtype=a.dtype) for a in arguments])
            return False
        after = facts({"metric": trial})
        changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
        return changed <= {"metric._update_count"}

    def _add(self, metric: torchmetrics.Metric, arguments: Sequence[Tensor]) -> None:
        """Update a metric with an output, a target, and the weights if it takes them."""
        y_pred, y, *weights = arguments
        metric.update(y_pred, y, **dict(zip([self._weight], weights, strict=False)))

    def _one_pair(self, y_pred: Any, y: Any) -> tuple[Tensor, Tensor]:
        """The output and the target that this metric compares."""
        one, other = (nest if self.output is None else part(nest, self.output) for nest in (y_pred, y))
        if not isinstance(one, Tensor) or not isinstance(other, Tensor):
            which = "" if self.output is None else f" for output {self.output!r}"
            raise ArgumentError(
                f"{self.name!r} compares one output tensor with one target tensor{which}, but the module returns "
                f"{described(y_pred)} and the targets are {described(y)}. Give metrics by output, in lists: "
                "metrics={'a': ['accuracy']} or metrics=[['accuracy'], []], or override update_metrics to pick them"
            )
        return one, other

    def _named(self, y_pred: Tensor, y: Tensor) -> torchmetrics.Metric:
        """The object that the name means, for an output and a target of these shapes."""
        name, ignored = self._resolved, self._ignored
        if name in _OF_LABELS and ignored is not None and _is_multiclass(y_pred, y):
            # torchmetrics would pick the labels that count, which the device can't; here the others weigh nothing.
            self._masks, self._weight = True, "weight"
            if name == "specificity":
                return _Specificity(y_pred.shape[1])
            return WeightedMean(_is_correct, torch.float32 if self._weighted else torch.int64)
        named = _by_shapes(name, y_pred, y, ignored)
        return WeightedMean(_VALUES[name]) if self._weighted else named

    def _weights(self, sample_weight: Any, y: Tensor) -> list[Tensor]:
        """The weights that its `update` takes, if it does; labels that are left out weigh nothing."""
        if not self._weight:
            return []
        weight = sample_weight if self.output is None else weight_of(sample_weight, self.output)
        counts: Tensor | None = torch.ne(y, self._ignored) if self._masks and self._ignored is not None else None
        if counts is not None and not self._weighted:
            return [counts]
        weight = torch.ones(len(y), device=y.device) if weight is None else weight.float()
        return [weight if counts is None else spread(weight, counts.float()) * counts]

    def _with_classes_first(self, y_pred: Tensor, y: Tensor) -> Tensor:
        """The output with its classes in dimension 1, as PyTorch has them; where they are last they are moved there.

        Where they are is settled by the first batch: another may be as long as there are classes.
        """
        if self._resolved not in _BY_TASK or y_pred.dim() != y.dim() + 1:
            return y_pred
        places = [at for at in (1, y_pred.dim() - 1) if _is_multiclass(y_pred.movedim(at, 1), y)]
        if self._classes_at is None and places:
            self._classes_at = places[0]
        if self._classes_at is None:
            return y_pred
        if self._classes_at not in places:
            raise _no_task(self._resolved, y_pred, y)
        return y_pred.movedim(self._classes_at, 1)


class _OnlyLowered(TorchDispatchMode):
    """Refuses operations that the device would hand back to the host, with a wait in each step."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not has_lowering(func.name()):
            raise NotImplementedError(f"{func.name()} has no lowering")
        return func(*args, **(kwargs or {}))


class WeightedMean(torchmetrics.Metric):
    """The mean of a value of each element, by the elements' weights.

    torchmetrics' own `MeanMetric` reads every batch to look for NaN; if told not to, it leaves out the weights (1.9).

    Args:
        value: `value(y_pred, y)`: the value of each element, shape `(batch, ...)`.
        dtype: Of the sums (default: float32); whole numbers are exact where values and weights are 0 or 1.

    Example:
        >>> metric = WeightedMean(torch.sub)
        >>> metric.update(torch.tensor([2.0, 4.0]), torch.tensor([1.0, 1.0]), torch.tensor([3.0, 1.0]))
        >>> float(metric.compute())
        1.5
    """

    full_state_update = False
    total: Tensor
    weight: Tensor

    def __init__(self, value: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self._value, self._sum_dtype = value, dtype
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
        """The mean."""
        return self.total / self.weight


def _is_correct(y_pred: Tensor, y: Tensor) -> Tensor:
    """Whether each element is right: of classes, or of probabilities or logits of two."""
    if y_pred.is_floating_point():
        y_pred = normalize_logits_if_needed(y_pred, "sigmoid") > 0.5
    return (y_pred == y).float()


class _Specificity(WeightedMean):
    """The share of the other classes that each prediction rightly leaves alone: all of them, or all but one."""

    def __init__(self, classes: int) -> None:
        super().__init__(_is_correct, torch.int64)
        self._others = classes - 1

    def compute(self) -> Tensor:
        return 1 - (1 - super().compute()) / self._others


# Over all classes together, as torchmetrics' default is, these are means over the labels.
_OF_LABELS = ("accuracy", "f1_score", "precision", "recall", "specificity")
_VALUES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "accuracy": _is_correct,
    "mean_absolute_error": partial(F.l1_loss, reduction="none"),
    "mean_squared_error": partial(F.mse_loss, reduction="none"),
}


class PassMetrics:
    """The running values of a pass over the data: means of what its steps returned, and metrics.

    Its sums are one flat list of device tensors. Which sums there are shows as the first step is traced.

    Args:
        metrics: The metrics of the pass.
        place: Where its steps run.
        watches: Whether to note the first step that returns a scalar which is not finite.

    Attributes:
        tensors: The sums as they stand.
        begun: The sums that the step being traced began with, those that it made itself among them.
        kept: What metrics without sums of their own keep of the step being traced: nests of tensors.
        rows: How many rows the pass has had so far.
        on_finite: Called with `finite` on the host whenever the sums have been fetched.
    """

    def __init__(self, metrics: Sequence[Metric], place: Placement, watches: bool = False) -> None:
        self.place, self._watches = place, watches
        self.tensors: list[Tensor] = []
        self.begun: list[Tensor] = []
        self.kept: list[tuple[Tensor, ...]] = []
        self.on_finite: Callable[[Tensor], None] = lambda finite: None
        self._metrics = list(metrics)
        self._places: dict[Any, int] = {}  # where each sum is in the lists; those of a mean go by its name
        self._defaults: list[Tensor] = []
        self._means: list[str] = []
        self._keepers: list[int] = []  # the metrics that keep batches, in the order of `kept`
        self._batches: list[list[tuple[Tensor, ...]]] = [[] for _ in metrics]
        self._noted: dict[str, Tensor] = {}
        self._updated = False
        self.rows = 0

    @property
    def names(self) -> list[str]:
        """The names of the logs that there are so far."""
        return [*self._means, *(m.name for m in self._metrics if self._updated)]

    def reset(self) -> None:
        """Begin a new pass."""
        self.rows = 0
        self._noted = {}
        self._batches = [[] for _ in self._metrics]
        self.tensors = to_device([default.clone() for default in self._defaults], self.place)

    def begin(self) -> None:
        """A step is about to be traced."""
        self.begun = self.tensors
        self.tensors = list(self.tensors)  # lists that somebody keeps as a batch's logs stay as they are
        self.kept, self._keepers, self._noted = [], [], {}

    def get(self, key: Any, default: Tensor) -> Tensor:
        """A sum, inside a step; a new one begins with its default."""
        if key not in self._places:
            self._places[key] = len(self._defaults)
            self._defaults.append(default.detach().clone())
            (tensor,) = to_device([default.clone()], self.place)
            self.tensors.append(tensor)
            self.begun = [*self.begun, tensor]
        return self.tensors[self._places[key]]

    def set(self, key: Any, value: Tensor) -> None:
        """Replace a sum, inside a step."""
        self.tensors[self._places[key]] = self.place.pin(value)

    def keep(self, slot: int, batch: tuple[Tensor, ...]) -> None:
        """Keep a batch for a metric, inside a step."""
        self._keepers.append(slot)
        # Clones: a graph gives each output once, and two metrics may keep the same tensor, or two views of it.
        self.kept.append(tuple(tensor.clone() for tensor in batch))

    def note(self, logs: Mapping[str, Tensor]) -> None:
        """Log scalars besides those that the step will return, inside that step; of one name the returned one counts.

        Args:
            logs: Scalars by name, each the mean over the batch.
        """
        self._noted |= {name: value.detach() for name, value in logs.items()}

    def add_means(self, logs: Mapping[str, Any], rows: int) -> None:
        """Add the scalars that a step returned, each the mean over its batch, inside that step.

        Args:
            logs: The step's scalars by name.
            rows: How many rows the batch has.
        """
        noted, self._noted = self._noted, {}
        values = {**logs, **{name: noted[name] for name in noted if name not in logs}}
        for name, value in values.items():
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
        if self._watches and values:
            steps = self.get(_FINITE, torch.zeros((), dtype=torch.int32))
            finite = torch.stack([value.detach().float().reshape(()) for value in values.values()]).isfinite().all()
            self.set(_FINITE, torch.where(steps < 0, steps, torch.where(finite, steps + 1, -1 - steps)))

    @property
    def finite(self) -> Tensor | None:
        """How many steps were finite so far, on the device, or None before the first: see `first_bad`."""
        place = self._places.get(_FINITE)
        return None if place is None else self.tensors[place]

    def update_metrics(self, y_pred: Any, y: Any, sample_weight: Any = None) -> None:
        """Add a batch to every metric, inside a step."""
        if not self._metrics:
            return
        for slot, metric in enumerate(self._metrics):
            metric.update(self, slot, y_pred, y, sample_weight)
        self._updated = True

    def count(self, rows: int, kept: Sequence[tuple[Tensor, ...]]) -> None:
        """Note a step that has been started.

        Args:
            rows: How many rows it has.
            kept: What it gave of `kept`, in their order.
        """
        self.rows += rows
        for slot, batch in zip(self._keepers, kept, strict=True):
            self._batches[slot].append(batch)

    def results(self, reason: str) -> dict[str, Any]:
        """The means and metrics over all rows so far. This waits for the device, once."""
        return self._snapshot()(reason)

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The sums so far, to go on with them in another process.

        Returns:
            Numbers and names, as JSON can hold them; and tensors, wherever they are, by names of our own.
        """
        tensors = {f"default/{i}": tensor for i, tensor in enumerate(self._defaults)}
        tensors |= {f"sum/{i}": tensor for i, tensor in enumerate(self.tensors)}
        for slot, batches in enumerate(self._batches):
            tensors |= {f"batch/{slot}/{i}/{j}": t for i, batch in enumerate(batches) for j, t in enumerate(batch)}
        state = {
            "keys": [list(key) for key in self._places],
            "means": self._means,
            "updated": self._updated,
            "rows": self.rows,
            "batches": [[len(batch) for batch in batches] for batches in self._batches],
            "metrics": [metric.state_dict() for metric in self._metrics],
        }
        return state, tensors

    def load_state_dict(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Go on with sums, before the first step of a pass.

        Args:
            state: What `state_dict` gave,
            tensors: and its tensors, on the host.

        Raises:
            DataError: There are other metrics now.
        """
        names = [[metric.name for metric in self._metrics], [own["name"] for own in state["metrics"]]]
        if names[0] != names[1]:
            raise DataError(f"the metrics are others in the middle of an epoch: {names[1]} then, {names[0]} now")
        for metric, own in zip(self._metrics, state["metrics"], strict=True):
            metric.load_state_dict(own)
        self._places = {(key[0], key[1]): i for i, key in enumerate(state["keys"])}
        self._means, self._updated, self.rows = list(state["means"]), state["updated"], state["rows"]
        self._defaults = [tensors[f"default/{i}"] for i in range(len(self._places))]
        sums = [tensors[f"sum/{i}"] for i in range(len(self._places))]
        self.tensors = to_device(sums, self.place)
        self._batches = [
            [tuple(tensors[f"batch/{slot}/{i}/{j}"] for j in range(size)) for i, size in enumerate(sizes)]
            for slot, sizes in enumerate(state["batches"])
        ]

    def take(self) -> tuple[dict[str, Tensor], int]:
        """The sums behind the means so far, by name and on the device, with the number of rows; a new pass begins."""
        taken = {name: self.tensors[self._places[name, "total"]] for name in self._means}, self.rows
        self.reset()
        return taken

    def lazy(self) -> LazyLogs:
        """The same, fetched only if one is read."""
        snapshot = self._snapshot()
        return LazyLogs(self.names, lambda: snapshot("batch logs"))

    def _snapshot(self) -> Callable[[str], dict[str, Any]]:
        rows, sums, kept, finite = self.rows, self.tensors, self._batches, self._places.get(_FINITE)
        tell = self.on_finite  # that of this pass, also when it is read after it
        sizes = [len(batches) for batches in kept]

        def read(reason: str) -> dict[str, Any]:
            batches = [b[:n] for b, n in zip(kept, sizes, strict=True)]
            flat = [tensor for b in batches for arguments in b for tensor in arguments]
            host = to_host([*sums, *flat], reason)
            rest = iter(host[len(sums) :])
            if finite is not None:
                tell(host[finite])
            values: dict[str, Any] = {
                name: float(np.float64(host[self._places[name, "total"]].item()) / rows) for name in self._means
            }
            for slot, metric in enumerate(self._metrics if self._updated else ()):
                fetched = [[next(rest) for _ in arguments] for arguments in batches[slot]]
                own = {key[1]: host[i] for key, i in self._places.items() if key[0] == slot}
                values[metric.name] = metric.compute(own, fetched)
            return values

        return read


# The key of a sum that counts the finite steps. At the first that isn't it becomes negative, and stays what it is then:
# one number tells both. A replayed step doesn't know its own.
_FINITE = (None, "finite")


def first_bad(finite: Tensor) -> int | None:
    """Which step of a pass, from 1, was the first to return a scalar that is not finite; None if none did.

    Args:
        finite: `PassMetrics.finite`, on the host.

    Example:
        >>> first_bad(torch.tensor(5)), first_bad(torch.tensor(-6))
        (None, 6)
    """
    return -int(finite) if finite < 0 else None


def build(
    metrics: MetricsArgument,
    weighted: MetricsArgument = None,
    outputs: Sequence[Output] | None = None,
    ignored: Callable[[Output | None], int | None] | None = None,
) -> list[Metric]:
    """The metrics of a model.

    Args:
        metrics: Names and torchmetrics objects in a list, or by the name they shall have in a dict; or just one. For
            several outputs, such metrics for each in a dict or list, one of whose values at least is a list or dict.
        weighted: Metrics that take weights, in the same forms.
        outputs: The outputs of the loss, if it has several: then metrics are by output in any case.
        ignored: `Loss.ignored`: the label that an output's loss leaves out, or None.

    Example:
        >>> [m.name for m in build(["accuracy", torchmetrics.MeanSquaredError()], ["accuracy"])]
        ['accuracy', 'mean_squared_error', 'weighted_accuracy']
        >>> [m.name for m in build({"a": ["accuracy"], "b": "mae"})], [m.name for m in build({"top": "accuracy"})]
        (['a_accuracy', 'b_mae'], ['top'])
    """
    ignored = ignored or (lambda output: None)
    built = _built(metrics, outputs, "metrics", ignored)
    taken = {metric.name for metric in built}
    for metric in _built(weighted, outputs, "weighted_metrics", ignored):
        if metric.name in taken:
            metric.mark_weighted()
        built.append(metric)
    names = ["loss", *(f"{output_name(output)}_loss" for output in outputs or ()), *(metric.name for metric in built)]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise ArgumentError(
            f"each metric needs a name of its own, but {doubled} is taken more than once. Pass a dict: "
            "metrics={'top1': ..., 'top5': ...}"
        )
    return built


def _built(
    metrics: Any, outputs: Sequence[Output] | None, argument: str, ignored: Callable[[Output | None], int | None]
) -> list[Metric]:
    """The metrics of one argument of `compile`."""
    weighted = argument == "weighted_metrics"
    built = []
    for output, own in _by_output(metrics, outputs, argument):
        named: Iterable[tuple[str | None, Any]]
        if isinstance(own, (Mapping, torchmetrics.MetricCollection)):
            named = own.items()
        else:
            named = (
                (None, metric) for metric in (own if isinstance(own, (list, tuple)) else [own]) if metric is not None
            )
        built += [Metric(metric, name, output, weighted, ignored(output)) for name, metric in named]
    return built


def _by_output(metrics: Any, outputs: Sequence[Output] | None, argument: str) -> list[tuple[Output | None, Any]]:
    """What is for which output; None for the only one."""
    if metrics is None:
        return []
    if outputs:
        check_form(metrics, outputs, argument, ())
    several = isinstance(metrics, (Mapping, list, tuple))
    values = list(metrics.values() if isinstance(metrics, Mapping) else metrics) if several else []
    if not outputs and not any(isinstance(value, (Mapping, list, tuple)) for value in values):
        return [(None, metrics)]
    return list(metrics.items() if isinstance(metrics, Mapping) else enumerate(metrics))


def _weight_argument(metric: torchmetrics.Metric) -> str:
    """What a metric's update calls its weights, if it takes them after an output and a target."""
    parameters = inspect.signature(metric.update).parameters
    return next((name for name in _WEIGHTS if name in parameters and len(parameters) > 2), "")


def _by_shapes(name: str, y_pred: Tensor, y: Tensor, ignored: int | None = None) -> torchmetrics.Metric:
    """The torchmetrics object that a name means for an output and a target of these shapes, less a label."""
    if name in _PLAIN:
        return _PLAIN[name]()
    make = _BY_TASK[name]
    if _is_multiclass(y_pred, y):
        return make(task="multiclass", num_classes=y_pred.shape[1], ignore_index=ignored)
    if y_pred.dim() == y.dim() and y.is_floating_point() and y.shape[1:] == y_pred.shape[1:] and y.dim() == 2:
        if y.shape[1] > 1:
            return make(task="multilabel", num_labels=y.shape[1])
        return make(task="binary")
    if y_pred.shape[1:].numel() == y.shape[1:].numel() == 1:
        return make(task="binary")
    raise _no_task(name, y_pred, y)


def _is_multiclass(y_pred: Tensor, y: Tensor) -> bool:
    """Whether an output has classes in dimension 1, for targets without that dimension."""
    return y_pred.dim() > 1 and y_pred.shape[1] > 1 and (*y_pred.shape[:1], *y_pred.shape[2:]) == tuple(y.shape)


def _no_task(name: str, y_pred: Tensor, y: Tensor) -> ArgumentError:
    return ArgumentError(
        f"{name!r} can't tell its task from an output of shape {tuple(y_pred.shape)} and a target of shape "
        f"{tuple(y.shape)} ({y.dtype}). Expected (batch, classes, ...) with integer targets (batch, ...), as PyTorch's "
        "cross_entropy does; (batch, time, classes) where the first batch can't be taken for that; or equal shapes for "
        "binary and multilabel. Pass a torchmetrics object instead, e.g. "
        "torchmetrics.classification.MulticlassAccuracy(num_classes=10)"
    )


def _comparable(name: str, y_pred: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """What torchmetrics compares, made small and of its shapes before it is gathered from the cores."""
    if name in _BY_TASK:
        if _is_multiclass(y_pred, y):
            if name != "auroc":  # the class is all that counts; the logits of a language model would be huge
                y_pred = y_pred.argmax(1)
        else:
            y_pred, y = y_pred.reshape(y.shape[0], *y.shape[1:]), y.long()
    return y_pred, y


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()  # MulticlassAUROC -> multiclass_auroc
