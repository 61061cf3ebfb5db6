"""`Logger`: what a tracker of experiments must be able to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Logger(Protocol):
    """Where the numbers of a training go: any object with these three methods will do.

    `Tracker` feeds it. `CSVFile` and `TensorBoardRun` are two of them; `examples/mlflow_tracking.py` shows a third.
    """

    def log_hyperparameters(self, values: Mapping[str, Any]) -> None:
        """Take what the training was started with, once, before any metrics.

        Args:
            values: Numbers, texts and truth values by name.
        """

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the numbers of one moment.

        Args:
            step: How many training steps had been taken. It never falls, but for a training that is resumed.
            metrics: Floats by name.
        """

    def close(self) -> None:
        """Training is over, also after an error. Another one may follow."""
