"""`AsyncCheckpointWriter`: writes checkpoints in a background thread."""

import threading
from concurrent.futures import Future
from pathlib import Path

from ..errors import CheckpointNotWrittenError
from ..hosts import is_first
from ..utils.failed_writes import FailedWrites
from ..utils.urls import Url
from .directory import CheckpointDirectory
from .format import Checkpoint


class AsyncCheckpointWriter:
    """Writes one checkpoint at a time to a run's folder. Each waits for the previous one.

    On a pod only process 0 writes.

    If a checkpoint can't be written, a warning says so, and training continues, until `max_failures` have failed in a
    row.
    """

    def __init__(self, run: CheckpointDirectory, max_failures: int = 3) -> None:
        self.run = run
        self.save_frozen = True  # False omits frozen parameters
        self._written: Future[Path | Url] | None = None  # the current checkpoint's
        self._thread: threading.Thread | None = None  # the thread that writes it; None if training's thread did
        self._failed_writes = FailedWrites(max_failures)

    def submit(self, checkpoint: Checkpoint) -> Path | Url | None:
        """Begin to write a checkpoint. **This waits** until the previous one is written.

        A checkpoint on the device is written at once, tensor by tensor. Other checkpoints' tensors mustn't change until
        they are written.

        Returns:
            The previous checkpoint's path, if it was written and not returned yet.

        Raises:
            CheckpointNotWrittenError: The previous checkpoint failed, and too many have in a row.
        """
        if not checkpoint.is_on_host:
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
        self._written = written  # only now: without a thread, a wait for it would never end
        return before

    def poll(self) -> Path | Url | None:
        """Return the path of a checkpoint that was written and not returned yet, if any, without waiting.

        Raises:
            CheckpointNotWrittenError: The checkpoint failed, and too many have in a row.
        """
        return self.wait() if self._written is not None and self._written.done() else None

    def wait(self) -> Path | Url | None:
        """Wait for the current checkpoint, then return what `poll` returns."""
        return self._wait(is_last=False)

    def finish(self) -> Path | Url | None:
        """Like `wait`, but any failure is an error, because there are no further attempts.

        Raises:
            CheckpointNotWrittenError: The last checkpoint could not be written.
        """
        try:
            return self._wait(is_last=True)
        finally:
            self._failed_writes.reset()

    def _wait(self, is_last: bool) -> Path | Url | None:
        if self._written is None:
            return None
        written = self._written
        error = written.exception()  # waits
        if self._thread is not None:
            self._thread.join()  # it may still free tensors, in C++, which mustn't overlap the interpreter's end
        self._written = None
        self._thread = None
        if error is None:
            self._failed_writes.reset()
            return written.result()
        if is_last or not isinstance(error, CheckpointNotWrittenError):
            raise error
        self._failed_writes.count(error, str(error))
        return None

    def _write(self, checkpoint: Checkpoint, writing: Future[Path | Url]) -> None:
        try:
            writing.set_result(self.run.write(checkpoint))
        except BaseException as error:  # raised in training's thread, by `wait`
            writing.set_exception(error)
            del writing  # the future, the error and this frame would form a cycle that keeps the checkpoint in memory
