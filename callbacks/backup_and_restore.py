"""`BackupAndRestore`: a `fit` that was broken off goes on where it was, when it is called again."""

from __future__ import annotations

import os
from typing import Any

from ..checkpoint import RunFolder
from ..errors import ArgumentError
from ..writer import Writer
from .base import Callback, Logs
from .frequency import batches
from .step_count import StepCount


class BackupAndRestore(Callback):
    """Backs the state of training up, and lets the next `fit` go on from there if this one is broken off.

    It is `ModelCheckpoint` and `fit(resume=True)` in one, for a script that is simply started again.

    Args:
        backup_dir: The folder for the backup. It can't be shared with another `ModelCheckpoint` or training.
        save_freq: `"epoch"` (default), or a number of batches. It is backed up too when the process gets SIGTERM or
            Ctrl-C, and when `max_time` is over.
        double_checkpoint: Whether the backup before the newest is kept too, should the newest be damaged (default
            False).
        delete_checkpoint: Whether the backup is deleted when training has come to its end (default True).

    Attributes:
        writer: What writes into the folder.

    Raises:
        ArgumentError: An unknown frequency, or no folder.

    Example:
        >>> BackupAndRestore("runs/backup", save_freq=100).writer.run.keep_last
        1

    Source: `keras.callbacks.BackupAndRestore`.
    """

    reads_weights = False
    restores = True

    def __init__(
        self,
        backup_dir: str | os.PathLike[str],
        save_freq: str | int = "epoch",
        double_checkpoint: bool = False,
        delete_checkpoint: bool = True,
    ) -> None:
        self._every = batches("save_freq", save_freq, {"epoch": 0})
        if not backup_dir:
            raise ArgumentError(f"backup_dir must be the path of a folder, got {backup_dir!r}")
        self.backup_dir, self.save_freq = os.fspath(backup_dir), save_freq
        self.double_checkpoint, self.delete_checkpoint = double_checkpoint, delete_checkpoint
        self.writer = Writer(RunFolder(backup_dir, keep_last=1 + double_checkpoint))
        self._count = StepCount(self._every)
        self._failed = False

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Make sure that the folder can be written to."""
        self._failed = False
        self._count.begin()
        self.writer.run.open()

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Back up, if it is time to."""
        if self._count.advance(batch):
            self.model.save_checkpoint(self.writer)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Back up, if it is time to."""
        if not self._every:
            self.model.save_checkpoint(self.writer)

    def on_exception(self, exception: BaseException, logs: Logs | None = None) -> None:
        """Keep the backup: training hasn't come to its end."""
        self._failed = True

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Delete the backup, if training has come to its end."""
        if self.delete_checkpoint and not self._failed and not self.model.out_of_time:
            self.writer.run.clear()
        self.writer.run.close()

    def state_dict(self) -> dict[str, Any]:
        """How many batches have been counted."""
        return self._count.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Go on from a state."""
        self._count.load_state_dict(state)
