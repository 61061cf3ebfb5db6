"""`ClassWeight`: sample weights by class, looked up on the device inside the step."""

from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from ..backend import HOST, Placement
from ..data import unpack
from ..data.to_tensors import to_host_tensor
from ..errors import ArgumentError
from ..runtime import to_device
from .outputs import describe_nest
from .sample_weights import spread_weights


class ClassWeight:
    """A table of weights, indexed by the labels of a batch; missing classes have weight 1.

    `"balanced"` computes the weights from the classes in array targets, in a form that `weigh` takes.

    Raises:
        ArgumentError: A class isn't a whole number of at least 0, or a weight isn't a number.

    Example:
        >>> x, y = torch.zeros(3, 2), torch.tensor([0, 2, 1])
        >>> _, _, sample_weight = ClassWeight({2: 5.0}).weigh((x, y), HOST)
        >>> sample_weight
        tensor([1., 5., 1.])

    Source: `class_weight` of `keras.Model.fit`.
    """

    def __init__(self, weights: Mapping[Any, Any] | str, targets: Any = None) -> None:
        wanted = "class_weight must be 'balanced' or a dict of weights by class, such as {0: 1.0, 1: 5.0}, got"
        if isinstance(weights, str) and weights == "balanced":
            weights = _balance(targets)
        if not isinstance(weights, Mapping) or not weights:
            raise ArgumentError(f"{wanted} {weights!r}")
        for label, weight in weights.items():
            if isinstance(label, bool) or not isinstance(label, Integral) or label < 0:
                raise ArgumentError(f"{wanted} the class {label!r}: classes are whole numbers from 0")
            if isinstance(weight, bool) or not isinstance(weight, Real):
                raise ArgumentError(f"{wanted} the weight {weight!r} for class {label}")
        self._table = torch.ones(
            max(weights) + 2, dtype=torch.float32
        )  # the last entry is for all labels outside the table
        for label, weight in weights.items():
            self._table[label] = float(weight)
        self._placed = self._table
        self._placed_at = HOST
        self.summary = repr(self._table.tolist())  # equal for equal weights

    def weigh(self, batch: Any, placement: Placement) -> tuple[Any, Tensor, Tensor]:
        """Give a batch the weights of its classes, multiplied by its sample weights, if any.

        Args:
            batch: `(x, y)` or `(x, y, sample_weight)`. `y` is labels of shape `(batch,)` or `(batch, time)`, or floats:
                one-hot, shape `(batch, classes)`, or 0.0 and 1.0, shape `(batch,)` or `(batch, 1)`.
            placement: Where the batch is.

        Returns:
            `(x, y, sample_weight)`.

        Raises:
            ArgumentError: The targets are missing, or aren't labels of one output.
        """
        x, y, sample_weight = unpack(batch)
        if not isinstance(y, Tensor):
            raise ArgumentError(
                f"class_weight needs batches (x, y) with one tensor of labels as y, got y = {describe_nest(y)}. For "
                "several outputs let the data yield sample_weight: one tensor for each output"
            )
        if not isinstance(sample_weight, Tensor | None):
            raise ArgumentError(
                f"with class_weight, sample_weight must be one tensor, got {describe_nest(sample_weight)}"
            )
        labels = _to_labels(y)
        if self._placed_at != placement:
            (self._placed,) = to_device([self._table], placement)
            self._placed_at = placement
        last = len(self._table) - 1
        weight = self._placed[torch.where((labels >= 0) & (labels < last), labels, last)]
        return x, y, weight if sample_weight is None else _multiply(weight, sample_weight)


def make_class_weight(weights: Mapping[Any, Any] | str | None, targets: Any = None) -> ClassWeight | None:
    """Return the table of a `class_weight`; None if there are no weights: None or an empty dict, as in Keras."""
    return None if weights is None or (isinstance(weights, dict) and not weights) else ClassWeight(weights, targets)


def _balance(targets: Any) -> dict[int, float]:
    """Compute the weight of each class, rows / (classes * its rows), as `sklearn.utils.class_weight` defines it."""
    if targets is None or isinstance(targets, (Mapping, tuple)):
        raise ArgumentError(
            f"class_weight='balanced' counts the labels of one array y, got y = {describe_nest(targets)}: pass other "
            "data with a dict of weights by class"
        )
    labels = _to_labels(to_host_tensor(targets))
    classes, counts = labels[labels >= 0].unique(return_counts=True)
    return dict(zip(classes.tolist(), (counts.sum() / (len(classes) * counts.double())).tolist(), strict=True))


def _to_labels(y: Tensor) -> Tensor:
    if not y.is_floating_point():
        return y.long()
    if y.dim() == 2 and y.shape[1] > 1:
        return y.argmax(1)
    if y.shape[1:].numel() == 1:
        return y.reshape(-1).round().long()
    raise ArgumentError(
        f"class_weight needs labels: whole numbers, or floats of shape (batch, classes), (batch, 1) or (batch,), got "
        f"floats of shape {tuple(y.shape)}"
    )


def _multiply(first: Tensor, second: Tensor) -> Tensor:
    """Multiply two weights; each has an element for each row, or for each step of a sequence."""
    fewer, more = sorted((first, second.float()), key=Tensor.numel)
    return spread_weights(fewer, more) * more
