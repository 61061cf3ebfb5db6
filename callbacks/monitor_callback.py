"""`MonitorCallback`: what callbacks share that follow a log."""

from ._support.monitor import Monitor
from .base import Callback


class MonitorCallback(Callback):
    """A callback that follows a log. Its attributes have Keras's names, and may be read and set at any time.

    Args:
        followed: The monitor of the log.

    Attributes:
        best: The best value so far, or None.
        wait: Values in a row without a better one.
    """

    reads_weights = False

    def __init__(self, followed: Monitor) -> None:
        self._followed = followed

    @property
    def monitor(self) -> str:
        """The log."""
        return self._followed.name

    @property
    def mode(self) -> str:
        """`"min"`, `"max"` or `"auto"`."""
        return self._followed.mode

    @property
    def min_delta(self) -> float:
        """The least change that counts as better, 0 or more."""
        return self._followed.min_delta

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
