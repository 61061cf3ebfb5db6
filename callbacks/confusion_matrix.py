"""`ConfusionMatrix`: a picture of the confusion matrix in TensorBoard or a tracker."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ..diagnostics import plots
from ..errors import ArgumentError, join_few, require_whole
from ..hosts import is_first
from ..utils.user_code import warn
from .base import Callback, Logs


class _Logger(Protocol):
    def add_figure(self, tag: str, figure: Any, step: int | None = None) -> None:
        """Write a figure."""


class ConfusionMatrix(Callback):
    """Draws the confusion matrix of each validation into TensorBoard or an experiment tracker.

    The metric `"confusion_matrix"` computes it during the validation, on any number of cores.

    Args:
        logger: The `TensorBoard`, `WandbLogger` or the like to draw into (default: the first in the same `fit`).
        labels: The names of the classes (default: their numbers, from 0).
        log: The log with the matrix, and the name of the picture (default `"val_confusion_matrix"`).
        freq: Draw every `freq` epochs (default 1).

    Raises:
        ArgumentError: The logger has no `add_figure`; or, when training begins, there is no logger, or no metric
            computes the log.
        ImportError: Matplotlib is not installed.

    Example:
        >>> from tpufit.callbacks import TensorBoard
        >>> callbacks = [TensorBoard("runs/a"), ConfusionMatrix(labels=["cat", "dog"])]
        >>> # model.compile("adamw", "cross_entropy", metrics=["accuracy", "confusion_matrix"])
    """

    reads_weights = False
    only_writes = True

    def __init__(
        self,
        logger: _Logger | None = None,
        labels: Sequence[object] | None = None,
        log: str = "val_confusion_matrix",
        freq: int = 1,
    ) -> None:
        if logger is not None and not _can_draw(logger):
            raise ArgumentError(f"logger must be a callback that draws, such as TensorBoard('logs'), got {logger!r}")
        self.logger = logger
        self._loggers: list[_Logger] = []  # among the callbacks of the same `fit`
        self.labels = labels
        self.log = log
        self.freq = require_whole("freq", freq)

    def set_callbacks(self, callbacks: Sequence[Any]) -> None:
        """Find the loggers among a run's callbacks."""
        self._loggers = [callback for callback in callbacks if _can_draw(callback)]

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Reject a log that no metric computes, and a run without a logger, before the first step."""
        plots.require_matplotlib()
        if self.logger is None and not self._loggers:
            raise ArgumentError(
                "ConfusionMatrix draws into a logger, and fit has none: callbacks=[TensorBoard('logs'), "
                "ConfusionMatrix()], or a tracker such as WandbLogger"
            )
        names = self.model.metrics_names
        if self.log.removeprefix("val_") not in names:
            raise ArgumentError(
                f"ConfusionMatrix draws the log {self.log!r}, and the model's metrics are {join_few(names)}: "
                "compile(metrics=['confusion_matrix'])"
            )
        if self.log.startswith("val_") and not (self.params or {}).get("validates", True):
            warn(
                f"ConfusionMatrix draws nothing: no epoch will have the log {self.log!r}. Pass validation_data or "
                "validation_split to fit, or log='confusion_matrix' to draw the training data's"
            )

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Draw, if a picture is due and there was a validation."""
        present: Mapping[str, Any] = logs or {}
        if (epoch + 1) % self.freq or self.log not in present or not is_first():
            return
        figure = plots.confusion_matrix(present[self.log], self.labels)
        logger = self._loggers[0] if self.logger is None else self.logger
        logger.add_figure(self.log, figure)
        plots.close(figure)


def _can_draw(logger: object) -> bool:
    return callable(getattr(logger, "add_figure", None))
