"""Gradients between the backward pass and the optimizer's step: summed over batches, and clipped."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import ArgumentError, require_whole
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
        require_whole("accumulate_steps", self.accumulate_steps)
        limits = {name: getattr(self, name) for name in ("clip_norm", "clip_value", "global_clip_norm")}
        given = {name: limit for name, limit in limits.items() if limit is not None}
        if len(given) > 1:
            raise ArgumentError(f"only one of {', '.join(limits)} can be given, got {given}")
        for name, limit in given.items():
            if not limit > 0:
                raise ArgumentError(f"{name} must be above 0, got {limit!r}")

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

    A batch counts by its rows, so that any batches give what all their rows would give as one.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        # The number is that of the rows so far.
        super().__init__(optimizer, partial(torch.zeros_like, dtype=torch.float32, requires_grad=False), ".rows")

    def add(self, rows: int) -> None:
        """Add the gradients of a batch of so many rows, inside a step."""
        self.extend()
        self._number.add_(rows)
        for parameter, total in self._beside.items():
            if parameter.grad is not None:
                total.add_(parameter.grad, alpha=rows)

    def release(self) -> None:
        """Give the parameters the mean gradient over all rows, and return the sums to 0, inside a step."""
        for parameter, total in self._beside.items():
            if parameter.grad is not None:
                parameter.grad = (total / self._number).to(parameter.dtype)
            total.zero_()
        self._number.zero_()
