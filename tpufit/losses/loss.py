"""Losses: PyTorch's, by name or as objects, one for each output; and the check of labels that the device can't make."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from ..data.batches import listed
from ..errors import ArgumentError, BatchError, DataError, LabelError, NotCompiledError, UnknownNameError
from .outputs import Output, check_form, described, output_name, part

OneLoss = str | nn.Module | Callable[[Any, Any], Tensor]
LossArgument = OneLoss | Mapping[str, OneLoss | None] | Sequence[OneLoss | None]
LossWeightsArgument = Mapping[str, float] | Sequence[float] | None

NAMES: dict[str, Callable[..., Tensor]] = {
    name: getattr(F, name)
    for name in (
        "binary_cross_entropy",
        "binary_cross_entropy_with_logits",
        "cross_entropy",
        "hinge_embedding_loss",
        "huber_loss",
        "l1_loss",
        "mse_loss",
        "multilabel_soft_margin_loss",
        "nll_loss",
        "poisson_nll_loss",
        "smooth_l1_loss",
        "soft_margin_loss",
    )
}
NAMES |= {"mse": F.mse_loss, "mae": F.l1_loss, "bce_with_logits": F.binary_cross_entropy_with_logits}

_LOGITS = "PyTorch's loss takes logits, so the module must not end in softmax or sigmoid."
KERAS = {  # Keras's names mean losses of probabilities by default; PyTorch's take logits: say so, never guess
    "sparse_categorical_crossentropy": f"In PyTorch that is 'cross_entropy'. {_LOGITS}",
    "categorical_crossentropy": f"In PyTorch that is 'cross_entropy', with probabilities as targets. {_LOGITS}",
    "binary_crossentropy": f"In PyTorch that is 'binary_cross_entropy_with_logits'. {_LOGITS}",
    "mean_squared_error": "In PyTorch that is 'mse_loss'.",
    "mean_absolute_error": "In PyTorch that is 'l1_loss'.",
    "huber": "In PyTorch that is 'huber_loss'.",
    "kl_divergence": "In PyTorch that is torch.nn.KLDivLoss(reduction='batchmean'), which takes log-probabilities.",
    "poisson": "In PyTorch that is 'poisson_nll_loss', which takes log-rates.",
}

_CLASS_LOSSES = (F.cross_entropy, F.nll_loss)

IGNORED = -100
"""The label that PyTorch's losses of classes leave out if they aren't told of another."""


class Loss:
    """A loss as the step uses it: in float32, weighted by sample if asked, its labels checked on the host.

    Args:
        loss: A name from `torch.nn.functional`, a loss module such as `nn.CrossEntropyLoss(label_smoothing=0.1)`, or
            a function of (prediction, target), in PyTorch's order, that returns a scalar.
        output: Whose loss it is, for errors, where the module has several outputs.

    Attributes:
        modules: The loss itself, if it is a module.
        users: What of it may be the user's own code.

    Raises:
        UnknownNameError: Nothing goes by that name; Keras's names are answered with PyTorch's.
        ArgumentError: Not a loss at all.

    Example:
        >>> import torch
        >>> float(Loss("mse_loss")(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 1.0])))
        2.0
    """

    def __init__(self, loss: OneLoss, output: str = "") -> None:
        if isinstance(loss, str):
            if loss not in NAMES:
                raise UnknownNameError("loss", loss, NAMES, KERAS.get(loss, ""))
            self.function: Callable[..., Any] = NAMES[loss]
        elif isinstance(loss, type) or not callable(loss):
            raise ArgumentError(
                "loss must be a name, a loss module (an instance, not the class) or a function of (prediction, "
                f"target), got {loss!r}"
            )
        else:
            self.function = loss
        self.module = self.function if isinstance(self.function, nn.Module) else None
        self.modules = [self.module] if self.module is not None else []
        self.users: Any = self.function
        self._name = loss if isinstance(loss, str) else ""
        self._of = f"output {output!r}: " if output else ""
        named = bool(self._name)
        self._reducible = named or (self.module is not None and hasattr(self.module, "reduction"))
        self._checks_labels = (named and self.function in _CLASS_LOSSES) or isinstance(
            self.module, (nn.CrossEntropyLoss, nn.NLLLoss)
        )
        self.ignore_index = int(getattr(self.module, "ignore_index", IGNORED))
        self._output: tuple[int, ...] = ()  # the shape of the output that labels were last compared with

    def __call__(self, y_pred: Any, y: Any, sample_weight: Tensor | None = None) -> Tensor:
        """The loss of a batch, a scalar.

        Args:
            y_pred: What the module returned, e.g. logits of shape `(batch, classes)`; bfloat16 is taken to float32.
            y: The targets, e.g. classes of shape `(batch,)`.
            sample_weight: One weight a row, shape `(batch,)`, or one for each element of a sequence, shape
                `(batch, time)`. As in Keras, the weighted losses are summed and divided by the number of elements, not
                by the sum of the weights. (Elements whose label is `ignore_index` are none.)

        Raises:
            BatchError: Output and targets are of shapes that don't go together.
        """
        y_pred = tree_map(_to_float32, y_pred)
        if self._name and not isinstance(y_pred, Tensor):
            raise ArgumentError(
                f"{self._of}loss={self._name!r} compares one tensor with one target, but the module returns "
                f"{described(y_pred)}. Give each output a loss: loss={{'a': ..., 'b': ...}} or loss=[..., ...]"
            )
        self._check_target(y_pred, y)
        if sample_weight is None:
            value = self._of_pair(self.function, y_pred, y)
        else:
            each = self._each(y_pred, y)
            value = (each * spread(sample_weight, each)).sum()
            reduction = getattr(self.module, "reduction", "mean")
            if reduction != "sum":
                value = value / (len(each) if reduction == "batchmean" else self._elements(each, y))
        if not isinstance(value, Tensor):
            raise ArgumentError(f"the loss must return a tensor, got {type(value).__name__}")
        return value if value.dim() == 0 else value.mean()

    def _elements(self, each: Tensor, y: Any) -> int | Tensor:
        """By how many losses PyTorch divides their sum, without weights."""
        labelled = self._checks_labels and not y.is_floating_point()
        return (y != self.ignore_index).sum() if labelled else each.numel()

    def _each(self, y_pred: Any, y: Any) -> Tensor:
        """The loss of each row, before any reduction."""
        if not self._reducible:
            value: Tensor = self._of_pair(self.function, y_pred, y)
            if value.dim() == 0:
                raise ArgumentError(
                    "sample_weight needs the loss of each row, but this loss function returns one number. Let it "
                    "return a tensor of shape (batch,), or use a loss by name"
                )
            return value
        if self.module is None:
            each: Tensor = self._of_pair(partial(self.function, reduction="none"), y_pred, y)
            return each
        module: Any = copy.copy(self.module)
        module.reduction = "none"
        return self._of_pair(module, y_pred, y)  # type: ignore[no-any-return]

    def _of_pair(self, function: Callable[..., Any], y_pred: Any, y: Any) -> Any:
        """What a function makes of output and target. What PyTorch says of their shapes names neither."""
        try:
            return function(y_pred, y)
        except (RuntimeError, ValueError) as error:
            if type(error) not in (RuntimeError, ValueError):  # what has a class of its own is no matter of shapes
                raise
            raise self._misfit(y_pred, y, f"PyTorch says: {error}") from error

    def _check_target(self, y_pred: Any, y: Any) -> None:
        """Of classes XLA takes some targets that PyTorch refuses, and computes NaN."""
        if not self._checks_labels or not isinstance(y_pred, Tensor) or not isinstance(y, Tensor):
            return
        classes = (*y_pred.shape[:1], *y_pred.shape[2:]) if y_pred.dim() > 1 else ()
        takes_shares = self.function is F.cross_entropy or isinstance(self.module, nn.CrossEntropyLoss)
        if takes_shares and y.is_floating_point() and y.shape == y_pred.shape:
            return
        if y.is_floating_point() or tuple(y.shape) != classes:
            other = ", or probabilities of the output's shape" if takes_shares else ""
            raise self._misfit(y_pred, y, f"Expected classes as the targets: whole numbers of shape {classes}{other}")

    def _misfit(self, y_pred: Any, y: Any, said: str) -> BatchError:
        name = self._name or getattr(self.function, "__name__", type(self.function).__name__)
        return BatchError(
            f"{self._of}the loss {name} fails on what the module returns and the targets, which are "
            f"{listed({'output': y_pred, 'target': y})}. {said}"
        )

    def ignored(self, output: Output | None = None) -> int | None:
        """The label that this loss leaves out, if it has classes.

        Args:
            output: For an output's metric; a single loss has none.
        """
        return self.ignore_index if self._checks_labels and output is None else None

    def label_range(self, y: Any) -> tuple[int, int] | None:
        """The smallest and largest class of a batch of host labels, if this loss has classes.

        Args:
            y: Host targets. Only whole numbers are classes; `ignore_index` is left out.

        Returns:
            `(smallest, largest)`, or None where there is nothing to check.
        """
        if not self._checks_labels or not isinstance(y, Tensor) or y.is_floating_point() or not y.numel():
            return None
        labels = y.numpy()
        smallest, largest = _range(labels)
        if self.ignore_index in (smallest, largest):
            labels = labels[labels != self.ignore_index]
            return _range(labels) if labels.size else None
        return smallest, largest

    def check_labels(self, found: tuple[int, int] | None, y_pred: Any = None) -> None:
        """Raise `LabelError` for a label that is no class of `y_pred`: the device would compute NaN, or nonsense.

        Args:
            found: What `label_range` found in the batch.
            y_pred: The module's output, whose dimension 1 is the classes (dimension 0 if it has no other). Left out, it
                is one like the last: a replayed step has no output to show.
        """
        if found is None:
            return
        if isinstance(y_pred, Tensor):
            self._output = tuple(y_pred.shape)
        if not self._output:
            return
        classes = self._output[1] if len(self._output) > 1 else self._output[0]
        smallest, largest = found
        if smallest < 0 or largest >= classes:
            raise LabelError(
                f"{self._of}label {largest if largest >= classes else smallest} is outside the module's {classes} "
                f"classes (0 to {classes - 1}), from an output of shape {self._output}. Number the classes from 0, "
                "give the last layer more outputs, or mark what shall not count with ignore_index "
                f"({self.ignore_index})"
            )


class LossByOutput:
    """A loss for each output of a module that returns a dict, or a tuple or list; the step uses their weighted sum.

    Args:
        losses: One loss for each output, by its name in a dict or by its position in a list; None for an output that
            has none.
        weights: What each loss is multiplied with in the sum, in the same form (default: 1).

    Attributes:
        outputs: The names of the outputs, or their positions.
        modules: Those of the losses that are modules.
        users: What of them may be the user's own code.

    Raises:
        UnknownNameError, ArgumentError: As `Loss`; or the weights are of another form.

    Example:
        >>> loss = LossByOutput({"a": "mse_loss", "b": "l1_loss"}, {"a": 1.0, "b": 10.0})
        >>> parts = loss.parts({"a": torch.ones(2), "b": torch.ones(2)}, {"a": torch.zeros(2), "b": torch.zeros(2)})
        >>> float(loss.total(parts)), loss.logs(parts)
        (11.0, {'a_loss': tensor(1.), 'b_loss': tensor(1.)})
    """

    def __init__(
        self, losses: Mapping[str, OneLoss | None] | Sequence[OneLoss | None], weights: LossWeightsArgument = None
    ) -> None:
        given: dict[Any, OneLoss | None] = dict(losses) if isinstance(losses, Mapping) else dict(enumerate(losses))
        if isinstance(losses, Mapping) and not all(isinstance(name, str) for name in losses):
            raise ArgumentError(f"a dict of losses goes by the names of the outputs, got the keys {list(losses)}")
        self.outputs: list[Output] = list(given)
        self._losses = {key: Loss(loss, output_name(key)) for key, loss in given.items() if loss is not None}
        if not self._losses:
            raise ArgumentError(f"at least one output needs a loss, got loss={losses!r}")
        self._weights = dict.fromkeys(self._losses, 1.0) if weights is None else self._weights_of(weights)
        self.modules = [module for loss in self._losses.values() for module in loss.modules]
        self.users: Any = {output_name(key): loss.users for key, loss in self._losses.items()}

    def parts(self, y_pred: Any, y: Any, sample_weight: Any = None) -> dict[Output, Tensor]:
        """The loss of each output, for a batch.

        Args:
            y_pred: What the module returned.
            y: The targets, in the same form; an output without a loss needs none in a dict.
            sample_weight: One tensor for all outputs, as `Loss` takes it, or one for each in the same form; outputs
                that a dict leaves out weigh 1.

        Raises:
            ArgumentError: The outputs or the weights are not of the losses' form.
            DataError: The targets are not.
        """
        check_form(y_pred, self.outputs, "what the module returns")
        check_form(y, self.outputs, "the targets", self._losses, DataError)
        if sample_weight is not None and not isinstance(sample_weight, Tensor):
            check_form(sample_weight, self.outputs, "sample_weight", ())
        return {
            key: loss(part(y_pred, key), part(y, key), weight_of(sample_weight, key))
            for key, loss in self._losses.items()
        }

    def total(self, parts: Mapping[Output, Tensor]) -> Tensor:
        """The weighted sum of the parts."""
        values = [value if self._weights[key] == 1 else value * self._weights[key] for key, value in parts.items()]
        return torch.stack(values).sum() if len(values) > 1 else values[0]

    def logs(self, parts: Mapping[Output, Tensor]) -> dict[str, Tensor]:
        """The parts, before they are weighed, by the names of their logs; as in Keras a single one is not told."""
        return dict(zip(self.names, parts.values(), strict=True)) if self.names else {}

    @property
    def names(self) -> list[str]:
        """The names of the parts' logs; none for a single one."""
        return [f"{output_name(key)}_loss" for key in self._losses] if len(self._losses) > 1 else []

    def ignored(self, output: Output | None = None) -> int | None:
        """The label that an output's loss leaves out, if it has classes."""
        return self._losses[output].ignored() if output in self._losses else None

    def label_range(self, y: Any) -> dict[Output, tuple[int, int]] | None:
        """What `Loss.label_range` says of each output's host labels, where there is something to check."""
        found = {key: loss.label_range(part(y, key)) for key, loss in self._losses.items()}
        return {key: labels for key, labels in found.items() if labels is not None} or None

    def check_labels(self, found: Mapping[Output, tuple[int, int]] | None, y_pred: Any = None) -> None:
        """Raise `LabelError` for a label that is none of its output's classes, as `Loss.check_labels` does."""
        for key, labels in (found or {}).items():
            self._losses[key].check_labels(labels, part(y_pred, key))

    def _weights_of(self, weights: Any) -> dict[Output, float]:
        check_form(weights, self.outputs, "loss_weights", self._losses)
        found: dict[Output, Any] = {key: part(weights, key) for key in self._losses}
        for weight in found.values():
            if isinstance(weight, bool) or not isinstance(weight, (int, float)):
                raise ArgumentError(f"loss_weights must be numbers, got {weight!r}")
        return found


def build(loss: LossArgument | None, weights: LossWeightsArgument = None) -> Loss | LossByOutput | None:
    """The loss of a model.

    Args:
        loss: A loss, or one for each output in a dict or list.
        weights: The weights of several losses.

    Raises:
        UnknownNameError, ArgumentError: See `Loss` and `LossByOutput`.

    Example:
        >>> build(["mse_loss", "l1_loss"]).outputs
        [0, 1]
    """
    if isinstance(loss, (Mapping, Sequence)) and not isinstance(loss, str):
        return LossByOutput(loss, weights)
    if weights is not None:
        raise ArgumentError(f"loss_weights go with a loss for each output, in a dict or a list, got loss={loss!r}")
    return None if loss is None else Loss(loss)


def spread(weight: Any, each: Tensor) -> Tensor:
    """Weights in a shape that multiplies a value for each element.

    Args:
        weight: One weight a row, shape `(batch,)` or `(batch, 1)`, or one for each element of a sequence, shape
            `(batch, time)`.
        each: The values, shape `(batch, ...)` or `(batch, time, ...)`.

    Raises:
        ArgumentError: The weights are of another shape.

    Example:
        >>> spread(torch.ones(2), torch.ones(2, 3)).shape
        torch.Size([2, 1])
    """
    if not isinstance(weight, Tensor):
        raise ArgumentError(
            f"sample_weight must be one tensor for one output, got {described(weight)}. Weights by output go with a "
            "loss for each output"
        )
    if weight.dim() > 1 and weight.shape[1:].numel() == 1:
        weight = weight.reshape(-1)
    if weight.shape != each.shape[: weight.dim()]:
        raise ArgumentError(
            f"sample_weight of shape {tuple(weight.shape)} doesn't fit losses of shape {tuple(each.shape)}: one weight "
            "a row, shape (batch,), or one for each element of a sequence, shape (batch, time)"
        )
    shaped: Tensor = weight.to(each.dtype).reshape(*weight.shape, *[1] * (each.dim() - weight.dim()))
    return shaped


def weight_of(sample_weight: Any, output: Output) -> Any:
    """The weights for an output: one tensor is for all outputs."""
    return sample_weight if isinstance(sample_weight, Tensor) else part(sample_weight, output)


def required(loss: Loss | LossByOutput | None, method: str) -> Loss | LossByOutput:
    """The loss, or the error that `compile` gave none."""
    if loss is None:
        raise NotCompiledError(
            f"{method} needs a loss: call model.compile(optimizer=..., loss='cross_entropy'), or override "
            "compute_loss in a subclass of tpufit.Model"
        )
    return loss


def _range(labels: NDArray[Any]) -> tuple[int, int]:
    """The smallest and largest, by the ufuncs themselves: `min` and `max` go through Python, in each step."""
    smallest: Callable[..., Any] = np.minimum.reduce
    largest: Callable[..., Any] = np.maximum.reduce
    return int(smallest(labels, axis=None)), int(largest(labels, axis=None))


def _to_float32(leaf: Any) -> Any:
    return leaf.float() if isinstance(leaf, Tensor) and leaf.dtype is torch.bfloat16 else leaf
