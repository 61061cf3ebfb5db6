"""`Metric`: one metric of a model. The device updates it inside the steps; the host computes it, once a pass."""

import inspect
import re
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
from ..losses import Output, aligned, described, output_name, pick, spread, weight_of
from ..runtime import has_kernel, move
from ..utils.kept import Kept
from ..utils.python_state import facts
from ..utils.random import RNGState
from ..utils.text import dtype_name
from .library import MetricArgument
from .named import TABLE, MetricName
from .sums import SumTable
from .weighted import RowMean

# The most elements of a tensor that a metric is tried on.
_CHECKED_ELEMENTS = 1 << 24

# The names that torchmetrics' classes give the weights that some of their `update`s take.
_WEIGHTS = ("sample_weight", "sample_weights", "weight", "weights")


class Metric:
    """One metric, of one output of the module.

    A name is resolved by the shapes of the first batch, a torchmetrics object is cloned, and a function of (prediction,
    target), as a loss is, returns a value for each row or one for the batch. A metric by name leaves out the label that
    the output's loss leaves out. The only output needs no name.

    Attributes:
        name: The name of its log.
        higher_is_better: False if it gets better as it falls; None if nobody knows.
        users: The part of it that is the user's own code, if any.

    Raises:
        UnknownNameError: Nothing goes by that name.
        ArgumentError: Neither a name nor a torchmetrics object nor a function, or one that can't be weighted.
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
        self._seen: list[tuple[list[int], str]] | None = None  # the shapes and dtypes that a name was resolved by
        self.users: Any = None
        if isinstance(metric, str):
            self._by_name = MetricName(metric, weighted, ignored)
            row = self._by_name.row
            own = metric
            takes_weights = row.value is not None
            self.higher_is_better: bool | None = row.higher_is_better
        elif isinstance(metric, torchmetrics.Metric):
            weight = _weight_argument(metric) if weighted else ""
            self._device_metric = DeviceMetric(metric.clone(), weight)
            own = _snake_case(type(metric).__name__)
            takes_weights = bool(weight)
            self.higher_is_better = metric.higher_is_better
        elif callable(metric) and not isinstance(metric, type):
            self._device_metric = DeviceMetric(RowMean(metric), "weight")
            self.users = metric
            own = getattr(metric, "__name__", type(metric).__name__).strip("<>")
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
                f"weighted_metrics can't have {metric!r}, which has no weights. Those that have: {known}, functions, "
                f"and torchmetrics objects whose update takes {' or '.join(_WEIGHTS)} after the output and the target"
            )
        self._prefix = "" if output is None else f"{output_name(output)}_"
        self.name = f"{self._prefix}{name or own}"

    def mark_weighted(self) -> None:
        """Take another name, as Keras does where an unweighted metric has this one."""
        self.name = f"{self._prefix}weighted_{self.name.removeprefix(self._prefix)}"

    def update(self, sums: SumTable, slot: int, y_pred: Any, y: Any, sample_weight: Any) -> Sequence[Tensor] | None:
        """Add a batch, inside a step; `slot` is the metric's number in the pass, which is in its sums' keys.

        The weights are one a row, or one for each element of a sequence; for several outputs as in the loss.

        Returns:
            The tensors to keep of the batch, for a metric that the device can't update; else None.

        Raises:
            ArgumentError: There is no such output or target, or the shapes don't go together.
        """
        y_pred, y = self._pair(y_pred, y)
        if self._device_metric is not None and self._by_name is None:
            self._device_metric.check(self.name, sums, [y_pred, y])
        y_pred = y_pred.detach()
        y_pred = y_pred.float() if y_pred.dtype is torch.bfloat16 else y_pred
        y_pred, y = compared = aligned(y_pred, y.long() if y.dtype is torch.bool else y)
        if self._by_name is not None:
            compared = self._by_name.arranged(y_pred, y)
            if self._device_metric is None:
                self._resolve(self._by_name, *compared)
            compared = self._by_name.comparable(*compared)
        assert self._device_metric is not None
        labels = y if y.is_floating_point() else compared[1]  # of one-hot targets none is left out
        arguments = [*compared, *self._weights(sample_weight, labels)]
        # Split over the cores, some metrics' graphs end the process in the partitioner; whole inputs never did.
        if not self._device_metric.splits:
            arguments = [sums.placement.gather(argument) for argument in arguments]
        return self._device_metric.update(sums, slot, arguments)

    def compute(self, sums: Mapping[str, Tensor], kept: Sequence[Sequence[Tensor]]) -> Any:
        """Compute the metric on the host, of its sums by name and the batches that `update` gave to keep.

        It is a float, or an array if the metric has several numbers.
        """
        return float("nan") if self._device_metric is None else self._device_metric.compute(sums, kept)

    def state_dict(self) -> dict[str, Any]:
        """The name of its log, and the shapes that a metric by name was resolved by."""
        return {"name": self.name, "seen": self._seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resolve a metric by name as before, so that loaded sums mean something even if no batch follows."""
        if self._by_name is not None and self._device_metric is None and state["seen"]:
            y_pred, y = (torch.empty(s, dtype=getattr(torch, d), device="meta") for s, d in state["seen"])
            self._resolve(self._by_name, y_pred, y)

    def _resolve(self, by_name: MetricName, y_pred: Tensor, y: Tensor) -> None:
        self._device_metric = DeviceMetric(by_name.resolve(y_pred, y), "weight", is_traceable=True)
        self._seen = [(list(tensor.shape), dtype_name(tensor.dtype)) for tensor in (y_pred, y)]

    def _pair(self, y_pred: Any, y: Any) -> tuple[Tensor, Tensor]:
        """Pick the output and the target that this metric compares."""
        output = self._output
        one, other = (nest if output is None else pick(nest, output) for nest in (y_pred, y))
        if not isinstance(one, Tensor) or not isinstance(other, Tensor):
            which = "" if output is None else f" for output {output!r}"
            raise ArgumentError(
                f"{self.name!r} compares one output tensor with one target tensor{which}, but the module returns "
                f"{described(y_pred)} and the targets are {described(y)}. Give metrics by output, in lists: "
                "metrics={'a': ['accuracy']} or metrics=[['accuracy'], []], or override update_metrics to pick them"
            )
        return one, other

    def _weights(self, sample_weight: Any, y: Tensor) -> list[Tensor]:
        """The weights that the metric's `update` takes, if it does; ignored labels weigh nothing."""
        counted = None if self._by_name is None else self._by_name.counted(y)
        if not self._weighted:
            return [] if counted is None else [counted]
        weight = sample_weight if self._output is None else weight_of(sample_weight, self._output)
        if weight is None and self.users is not None:
            return []
        weight = torch.ones(len(y), device=y.device) if weight is None else weight.float()
        return [weight if counted is None else spread(weight, counted.float()) * counted]


class DeviceMetric:
    """A torchmetrics object that computes on the host, and its copy, which is updated where the steps run.

    Args:
        metric: The object, which nobody else uses.
        weight: The name of the weights among the arguments of its `update`, after an output and a target; empty if it
            takes none.
        is_traceable: True if the device is known to have all operations of its `update` (default: it is tried).

    Attributes:
        keeps_batches: True if batches are kept for it, and update it on the host once the pass is over.
        splits: True if each core may update it with its own rows; else it needs those of all cores.
    """

    def __init__(self, metric: torchmetrics.Metric, weight: str, is_traceable: bool = False) -> None:
        metric.reset()
        # Those of torchmetrics' own classes, which its checks are for; a wrapper has others inside.
        of_torchmetrics = type(metric).update.__module__.startswith("torchmetrics.")
        self._checks = of_torchmetrics and any(getattr(part, "validate_args", False) for part in metric.modules())
        self._checked: set[Any] = set()  # the shapes and dtypes of the batches that were checked
        if hasattr(metric, "validate_args"):
            metric.validate_args = False  # it would read every batch back to the host; labels are checked there anyway
        self._metric = metric
        self._weight = weight
        self._is_traceable = is_traceable
        self.splits = bool(getattr(metric, "splits", False))
        self._device_copy: torchmetrics.Metric | None = None
        self._copied_to: Placement | None = None
        # Without sums of its own (it collects whole batches, or wraps other metrics) it is updated on the host.
        own_sums = bool(metric._defaults) and not any(isinstance(v, list) for v in metric._defaults.values())
        self.keeps_batches = not own_sums or any(isinstance(m, torchmetrics.Metric) for m in metric.children())

    def check(self, name: str, sums: SumTable, arguments: Sequence[Tensor]) -> None:
        """Let torchmetrics check the first batch of each shape, before anything is compiled.

        What came with the batch, such as labels, is checked with its values, on the host. What the step computes has
        none yet; of scores torchmetrics checks only shape and dtype.

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
        given[:2] = aligned(*given[:2]) if len(given) > 1 else given
        fault = self._fault(given)
        # Losses such as binary_cross_entropy need targets in floating point, in which torchmetrics takes no labels.
        whole = [t if i == 0 or not t.is_floating_point() else t.long() for i, t in enumerate(given)]
        if fault is not None and all(bool((a == b).all()) for a, b in zip(given, whole, strict=True)):
            fault = self._fault(whole)
        before.restore()
        if fault is not None:
            shapes = " and ".join(f"{dtype_name(dtype)} {tuple(shape)}" for shape, dtype in form)
            raise ArgumentError(
                f"the metric {name!r}, {type(self._metric).__name__}, can't take an output and targets of {shapes}: "
                f"{str(fault).strip()}"
            ) from fault

    def _fault(self, arguments: Sequence[Tensor]) -> Exception | None:
        """The error that torchmetrics raises for a batch on the host, if it raises one."""
        trial = self._metric.clone()
        if hasattr(trial, "validate_args"):
            trial.validate_args = True
        weights = [torch.ones(len(arguments[0]))] if self._weight else []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                self._add(trial, [*arguments, *weights])
                self._check_classes(arguments)
            except (ValueError, RuntimeError, TypeError, IndexError) as error:  # all that its checks raise
                return error
        return None

    def _check_classes(self, arguments: Sequence[Tensor]) -> None:
        """Refuse classes that a metric has no place for: torchmetrics (1.9) counts them as another, or not at all."""
        classes = getattr(self._metric, "num_classes", None)
        if not type(self._metric).update.__module__.startswith("torchmetrics.classification") or classes is None:
            return
        ignored = getattr(self._metric, "ignore_index", None)
        for argument in arguments:
            if not argument.is_floating_point():
                counted = argument if ignored is None else argument[argument != ignored]
                least, most = (int(counted.min()), int(counted.max())) if counted.numel() else (0, 0)
                if not 0 <= least <= most < classes:
                    raise ValueError(f"the classes are from {least} to {most}, and num_classes={classes}")

    def update(self, sums: SumTable, slot: int, arguments: Sequence[Tensor]) -> Sequence[Tensor] | None:
        """Add a batch, inside a step: the output, the target, and the weights if it takes them.

        Returns:
            The arguments, if they must be kept for the host; else None.
        """
        copy = self._copy_for(sums.placement, arguments)
        if self.keeps_batches:
            return arguments
        attributes = vars(copy)  # which a module and then torchmetrics look through at each assignment
        for key, default in copy._defaults.items():
            # A clone, so that a sum which somebody still holds keeps its value.
            attributes[key] = sums.get((slot, key), torch.as_tensor(default)).clone()
        self._add(copy, arguments)
        for key, default in copy._defaults.items():
            # Some metrics' sums change their shape with the first batch, from () to (1,). A graph's inputs may not.
            value = attributes[key]
            like = torch.as_tensor(default)
            value = value if value.shape == like.shape else value.reshape(like.shape)  # a view keeps its origin alive
            sums.set((slot, key), value if value.dtype is like.dtype else value.to(like.dtype))
            attributes[key] = default
        return None

    def compute(self, sums: Mapping[str, Tensor], kept: Sequence[Sequence[Tensor]]) -> Any:
        """Compute the metric on the host, see `Metric.compute`."""
        metric = self._metric.clone() if kept else self._metric  # an update may leave more in it than `reset` undoes
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
        """The copy at a placement, where its buffers live (thresholds and the like)."""
        if self._device_copy is None or self._copied_to != placement:
            if not (self._is_traceable or self.keeps_batches or placement.on_host):
                self.keeps_batches = not self._can_be_traced(arguments)
            self._device_copy = self._metric.clone()
            self._copied_to = placement
            move(self._device_copy.buffers(), placement)
        return self._device_copy

    def _can_be_traced(self, arguments: Sequence[Tensor]) -> bool:
        """Try the update on tensors without values: can the device do it, with nothing left in Python?"""
        trial = self._metric.clone().to("meta")
        before = facts({"metric": trial})
        kept = Kept({"metric": self._metric})
        try:
            with _OnlyLowered():  # type: ignore[no-untyped-call]
                self._add(trial, [torch.empty(a.shape, dtype=a.dtype, device="meta") for a in arguments])
        except (RuntimeError, TypeError):  # PyTorch has no error of its own for a value that isn't there
            # A try on the host raises the error of wrong shapes now, not when the epoch is over. Its ValueErrors are
            # of values, and these are not the batch's.
            with warnings.catch_warnings(), suppress(ValueError):
                warnings.simplefilter("ignore")
                self._add(self._metric.clone(), [torch.zeros(a.shape, dtype=a.dtype) for a in arguments])
            kept.load_state_dict({})
            return False
        after = facts({"metric": trial})
        changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
        counted = kept.state_dict()  # by the user's function, which both share
        kept.load_state_dict({})
        return changed <= {"metric._update_count"} and not counted

    def _add(self, metric: torchmetrics.Metric, arguments: Sequence[Tensor]) -> None:
        plain = arguments[:2] if self._weight else arguments
        metric.update(*plain, **dict(zip([self._weight], arguments[len(plain) :], strict=False)))


def _on_host(tensor: Tensor, sums: SumTable, rows: int) -> Tensor:
    """The first rows of a tensor on the host, as a metric is given them; zeros for what isn't known yet."""
    known = None if tensor.is_floating_point() and tensor.requires_grad else sums.known(tensor)
    value = torch.zeros(tensor.shape[:1] and (rows, *tensor.shape[1:]), dtype=tensor.dtype) if known is None else known
    value = value[:rows] if value.dim() else value
    if value.dtype is torch.bool:
        return value.long()
    return value.float() if value.dtype is torch.bfloat16 else value


class _OnlyLowered(TorchDispatchMode):
    """Refuses operations that the device would hand back to the host, with a wait in each step."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not has_kernel(func.name()):
            raise NotImplementedError(f"{func.name()} has no lowering")
        return func(*args, **(kwargs or {}))


def _weight_argument(metric: torchmetrics.Metric) -> str:
    """The name of the weights that a metric's update takes after an output and a target; empty if it takes none."""
    parameters = inspect.signature(metric.update).parameters
    return next((name for name in _WEIGHTS if name in parameters and len(parameters) > 2), "")


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()  # MulticlassAUROC -> multiclass_auroc
