"""`Averages`: what the losses of a step are means over. Batches count by it wherever they are put together."""

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
from .outputs import described
from .sample_weights import spread

# The number of rows, elements or labels, or the sum of their weights, on the device. A sum over rows is over "nothing".
Weight = Tensor | float | str
NOTHING = "nothing"


class Mean(NamedTuple):
    """A number of a batch, and what it is the mean over."""

    value: Any  # a tensor; that of a log may be a number
    weight: Weight | None  # None if it is not known


def mean_of(values: Tensor, weights: Any = None) -> Mean:
    """Average the losses of rows or elements by their weights. One number is the mean over its weight already.

    Raises:
        ArgumentError: The weights are of a shape that fits no rows or elements.

    Example:
        >>> [float(part) for part in mean_of(torch.tensor([1.0, 4.0]), torch.tensor([True, False]))]
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
            f"{described(weights)}"
        )
    weights = spread(weights, values).detach().expand_as(values)
    total = weights.sum()
    # What doesn't count may be infinite.
    return Mean((values.masked_fill(weights == 0, 0) * weights).sum() / total, total)


def weight_of_classes(y: Tensor, ignored: int, weight: Tensor | None = None) -> Weight:
    """Count the labels that a loss of classes doesn't leave out, or sum up the weights of their classes.

    Example:
        >>> y = torch.tensor([0, 2, -100])
        >>> int(weight_of_classes(y, -100)), float(weight_of_classes(y, -100, torch.tensor([0.5, 1.0, 3.0])))
        (2, 3.5)
    """
    if y.is_floating_point():  # shares of classes, whose weights PyTorch doesn't divide by
        return float(y.numel() // y.shape[min(1, y.dim() - 1)])
    # In the words of our own kernel of the loss, so that the compiler finds that it has the count already.
    labels = y.to(COUNTS if abs(ignored) < torch.iinfo(COUNTS).max else torch.int64)
    left_out = labels == labels.new_full((), ignored)
    if weight is None:
        return (~left_out).sum(dtype=COUNTS)
    others = torch.arange(len(weight), dtype=labels.dtype, device=y.device) != labels.unsqueeze(-1)
    weights = weight.detach().float().expand(others.shape).masked_fill(others, 0).sum(-1)
    return weights.masked_fill(left_out, 0).sum()


class Averages:
    """What the losses of one step are means over, by the tensors themselves.

    Args:
        rows: What counts where nothing else is known: the rows of the step's targets; None leaves that open.

    Example:
        >>> averages, loss = Averages(8), torch.ones(())
        >>> averages.note(loss, [mean_of(loss, 5)])
        >>> averages.of(loss)[0].weight, averages.of(loss + 1)[0].weight, Averages(8).of(loss)[0].weight
        (5, 5, 8)
    """

    def __init__(self, rows: float | None) -> None:
        self._rows = rows
        self._noted: list[tuple[Tensor, list[Mean]]] = []
        self._taken: list[Tensor] = []

    def note(self, loss: Tensor, means: Sequence[Mean]) -> None:
        """Note that a loss is the sum of some means; those over the same are put together."""
        together: list[Mean] = []
        for mean in means:
            place = next((i for i, own in enumerate(together) if _same(own.weight, mean.weight)), None)
            if place is None:
                together.append(mean)
            else:
                together[place] = Mean(together[place].value + mean.value, mean.weight)
        if len(together) == 1:
            together = [Mean(loss, together[0].weight)]
        self._noted = [pair for pair in self._noted if pair[0] is not loss] + [(loss, together)]

    def of(self, value: Any) -> list[Mean]:
        """Return the means whose sum is a value of the step.

        One that was not noted is a mean over what the noted means are over, if that is the same for all; else over
        rows.
        """
        for noted, means in self._noted:
            if noted is value:
                return means
        found = [mean.weight for _, means in self._noted for mean in means]
        weights = [weight for weight in found if not isinstance(weight, str)]
        only = weights[0] if weights and all(_same(weights[0], weight) for weight in weights[1:]) else self._rows
        return [Mean(value, only)]

    def note_copy(self, loss: Tensor, copy: Tensor) -> None:
        """Note that a tensor is a loss without its history."""
        self._noted += [(copy, means) for noted, means in self._noted if noted is loss]

    def take(self, loss: Tensor) -> None:
        """Note that the user's own Python has computed the gradients of a loss."""
        self._taken.append(loss)

    def pop_weight(self) -> Weight | None:
        """Return what the losses taken so far are means over, all together, and forget these losses."""
        found = [mean.weight for loss in self._taken for mean in self.of(loss)]
        self._taken = []
        alike = found and all(_same(found[0], weight) for weight in found[1:])
        return found[0] if alike else self.of(None)[0].weight if not found else self._rows


class LossWatch(TorchFunctionMode):
    """A context for Python that is not ours, in which PyTorch's own losses note what they are means over.

    Sums are left out unless wanted: they may be divided by anything later on.
    """

    def __init__(self, averages: Averages, sums: bool = False) -> None:
        super().__init__()
        self._averages = averages
        self._sums = sums

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in _LOSSES and isinstance(result, Tensor) and result.dim() == 0:
            weight = _weight_of_call(func, inspect.signature(func).bind(*args, **kwargs).arguments)
            if weight is not None and (self._sums or not isinstance(weight, str)):
                self._averages.note(result, [Mean(result, weight)])
        elif func is Tensor.backward:
            self._averages.take(args[0])
        elif func is Tensor.detach and args[0].dim() == 0:
            self._averages.note_copy(args[0], result)
        return result


_OF_LABELS = (F.cross_entropy, F.nll_loss)
_OF_WEIGHTED_ELEMENTS = (F.huber_loss, F.l1_loss, F.mse_loss)  # their mean is over their weights, if they have some
_LOSSES = {
    *_OF_LABELS,
    *_OF_WEIGHTED_ELEMENTS,
    *(F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.gaussian_nll_loss, F.hinge_embedding_loss),
    *(F.kl_div, F.multilabel_soft_margin_loss, F.poisson_nll_loss, F.smooth_l1_loss, F.soft_margin_loss),
}


def _weight_of_call(function: Callable[..., Any], given: Mapping[str, Any]) -> Weight | None:
    """Find what the result of one of `_LOSSES` is the mean over; None if that is not known."""
    input, target, weight = given["input"], given["target"], given.get("weight")
    reduction = given.get("reduction", "mean")
    if given.get("size_average") is not None or given.get("reduce") is not None:  # from before `reduction`
        return None
    if reduction == "sum":
        return NOTHING
    if reduction == "batchmean":
        return float(len(input))
    with torch.no_grad():
        if function in _OF_LABELS:
            return weight_of_classes(target, given.get("ignore_index", -100), weight)
        if function in _OF_WEIGHTED_ELEMENTS and weight is not None:
            total: Tensor = weight.float().expand_as(input).sum()
            return total
        return float(torch.broadcast_shapes(input.shape, target.shape).numel())


def _same(one: Weight | None, other: Weight | None) -> bool:
    alike = one is other
    return alike or (not isinstance(one, Tensor) and not isinstance(other, Tensor) and one == other)
