"""`Averages`: the denominators of a step's mean losses, which are a batch's weight wherever batches are averaged."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..errors import ArgumentError
from ..runtime import COUNTS
from .outputs import describe_nest
from .sample_weights import spread_weights

# The number of rows, elements or labels, or the sum of their weights, possibly on the device; "nothing" for a sum.
Weight = Tensor | float | str
NOTHING = "nothing"


class Mean(NamedTuple):
    """A mean value of a batch, and its denominator."""

    value: Any  # a tensor; a log may be a number
    weight: Weight | None  # None if unknown


def weighted_mean(values: Tensor, weights: Any = None) -> Mean:
    """Average the losses of rows or elements by their weights. A scalar is taken as the mean over its weight.

    Raises:
        ArgumentError: The weights fit neither rows nor elements.

    Example:
        >>> [float(part) for part in weighted_mean(torch.tensor([1.0, 4.0]), torch.tensor([True, False]))]
        [1.0, 1.0]
    """
    if values.dim() == 0:
        return Mean(values, weights.detach().float() if isinstance(weights, Tensor) else weights)
    if weights is None:
        return Mean(values.mean(), float(values.numel()))
    fits = isinstance(weights, Tensor) and (
        weights.shape == values.shape[: weights.dim()] or weights.shape == (len(values), *(1,) * (weights.dim() - 1))
    )
    if not fits:
        raise ArgumentError(
            f"losses of shape {tuple(values.shape)} need weights of their shape or of shape ({len(values)},), got "
            f"{describe_nest(weights)}"
        )
    weights = spread_weights(weights, values).detach().expand_as(values)
    total = weights.sum()
    # Losses with a weight of 0 may be infinite.
    return Mean((values.masked_fill(weights == 0, 0) * weights).sum() / total, total)


def sum_label_weights(y: Tensor, ignored: int, weight: Tensor | None = None) -> Weight:
    """Count the labels that a loss of classes doesn't ignore, or sum the weights of their classes.

    Example:
        >>> y = torch.tensor([0, 2, -100])
        >>> int(sum_label_weights(y, -100)), float(sum_label_weights(y, -100, torch.tensor([0.5, 1.0, 3.0])))
        (2, 3.5)
    """
    if y.is_floating_point():  # probabilities of classes; PyTorch then doesn't divide by the weights
        return float(y.numel() // y.shape[min(1, y.dim() - 1)])
    # Written as in our kernel of the loss, so that the compiler reuses the count.
    labels = y.to(COUNTS if abs(ignored) < torch.iinfo(COUNTS).max else torch.int64)
    is_ignored = labels == labels.new_full((), ignored)
    if weight is None:
        return (~is_ignored).sum(dtype=COUNTS)
    others = torch.arange(len(weight), dtype=labels.dtype, device=y.device) != labels.unsqueeze(-1)
    weights = weight.detach().float().expand(others.shape).masked_fill(others, 0).sum(-1)
    return weights.masked_fill(is_ignored, 0).sum()


class Averages:
    """The denominators of one step's mean losses, found by the identity of their tensors.

    Args:
        rows: The denominator where no other is known: the number of rows of the step's targets; None for unknown.

    Example:
        >>> averages, loss = Averages(8), torch.ones(())
        >>> averages.note(loss, [weighted_mean(loss, 5)])
        >>> averages.of(loss)[0].weight, averages.of(loss + 1)[0].weight, Averages(8).of(loss)[0].weight
        (5, 5, 8)
    """

    def __init__(self, rows: float | None) -> None:
        self._rows = rows
        self._noted: list[tuple[Tensor, list[Mean]]] = []
        self._differentiated: list[Tensor] = []

    def note(self, loss: Tensor, means: Sequence[Mean]) -> None:
        """Note that a loss is the sum of some means; means over the same weight are added up."""
        added: list[Mean] = []
        for mean in means:
            at = next((i for i, other in enumerate(added) if _is_same(other.weight, mean.weight)), None)
            if at is None:
                added.append(mean)
            else:
                added[at] = Mean(added[at].value + mean.value, mean.weight)
        if len(added) == 1:
            added = [Mean(loss, added[0].weight)]
        self._noted = [pair for pair in self._noted if pair[0] is not loss] + [(loss, added)]

    def of(self, value: Any) -> list[Mean]:
        """Return the means whose sum is a value of the step.

        A value that was not noted is taken as a mean over the weight of all noted means if they share one, else over
        rows.
        """
        for noted, means in self._noted:
            if noted is value:
                return means
        noted_weights = [mean.weight for _, means in self._noted for mean in means]
        weights = [weight for weight in noted_weights if not isinstance(weight, str)]
        only = weights[0] if weights and all(_is_same(weights[0], weight) for weight in weights[1:]) else self._rows
        return [Mean(value, only)]

    def note_copy(self, loss: Tensor, copy: Tensor) -> None:
        """Note that a tensor is a detached loss."""
        self._noted += [(copy, means) for noted, means in self._noted if noted is loss]

    def note_backward(self, loss: Tensor) -> None:
        """Note that the user's Python has computed the gradients of a loss."""
        self._differentiated.append(loss)

    def pop_weight(self) -> Weight | None:
        """Return the common weight of the losses whose gradients were computed, and forget these losses."""
        weights = [mean.weight for loss in self._differentiated for mean in self.of(loss)]
        self._differentiated = []
        if not weights:
            return self.of(None)[0].weight
        return weights[0] if all(_is_same(weights[0], weight) for weight in weights[1:]) else self._rows


class LossWatch(TorchFunctionMode):
    """A context for the user's Python, in which PyTorch's losses note their denominators.

    Sums are noted only with `sums`, because the user's Python may divide them by anything. Inside a transform of
    `torch.func` nothing is noted: its tensors exist only there.
    """

    def __init__(self, averages: Averages, sums: bool = False) -> None:
        super().__init__()
        self._averages = averages
        self._sums = sums

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if torch._C._are_functorch_transforms_active():
            return result
        if func in _LOSSES and isinstance(result, Tensor) and result.dim() == 0:
            weight = _weight_of_call(func, inspect.signature(func).bind(*args, **kwargs).arguments)
            if weight is not None and (self._sums or not isinstance(weight, str)):
                self._averages.note(result, [Mean(result, weight)])
        elif func is Tensor.backward:
            self._averages.note_backward(args[0])
        elif func is Tensor.detach and args[0].dim() == 0:
            self._averages.note_copy(args[0], result)
        return result


_OF_LABELS = (F.cross_entropy, F.nll_loss)
_OF_WEIGHTED_ELEMENTS = (F.huber_loss, F.l1_loss, F.mse_loss)  # with `weight`, they divide by the sum of the weights
_LOSSES = {
    *_OF_LABELS,
    *_OF_WEIGHTED_ELEMENTS,
    *(F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.gaussian_nll_loss, F.hinge_embedding_loss),
    *(F.kl_div, F.multilabel_soft_margin_loss, F.poisson_nll_loss, F.smooth_l1_loss, F.soft_margin_loss),
}


def _weight_of_call(function: Callable[..., Any], given: Mapping[str, Any]) -> Weight | None:
    """Find the denominator of the result of one of `_LOSSES`; None if unknown."""
    input, target, weight = given["input"], given["target"], given.get("weight")
    reduction = given.get("reduction", "mean")
    if given.get("size_average") is not None or given.get("reduce") is not None:  # predecessors of `reduction`
        return None
    if reduction == "sum":
        return NOTHING
    if reduction == "batchmean":
        return float(len(input))
    with torch.no_grad():
        if function in _OF_LABELS:
            return sum_label_weights(target, given.get("ignore_index", -100), weight)
        if function in _OF_WEIGHTED_ELEMENTS and weight is not None:
            total: Tensor = weight.float().expand_as(input).sum()
            return total
        return float(torch.broadcast_shapes(input.shape, target.shape).numel())


def _is_same(first: Weight | None, second: Weight | None) -> bool:
    # Tensors are compared by identity, because comparing values would wait for the device.
    return first is second or (not isinstance(first, Tensor) and not isinstance(second, Tensor) and first == second)
