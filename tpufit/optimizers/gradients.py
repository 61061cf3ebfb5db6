"""Gradient accumulation and clipping, between the backward pass and the optimizer's step."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import ArgumentError, require_number, require_whole
from .build import PerParameter


class UpdatePlan(NamedTuple):
    """What a step does after accumulating gradients. Each plan has its own graph."""

    takes_step: bool = True  # with `accumulate_steps=n` only at the last of n batches
    overwrites: bool = False  # the moving averages then overwrite the weights


@dataclass(frozen=True)
class GradientConfig:
    """The options of `compile` for accumulation and clipping.

    Raises:
        ArgumentError: A value is out of range, or more than one kind of clipping is given.
    """

    accumulate_steps: int = 1  # batches for each step of the optimizer
    clip_norm: float | None = None  # the largest norm of each parameter's gradient
    clip_value: float | None = None  # the largest absolute value of each element
    global_clip_norm: float | None = None  # the largest norm of all gradients together

    def __post_init__(self) -> None:
        object.__setattr__(self, "accumulate_steps", require_whole("accumulate_steps", self.accumulate_steps))
        limits = {name: getattr(self, name) for name in ("clip_norm", "clip_value", "global_clip_norm")}
        given = {name: limit for name, limit in limits.items() if limit is not None}
        if len(given) > 1:
            raise ArgumentError(f"only one of {', '.join(limits)} can be given, got {given}")
        for name, limit in given.items():
            object.__setattr__(self, name, require_number(name, limit, "a number above 0", lambda most: most > 0))

    def clip(self, parameters: Iterable[nn.Parameter]) -> None:
        """Clip the gradients, inside a step. On several cores the gradients are already the whole batch's.

        Source: `torch.nn.utils.clip_grad_norm_` and `clip_grad_value_`.
        """
        with_gradient = [p for p in parameters if p.grad is not None]
        if self.clip_value is not None:
            nn.utils.clip_grad_value_(with_gradient, self.clip_value, foreach=False)
        if self.clip_norm is not None:
            for parameter in with_gradient:
                nn.utils.clip_grad_norm_(parameter, self.clip_norm, foreach=False)
        if self.global_clip_norm is not None:
            nn.utils.clip_grad_norm_(with_gradient, self.global_clip_norm, foreach=False)


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
