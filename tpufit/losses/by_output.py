"""`LossByOutput`: a loss for each output of a module; `SharedLoss`: one loss for any number of outputs."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError, DataError
from .averages import Mean
from .labels import LabelRange
from .loss import Loss, OneLoss
from .outputs import Output, check_form, flatten_outputs, is_nest, output_name, pick
from .sample_weights import pick_weight

LossByOutputArgument = Mapping[str, Any] | Sequence[Any]  # of losses, None, or further nests
LossWeightsArgument = Mapping[str, Any] | Sequence[Any] | None


class LossByOutput:
    """A loss for each output of a module that returns a nest of dicts, tuples or lists; the step uses their sum.

    Args:
        losses: A loss for each output, by name in a dict or by position in a list, in the nest that the module
            returns; None for an output without a loss.
        weights: The factor of each loss in the sum, in the same form; None, or missing in a dict, is 1.
        like: For errors, what the outputs were taken from (default: the losses).

    Attributes:
        outputs: The names or positions of the outputs.
        modules: The losses that are modules.
        user_code: The parts of the losses that may be the user's code.
        ignored: The label that each output's loss ignores, for losses of classes.

    Raises:
        UnknownNameError, ArgumentError: As `Loss`; or the weights have another form.

    Example:
        >>> loss = LossByOutput({"a": "mse_loss", "b": "l1_loss"}, {"a": 1.0, "b": 10.0})
        >>> parts = loss.parts({"a": torch.ones(2), "b": torch.ones(2)}, {"a": torch.zeros(2), "b": torch.zeros(2)})
        >>> float(loss.total(parts)), loss.logs(parts)
        (11.0, {'a_loss': tensor(1.), 'b_loss': tensor(1.)})
    """

    def __init__(
        self, losses: LossByOutputArgument, weights: LossWeightsArgument = None, like: str = "loss is"
    ) -> None:
        given: dict[Output, OneLoss | None] = flatten_outputs(losses)
        if isinstance(losses, Mapping) and not all(isinstance(name, str) for name in losses):
            raise ArgumentError(f"a dict of losses must have the names of the outputs as keys, got {list(losses)}")
        self.outputs: list[Output] = list(given)
        self._like = like
        self._losses = {key: Loss(loss, output_name(key)) for key, loss in given.items() if loss is not None}
        if not self._losses:
            raise ArgumentError(f"at least one output needs a loss, got loss={losses!r}")
        if weights is not None:
            check_form(weights, self.outputs, "loss_weights", ())
        self._weights = {key: 1.0 if (weight := pick(weights, key)) is None else weight for key in self._losses}
        for weight in self._weights.values():
            if isinstance(weight, bool) or not isinstance(weight, (int, float)):
                raise ArgumentError(f"loss_weights must be numbers, got {weight!r}")
        self.modules = [module for loss in self._losses.values() for module in loss.modules]
        self.user_code: Any = {output_name(key): loss.user_code for key, loss in self._losses.items()}
        self.ignored = {key: label for key, loss in self._losses.items() for label in loss.ignored.values()}

    def parts(self, y_pred: Any, y: Any, sample_weight: Any = None) -> dict[Output, Tensor]:
        """Compute the loss of each output, see `measure`."""
        return {key: mean.value for key, mean in self.measure(y_pred, y, sample_weight).items()}

    def measure(self, y_pred: Any, y: Any, sample_weight: Any = None) -> dict[Output, Mean]:
        """Compute the loss of each output, and its denominator.

        Outputs, targets and weights have the same form. In a dict, an output without a loss needs no targets. A single
        tensor of weights is for all outputs; outputs missing in a dict of weights have weight 1.

        Raises:
            ArgumentError: The form of the outputs or the weights isn't that of the losses.
            DataError: The form of the targets isn't that of the losses.
        """
        check_form(y_pred, self.outputs, "what the module returns", like=self._like)
        check_form(y, self.outputs, "the targets", self._losses, DataError, self._like)
        if sample_weight is not None and not isinstance(sample_weight, Tensor):
            check_form(sample_weight, self.outputs, "sample_weight", (), like=self._like)
        for key in self._losses:
            if pick(y, key) is None:
                raise DataError(
                    f"output {output_name(key)!r} has a loss, but its target is None: pass a target, or None as the "
                    "loss"
                )
        return {
            key: loss.measure(pick(y_pred, key), pick(y, key), pick_weight(sample_weight, key))
            for key, loss in self._losses.items()
        }

    def total(self, parts: Mapping[Output, Tensor]) -> Tensor:
        """Compute the weighted sum of the parts."""
        values = list(self.weight_parts(parts).values())
        return torch.stack(values).sum() if len(values) > 1 else values[0]

    def weight_parts(self, parts: Mapping[Output, Tensor]) -> dict[Output, Tensor]:
        """Multiply the parts by their weights in the sum."""
        return {key: value if self._weights[key] == 1 else value * self._weights[key] for key, value in parts.items()}

    def logs(self, parts: Mapping[Output, Tensor]) -> dict[str, Tensor]:
        """Return the unweighted parts by the names of their logs; as in Keras, a single part has no separate log."""
        return dict(zip(self.names, parts.values(), strict=True)) if self.names else {}

    @property
    def names(self) -> list[str]:
        """The names of the parts' logs; empty for a single part."""
        return [f"{output_name(key)}_loss" for key in self._losses] if len(self._losses) > 1 else []

    def label_range(self, y: Any) -> dict[Output, LabelRange] | None:
        """Find the range of each output's host labels, see `Loss.label_range`; None if there is nothing to check."""
        ranges = {key: loss.label_range(pick(y, key)) for key, loss in self._losses.items()}
        return {key: labels for key, labels in ranges.items() if labels is not None} or None

    def forget_classes(self) -> None:
        """Forget the numbers of classes, see `Loss.forget_classes`."""
        for loss in self._losses.values():
            loss.forget_classes()

    def check_labels(self, ranges: Mapping[Output, LabelRange] | None, y_pred: Any = None) -> None:
        """Raise `LabelError` for a label that isn't a class of its output, see `Loss.check_labels`."""
        for key, labels in (ranges or {}).items():
            self._losses[key].check_labels(labels, pick(y_pred, key))


class SharedLoss(Loss):
    """A loss that compares one tensor with another: for a single output, or for each of several, as in Keras.

    Example:
        >>> loss, ones, zeros = SharedLoss("mse_loss"), torch.ones(2), torch.zeros(2)
        >>> float(loss.of(zeros)(ones, zeros)), loss.of([zeros, zeros]).parts([ones, zeros], [zeros, zeros])
        (1.0, {0: tensor(1.), 1: tensor(0.)})
    """

    def __init__(self, loss: OneLoss) -> None:
        super().__init__(loss)
        self._loss = loss
        self._by_output: LossByOutput | None = None

    def of(self, y: Any) -> Loss | LossByOutput:
        """Return the loss for these targets: a `LossByOutput` if there are several."""
        if not is_nest(y):
            return self
        outputs = flatten_outputs(y)
        if not any(isinstance(target, Tensor) for target in outputs.values()):
            return self  # its check refuses the targets
        if self._by_output is None or self._by_output.outputs != list(outputs):
            self._by_output = LossByOutput(_fill(y, self._loss), like="the targets are")
        return self._by_output

    @property
    def names(self) -> list[str]:
        """The names of the parts' logs; empty until several targets have come."""
        return [] if self._by_output is None else self._by_output.names

    def label_range(self, y: Any) -> Any:
        """Find the range of host labels, by output if there are several."""
        if isinstance(y, Tensor) or not is_nest(y):
            return super().label_range(y)
        loss = self.of(y)
        return super().label_range(y) if loss is self else loss.label_range(y)

    def forget_classes(self) -> None:
        """Forget the numbers of classes, see `Loss.forget_classes`."""
        super().forget_classes()
        if self._by_output is not None:
            self._by_output.forget_classes()

    def check_labels(self, labels: Any, y_pred: Any = None) -> None:
        """Raise `LabelError` for a label that isn't a class of its output."""
        if labels is None or isinstance(labels, LabelRange):
            super().check_labels(labels, y_pred)
        else:
            assert self._by_output is not None
            self._by_output.check_labels(labels, y_pred)


def _fill(nest: Any, value: Any) -> Any:
    """Return the same nest with a value in place of each leaf."""
    if isinstance(nest, Mapping):
        return {key: _fill(inner, value) for key, inner in nest.items()}
    return [_fill(inner, value) for inner in nest] if is_nest(nest) else value
