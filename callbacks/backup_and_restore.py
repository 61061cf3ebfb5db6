"""`BackupAndRestore`: an interrupted `fit` resumes when it is called again."""

import os
from collections.abc import Mapping
from datetime import timedelta
from time import monotonic
from typing import Any

from ..checkpoint import AsyncCheckpointWriter, CheckpointDirectory
from ..errors import ArgumentError
from ._support.frequency import SaveRule
from .base import Callback, Logs


class BackupAndRestore(Callback):
    """Backs up the state of training, so that the next `fit` resumes from it if this one is interrupted.

    It combines `ModelCheckpoint` and `fit(resume=True)`, for a script that is simply started again.

    Args:
        backup_dir: The folder for the backup. It can't be shared with another `ModelCheckpoint` or training.
        save_freq: As in `ModelCheckpoint` (default `"epoch"`). A backup is also written on SIGTERM or Ctrl-C, and when
            `max_time` is over.
        double_checkpoint: Keep the second-newest backup too, in case the newest is damaged (default False).
        delete_checkpoint: Delete the backup when training is complete (default True), and the folder unless it contains
            other files.

    Attributes:
        checkpoint_writer: The writer of the folder.

    Raises:
        ArgumentError: An unknown frequency, or no folder.

    Example:
        >>> BackupAndRestore("runs/backup", save_freq=100).checkpoint_writer.run.keep_last
        1

    Source: `keras.callbacks.BackupAndRestore`.
    """

    checkpoint_writer: AsyncCheckpointWriter
    reads_weights = False
    always_resumes = True

    def __init__(
        self,
        backup_dir: str | os.PathLike[str],
        save_freq: str | int | timedelta = "epoch",
        double_checkpoint: bool = False,
        delete_checkpoint: bool = True,
    ) -> None:
        self._rule = SaveRule(save_freq)
        if not backup_dir:
            raise ArgumentError(f"backup_dir must be the path of a folder, got {backup_dir!r}")
        self.backup_dir = os.fspath(backup_dir)
        self.save_freq = save_freq
        self.double_checkpoint = double_checkpoint
        self.delete_checkpoint = delete_checkpoint
        self.checkpoint_writer = AsyncCheckpointWriter(CheckpointDirectory(backup_dir, keep_last=1 + double_checkpoint))
        self._failed = False

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Check that the folder is writable."""
        self._failed = False
        self._rule.note_save(monotonic())
        self.checkpoint_writer.run.open()

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Count steps from here."""
        self._rule.begin(self.model.steps_taken)

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Back up, if a backup is due."""
        if self._rule.is_due(self.model.steps_taken, monotonic()):
            self._rule.note_save(monotonic())
            self.model.save_checkpoint(self.checkpoint_writer)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Back up, if a backup is due."""
        if not self._rule.between_batches:
            self.model.save_checkpoint(self.checkpoint_writer)

    def on_exception(self, exception: BaseException, logs: Logs | None = None) -> None:
        """Keep the backup: training is incomplete."""
        self._failed = True

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Delete the backup, if training is complete."""
        if self.delete_checkpoint and not self._failed and not self.model.out_of_time:
            self.checkpoint_writer.run.clear()
        self.checkpoint_writer.run.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps since the last backup."""
        return self._rule.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; in the middle of an epoch this comes after `on_epoch_begin`.

        Args:
            state: The dict that `state_dict` returned.
        """
        self._rule.load_state_dict(state, self.model.steps_taken)
