"""`AsyncCheckpointWriter`: writes checkpoints on a thread of its own, while training goes on."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path

from ..errors import CheckpointNotWrittenError
from .directory import CheckpointDirectory
from .format import Checkpoint


class AsyncCheckpointWriter:
    """Writes one checkpoint at a time into a run's folder. Whoever has the next one waits for the one before.

    A checkpoint that can't be written is a warning, and training goes on, until so many have failed in a row.

    Args:
        run: The run's folder.
        max_failures: How many failures in a row end training (default 3).

    Attributes:
        run: The run's folder.
    """

    def __init__(self, run: CheckpointDirectory, max_failures: int = 3) -> None:
        self.run, self._max_failures = run, max_failures
        self._thread: threading.Thread | None = None
        self._written: Path | None = None
        self._error: BaseException | None = None
        self._failures = 0

    def submit(self, checkpoint: Checkpoint) -> Path | None:
        """Begin to write a checkpoint. **This waits** as long as one before it is being written.

        Args:
            checkpoint: What to write. Its tensors are read until it is written, and mustn't change.

        Returns:
            The one before, if it was written since the last time that somebody asked.

        Raises:
            CheckpointNotWrittenError: The one before has failed, once too often.
        """
        before = self.wait()
        # A daemon: who leaves for good shall not have to wait for a slow disk. What it leaves is dropped the next time.
        self._thread = threading.Thread(target=self._write, args=(checkpoint,), name="tpufit-checkpoint", daemon=True)
        self._thread.start()
        return before

    def poll(self) -> Path | None:
        """The checkpoint that was written since the last time that somebody asked, if any. It waits for nothing.

        Raises:
            CheckpointNotWrittenError: It has failed, once too often.
        """
        return None if self._thread is None or self._thread.is_alive() else self.wait()

    def wait(self) -> Path | None:
        """As `poll`, but once what is being written is written."""
        if self._thread is None:
            return None
        self._thread.join()
        self._thread = None
        written, error = self._written, self._error
        self._written = self._error = None
        if error is None:
            self._failures = 0
            return written
        self._failures += 1
        if not isinstance(error, CheckpointNotWrittenError) or self._failures >= self._max_failures:
            raise error
        warnings.warn(f"{error}. Training goes on", stacklevel=3)
        return None

    def finish(self) -> Path | None:
        """As `wait`, but a failure is an error in any case: nobody will try again.

        Raises:
            CheckpointNotWrittenError: The last checkpoint could not be written.
        """
        self._failures = self._max_failures
        try:
            return self.wait()
        finally:
            self._failures = 0

    def _write(self, checkpoint: Checkpoint) -> None:
        try:
            self._written = self.run.write(checkpoint)
        except BaseException as error:  # it is raised where somebody can see it
            self._error = error
