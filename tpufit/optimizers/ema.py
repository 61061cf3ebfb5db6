"""`EMA`: an exponential moving average of the weights, kept on the device by the step itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from ..errors import ArgumentError
from ..runtime import swap_value
from .build import PerParameter


@dataclass(frozen=True)
class EMAConfig:
    """How the weights are averaged.

    Args:
        momentum: How much of the averages each update keeps, from 0 to 1.
        overwrite_frequency: After how many updates the weights become the averages; None is never.

    Raises:
        ArgumentError: A value out of range.
    """

    momentum: float = 0.99
    overwrite_frequency: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.momentum <= 1:
            raise ArgumentError(f"ema_momentum must be from 0 to 1, got {self.momentum!r}")
        if self.overwrite_frequency is not None and self.overwrite_frequency < 1:
            raise ArgumentError(f"ema_overwrite_frequency must be at least 1, got {self.overwrite_frequency!r}")


class EMA(PerParameter):
    """The moving averages of an optimizer's parameters: part of what training changes.

    Args:
        optimizer: The optimizer; of its parameters those that learn.

    Attributes:
        swapped: Whether the weights and their averages have changed places.

    Source: `use_ema` of `keras.optimizers.Optimizer`.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        # The number is 0 until the first update, and then 1.
        super().__init__(optimizer, lambda parameter: parameter.detach().clone(), ".begun")
        self.swapped = False

    @torch.no_grad()
    def update(self, momentum: float, overwrite: bool) -> None:
        """Take the weights in, inside a step. The first time the averages become the weights.

        Args:
            momentum: How much of the averages is kept.
            overwrite: Whether the weights then become the averages.
        """
        kept = self._number * momentum
        for parameter, average in self._beside.items():
            average.copy_(average * kept + parameter * (1 - kept))
            if overwrite:
                parameter.copy_(average)
        self._number.fill_(1)

    def swap(self) -> None:
        """Exchange the weights with their averages, without a copy."""
        for parameter, average in self._beside.items():
            weights = swap_value(parameter, torch.empty_like(parameter, device="meta"))
            swap_value(parameter, swap_value(average, weights.detach()).detach())
        self.swapped = not self.swapped

    @torch.no_grad()
    def overwrite(self) -> None:
        """Make the averages the weights; where they are already, the averages become averages again."""
        for parameter, average in self._beside.items():
            source, target = (parameter, average) if self.swapped else (average, parameter)
            target.copy_(source)
        self.swapped = False
