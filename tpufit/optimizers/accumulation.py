"""Gradient accumulation: which batches make the optimizer step, and the sums of gradients until then."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .build import PerParameter


class UpdatePlan(NamedTuple):
    """What a step does after accumulating gradients. Each plan has its own graph."""

    takes_step: bool = True  # with `accumulate_steps=n` only at the last of n batches
    overwrites: bool = False  # the moving averages then overwrite the weights


def plan_updates(
    steps: int, last: bool, accumulate_steps: int, overwrite_frequency: int | None, waiting: int, updates: int
) -> list[UpdatePlan]:
    """Plan how the next steps use their gradients.

    Args:
        steps: The number of steps.
        last: True if the last of them ends the epoch and so uses all gradients.
        accumulate_steps: The number of batches for each step of the optimizer.
        overwrite_frequency: The number of optimizer steps until averages overwrite the weights; None: never.
        waiting: The number of batches since the last optimizer step.
        updates: The number of optimizer steps so far.

    Example:
        >>> [plan.takes_step for plan in plan_updates(5, True, 2, None, 0, 0)]
        [False, True, False, True, True]
    """
    plans = []
    for i in range(steps):
        takes_step = waiting + 1 == accumulate_steps or (last and i == steps - 1)
        waiting, updates = (0, updates + 1) if takes_step else (waiting + 1, updates)
        overwrites = takes_step and overwrite_frequency is not None and updates % overwrite_frequency == 0
        plans.append(UpdatePlan(takes_step, overwrites))
    return plans


class Accumulator(PerParameter):
    """The accumulated gradients of an optimizer's parameters, on the device: a part of the training state.

    A batch's weight is the denominator of its mean loss, so the result equals that of one batch with all rows.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        # The number is the sum of the batches' weights, by default their rows.
        super().__init__(optimizer, _zeros, ".rows")

    def add(self, weight: Tensor | float | None) -> set[nn.Parameter]:
        """Add the gradients of a loss, inside a step: of a mean over `weight`, or of a sum if `weight` is None.

        Returns:
            The parameters that have a gradient.
        """
        self.extend()
        gradients = {p: p.grad for p in self._tensors if p.grad is not None}  # ordered, as hosts need equal graphs
        if isinstance(weight, Tensor):
            weight = weight.float()
            self._number.add_(weight)
        elif weight is None:
            self._number.fill_(1)  # `release` divides by it
        else:
            self._number.add_(weight)
        for parameter, gradient in gradients.items():
            total = self._tensors[parameter]
            if isinstance(weight, Tensor):  # a mean over a weight of 0 is NaN, and its gradient may be NaN
                total.add_((gradient.to(total.dtype) * weight).masked_fill(weight == 0, 0))
            else:
                total.add_(gradient, alpha=1 if weight is None else weight)
        return set(gradients)

    def release(self, parameters: set[nn.Parameter]) -> None:
        """Add the mean over all batches to the gradients of some parameters, and clear all sums, inside a step."""
        weight = self._number.masked_fill(self._number == 0, 1)
        for parameter, total in self._tensors.items():
            if parameter in parameters:
                mean = (total / weight).reshape(total.shape).to(parameter.dtype)  # reshaped for scalar parameters
                parameter.grad = mean if parameter.grad is None else parameter.grad + mean
            total.zero_()
        self._number.zero_()


def _zeros(parameter: Tensor) -> Tensor:
    """Return zeros in at least float32, complex for a complex parameter."""
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
