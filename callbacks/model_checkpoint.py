"""`ModelCheckpoint`: saves the state of training, or weights alone, during training."""

import os
from collections.abc import Mapping
from datetime import timedelta
from time import monotonic
from typing import Any

from ..checkpoint import AsyncCheckpointWriter, CheckpointDirectory, Score
from ..errors import ArgumentError, CheckpointNotWrittenError
from ..step import explain_arguments
from ..utils.failed_writes import FailedWrites
from ..utils.terminal import say
from ..utils.user_code import warn
from ._support.checkpoint_path import CheckpointPath
from ._support.frequency import SaveRule
from ._support.scalars import as_scalar, as_text
from .base import Logs
from .monitor_callback import MonitorCallback


class ModelCheckpoint(MonitorCallback):
    """Saves the state of training, or weights alone: after each epoch, or at an interval of batches or minutes.

    A run directory gets all that `fit(resume=True)` needs to resume bit for bit. It is written in the background, and
    also on SIGTERM or Ctrl-C, and when `max_time` is over. A file gets the weights only.

    Args:
        filepath: Where to save. `"ckpt"`, without suffix or braces, is a run directory: `ckpt/step-0000000010/`, by
            training steps. `"ckpt/best.safetensors"` is one file of weights, replaced each time.
            `"ckpt/{epoch:02d}-{val_loss:.2f}.safetensors"` is a template for file names: its last component may have
            the fields `{epoch}` and `{batch}`, both from 1, and any log.
        monitor: The log that decides which checkpoint is best (default `"val_loss"`).
        verbose: 1 prints a line for each checkpoint; 0 (default) prints nothing.
        save_best_only: Save only if the log is better than all earlier values (default False). NaN never is. If the log
            is missing, a warning lists the available logs, and nothing is saved.
        save_weights_only: Save weights alone (default False); a file always has weights alone.
        mode: `"min"`, `"max"` or `"auto"` (default: decided by the metric, else by the log's name; if neither decides,
            `fit` raises an error).
        save_freq: `"epoch"` (default), a number of training steps since the last save, counted across epochs and calls
            of `fit` from this object's first step, or a `timedelta`.
        initial_value_threshold: The value that the first save must beat (default: none). It carries over from one `fit`
            to the next.
        keep_last: How many of the newest checkpoints a run directory keeps (default 3); None keeps all.
        keep_best: How many of the best checkpoints it keeps in addition (default: 1 if the log exists). If you give a
            number and the log is missing, that is an error.
        on_exception: Save also when an error between two steps ends `fit` (default False).
        max_save_failures: The number of checkpoints in a row that may fail, each with a warning, before training ends
            (default 3).
        save_frozen: False omits frozen parameters from a run directory, such as all but LoRA's adapters (default True).
            To resume or load, build the net with those parameters.

    Attributes:
        best: The best value so far, or None.
        checkpoint_writer: The writer of the run directory, or None for files.

    Raises:
        ArgumentError: A format other than safetensors, a template with anything but plain names, an unknown mode or
            frequency, or a validation log to monitor between batches.

    Example:
        >>> from types import SimpleNamespace
        >>> checkpoint = ModelCheckpoint("{epoch:02d}-{loss:.1f}.safetensors", monitor="loss", save_best_only=True)
        >>> saves = lambda path, finite_only: print("saves", path)
        >>> rule = {"higher_is_better": lambda name: False, "metrics_names": []}
        >>> checkpoint.set_model(SimpleNamespace(save_weights=saves, **rule))
        >>> checkpoint.on_train_begin()
        >>> for epoch, loss in enumerate([0.5, 0.7, 0.4]):
        ...     checkpoint.on_epoch_end(epoch, {"loss": loss})
        saves 01-0.5.safetensors
        saves 03-0.4.safetensors

    Source: `keras.callbacks.ModelCheckpoint`.
    """

    @explain_arguments
    def __init__(
        self,
        filepath: str | os.PathLike[str],
        monitor: str = "val_loss",
        verbose: int = 0,
        save_best_only: bool = False,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int | timedelta = "epoch",
        initial_value_threshold: float | None = None,
        *,
        keep_last: int | None = 3,
        keep_best: int | None = None,
        on_exception: bool = False,
        max_save_failures: int = 3,
        save_frozen: bool = True,
    ) -> None:
        self._rule = SaveRule(save_freq)
        if self._rule.between_batches and save_best_only and monitor.startswith("val_"):
            raise ArgumentError(
                f"monitor={monitor!r} is not known between batches: use save_freq='epoch', or a training log such as "
                "monitor='loss'"
            )
        for name, value, least in (("keep_last", keep_last, 1), ("keep_best", keep_best, 0)):
            if value is not None and value < least:
                raise ArgumentError(f"{name} must be a whole number of at least {least}, or None, got {value!r}")
        super().__init__(monitor, mode, initial_value_threshold)
        self.filepath = os.fspath(filepath)
        self.verbose = verbose
        self.save_best_only = save_best_only
        self.keep_best = keep_best
        self.save_on_exception = on_exception
        self.save_freq = save_freq
        self._path = CheckpointPath(filepath, per_batch=self._rule.between_batches)
        self._failed_writes = FailedWrites(max_save_failures)
        self._epoch = 0
        if self._path.run is not None:
            if save_weights_only:
                raise ArgumentError(
                    f"weights alone go into a file: filepath must end in '.safetensors', got {self.filepath!r}"
                )
            best = 1 if keep_best is None else keep_best
            self.checkpoint_writer = AsyncCheckpointWriter(
                CheckpointDirectory(self._path.run, keep_last, best), max_save_failures
            )
            self.checkpoint_writer.save_frozen = save_frozen
        elif not save_frozen:
            raise ArgumentError(
                f"save_frozen=False goes with a run directory: filepath must have no suffix, got {self.filepath!r}"
            )

    @property
    def save_weights_only(self) -> bool:
        """True if it writes files of weights, False if a run directory."""
        return self.checkpoint_writer is None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Ask the metric whether higher is better, and check that the run directory is writable."""
        if self.save_best_only or self.checkpoint_writer is not None:
            self._set_monitor_op()
        self._rule.note_save(monotonic())
        if self.checkpoint_writer is not None:
            self.checkpoint_writer.run.open()

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Note the epoch."""
        self._epoch = epoch
        self._rule.begin(self.model.steps_taken)

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Save, if a save is due."""
        if self._rule.is_due(self.model.steps_taken, monotonic()):
            self._save(self._epoch, batch, logs or {})

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Save, if a save is due."""
        if not self._rule.between_batches:
            self._save(epoch, None, logs or {})

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Unlock the run directory."""
        if self.checkpoint_writer is not None:
            self.checkpoint_writer.run.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the best value so far, and the steps since the last checkpoint."""
        return {"monitor": self._monitor.state_dict(), **self._rule.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state.

        Args:
            state: The dict that `state_dict` returned.
        """
        self._monitor.load_state_dict(state["monitor"])
        # In the middle of an epoch this comes after on_epoch_begin, and the model's step count has been restored since.
        self._rule.load_state_dict(state, self.model.steps_taken)

    def _save(self, epoch: int, batch: int | None, logs: Logs) -> None:
        reason = ""
        before = self._monitor.state_dict()
        if self.save_best_only:
            value = self.get_monitor_value(logs)
            if value is None:
                return
            best = "none" if self.best is None else as_text(self.best)
            better = self._monitor.observe(value)
            reason = f"{self.monitor} is {as_text(value)}, the best so far was {best}: "
            if not better:
                if self.verbose:
                    say(f"Epoch {epoch + 1}: {reason}not saved")
                return
        self._rule.note_save(monotonic())
        if self.checkpoint_writer is not None:
            self.model.save_checkpoint(self.checkpoint_writer, self._metric(batch, logs))
            where = self.filepath
        else:
            where = str(self._path.file_path(epoch + 1, None if batch is None else batch + 1, logs))
            saved = False
            try:
                with self._failed_writes.tolerate(where):
                    self.model.save_weights(where, finite_only=True)
                    saved = True
            except CheckpointNotWrittenError as error:  # NaN
                warn(str(error))
                return
            if not saved:
                self._monitor.load_state_dict(before)  # the best value must be of a checkpoint on disk
                return
        if self.verbose:
            say(f"Epoch {epoch + 1}: {reason}saved {where}")

    def _metric(self, batch: int | None, logs: Logs) -> Score | None:
        """Return the value that ranks the checkpoint; None between batches, unless it was read: reading a log waits."""
        if batch is not None and not self.save_best_only:
            return None
        value = as_scalar(logs[self.monitor]) if self.monitor in logs else None
        if value is None:
            if self.keep_best:
                raise ArgumentError(
                    f"keep_best={self.keep_best} needs the log {self.monitor!r}, which is missing. Available: "
                    f"{', '.join(sorted(logs)) or 'none'}"
                )
            return None
        return Score(self.monitor, value, "max" if self._monitor.rising else "min")
