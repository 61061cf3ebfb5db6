"""`Tracker`: the numbers of a training, for any tracker of experiments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ArgumentError
from .base import Callback, Logs
from .frequency import batches
from .logger import Logger
from .scalars import scalars
from .step_count import StepCount


class Tracker(Callback):
    """Gives hyper-parameters, the logs of each epoch and, if asked, of batches to a `Logger`.

    All are by training steps, which go on from epoch to epoch and from one `fit` to the next, and are resumed with the
    training. The logs of an epoch come with its number, `epoch`, from 0.

    Args:
        logger: An object with `log_hyperparameters`, `log_metrics` and `close`.
        hyperparameters: What the training is started with, by name (default: nothing). Each `fit` logs them once, with
            its `epochs` and `steps`.
        update_freq: `"epoch"` (default), `"batch"`, or a number of batches after which to log the running means of the
            epoch as well, as `batch_loss`, ... Each time waits for the device.

    Attributes:
        steps: The training steps so far.

    Raises:
        ArgumentError: A logger without one of the methods, or another `update_freq`.

    Example:
        >>> class Printing:
        ...     def log_hyperparameters(self, values): print(values)
        ...     def log_metrics(self, step, metrics): print(step, metrics)
        ...     def close(self): print("closed")
        >>> tracker = Tracker(Printing(), {"width": 64})
        >>> tracker.set_params({"epochs": 1, "steps": 2, "verbose": 0})
        >>> tracker.on_train_begin()
        {'width': 64, 'epochs': 1, 'steps': 2}
        >>> for batch in range(2):
        ...     tracker.on_train_batch_end(batch, {"loss": 0.5})
        >>> tracker.on_epoch_end(0, {"loss": 0.5})
        2 {'epoch': 0.0, 'loss': 0.5}
        >>> tracker.on_train_end()
        closed
    """

    reads_weights = False

    def __init__(
        self, logger: Logger, hyperparameters: Mapping[str, Any] | None = None, update_freq: str | int = "epoch"
    ) -> None:
        if isinstance(logger, type) or not isinstance(logger, Logger):
            raise ArgumentError(
                f"logger must be an object with log_hyperparameters, log_metrics and close, got {logger!r}"
            )
        self.logger, self.hyperparameters, self.update_freq = logger, dict(hyperparameters or {}), update_freq
        self._count = StepCount(batches("update_freq", update_freq, {"epoch": 0, "batch": 1}))

    @property
    def steps(self) -> int:
        """The training steps so far."""
        return self._count.steps

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Log the hyper-parameters."""
        self._count.begin()
        run = {name: self.params[name] for name in ("epochs", "steps") if self.params[name] is not None}
        self.logger.log_hyperparameters(self.hyperparameters | run)

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Log the running means, if it is time to."""
        if self._count.advance(batch):
            self.logger.log_metrics(self.steps, {f"batch_{name}": value for name, value in scalars(logs).items()})

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Log the epoch."""
        self.logger.log_metrics(self.steps, {"epoch": float(epoch), **scalars(logs)})

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Close the logger."""
        self.logger.close()

    def state_dict(self) -> dict[str, Any]:
        """How many steps there have been."""
        return self._count.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state.

        Args:
            state: What `state_dict` returned; after `on_train_begin`.
        """
        self._count.load_state_dict(state)
