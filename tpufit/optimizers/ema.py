"""`EMA`: an exponential moving average of the weights, kept on the device by the step itself."""

from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from ..errors import require_number, require_whole
from ..runtime import swap_value
from .build import PerParameter


@dataclass(frozen=True)
class EMAConfig:
    """The options of `compile` for the moving average of the weights.

    Raises:
        ArgumentError: A value is out of range.
    """

    momentum: float = 0.99  # the share of the averages that each update keeps, from 0 to 1
    overwrite_frequency: int | None = None  # updates after which the weights become the averages; None is never

    def __post_init__(self) -> None:
        momentum = require_number("ema_momentum", self.momentum, "a number from 0 to 1", lambda share: 0 <= share <= 1)
        object.__setattr__(self, "momentum", momentum)
        if self.overwrite_frequency is not None:
            frequency = require_whole("ema_overwrite_frequency", self.overwrite_frequency)
            object.__setattr__(self, "overwrite_frequency", frequency)


class EMA(PerParameter):
    """The moving averages of an optimizer's parameters that learn: part of what training changes.

    Source: `use_ema` of `keras.optimizers.Optimizer`.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        # The number is 0 until the first update, and then 1.
        super().__init__(optimizer, lambda parameter: parameter.detach().clone(), ".begun")
        self.swapped = False  # the weights and their averages have changed places

    @torch.no_grad()
    def update(self, momentum: float, overwrite: bool) -> None:
        """Move the averages towards the weights, inside a step; if `overwrite`, the weights then become the averages.

        The first time the averages become the weights. The momentum is the share of them that is kept.
        """
        self.extend()
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
        """Give the weights the averages' values, for good. Swapped, they have them, and the averages get them back."""
        for parameter, average in self._beside.items():
            source, target = (parameter, average) if self.swapped else (average, parameter)
            target.copy_(source)
        self.swapped = False
