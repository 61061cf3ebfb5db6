"""`AsyncCheckpointWriter`: writes checkpoints on a thread of its own, while training goes on."""

import threading
from concurrent.futures import Future
from pathlib import Path

from ..errors import CheckpointNotWrittenError
from ..hosts import is_first
from ..utils.urls import Url
from ..utils.users_code import warn
from .directory import CheckpointDirectory
from .format import Checkpoint


class AsyncCheckpointWriter:
    """Writes one checkpoint at a time into a run's folder. The next one waits for the one before.

    On a pod process 0 writes, and the others do nothing.

    A checkpoint that can't be written is a warning, and training goes on, until `max_failures` have failed in a row.
    """

    def __init__(self, run: CheckpointDirectory, max_failures: int = 3) -> None:
        self.run = run
        self.save_frozen = True  # False leaves out the parameters that don't learn
        self._max_failures = max_failures
        self._written: Future[Path | Url] | None = None  # of the checkpoint under way
        self._thread: threading.Thread | None = None  # that writes it; None if this one did
        self._failures = 0

    def submit(self, checkpoint: Checkpoint) -> Path | Url | None:
        """Begin to write a checkpoint. **This waits** until the one before is written.

        One that is still on the device is written at once, tensor by tensor. The others' tensors mustn't change until
        they are written.

        Returns:
            The path of the one before, if it was written and not returned yet.

        Raises:
            CheckpointNotWrittenError: The one before has failed, as the last of too many.
        """
        if not checkpoint.is_here:
            before = self.wait()
            written = Future[Path | Url]()
            self._write(checkpoint, written)
            self._written = written
            return before
        if not is_first():
            return None
        before = self.wait()
        written = Future[Path | Url]()
        # A daemon: the process can end without waiting for a slow disk. The next run drops the unfinished draft.
        thread = threading.Thread(target=self._write, args=(checkpoint, written), name="tpufit-checkpoint", daemon=True)
        thread.start()
        self._thread = thread
        self._written = written  # only now: nobody would end the wait for one that has no thread
        return before

    def poll(self) -> Path | Url | None:
        """Return the path of a checkpoint that was written and not returned yet, if any, without waiting.

        Raises:
            CheckpointNotWrittenError: The checkpoint has failed, as the last of too many.
        """
        return self.wait() if self._written is not None and self._written.done() else None

    def wait(self) -> Path | Url | None:
        """Wait for the checkpoint under way, then return what `poll` returns."""
        if self._written is None:
            return None
        written = self._written
        error = written.exception()  # waits
        if self._thread is not None:
            self._thread.join()  # it may still drop tensors, in C++, which mustn't meet the interpreter's end
        self._written = None
        self._thread = None
        if error is None:
            self._failures = 0
            return written.result()
        self._failures += 1
        if not isinstance(error, CheckpointNotWrittenError) or self._failures >= self._max_failures:
            raise error
        warn(f"{error}. Training goes on")
        return None

    def finish(self) -> Path | Url | None:
        """As `wait`, but any failure is an error, because nobody tries again.

        Raises:
            CheckpointNotWrittenError: The last checkpoint could not be written.
        """
        self._failures = self._max_failures
        try:
            return self.wait()
        finally:
            self._failures = 0

    def _write(self, checkpoint: Checkpoint, writing: Future[Path | Url]) -> None:
        try:
            writing.set_result(self.run.write(checkpoint))
        except BaseException as error:  # raised in training's thread, by `wait`
            writing.set_exception(error)
            del writing  # it, the error and this frame would keep each other, and the checkpoint in memory
