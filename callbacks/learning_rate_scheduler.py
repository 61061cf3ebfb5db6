"""`LearningRateScheduler`: a function that gives each epoch its rate."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import ArgumentError
from ..utils.terminal import say
from .base import Logs, RateCallback


class LearningRateScheduler(RateCallback):
    """Asks a function for the learning rate of each epoch.

    Epoch logs get a `learning_rate`, as in Keras. The rate is the actual one: it is not scaled by the cores.

    Args:
        schedule: Called with the epoch's number, from 0, and the current rate (or with the number alone, if it takes
            one argument); it returns the rate. With several groups the first gets it, and the others theirs in
            proportion.
        verbose: 1 says each epoch's rate; 0 (default) says nothing.

    Raises:
        ArgumentError: `schedule` is no function; or, in training, it returned no number.

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
        self._takes_rate = _takes_two(schedule)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Set the epoch's rate."""
        rate: Any = self.schedule(epoch, self.model.learning_rate) if self._takes_rate else self.schedule(epoch)
        if isinstance(rate, bool) or not isinstance(rate, (int, float, np.number)):
            raise ArgumentError(f"schedule must return a number, got {rate!r} for epoch {epoch}")
        self.model.learning_rate = float(rate)
        if self.verbose:
            say(f"Epoch {epoch + 1}: learning rate {float(rate):g}")


def _takes_two(schedule: Callable[..., float]) -> bool:
    try:
        inspect.signature(schedule).bind(0, 0.1)
    except TypeError:
        return False
    except ValueError:  # written in C, and says nothing of its arguments
        return True
    return True
