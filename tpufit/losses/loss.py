"""`Loss`: a loss as the step uses it."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from ..data.batches import describe_value, list_tensors
from ..errors import ArgumentError, BatchError, UnknownNameError
from ..utils.text import find_answer, match_known_name
from .averages import NOTHING, Averages, LossWatch, Mean, sum_label_weights, weighted_mean
from .elementwise import log_cosh, percentage_error, squared_log_error, with_reduction
from .keras_names import NEAREST
from .labels import LabelRange, check_label_range, find_label_range
from .outputs import Output, align, describe_nest
from .sample_weights import spread_weights

OneLoss = str | nn.Module | Callable[[Any, Any], Tensor]

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
# Keras's names of losses of numbers. Its names of losses of probabilities raise an error, see `keras_names.py`.
NAMES |= {"huber": F.huber_loss, "mean_absolute_error": F.l1_loss, "mean_squared_error": F.mse_loss}
NAMES |= {
    **dict.fromkeys(("mape", "mean_absolute_percentage_error"), with_reduction(percentage_error)),
    **dict.fromkeys(("msle", "mean_squared_logarithmic_error"), with_reduction(squared_log_error)),
    "log_cosh": with_reduction(log_cosh),
}

# Losses of elements, for which PyTorch would broadcast different shapes, and which take no whole numbers.
_ELEMENTWISE = (
    *(nn.BCELoss, nn.BCEWithLogitsLoss, nn.HingeEmbeddingLoss, nn.HuberLoss, nn.KLDivLoss, nn.L1Loss, nn.MSELoss),
    *(nn.MultiLabelSoftMarginLoss, nn.PoissonNLLLoss, nn.SmoothL1Loss, nn.SoftMarginLoss),
)


class Loss:
    """A loss as the step uses it: in float32, with sample weights if given, and labels checked on the host.

    Args:
        loss: A name in `NAMES`, a loss module such as `nn.CrossEntropyLoss(label_smoothing=0.1)`, or a function of
            (prediction, target), in PyTorch's order, that returns a scalar, a loss for each row or element, or a pair
            of losses and their weights, see `weighted_mean`.
        output: The name of the output for errors (default "": the only output).

    Attributes:
        modules: The loss itself, if it is a module.
        user_code: The part of the loss that may be the user's code.
        ignored: For a loss of classes, the label that it ignores, under the key None. See `LossByOutput.ignored`.

    Raises:
        UnknownNameError: No loss has this name; for Keras's names the error gives PyTorch's.
        ArgumentError: The argument isn't a loss.

    Example:
        >>> import torch
        >>> float(Loss("mse_loss")(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 1.0])))
        2.0
    """

    def __init__(self, loss: OneLoss, output: str = "") -> None:
        if isinstance(loss, str):
            loss = match_known_name(loss, NAMES)
            if loss not in NAMES:
                raise UnknownNameError("loss", loss, NAMES, find_answer(loss, NEAREST))
        elif isinstance(loss, type) or not callable(loss):
            raise ArgumentError(
                "loss must be a name, a loss module (an instance, not the class) or a function of (prediction, "
                f"target), got {loss!r}"
            )
        self._name = loss if isinstance(loss, str) else ""
        self._function: Callable[..., Any] = NAMES[loss] if isinstance(loss, str) else loss
        self._prefix = f"output {output!r}: " if output else ""
        self._module = loss if isinstance(loss, nn.Module) else None
        self.modules = [] if self._module is None else [self._module]
        self.user_code: Any = self._function
        has_classes = isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)) or self._name in ("cross_entropy", "nll_loss")
        self.ignored: dict[Output | None, int] = {None: getattr(loss, "ignore_index", -100)} if has_classes else {}
        classes = (nn.CrossEntropyLoss, nn.NLLLoss)
        self._known = bool(self._name) or type(loss) in (*_ELEMENTWISE, *classes)
        self._classes = 0  # the number of classes of the last output that labels were compared with

    def __call__(self, y_pred: Any, y: Any, sample_weight: Tensor | None = None) -> Tensor:
        """Compute the loss of a batch, a scalar, see `measure`."""
        value: Tensor = self.measure(y_pred, y, sample_weight).value
        return value

    def measure(self, y_pred: Any, y: Any, sample_weight: Tensor | None = None) -> Mean:
        """Compute the loss of a batch, and its denominator; bfloat16 outputs become float32.

        There is a sample weight for each row, or for each element of a sequence. As in Keras, the sum of the weighted
        losses is divided by the number of elements, not by the sum of the weights. Elements with the label
        `ignore_index` aren't counted.

        Raises:
            BatchError: The shapes of output and targets don't fit.
        """
        y_pred = tree_map(_to_float32, y_pred)
        if self._name and not isinstance(y_pred, Tensor):
            raise ArgumentError(
                f"{self._prefix}loss={self._name!r} compares one tensor with one target, but the module returns "
                f"{describe_nest(y_pred)}. Give each output a loss: loss={{'a': ..., 'b': ...}} or loss=[..., ...]"
            )
        y_pred, y = self._check(y_pred, y)
        if sample_weight is not None:
            return self._measure_weighted(y_pred, y, sample_weight)
        averages = Averages(None)
        with nullcontext() if self._known else LossWatch(averages, sums=True):
            value = self._compare(self._function, y_pred, y)
        if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], Tensor):
            return weighted_mean(*value)
        if not isinstance(value, Tensor):
            raise ArgumentError(f"the loss must return a tensor, got {type(value).__name__}")
        if value.dim():
            return weighted_mean(value)
        reduction = getattr(self._module, "reduction", "mean")
        if reduction == "sum":
            return Mean(value, NOTHING)
        if not self._known:
            return averages.of(value)[0]
        if self.ignored:
            with torch.no_grad():
                return Mean(value, sum_label_weights(y, self.ignored[None], getattr(self._module, "weight", None)))
        return Mean(value, float(len(y_pred) if reduction == "batchmean" else y_pred.numel()))

    def _measure_weighted(self, y_pred: Any, y: Any, sample_weight: Tensor) -> Mean:
        """Compute the loss of a batch with sample weights."""
        each, weights = self._compute_row_losses(y_pred, y)
        factors = spread_weights(sample_weight, each)
        if weights is not None:  # returned by the loss function; the sum is divided by these
            return Mean(weighted_mean(each * factors, weights).value, weighted_mean(each, weights).weight)
        value = (each * factors).sum()
        reduction = getattr(self._module, "reduction", "mean")
        if reduction == "sum":
            return Mean(value, NOTHING)
        if reduction == "batchmean":
            return Mean(value / len(each), float(len(each)))
        # Without sample weights, PyTorch divides by the number of labels that aren't ignored.
        counts_labels = self.ignored and not y.is_floating_point()
        weight = (y != self.ignored[None]).sum() if counts_labels else float(each.numel())
        return Mean(value / weight, weight)

    def _compute_row_losses(self, y_pred: Any, y: Any) -> tuple[Tensor, Any]:
        """Compute the loss of each row, without reduction, and the weights that a loss function returns, or None."""
        function: Any = self._function
        if self._name:
            function = partial(function, reduction="none")
        elif hasattr(self._module, "reduction"):
            function = copy.copy(self._module)
            function.reduction = "none"
        value: Any = self._compare(function, y_pred, y)
        value, weights = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
        if value.dim() == 0 and function is self._function:
            raise ArgumentError(
                "sample_weight needs the loss of each row, but this loss function returns one number. Return a tensor "
                "of shape (batch,), or use a loss by name"
            )
        return value, weights

    def _compare(self, function: Callable[..., Any], y_pred: Any, y: Any) -> Any:
        """Call a function on output and target, and name both in an error about their shapes, as PyTorch doesn't."""
        try:
            return function(y_pred, y)
        except (RuntimeError, ValueError) as error:
            if type(error) not in (RuntimeError, ValueError):  # subclasses aren't errors about shapes
                raise
            raise self._shape_error(y_pred, y, f"PyTorch says: {error}") from error

    def _check(self, y_pred: Any, y: Any) -> tuple[Any, Any]:
        """Check the targets, and return output and targets, for an elementwise loss in one shape and dtype.

        Targets of classes that PyTorch refuses are refused here, because for some of them XLA would compute NaN.
        """
        if not isinstance(y, Tensor) and (self._name or type(self._module).__module__.startswith("torch.nn.")):
            raise BatchError(
                f"{self._prefix}the targets must be tensors or arrays of numbers, but the data gave {describe_value(y)}"
            )
        if not isinstance(y_pred, Tensor) or not isinstance(y, Tensor):
            return y_pred, y
        if not self.ignored:
            if self._name or type(self._module) in _ELEMENTWISE:
                y_pred, y = align(y_pred, y)
                if y.shape != y_pred.shape:
                    raise self._shape_error(y_pred, y, "Expected targets of the output's shape")
                y = y.to(y_pred.dtype)
            return y_pred, y
        classes = (*y_pred.shape[:1], *y_pred.shape[2:]) if y_pred.dim() > 1 else ()
        takes_probabilities = self._name == "cross_entropy" or isinstance(self._module, nn.CrossEntropyLoss)
        fits = takes_probabilities and y.shape == y_pred.shape if y.is_floating_point() else tuple(y.shape) == classes
        if not fits:
            other = ", or probabilities of the output's shape" if takes_probabilities else ""
            raise self._shape_error(
                y_pred, y, f"Expected classes as the targets: whole numbers of shape {classes}{other}"
            )
        return y_pred, y if y.is_floating_point() else y.long()

    def _shape_error(self, y_pred: Any, y: Any, reason: str) -> BatchError:
        name = self._name or getattr(self._function, "__name__", type(self._function).__name__)
        return BatchError(
            f"{self._prefix}the loss {name} fails on the module's output and the targets, which are "
            f"{list_tensors({'output': y_pred, 'target': y})}. {reason}"
        )

    def label_range(self, y: Any) -> LabelRange | None:
        """Find the smallest and largest class in a batch of host labels, if this loss has classes.

        Only whole numbers are classes; the ignored label is left out. None if there is nothing to check.
        """
        return find_label_range(y, self.ignored[None]) if self.ignored and isinstance(y, Tensor) else None

    def forget_classes(self) -> None:
        """Forget the number of classes, because the module may have changed; the next step sets it."""
        self._classes = 0

    def check_labels(self, labels: LabelRange | None, y_pred: Any = None) -> None:
        """Raise `LabelError` for a label that isn't a class of `y_pred`: the device would compute NaN or nonsense.

        The classes are dimension 1 of the output, or dimension 0 of a vector. Without `y_pred`, which a replayed step
        doesn't have, the number of classes is that of the last output.
        """
        if labels is not None and isinstance(y_pred, Tensor):
            self._classes = y_pred.shape[min(1, y_pred.dim() - 1)]
        if labels is None or not self._classes:
            return
        output_shape = y_pred.shape if isinstance(y_pred, Tensor) else None
        check_label_range(labels, self._classes, output_shape, self.ignored[None], self._prefix)


def _to_float32(leaf: Any) -> Any:
    return leaf.float() if isinstance(leaf, Tensor) and leaf.dtype is torch.bfloat16 else leaf
