"""Gradients between the backward pass and the optimizer's step: summed over batches, and clipped."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import ArgumentError, require_number, require_whole
from .build import PerParameter


class UpdatePlan(NamedTuple):
    """The part of an update that a step makes after adding up gradients. Each plan has a graph of its own."""

    takes_step: bool = True  # with `accumulate_steps=n` at the last of n batches
    overwrites: bool = False  # then the weights become their own moving average


@dataclass(frozen=True)
class GradientConfig:
    """The options of `compile` for gradients.

    Raises:
        ArgumentError: A value is out of range, or there is more than one kind of clipping.
    """

    accumulate_steps: int = 1  # batches that make one step of the optimizer
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
        """Clip the gradients, inside a step. On several cores they are those of the whole batch by then.

        Source: `torch.nn.utils.clip_grad_norm_` and `clip_grad_value_`.
        """
        having = [p for p in parameters if p.grad is not None]
        if self.clip_value is not None:
            nn.utils.clip_grad_value_(having, self.clip_value, foreach=False)
        if self.clip_norm is not None:
            for parameter in having:
                nn.utils.clip_grad_norm_(parameter, self.clip_norm, foreach=False)
        if self.global_clip_norm is not None:
            nn.utils.clip_grad_norm_(having, self.global_clip_norm, foreach=False)


class Accumulator(PerParameter):
    """The gradients of an optimizer's parameters, summed over batches on the device: part of what training changes.

    A batch counts by what its loss is the mean over, so that any batches give what all their rows would give as one.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        # The number is the weight of the batches so far, by default their rows.
        super().__init__(optimizer, partial(torch.zeros_like, dtype=torch.float32, requires_grad=False), ".rows")

    def add(self, weight: Tensor | float | None) -> set[nn.Parameter]:
        """Add the gradients of a loss that is the mean over this weight, or a sum if it is None, inside a step.

        Returns:
            The parameters that have a gradient.
        """
        self.extend()
        having = {p: p.grad for p in self._beside if p.grad is not None}  # in order: hosts need equal graphs
        if isinstance(weight, Tensor):
            weight = weight.float()
            self._number.add_(weight)
        elif weight is None:
            self._number.fill_(1)  # by which it will be divided
        else:
            self._number.add_(weight)
        for parameter, gradient in having.items():
            total = self._beside[parameter]
            if isinstance(weight, Tensor):  # the mean over nothing is NaN, and its gradient may be
                total.add_((gradient.float() * weight).masked_fill(weight == 0, 0))
            else:
                total.add_(gradient, alpha=1 if weight is None else weight)
        return set(having)

    def release(self, having: set[nn.Parameter]) -> None:
        """Add the mean gradients over all batches to those of some parameters, and clear the sums, inside a step."""
        weight = self._number.masked_fill(self._number == 0, 1)
        for parameter, total in self._beside.items():
            if parameter in having:
                mean = (total / weight).to(parameter.dtype)
                parameter.grad = mean if parameter.grad is None else parameter.grad + mean
            total.zero_()
        self._number.zero_()
