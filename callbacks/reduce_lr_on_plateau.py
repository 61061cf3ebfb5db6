"""`ReduceLROnPlateau`: reduces the learning rate when a log stops improving."""

from collections.abc import Mapping
from typing import Any

from ..errors import ArgumentError
from ..utils.terminal import say
from .base import Logs, RateCallback
from .monitor_callback import MonitorCallback


class ReduceLROnPlateau(MonitorCallback, RateCallback):
    """Multiplies the learning rate by a factor when a log has stopped improving.

    Epoch logs get a `learning_rate`, as in Keras. An object may be used for several calls of `fit`; each call starts
    afresh.

    Args:
        monitor: The log to monitor (default `"val_loss"`).
        factor: The factor, below 1 (default 0.1).
        patience: The number of epochs in a row without an improvement after which the rate is reduced (default 10).
        verbose: 1 prints each reduction; 0 (default) prints nothing.
        mode: `"min"`, `"max"` or `"auto"` (default: decided by the metric, else by the log's name; if neither decides,
            `fit` raises an error).
        min_delta: The least change that counts as better (default 0.0001).
        cooldown: The number of epochs after a reduction that `patience` ignores (default 0).
        min_lr: The lowest rate to reduce to (default 0).

    Attributes:
        best: The best value so far, or None.
        wait: Epochs in a row without an improvement.
        cooldown_counter: The remaining epochs of the cooldown.

    Raises:
        ArgumentError: A factor of 1 or more, or an unknown mode.

    Example:
        >>> from types import SimpleNamespace
        >>> plateau = ReduceLROnPlateau("loss", factor=0.5, patience=2)
        >>> plateau.set_model(SimpleNamespace(learning_rate=0.1, higher_is_better=lambda name: None, metrics_names=[]))
        >>> plateau.on_train_begin()
        >>> for epoch, loss in enumerate([0.9, 0.5, 0.5, 0.5]):
        ...     plateau.on_epoch_end(epoch, {"loss": loss})
        >>> plateau.model.learning_rate
        0.05

    Source: `keras.callbacks.ReduceLROnPlateau`.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        factor: float = 0.1,
        patience: int = 10,
        verbose: int = 0,
        mode: str = "auto",
        min_delta: float = 1e-4,
        cooldown: int = 0,
        min_lr: float = 0.0,
    ) -> None:
        if not 0 <= factor < 1:
            raise ArgumentError(f"factor must be at least 0 and below 1, or the rate would not get smaller: {factor!r}")
        super().__init__(monitor, mode, min_delta=min_delta)
        self.factor = factor
        self.patience = patience
        self.verbose = verbose
        self.cooldown = cooldown
        self.min_lr = min_lr
        self.cooldown_counter = 0

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Forget the previous training."""
        self._set_monitor_op()
        self._monitor.reset()
        self.cooldown_counter = 0

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Check the log, and reduce the rate if patience has run out."""
        super().on_epoch_end(epoch, logs)
        value = self.get_monitor_value(logs)
        if value is None:
            return
        self.cooldown_counter = max(0, self.cooldown_counter - 1)
        self._monitor.observe(value)
        if self.in_cooldown():
            self.wait = 0
        rate = self.model.learning_rate
        if self.wait >= max(self.patience, 1) and rate > self.min_lr:
            self.model.learning_rate = max(rate * self.factor, self.min_lr)
            self.cooldown_counter = self.cooldown
            self.wait = 0
            if self.verbose:
                say(f"Epoch {epoch + 1}: ReduceLROnPlateau reduces the learning rate to {self.model.learning_rate:g}")

    def in_cooldown(self) -> bool:
        """True during the cooldown after a reduction."""
        return self.cooldown_counter > 0

    def state_dict(self) -> dict[str, Any]:
        """Return the best value so far, and the counts of epochs since, as numbers."""
        return {**self._monitor.state_dict(), "cooldown_counter": self.cooldown_counter}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state.

        Args:
            state: The dict that `state_dict` returned; call it after `on_train_begin`, which forgets everything.
        """
        self._monitor.load_state_dict(state)
        self.cooldown_counter = state["cooldown_counter"]
