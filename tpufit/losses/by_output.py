"""`LossByOutput`: a loss for each output of a module; `SharedLoss`: the same for all, however many there are."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError, DataError
from .averages import Mean
from .loss import LabelRange, Loss, OneLoss
from .outputs import Output, check_form, is_nest, output_name, outputs_of, pick
from .sample_weights import weight_of

LossByOutputArgument = Mapping[str, Any] | Sequence[Any]  # of losses, None, or further nests
LossWeightsArgument = Mapping[str, Any] | Sequence[Any] | None


class LossByOutput:
    """A loss for each output of a module that returns a nest of dicts, tuples or lists; the step uses their sum.

    Args:
        losses: One loss for each output, by its name in a dict or by its position in a list, in the nest that the
            module returns; None for an output that has none.
        weights: The factor of each loss in the sum, in the same form; 1 where a dict leaves it out, or it is None.
        like: What the outputs were taken from, for errors.

    Attributes:
        outputs: The names of the outputs, or their positions.
        modules: The modules among the losses.
        users: The parts of the losses that may be the user's own code.
        ignored: The label that each output's loss leaves out, for those that have classes.

    Raises:
        UnknownNameError, ArgumentError: As `Loss`; or the weights are of another form.

    Example:
        >>> loss = LossByOutput({"a": "mse_loss", "b": "l1_loss"}, {"a": 1.0, "b": 10.0})
        >>> parts = loss.parts({"a": torch.ones(2), "b": torch.ones(2)}, {"a": torch.zeros(2), "b": torch.zeros(2)})
        >>> float(loss.total(parts)), loss.logs(parts)
        (11.0, {'a_loss': tensor(1.), 'b_loss': tensor(1.)})
    """

    def __init__(
        self, losses: LossByOutputArgument, weights: LossWeightsArgument = None, like: str = "loss is"
    ) -> None:
        given: dict[Output, OneLoss | None] = outputs_of(losses)
        if isinstance(losses, Mapping) and not all(isinstance(name, str) for name in losses):
            raise ArgumentError(f"a dict of losses goes by the names of the outputs, got the keys {list(losses)}")
        self.outputs: list[Output] = list(given)
        self._like = like
        self._losses = {key: Loss(loss, output_name(key)) for key, loss in given.items() if loss is not None}
        if not self._losses:
            raise ArgumentError(f"at least one output needs a loss, got loss={losses!r}")
        if weights is not None:
            check_form(weights, self.outputs, "loss_weights", ())
        self._weights = {key: 1.0 if (own := pick(weights, key)) is None else own for key in self._losses}
        for weight in self._weights.values():
            if isinstance(weight, bool) or not isinstance(weight, (int, float)):
                raise ArgumentError(f"loss_weights must be numbers, got {weight!r}")
        self.modules = [module for loss in self._losses.values() for module in loss.modules]
        self.users: Any = {output_name(key): loss.users for key, loss in self._losses.items()}
        self.ignored = {key: label for key, loss in self._losses.items() for label in loss.ignored.values()}

    def parts(self, y_pred: Any, y: Any, sample_weight: Any = None) -> dict[Output, Tensor]:
        """Compute the loss of each output, see `measure`."""
        return {key: mean.value for key, mean in self.measure(y_pred, y, sample_weight).items()}

    def measure(self, y_pred: Any, y: Any, sample_weight: Any = None) -> dict[Output, Mean]:
        """Compute the loss of each output, and what it is the mean over.

        Outputs, targets and weights are in the same form. An output without a loss needs no targets in a dict. One
        tensor of weights, as `Loss` takes it, is for all outputs; those that a dict leaves out weigh 1.

        Raises:
            ArgumentError: The outputs or the weights are not of the losses' form.
            DataError: The targets are not.
        """
        check_form(y_pred, self.outputs, "what the module returns", like=self._like)
        check_form(y, self.outputs, "the targets", self._losses, DataError, self._like)
        if sample_weight is not None and not isinstance(sample_weight, Tensor):
            check_form(sample_weight, self.outputs, "sample_weight", (), like=self._like)
        for key in self._losses:
            if pick(y, key) is None:
                raise DataError(
                    f"output {output_name(key)!r} has a loss, and None as its target: give it a target, or None as its "
                    "loss, too"
                )
        return {
            key: loss.measure(pick(y_pred, key), pick(y, key), weight_of(sample_weight, key))
            for key, loss in self._losses.items()
        }

    def total(self, parts: Mapping[Output, Tensor]) -> Tensor:
        """Compute the weighted sum of the parts."""
        values = list(self.weighed(parts).values())
        return torch.stack(values).sum() if len(values) > 1 else values[0]

    def weighed(self, parts: Mapping[Output, Tensor]) -> dict[Output, Tensor]:
        """Multiply the parts by their weights in the sum."""
        return {key: value if self._weights[key] == 1 else value * self._weights[key] for key, value in parts.items()}

    def logs(self, parts: Mapping[Output, Tensor]) -> dict[str, Tensor]:
        """Name the parts, before they are weighed, by their logs. As in Keras a single one has no log of its own."""
        return dict(zip(self.names, parts.values(), strict=True)) if self.names else {}

    @property
    def names(self) -> list[str]:
        """The names of the parts' logs; none for a single part."""
        return [f"{output_name(key)}_loss" for key in self._losses] if len(self._losses) > 1 else []

    def label_range(self, y: Any) -> dict[Output, LabelRange] | None:
        """Find the range of each output's host labels, where there is something to check, see `Loss.label_range`."""
        found = {key: loss.label_range(pick(y, key)) for key, loss in self._losses.items()}
        return {key: labels for key, labels in found.items() if labels is not None} or None

    def forget_classes(self) -> None:
        """Forget the numbers of classes, see `Loss.forget_classes`."""
        for loss in self._losses.values():
            loss.forget_classes()

    def check_labels(self, found: Mapping[Output, LabelRange] | None, y_pred: Any = None) -> None:
        """Raise `LabelError` for a label that is no class of its output, see `Loss.check_labels`."""
        for key, labels in (found or {}).items():
            self._losses[key].check_labels(labels, pick(y_pred, key))


class SharedLoss(Loss):
    """A loss that compares one tensor with another: the loss of the only output, or of each of several, as in Keras.

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
        """Return the loss for these targets: one for each of them if there are several."""
        if not is_nest(y):
            return self
        outputs = outputs_of(y)
        if not any(isinstance(target, Tensor) for target in outputs.values()):
            return self  # which refuses them
        if self._by_output is None or self._by_output.outputs != list(outputs):
            self._by_output = LossByOutput(_mapped(y, self._loss), like="the targets are")
        return self._by_output

    @property
    def names(self) -> list[str]:
        """The names of the parts' logs, once targets have shown that there are several."""
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

    def check_labels(self, found: Any, y_pred: Any = None) -> None:
        """Raise `LabelError` for a label that is no class of its output."""
        if found is None or isinstance(found, LabelRange):
            super().check_labels(found, y_pred)
        else:
            assert self._by_output is not None
            self._by_output.check_labels(found, y_pred)


def _mapped(nest: Any, value: Any) -> Any:
    """The same nest with a value in place of each leaf."""
    if isinstance(nest, Mapping):
        return {key: _mapped(own, value) for key, own in nest.items()}
    return [_mapped(own, value) for own in nest] if is_nest(nest) else value
