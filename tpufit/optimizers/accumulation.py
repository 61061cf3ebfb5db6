"""What becomes of the gradients between the backward pass and the optimizer's step: they are summed, and clipped."""

from __future__ import annotations

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
    """What a step does with the weights beside adding up gradients; it is part of the step's graph.

    Attributes:
        takes_step: Whether the optimizer takes its step: with `accumulate_steps=n` the last of n batches does.
        overwrites: Whether the weights then become their own moving average.
    """

    takes_step: bool = True
    overwrites: bool = False


@dataclass(frozen=True)
class GradientConfig:
    """How gradients are treated.

    Args:
        accumulate_steps: How many batches make one step of the optimizer.
        clip_norm: Each parameter's gradient is scaled to at most this norm.
        clip_value: Each element is cut off at this absolute value.
        global_clip_norm: All gradients together are scaled to at most this norm.

    Raises:
        ArgumentError: A value out of range, or more than one kind of clipping.
    """

    accumulate_steps: int = 1
    clip_norm: float | None = None
    clip_value: float | None = None
    global_clip_norm: float | None = None

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

        Args:
            parameters: Whose.

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

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        # The number is that of the rows so far.
        super().__init__(optimizer, partial(torch.zeros_like, dtype=torch.float32, requires_grad=False), ".rows")

    def add(self, rows: int) -> None:
        """Take the gradients of a batch in, inside a step; the parameters have none afterwards.

        Args:
            rows: How many rows the batch has.
        """
        self._number.add_(rows)
        for parameter, total in self._beside.items():
            if parameter.grad is not None:
                total.add_(parameter.grad, alpha=rows)

    def release(self) -> None:
        """Give the parameters that have a gradient the mean one over all rows, and begin anew, inside a step."""
        for parameter, total in self._beside.items():
            if parameter.grad is not None:
                parameter.grad = (total / self._number).to(parameter.dtype)
            total.zero_()
        self._number.zero_()
