"""`LearningRateScheduler`: a function that returns each epoch's learning rate."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import ArgumentError
from ..utils.terminal import say
from .base import Logs, RateCallback


class LearningRateScheduler(RateCallback):
    """Sets each epoch's learning rate to a function's result.

    Epoch logs get a `learning_rate`, as in Keras. The rate is the actual rate: it is not scaled by the number of cores.

    Args:
        schedule: Called with the epoch's number, from 0, and the current rate (or only the number, if it has one
            argument); returns the rate. With several parameter groups, the first gets this rate, and the others keep
            their proportions to it.
        verbose: 1 prints each epoch's rate; 0 (default) prints nothing.

    Raises:
        ArgumentError: `schedule` isn't a function; or, in training, it didn't return a number.

    Example:
        >>> from types import SimpleNamespace
        >>> halving = LearningRateScheduler(lambda epoch, lr: lr / 2)
        >>> halving.set_model(SimpleNamespace(learning_rate=0.1))
        >>> halving.on_epoch_begin(0)
        >>> halving.model.learning_rate
        0.05

    Source: `keras.callbacks.LearningRateScheduler`.
    """

    def __init__(self, schedule: Callable[..., float], verbose: int = 0) -> None:
        if not callable(schedule):
            raise ArgumentError(f"schedule must be a function of (epoch, lr), got {schedule!r}")
        self.schedule = schedule
        self.verbose = verbose
        self._takes_rate = _takes_two_arguments(schedule)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Set the epoch's rate."""
        rate: Any = self.schedule(epoch, self.model.learning_rate) if self._takes_rate else self.schedule(epoch)
        if isinstance(rate, bool) or not isinstance(rate, (int, float, np.number)):
            raise ArgumentError(f"schedule must return a number, got {rate!r} for epoch {epoch}")
        self.model.learning_rate = float(rate)
        if self.verbose:
            say(f"Epoch {epoch + 1}: learning rate {float(rate):g}")


def _takes_two_arguments(schedule: Callable[..., float]) -> bool:
    try:
        inspect.signature(schedule).bind(0, 0.1)
    except TypeError:
        return False
    except ValueError:  # written in C, without a signature
        return True
    return True
