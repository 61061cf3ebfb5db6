"""`History`: the logs of every epoch."""

from __future__ import annotations

from typing import Any

from .base import Callback, Logs


class History(Callback):
    """Keeps the logs of every epoch. `fit` makes one and returns it.

    Attributes:
        history: For each log a list of its values, one an epoch; a `val_*` list is shorter where validation was rarer.
        epoch: The epochs' numbers, from 0.

    Example:
        >>> history = History()
        >>> history.on_epoch_end(0, {"loss": 0.5})
        >>> history.on_epoch_end(1, {"loss": 0.25})
        >>> history.epoch, history.history
        ([0, 1], {'loss': [0.5, 0.25]})

    Source: `keras.callbacks.History`.
    """

    reads_weights = False

    def __init__(self) -> None:
        self.epoch: list[int] = []
        self.history: dict[str, list[Any]] = {}

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Add the epoch's logs."""
        self.epoch.append(epoch)
        for name, value in (logs or {}).items():
            self.history.setdefault(name, []).append(value)
