"""`MonitorCallback`: the base of callbacks that monitor a log."""

import operator
from collections.abc import Callable
from typing import Any

from ._support.monitor import Monitor
from .base import Callback, Logs


class MonitorCallback(Callback):
    """A callback that monitors a log, to be subclassed. Its methods have the names of Keras's `MonitorCallback`.

    Its attributes may be read and set at any time.

    Args:
        monitor: The log to monitor (default `"val_loss"`).
        mode: `"min"`, `"max"` or `"auto"` (default: decided by the metric, else by the log's name; if neither decides,
            `fit` raises an error when it begins).
        baseline: The initial `best`, which the first value must beat (default: none, so any finite value is better).
        min_delta: The least change that counts as better (default 0). The attribute is never negative; Keras negates it
            if lower is better.

    Attributes:
        best: The best value so far, or None.
        wait: Values in a row without an improvement.

    Raises:
        ArgumentError: An unknown mode.

    Example:
        >>> class Best(MonitorCallback):
        ...     def on_epoch_end(self, epoch, logs=None):
        ...         value = self.get_monitor_value(logs)
        ...         if value is not None and self._is_improvement(value, self.best):
        ...             self.best = value
        >>> best = Best("accuracy", min_delta=0.1)
        >>> for epoch, accuracy in enumerate([0.5, 0.7, 0.75]):
        ...     best.on_epoch_end(epoch, {"accuracy": accuracy})
        >>> best.best
        0.7

    Source: Keras's `MonitorCallback`.
    """

    reads_weights = False

    def __init__(
        self, monitor: str = "val_loss", mode: str = "auto", baseline: float | None = None, min_delta: float = 0
    ) -> None:
        self._monitor = Monitor(monitor, mode, min_delta, best=baseline)

    @property
    def monitor(self) -> str:
        """The name of the log."""
        return self._monitor.name

    @monitor.setter
    def monitor(self, name: str) -> None:
        self._monitor.follow(name, self.mode)

    @property
    def mode(self) -> str:
        """`"min"`, `"max"` or `"auto"`."""
        return self._monitor.mode

    @mode.setter
    def mode(self, mode: str) -> None:
        self._monitor.follow(self.monitor, mode)

    @property
    def min_delta(self) -> float:
        """The least change that counts as better, 0 or more."""
        return self._monitor.min_delta

    @min_delta.setter
    def min_delta(self, change: float) -> None:
        self._monitor.min_delta = abs(change)

    @property
    def best(self) -> float | None:
        """The best value so far, or None."""
        return self._monitor.best

    @best.setter
    def best(self, value: float | None) -> None:
        self._monitor.best = value

    @property
    def wait(self) -> int:
        """Values in a row without an improvement."""
        return self._monitor.wait

    @wait.setter
    def wait(self, count: int) -> None:
        self._monitor.wait = count

    @property
    def monitor_op(self) -> Callable[[Any, Any], Any] | None:
        """The comparison of a value with the best, `operator.gt` or `operator.lt`; None until it is known."""
        if not self._monitor.has_direction:
            return None
        return operator.gt if self._monitor.rising else operator.lt

    def get_monitor_value(self, logs: Logs | None) -> float | None:
        """Return the log's value. The first time it is missing, a warning lists the available logs.

        Args:
            logs: The logs of an epoch or a batch; if they are lazy and contain the value, this waits for the device.
        """
        return self._monitor.read(logs, type(self).__name__, self.params)

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Ask the metric whether higher is better."""
        self._set_monitor_op()

    def _set_monitor_op(self) -> None:
        """Find out from the metric, or the log's name, whether higher is better."""
        self._monitor.choose_direction(self.model.higher_is_better(self.monitor), self.model.metrics_names)

    def _is_improvement(self, monitor_value: float, reference_value: float | None) -> bool:
        """True if a value beats the reference by more than `min_delta`. Any value beats None, and NaN beats none."""
        return self._monitor.is_better(monitor_value, reference_value)
