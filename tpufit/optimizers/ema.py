"""`EMA`: an exponential moving average of the weights, which each step updates on the device."""

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
    overwrite_frequency: int | None = None  # updates after which the averages overwrite the weights; None: never

    def __post_init__(self) -> None:
        momentum = require_number("ema_momentum", self.momentum, "a number from 0 to 1", lambda share: 0 <= share <= 1)
        object.__setattr__(self, "momentum", momentum)
        if self.overwrite_frequency is not None:
            frequency = require_whole("ema_overwrite_frequency", self.overwrite_frequency)
            object.__setattr__(self, "overwrite_frequency", frequency)


class EMA(PerParameter):
    """The moving averages of an optimizer's parameters that learn: a part of the training state.

    Source: `use_ema` of `keras.optimizers.Optimizer`.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        # The number is 0 before the first update, then 1.
        super().__init__(optimizer, lambda parameter: parameter.detach().clone(), ".begun")
        self.swapped = False  # True while the module has the averages, see `swap`

    @torch.no_grad()
    def update(self, momentum: float, overwrite: bool) -> None:
        """Move the averages towards the weights, inside a step; the first update copies the weights.

        Args:
            momentum: The share of the averages that is kept.
            overwrite: If True, the averages then overwrite the weights.
        """
        self.extend()
        kept = self._number * momentum
        for parameter, average in self._tensors.items():
            moved = average * kept + parameter * (1 - kept)
            average.copy_(moved.reshape(average.shape))  # reshaped for scalar parameters
            if overwrite:
                parameter.copy_(average)
        self._number.fill_(1)

    def swap(self) -> None:
        """Exchange the weights with their averages, without a copy."""
        for parameter, average in self._tensors.items():
            weights = swap_value(parameter, torch.empty_like(parameter, device="meta"))
            swap_value(parameter, swap_value(average, weights.detach()).detach())
        self.swapped = not self.swapped

    @torch.no_grad()
    def overwrite(self) -> None:
        """Copy the averages into the weights; if swapped, the weights have them, and the averages get a copy."""
        for parameter, average in self._tensors.items():
            source, target = (parameter, average) if self.swapped else (average, parameter)
            target.copy_(source)
        self.swapped = False
