"""`MonitorCallback`: what callbacks share that follow a log."""

import operator
from collections.abc import Callable
from typing import Any

from ._support.monitor import Monitor
from .base import Callback, Logs


class MonitorCallback(Callback):
    """A callback that follows a log, to be subclassed. It has the names of Keras's own, which its subclasses there use.

    Its attributes may be read and set at any time.

    Args:
        monitor: The log to follow (default `"val_loss"`).
        mode: `"min"`, `"max"` or `"auto"` (default: as the metric says, else by the log's name; if neither does, an
            error asks when `fit` begins).
        baseline: The value to beat at first, which `best` begins with (default: none, so that any finite value is
            better).
        min_delta: The least change that counts as better (default 0). The attribute is 0 or more: Keras makes it
            negative for a log that falls.

    Attributes:
        best: The best value so far, or None.
        wait: Values in a row without a better one.

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
        self._followed = Monitor(monitor, mode, min_delta, best=baseline)

    @property
    def monitor(self) -> str:
        """The log."""
        return self._followed.name

    @monitor.setter
    def monitor(self, name: str) -> None:
        self._followed.follow(name, self.mode)

    @property
    def mode(self) -> str:
        """`"min"`, `"max"` or `"auto"`."""
        return self._followed.mode

    @mode.setter
    def mode(self, mode: str) -> None:
        self._followed.follow(self.monitor, mode)

    @property
    def min_delta(self) -> float:
        """The least change that counts as better, 0 or more."""
        return self._followed.min_delta

    @min_delta.setter
    def min_delta(self, change: float) -> None:
        self._followed.min_delta = abs(change)

    @property
    def best(self) -> float | None:
        """The best value so far, or None."""
        return self._followed.best

    @best.setter
    def best(self, value: float | None) -> None:
        self._followed.best = value

    @property
    def wait(self) -> int:
        """Values in a row without a better one."""
        return self._followed.wait

    @wait.setter
    def wait(self, count: int) -> None:
        self._followed.wait = count

    @property
    def monitor_op(self) -> Callable[[Any, Any], Any] | None:
        """The comparison of a value with the best, `operator.gt` or `operator.lt`; None until that is known."""
        if not self._followed.settled:
            return None
        return operator.gt if self._followed.rising else operator.lt

    def get_monitor_value(self, logs: Logs | None) -> float | None:
        """Find the log's value. The first time that it is missing, a warning lists the logs that there are.

        Args:
            logs: The logs of an epoch or a batch; if they are lazy and have it, this waits for the device.
        """
        return self._followed.read(logs, type(self).__name__, self.params)

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Learn from the metric which values are better."""
        self._set_monitor_op()

    def _set_monitor_op(self) -> None:
        """Learn from the metric, or from the log's name, which values are better."""
        self._followed.settle(self.model.higher_is_better(self.monitor), self.model.metrics_names)

    def _is_improvement(self, monitor_value: float, reference_value: float | None) -> bool:
        """True if a value is better than another by more than `min_delta`; None is worse than any. NaN never is."""
        return self._followed.is_better(monitor_value, reference_value)
