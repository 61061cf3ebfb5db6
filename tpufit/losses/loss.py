"""`Loss`: a loss as the step uses it, and the check of labels that the device can't make."""

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from ..data.batches import kind_of, listed
from ..errors import ArgumentError, BatchError, LabelError, UnknownNameError
from ..utils.text import dtype_name
from .averages import NOTHING, Averages, LossWatch, Mean, mean_of, weight_of_classes
from .outputs import Output, aligned, described
from .sample_weights import spread

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

# They compare output and target element by element; PyTorch would broadcast other shapes, and take no whole numbers.
_ELEMENTWISE = (
    *(nn.BCELoss, nn.BCEWithLogitsLoss, nn.HingeEmbeddingLoss, nn.HuberLoss, nn.KLDivLoss, nn.L1Loss, nn.MSELoss),
    *(nn.MultiLabelSoftMarginLoss, nn.PoissonNLLLoss, nn.SmoothL1Loss, nn.SoftMarginLoss),
)

# Labels of a batch whose ends are looked for in a list: of so many, an array takes three times as long.
_SHORT = 256

_LOGITS = "PyTorch's loss takes logits, so the module must not end in softmax or sigmoid."
# Keras's names mean losses of probabilities by default; PyTorch's take logits: say so, never guess.
_KERAS = {
    "sparse_categorical_crossentropy": f"In PyTorch that is 'cross_entropy'. {_LOGITS}",
    "categorical_crossentropy": f"In PyTorch that is 'cross_entropy', with probabilities as targets. {_LOGITS}",
    "binary_crossentropy": f"In PyTorch that is 'binary_cross_entropy_with_logits'. {_LOGITS}",
    "mean_squared_error": "In PyTorch that is 'mse_loss'.",
    "mean_absolute_error": "In PyTorch that is 'l1_loss'.",
    "huber": "In PyTorch that is 'huber_loss'.",
    "kl_divergence": "In PyTorch that is torch.nn.KLDivLoss(reduction='batchmean'), which takes log-probabilities.",
    "poisson": "In PyTorch that is 'poisson_nll_loss', which takes log-rates.",
}


class LabelRange(NamedTuple):
    """The smallest and the largest class label of a batch, and the shape and dtype of its targets."""

    smallest: int
    largest: int
    shape: torch.Size
    dtype: torch.dtype


class Loss:
    """A loss as the step uses it: in float32, weighted by sample if asked, its labels checked on the host.

    Args:
        loss: A name from `torch.nn.functional`, a loss module such as `nn.CrossEntropyLoss(label_smoothing=0.1)`, or
            a function of (prediction, target), in PyTorch's order, that returns a scalar, a loss for each row or
            element, or a pair of losses and their weights, see `mean_of`.
        output: The output that it is for, for errors, where the module has several.

    Attributes:
        modules: The loss itself, if it is a module.
        users: The part of it that may be the user's own code.
        ignored: The label that it leaves out, under the key None, if it has classes. See `LossByOutput.ignored`.

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
                raise UnknownNameError("loss", loss, NAMES, _KERAS.get(loss, ""))
        elif isinstance(loss, type) or not callable(loss):
            raise ArgumentError(
                "loss must be a name, a loss module (an instance, not the class) or a function of (prediction, "
                f"target), got {loss!r}"
            )
        self._name = loss if isinstance(loss, str) else ""
        self._function: Callable[..., Any] = NAMES[loss] if isinstance(loss, str) else loss
        self._of = f"output {output!r}: " if output else ""
        self._module = loss if isinstance(loss, nn.Module) else None
        self.modules = [] if self._module is None else [self._module]
        self.users: Any = self._function
        has_classes = isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)) or self._name in ("cross_entropy", "nll_loss")
        self.ignored: dict[Output | None, int] = {None: getattr(loss, "ignore_index", -100)} if has_classes else {}
        classes = (nn.CrossEntropyLoss, nn.NLLLoss)
        self._known = bool(self._name) or type(loss) in (*_ELEMENTWISE, *classes)
        self._classes = 0  # of the output that labels were last compared with

    def __call__(self, y_pred: Any, y: Any, sample_weight: Tensor | None = None) -> Tensor:
        """Compute the loss of a batch, a scalar, see `measure`."""
        value: Tensor = self.measure(y_pred, y, sample_weight).value
        return value

    def measure(self, y_pred: Any, y: Any, sample_weight: Tensor | None = None) -> Mean:
        """Compute the loss of a batch, and what it is the mean over; an output in bfloat16 is taken to float32.

        The weights are one a row, or one for each element of a sequence. As in Keras, the weighted losses are summed
        and divided by the number of elements, not by the sum of the weights. (Elements whose label is `ignore_index`
        are none.)

        Raises:
            BatchError: Output and targets are of shapes that don't go together.
        """
        y_pred = tree_map(_to_float32, y_pred)
        if self._name and not isinstance(y_pred, Tensor):
            raise ArgumentError(
                f"{self._of}loss={self._name!r} compares one tensor with one target, but the module returns "
                f"{described(y_pred)}. Give each output a loss: loss={{'a': ..., 'b': ...}} or loss=[..., ...]"
            )
        y_pred, y = self._checked(y_pred, y)
        if sample_weight is not None:
            return self._weighed(y_pred, y, sample_weight)
        averages = Averages(None)
        with nullcontext() if self._known else LossWatch(averages, sums=True):
            value = self._compare(self._function, y_pred, y)
        if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], Tensor):
            return mean_of(*value)
        if not isinstance(value, Tensor):
            raise ArgumentError(f"the loss must return a tensor, got {type(value).__name__}")
        if value.dim():
            return mean_of(value)
        reduction = getattr(self._module, "reduction", "mean")
        if reduction == "sum":
            return Mean(value, NOTHING)
        if not self._known:
            return averages.of(value)[0]
        if self.ignored:
            with torch.no_grad():
                return Mean(value, weight_of_classes(y, self.ignored[None], getattr(self._module, "weight", None)))
        return Mean(value, float(len(y_pred) if reduction == "batchmean" else y_pred.numel()))

    def _weighed(self, y_pred: Any, y: Any, sample_weight: Tensor) -> Mean:
        """Compute the loss of a batch with sample weights."""
        each, weights = self._each(y_pred, y)
        factors = spread(sample_weight, each)
        if weights is not None:  # the function's own, which divide, too
            return Mean(mean_of(each * factors, weights).value, mean_of(each, weights).weight)
        value = (each * factors).sum()
        reduction = getattr(self._module, "reduction", "mean")
        if reduction == "sum":
            return Mean(value, NOTHING)
        if reduction == "batchmean":
            return Mean(value / len(each), float(len(each)))
        # PyTorch, without weights, divides by the number of labels that count.
        counts_labels = self.ignored and not y.is_floating_point()
        weight = (y != self.ignored[None]).sum() if counts_labels else float(each.numel())
        return Mean(value / weight, weight)

    def _each(self, y_pred: Any, y: Any) -> tuple[Tensor, Any]:
        """The loss of each row, before any reduction, and the weights that a function gives them, or None."""
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
                "sample_weight needs the loss of each row, but this loss function returns one number. Let it return a "
                "tensor of shape (batch,), or use a loss by name"
            )
        return value, weights

    def _compare(self, function: Callable[..., Any], y_pred: Any, y: Any) -> Any:
        """Call a function on output and target. PyTorch's errors about their shapes name neither."""
        try:
            return function(y_pred, y)
        except (RuntimeError, ValueError) as error:
            if type(error) not in (RuntimeError, ValueError):  # an error with a class of its own is no matter of shapes
                raise
            raise self._misfit(y_pred, y, f"PyTorch says: {error}") from error

    def _checked(self, y_pred: Any, y: Any) -> tuple[Any, Any]:
        """Give output and targets one shape and type where they are compared element by element, and refuse targets of
        classes that PyTorch refuses: XLA takes some of them, and computes NaN.
        """
        if not isinstance(y, Tensor) and (self._name or type(self._module).__module__.startswith("torch.nn.")):
            raise BatchError(
                f"{self._of}the targets must be tensors or arrays of numbers, but the data gave {kind_of(y)}"
            )
        if not isinstance(y_pred, Tensor) or not isinstance(y, Tensor):
            return y_pred, y
        if not self.ignored:
            if self._name or type(self._module) in _ELEMENTWISE:
                y_pred, y = aligned(y_pred, y)
                if y.shape != y_pred.shape:
                    raise self._misfit(y_pred, y, "Expected targets of the output's shape")
                y = y.to(y_pred.dtype)
            return y_pred, y
        classes = (*y_pred.shape[:1], *y_pred.shape[2:]) if y_pred.dim() > 1 else ()
        takes_shares = self._name == "cross_entropy" or isinstance(self._module, nn.CrossEntropyLoss)
        fits = takes_shares and y.shape == y_pred.shape if y.is_floating_point() else tuple(y.shape) == classes
        if not fits:
            other = ", or probabilities of the output's shape" if takes_shares else ""
            raise self._misfit(y_pred, y, f"Expected classes as the targets: whole numbers of shape {classes}{other}")
        return y_pred, y if y.is_floating_point() else y.long()

    def _misfit(self, y_pred: Any, y: Any, said: str) -> BatchError:
        name = self._name or getattr(self._function, "__name__", type(self._function).__name__)
        return BatchError(
            f"{self._of}the loss {name} fails on what the module returns and the targets, which are "
            f"{listed({'output': y_pred, 'target': y})}. {said}"
        )

    def label_range(self, y: Any) -> LabelRange | None:
        """Find the smallest and largest class in a batch of host labels, if this loss has classes.

        Only whole numbers are classes; the ignored label is left out. It is None where there is nothing to check.
        """
        if not self.ignored or not isinstance(y, Tensor):
            return None
        shape = y.shape
        dtype = y.dtype
        if dtype.is_floating_point or y.is_meta or 0 in shape:
            return None
        found = _range(y, self.ignored[None])
        return None if found is None else LabelRange(*found, shape, dtype)

    def forget_classes(self) -> None:
        """Forget the number of classes, which the module may have changed: the next step tells it."""
        self._classes = 0

    def check_labels(self, found: LabelRange | None, y_pred: Any = None) -> None:
        """Raise `LabelError` for a label that is no class of `y_pred`: the device would compute NaN, or nonsense.

        The classes are dimension 1 of the output (0 if it has no other). Left out, it has as many as the last: a
        replayed step has no output to show.
        """
        if found is not None and isinstance(y_pred, Tensor):
            self._classes = y_pred.shape[min(1, y_pred.dim() - 1)]
        if found is None or not self._classes:
            return
        classes = self._classes
        smallest, largest, shape, dtype = found
        if smallest < 0 or largest >= classes:
            of_output: Sequence[int] = y_pred.shape if isinstance(y_pred, Tensor) else [0]
            if len(shape) > 1 and smallest >= 0 and [*of_output[:-1]] == [*shape] and largest < of_output[-1]:
                raise LabelError(
                    f"{self._of}the loss finds {classes} classes in an output of shape {tuple(of_output)}, and "
                    f"label {largest}: PyTorch has the classes in dimension 1. Return the output transposed, "
                    "output.mT, or compile a causal language model of transformers with loss='module'"
                )
            raise LabelError(
                f"{self._of}label {largest if largest >= classes else smallest} is outside the module's {classes} "
                f"classes (0 to {classes - 1}), in a batch of targets of shape {tuple(shape)}, {dtype_name(dtype)}. "
                "Number the classes from 0, give the last layer more outputs, or mark what shall not count with "
                f"ignore_index ({self.ignored[None]})"
            )


def _range(y: Tensor, ignored: int) -> tuple[int, int] | None:
    """The smallest and largest class, or None if all labels are ignored."""
    found = _ends(y)
    if ignored not in found:
        return found
    labels = y.numpy()
    kept = torch.from_numpy(labels[labels != ignored])
    return _ends(kept) if len(kept) else None


def _ends(y: Tensor) -> tuple[int, int]:
    """The smallest and largest, as fast as can be between two steps, which leave other code in the caches."""
    shape = y.shape
    if len(shape) == 1 and shape[0] <= _SHORT:
        labels = y.tolist()
        return int(min(labels)), int(max(labels))
    array = y.numpy()
    # The ufuncs themselves: `min` and `max` go through Python.
    return int(np.minimum.reduce(array, axis=None)), int(np.maximum.reduce(array, axis=None))


def _to_float32(leaf: Any) -> Any:
    return leaf.float() if isinstance(leaf, Tensor) and leaf.dtype is torch.bfloat16 else leaf
