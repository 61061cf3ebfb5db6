"""`Metric`: one metric of a model, updated on the device inside the steps, and computed on the host once a pass."""

import inspect
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
import torchmetrics
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..backend import Placement
from ..errors import ArgumentError
from ..losses import Output, align, describe_nest, output_name, pick, pick_weight, spread_weights
from ..runtime import has_kernel, move
from ..utils.python_state import list_values
from ..utils.random import RNGState
from ..utils.saved_attributes import SavedAttributes
from ..utils.text import dtype_name
from ..utils.user_code import warn
from .extra_metrics import RowMean
from .metric_names import TABLE, MetricName
from .sum_table import SumTable
from .torchmetrics_classes import MetricArgument, to_snake_case

# The largest number of elements of a tensor in the trial of a metric.
_CHECKED_ELEMENTS = 1 << 24

# The names of the weights among the arguments of torchmetrics' `update` methods.
_WEIGHTS = ("sample_weight", "sample_weights", "weight", "weights")


class Metric:
    """One metric, of one output of the module.

    A name is resolved by the shapes of the first batch, a torchmetrics object is cloned, and a function of (prediction,
    target) returns a value for each row or one for the batch. A metric by name ignores the label that the output's loss
    ignores. A single output needs no name.

    Attributes:
        name: The name of the log.
        higher_is_better: True or False if the metric gets better as it rises or falls; None if unknown.
        user_code: The user's function, if the metric is one.

    Raises:
        UnknownNameError: No metric has this name.
        ArgumentError: The argument isn't a name, a torchmetrics object or a function, or the metric takes no weights.
    """

    def __init__(
        self,
        metric: MetricArgument,
        name: str | None = None,
        output: Output | None = None,
        weighted: bool = False,
        ignored: int | None = None,
    ) -> None:
        self._output = output
        self._weighted = weighted
        self._by_name: MetricName | None = None
        self._device_metric: DeviceMetric | None = None  # None until a name is resolved
        self._seen: list[tuple[list[int], str]] | None = None  # the shapes and dtypes by which a name was resolved
        self.user_code: Any = None
        if isinstance(metric, str):
            self._by_name = MetricName(metric, weighted, ignored)
            row = self._by_name.row
            default_name = self._by_name.name
            takes_weights = row.value is not None
            self.higher_is_better: bool | None = row.higher_is_better
        elif isinstance(metric, torchmetrics.Metric):
            weight = _find_weight_argument(metric) if weighted else ""
            self._device_metric = DeviceMetric(metric.clone(), weight)
            default_name = to_snake_case(type(metric).__name__)
            takes_weights = bool(weight)
            self.higher_is_better = metric.higher_is_better
        elif callable(metric) and not isinstance(metric, type):
            self._device_metric = DeviceMetric(RowMean(metric), "weight")
            self.user_code = metric
            default_name = getattr(metric, "__name__", type(metric).__name__).strip("<>")
            takes_weights = True
            self.higher_is_better = None
        else:
            raise ArgumentError(
                "a metric must be a name, a torchmetrics object (an instance, not the class) or a function of "
                f"(prediction, target), got {metric!r}"
            )
        if weighted and not takes_weights:
            known = ", ".join(repr(name) for name, row in TABLE.items() if row.value is not None)
            raise ArgumentError(
                f"weighted_metrics can't have {metric!r}, which takes no weights. Metrics that take weights: {known}, "
                f"functions, and torchmetrics objects whose update takes {' or '.join(_WEIGHTS)} after the output and "
                "the target"
            )
        self._prefix = "" if output is None else f"{output_name(output)}_"
        self.name = f"{self._prefix}{name or default_name}"

    @property
    def leaves_out(self) -> bool:
        """True if rows with the label that the loss ignores aren't counted."""
        return self._by_name is not None and self._by_name.leaves_out

    def mark_weighted(self) -> None:
        """Add `weighted_` to the name, as Keras does if an unweighted metric has the same name."""
        self.name = f"{self._prefix}weighted_{self.name.removeprefix(self._prefix)}"

    def update(self, sums: SumTable, slot: int, y_pred: Any, y: Any, sample_weight: Any) -> Sequence[Tensor] | None:
        """Add a batch, inside a step.

        Args:
            sums: The sums of the pass.
            slot: The metric's number in the pass, which is the owner in the keys of its sums.
            y_pred: The module's output.
            y: The targets.
            sample_weight: A weight for each row, or for each element of a sequence; for several outputs as in the loss.

        Returns:
            The tensors to keep of the batch, for a metric that the device can't update; else None.

        Raises:
            ArgumentError: The output or target is missing, or the shapes don't fit.
        """
        y_pred, y = self._pair(y_pred, y)
        if self._device_metric is not None and self._by_name is None:
            self._device_metric.check(self.name, sums, [y_pred, y])
        y_pred = y_pred.detach()
        y_pred = y_pred.float() if y_pred.dtype is torch.bfloat16 else y_pred
        y_pred, y = pair = align(y_pred, y.long() if y.dtype is torch.bool else y)
        if self._by_name is not None:
            pair = self._by_name.arrange(y_pred, y)
            if self._device_metric is None:
                self._resolve(self._by_name, *pair)
            pair = self._by_name.make_comparable(*pair)
        assert self._device_metric is not None
        labels = y if y.is_floating_point() else pair[1]  # one-hot targets have no label to ignore
        arguments = [*pair, *self._weights(sample_weight, labels)]
        # With split inputs, XLA's partitioner aborts the process for some metrics' graphs; with whole inputs never.
        if not self._device_metric.splits:
            arguments = [sums.placement.gather(argument) for argument in arguments]
        return self._device_metric.update(sums, slot, arguments)

    def compute(self, sums: Mapping[str, Tensor], kept: Sequence[Sequence[Tensor]]) -> Any:
        """Compute the metric on the host from its sums by name and the batches that `update` returned.

        The result is a float, or an array if the metric has several numbers.
        """
        return float("nan") if self._device_metric is None else self._device_metric.compute(sums, kept)

    def state_dict(self) -> dict[str, Any]:
        """Return the name of the log, and the shapes by which a metric by name was resolved."""
        return {"name": self.name, "seen": self._seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resolve a metric by name as before, so that loaded sums can be computed even if no batch follows."""
        if self._by_name is not None and self._device_metric is None and state["seen"]:
            y_pred, y = (torch.empty(s, dtype=getattr(torch, d), device="meta") for s, d in state["seen"])
            self._resolve(self._by_name, y_pred, y)

    def _resolve(self, by_name: MetricName, y_pred: Tensor, y: Tensor) -> None:
        self._device_metric = DeviceMetric(by_name.resolve(y_pred, y), "weight", is_traceable=True)
        self._seen = [(list(tensor.shape), dtype_name(tensor.dtype)) for tensor in (y_pred, y)]

    def _pair(self, y_pred: Any, y: Any) -> tuple[Tensor, Tensor]:
        """Pick the output and the target that this metric compares."""
        output = self._output
        picked, target = (nest if output is None else pick(nest, output) for nest in (y_pred, y))
        if not isinstance(picked, Tensor) or not isinstance(target, Tensor):
            which = "" if output is None else f" for output {output!r}"
            raise ArgumentError(
                f"{self.name!r} compares one output tensor with one target tensor{which}, but the module returns "
                f"{describe_nest(y_pred)} and the targets are {describe_nest(y)}. Give metrics by output, in lists: "
                "metrics={'a': ['accuracy']} or metrics=[['accuracy'], []], pass tpufit.DatasetMetric(function), which "
                "takes nests, or override update_metrics to pick them"
            )
        return picked, target

    def _weights(self, sample_weight: Any, y: Tensor) -> list[Tensor]:
        """Return the weights for the metric's `update`, if it takes some; ignored labels have weight 0."""
        mask = None if self._by_name is None else self._by_name.mask_ignored(y)
        if not self._weighted:
            return [] if mask is None else [mask]
        weight = sample_weight if self._output is None else pick_weight(sample_weight, self._output)
        if weight is None and self.user_code is not None:
            return []
        weight = torch.ones(len(y), dtype=torch.float32, device=y.device) if weight is None else weight.float()
        return [weight if mask is None else spread_weights(weight, mask.float()) * mask]


class DeviceMetric:
    """A torchmetrics object that computes on the host, and its copy, which steps update on the device.

    Args:
        metric: The object, a clone.
        weight: The name of the weights among the arguments of its `update`, after an output and a target; "" if it
            takes no weights.
        is_traceable: True if the device has all operations of its `update` (default False: unknown, so a trial tells).

    Attributes:
        keeps_batches: True if batches are kept, and update the metric on the host after the pass.
        splits: True if each core may update it with its own rows; else each core needs all rows.
    """

    def __init__(self, metric: torchmetrics.Metric, weight: str, is_traceable: bool = False) -> None:
        metric.reset()
        # torchmetrics checks the arguments of its own classes; a wrapper contains other metrics.
        of_torchmetrics = type(metric).update.__module__.startswith("torchmetrics.")
        self._checks = of_torchmetrics and any(getattr(part, "validate_args", False) for part in metric.modules())
        self._checked: set[Any] = set()  # the shapes and dtypes of the batches that were checked
        if hasattr(metric, "validate_args"):
            metric.validate_args = False  # the checks would read every batch back to the host; `check` checks the first
        self._metric = metric
        self._weight = weight
        self._is_traceable = is_traceable
        self.splits = bool(getattr(metric, "splits", False))
        self._device_copy: torchmetrics.Metric | None = None
        self._copied_to: Placement | None = None
        # A metric without sums of its own (it collects whole batches, or wraps other metrics) is updated on the host.
        own_sums = bool(metric._defaults) and not any(isinstance(v, list) for v in metric._defaults.values())
        self.keeps_batches = not own_sums or any(isinstance(m, torchmetrics.Metric) for m in metric.children())

    def check(self, name: str, sums: SumTable, arguments: Sequence[Tensor]) -> None:
        """Let torchmetrics check the first batch of each shape, before anything is compiled.

        Tensors of the batch, such as labels, are checked with their values on the host. Computed tensors have no values
        yet; of scores torchmetrics checks only shape and dtype.

        Raises:
            ArgumentError: torchmetrics refuses the batch.
        """
        form = tuple((argument.shape, argument.dtype) for argument in arguments)
        if not self._checks or form in self._checked:
            return
        self._checked.add(form)
        rows = min(len(argument) if argument.dim() else 1 for argument in arguments)
        most = max(1, _CHECKED_ELEMENTS // max(argument.shape[1:].numel() for argument in arguments))
        before = RNGState.now()
        given = [_on_host(argument, sums, min(rows, most)) for argument in arguments]
        given[:2] = align(*given[:2]) if len(given) > 1 else given
        fault = self._find_fault(given)
        # Losses such as binary_cross_entropy need floating-point targets, which torchmetrics doesn't take as labels.
        whole = [t if i == 0 or not t.is_floating_point() else t.long() for i, t in enumerate(given)]
        if fault is not None and all(bool((a == b).all()) for a, b in zip(given, whole, strict=True)):
            fault = self._find_fault(whole)
        before.restore()
        if fault is not None:
            shapes = " and ".join(f"{dtype_name(dtype)} {tuple(shape)}" for shape, dtype in form)
            raise ArgumentError(
                f"the metric {name!r}, {type(self._metric).__name__}, can't take an output and targets of {shapes}: "
                f"{str(fault).strip().rstrip('.')}. Pass a metric with the arguments for this task (such as "
                "num_classes and ignore_index), or a function of (prediction, target) that reshapes them"
            ) from fault

    def _find_fault(self, arguments: Sequence[Tensor]) -> Exception | None:
        """Return the error that torchmetrics raises for a batch on the host, or None."""
        trial = self._metric.clone()
        if hasattr(trial, "validate_args"):
            trial.validate_args = True
        weights = [torch.ones(len(arguments[0]), dtype=torch.float32)] if self._weight else []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                self._check_classes(arguments)
                self._add(trial, [*arguments, *weights])
            except (ValueError, RuntimeError, TypeError, IndexError) as error:  # torchmetrics' checks raise these
                return error
        return None

    def _check_classes(self, arguments: Sequence[Tensor]) -> None:
        """Refuse classes outside `num_classes`: torchmetrics (1.9) counts them as other classes or not at all."""
        classes = getattr(self._metric, "num_classes", None)
        if not type(self._metric).update.__module__.startswith("torchmetrics.classification") or classes is None:
            return
        ignored = getattr(self._metric, "ignore_index", None)
        for argument in arguments:
            if not argument.is_floating_point():
                labels = argument if ignored is None else argument[argument != ignored]
                least, most = (int(labels.min()), int(labels.max())) if labels.numel() else (0, 0)
                if not 0 <= least <= most < classes:
                    raise ValueError(f"there are classes from {least} to {most}, but num_classes={classes}")

    def update(self, sums: SumTable, slot: int, arguments: Sequence[Tensor]) -> Sequence[Tensor] | None:
        """Add a batch, inside a step: the output, the target, and the weights if `update` takes them.

        Returns:
            The arguments, if they must be kept for the host; else None.
        """
        copy = self._copy_for(sums.placement, arguments)
        if self.keeps_batches:
            return arguments
        attributes = vars(copy)  # assignments to attributes are slow in modules and torchmetrics
        for key, default in copy._defaults.items():
            # A clone, because the sum may still be referenced elsewhere and must keep its value.
            attributes[key] = sums.get((slot, key), torch.as_tensor(default)).clone()
        self._add(copy, arguments)
        for key, default in copy._defaults.items():
            # Some metrics' sums change shape at the first batch, from () to (1,), which a graph's inputs can't.
            value = attributes[key]
            like = torch.as_tensor(default)
            value = value if value.shape == like.shape else value.reshape(like.shape)  # views keep their base alive
            sums.set((slot, key), value if value.dtype is like.dtype else value.to(like.dtype))
            attributes[key] = default
        return None

    def compute(self, sums: Mapping[str, Tensor], kept: Sequence[Sequence[Tensor]]) -> Any:
        """Compute the metric on the host, see `Metric.compute`."""
        metric = self._metric.clone() if kept else self._metric  # an update may set more than `reset` undoes
        metric.reset()
        for arguments in kept:
            self._add(metric, arguments)
        for key, value in sums.items():
            setattr(metric, key, value)
            metric._update_count = 1  # else torchmetrics warns that nothing was added
        value = metric.compute()
        metric.reset()
        if isinstance(value, Tensor):
            return float(value) if value.numel() == 1 else value.numpy()
        return value

    def _copy_for(self, placement: Placement, arguments: Sequence[Tensor]) -> torchmetrics.Metric:
        """Return the copy for a placement, with its buffers, such as thresholds, on the device."""
        if self._device_copy is None or self._copied_to != placement:
            if not (self._is_traceable or self.keeps_batches or placement.eager):
                self.keeps_batches = not self._can_be_traced(arguments)
            self._device_copy = self._metric.clone()
            self._copied_to = placement
            move(self._device_copy.buffers(), placement)
        return self._device_copy

    def _can_be_traced(self, arguments: Sequence[Tensor]) -> bool:
        """Try the update on tensors without values: True if the device can do it, and no Python state changes."""
        trial = self._metric.clone().to("meta")
        before = list_values({"metric": trial})
        saved = SavedAttributes({"metric": self._metric})
        try:
            with _OnlyLowered():  # type: ignore[no-untyped-call]
                self._add(trial, [torch.empty(a.shape, dtype=a.dtype, device="meta") for a in arguments])
        except (RuntimeError, TypeError):  # PyTorch has no specific error for a missing value
            # A trial on the host raises errors of wrong shapes now instead of after the epoch. ValueErrors are ignored,
            # because the trial's values aren't the batch's.
            trial = self._metric.clone()
            with warnings.catch_warnings(), suppress(ValueError):
                warnings.simplefilter("ignore")
                self._add(trial, [torch.zeros(a.shape, dtype=a.dtype) for a in arguments])
            if isinstance(trial, RowMean) and trial.of_host:
                warn(
                    f"the metric {trial.function_name!r} returns a number computed on the host: its log is the "
                    "mean over the batches, which depends on their size. tpufit.DatasetMetric(function) computes it "
                    "once, from all rows"
                )
            saved.load_state_dict({})
            return False
        after = list_values({"metric": trial})
        changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
        changed_objects = saved.state_dict()  # objects of the user's function, which metric and trial share
        saved.load_state_dict({})
        return changed <= {"metric._update_count", "metric.of_host"} and not changed_objects

    def _add(self, metric: torchmetrics.Metric, arguments: Sequence[Tensor]) -> None:
        plain = arguments[:2] if self._weight else arguments
        metric.update(*plain, **dict(zip([self._weight], arguments[len(plain) :], strict=False)))


def _on_host(tensor: Tensor, sums: SumTable, rows: int) -> Tensor:
    """Return the first rows of a tensor on the host for the check of a metric; zeros if the values aren't known yet."""
    known = None if tensor.is_floating_point() and tensor.requires_grad else sums.find_host_value(tensor)
    value = torch.zeros(tensor.shape[:1] and (rows, *tensor.shape[1:]), dtype=tensor.dtype) if known is None else known
    value = value[:rows] if value.dim() else value
    if value.dtype is torch.bool:
        return value.long()
    return value.float() if value.dtype is torch.bfloat16 else value


class _OnlyLowered(TorchDispatchMode):
    """Refuses operations that the device would leave to the host, with a wait in each step."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not has_kernel(func.name()):
            raise NotImplementedError(f"{func.name()} has no lowering")
        return func(*args, **(kwargs or {}))


def _find_weight_argument(metric: torchmetrics.Metric) -> str:
    """Return the name of the weights that a metric's update takes after an output and a target, or ""."""
    parameters = inspect.signature(metric.update).parameters
    return next((name for name in _WEIGHTS if name in parameters and len(parameters) > 2), "")
