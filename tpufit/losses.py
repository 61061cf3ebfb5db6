"""Losses: PyTorch's, by name or as objects, and the check of class labels that the device can't make."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from .errors import ArgumentError, LabelError, NotCompiledError, UnknownNameError

LossArgument = str | nn.Module | Callable[[Any, Any], Tensor]

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


class Loss:
    """A loss as the step uses it: in float32, weighted by sample if asked, its labels checked on the host.

    Args:
        loss: A name from `torch.nn.functional`, a loss module such as `nn.CrossEntropyLoss(label_smoothing=0.1)`, or
            a function of (prediction, target), in PyTorch's order, that returns a scalar.

    Raises:
        UnknownNameError: Nothing goes by that name; Keras's names are answered with PyTorch's.
        ArgumentError: Not a loss at all.

    Example:
        >>> import torch
        >>> float(Loss("mse_loss")(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 1.0])))
        2.0
    """

    def __init__(self, loss: LossArgument) -> None:
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
        named = isinstance(loss, str)
        self._reducible = named or (self.module is not None and hasattr(self.module, "reduction"))
        self._checks_labels = (named and self.function in _CLASS_LOSSES) or isinstance(
            self.module, (nn.CrossEntropyLoss, nn.NLLLoss)
        )
        self.ignore_index = int(getattr(self.module, "ignore_index", -100))
        self._output: tuple[int, ...] = ()  # the shape of the output that labels were last compared with

    def __call__(self, y_pred: Any, y: Any, sample_weight: Tensor | None = None) -> Tensor:
        """The loss of a batch, a scalar.

        Args:
            y_pred: What the module returned, e.g. logits of shape `(batch, classes)`; bfloat16 is taken to float32.
            y: The targets, e.g. classes of shape `(batch,)`.
            sample_weight: One weight a row, shape `(batch,)`. As in Keras, the weighted losses are summed and divided
                by the number of rows, not by the sum of the weights.
        """
        y_pred = tree_map(_to_float32, y_pred)
        if sample_weight is None:
            value = self.function(y_pred, y)
        else:
            reduction = getattr(self.module, "reduction", "mean")
            each = self._each(y_pred, y)
            if each.dim() > 1:
                each = each.flatten(1).mean(1) if reduction == "mean" else each.flatten(1).sum(1)
            weighted = each * sample_weight.to(each.dtype).reshape(-1)
            value = weighted.sum() if reduction == "sum" else weighted.mean()
        if not isinstance(value, Tensor):
            raise ArgumentError(f"the loss must return a tensor, got {type(value).__name__}")
        return value if value.dim() == 0 else value.mean()

    def _each(self, y_pred: Any, y: Any) -> Tensor:
        """The loss of each row, before any reduction."""
        if not self._reducible:
            value: Tensor = self.function(y_pred, y)
            if value.dim() == 0:
                raise ArgumentError(
                    "sample_weight needs the loss of each row, but this loss function returns one number. Let it "
                    "return a tensor of shape (batch,), or use a loss by name"
                )
            return value
        if self.module is None:
            each: Tensor = self.function(y_pred, y, reduction="none")
            return each
        module: Any = copy.copy(self.module)
        module.reduction = "none"
        return module(y_pred, y)  # type: ignore[no-any-return]

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
                f"label {largest if largest >= classes else smallest} is outside the module's {classes} classes (0 to "
                f"{classes - 1}), from an output of shape {self._output}. Number the classes from 0, give the last "
                f"layer more outputs, or mark what shall not count with ignore_index ({self.ignore_index})"
            )


def required(loss: Loss | None, method: str) -> Loss:
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
