"""`ModelCheckpoint`: saves weights while training goes on."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import ArgumentError
from .base import Callback, Logs, duplicate
from .checkpoint_path import CheckpointPath
from .frequency import batches
from .monitor import Monitor
from .scalars import as_text
from .terminal import say


class ModelCheckpoint(Callback):
    """Saves the weights after each epoch, after a number of batches, or whenever they are the best so far.

    This version saves weights; a run directory will hold the whole state of training in a later one.

    Args:
        filepath: Where to. `"ckpt/best.safetensors"` is one file, replaced each time.
            `"ckpt/{epoch:02d}-{val_loss:.2f}.safetensors"` is a template: its last component may have the fields
            `{epoch}` and `{batch}`, both from 1, and any log. A path with neither suffix nor braces, as `"ckpt"`, is a
            run directory: `ckpt/step-0000000010/model.safetensors`, by the training steps that this object has seen.
        monitor: The log that says what is best (default `"val_loss"`). If it is missing, a warning lists the logs there
            are, and nothing is saved.
        verbose: 1 says what is saved; 0 (default) says nothing.
        save_best_only: Whether to save only what is better than all before (default False). NaN never is.
        save_weights_only: Weights are all that is saved, with either value (default False).
        mode: `"min"`, `"max"` or `"auto"` (default: as the metric says, else by the log's name).
        save_freq: `"epoch"` (default), or a number of batches.
        initial_value_threshold: The value to beat at first (default: none). It goes on from one `fit` to the next.

    Attributes:
        best: The best value so far, or None.

    Raises:
        ArgumentError: A format other than safetensors, a template with anything but plain names, an unknown mode or
            frequency, or a validation log to be followed between batches.

    Example:
        >>> from types import SimpleNamespace
        >>> checkpoint = ModelCheckpoint("{epoch:02d}-{loss:.1f}.safetensors", monitor="loss", save_best_only=True)
        >>> saves = lambda path: print("saves", path)
        >>> checkpoint.set_model(SimpleNamespace(save_weights=saves, higher_is_better=lambda name: False))
        >>> checkpoint.on_train_begin()
        >>> for epoch, loss in enumerate([0.5, 0.7, 0.4]):
        ...     checkpoint.on_epoch_end(epoch, {"loss": loss})
        saves 01-0.5.safetensors
        saves 03-0.4.safetensors

    Source: `keras.callbacks.ModelCheckpoint`.
    """

    reads_weights = False

    def __init__(
        self,
        filepath: str | os.PathLike[str],
        monitor: str = "val_loss",
        verbose: int = 0,
        save_best_only: bool = False,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        initial_value_threshold: float | None = None,
    ) -> None:
        every = batches("save_freq", save_freq, {"epoch": 0})
        if every and save_best_only and monitor.startswith("val_"):
            raise ArgumentError(
                f"monitor={monitor!r} is not known between batches: use save_freq='epoch', or a training log such as "
                "monitor='loss'"
            )
        self.filepath, self.monitor, self.verbose = os.fspath(filepath), monitor, verbose
        self.save_best_only, self.save_weights_only = save_best_only, save_weights_only
        self.save_freq, self.mode = save_freq, mode
        self._path = CheckpointPath(filepath, per_batch=bool(every))
        self._every = every  # 0: epochs
        self._followed = Monitor(monitor, mode, best=initial_value_threshold)
        self._epoch = self._steps = 0

    @property
    def best(self) -> float | None:
        """The best value so far, or None."""
        return self._followed.best

    def for_dry_run(self, folder: Path) -> Callback:
        """One that saves into the folder, and in any case: whatever was the best so far, and each batch if any."""
        twin = duplicate(self)
        twin._path = self._path.moved_to(folder)
        twin._every = min(self._every, 1)
        twin._followed = Monitor(self.monitor, self.mode)
        return twin

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Learn from the metric what is better."""
        self._followed.settle(self.model.higher_is_better(self.monitor))

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Note the epoch."""
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Save, if it is time to."""
        self._steps += 1
        if self._every and self._steps % self._every == 0:
            self._save(self._epoch, batch, logs or {})

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Save, if it is time to."""
        if not self._every:
            self._save(epoch, None, logs or {})

    def _save(self, epoch: int, batch: int | None, logs: Logs) -> None:
        reason = ""
        if self.save_best_only:
            value = self._followed.read(logs, "ModelCheckpoint")
            if value is None:
                return
            best = "none" if self.best is None else as_text(self.best)
            better = self._followed.observe(value)
            reason = f"{self.monitor} is {as_text(value)}, the best so far was {best}: "
            if not better:
                if self.verbose:
                    say(f"Epoch {epoch + 1}: {reason}not saved")
                return
        path = self._path.at(self._steps, epoch + 1, None if batch is None else batch + 1, logs)
        self.model.save_weights(path)
        if self.verbose:
            say(f"Epoch {epoch + 1}: {reason}saved {path}")
