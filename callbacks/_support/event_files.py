"""`EventFiles`: writes TensorBoard's event files, and uploads them if they belong behind a URL."""

import io
import itertools
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...utils.files import append_or_undo, tolerating_full_disk
from ...utils.urls import Mirror
from .event_rewind import Keep, rewind

_RUNS = ("train", "validation", ".")
_SECONDS = 1.0  # the longest time that an event stays in memory


class EventFiles:
    """The event files of a training, in a folder or behind a URL; each flush uploads them."""

    def __init__(self, place: str) -> None:
        self._mirror = Mirror(place)
        self._writers: dict[str, Any] = {}
        self._files: list[_EventFile] = []
        self._keep: Keep | None = None  # for a rewind that is due

    @property
    def folder(self) -> str:
        """The local folder with the files."""
        return os.fspath(self._mirror.path)

    def writer(self, run: str) -> Any:
        """Return PyTorch's writer of a run; the first call makes it."""
        if run not in self._writers:
            # Imported only for a run that has something to show, because the import takes a second.
            from torch.utils.tensorboard import writer

            class File(writer.FileWriter):
                """PyTorch's class with our event file, because tensorboard's writer thread can't report a full disk."""

                def __init__(self, folder: str) -> None:
                    self.event_writer = file

            class Writer(writer.SummaryWriter):
                """PyTorch's class with the class above."""

                def _get_file_writer(self) -> Any:
                    if self.all_writers is None or self.file_writer is None:
                        self.file_writer = File(self.log_dir)
                        self.all_writers = {self.log_dir: self.file_writer}
                    return self.file_writer

            file = _EventFile(Path(self.folder, run), lambda: self._keep is None)
            self._files.append(file)
            kind: Any = Writer
            self._writers[run] = kind(os.path.join(self.folder, run))
        return self._writers[run]

    def write(self) -> None:
        """Write the pending events into the local files.

        Raises:
            OSError: The file system refused; the events stay in memory.
        """
        if self._keep is not None:
            for run in _RUNS:
                rewind(self._mirror.path / run, self._keep)
            self._keep = None
        for file in self._files:
            file.write()

    def flush(self) -> None:
        """Write the pending events, and upload the files.

        Raises:
            OSError: The file system refused; the events stay in memory.
        """
        self.write()
        self._mirror.push()

    def close(self) -> None:
        """Write the pending events. The next event begins new files.

        Raises:
            OSError: The file system refused, and some events are lost.
        """
        try:
            self.flush()
        finally:
            self._writers.clear()
            self._files.clear()

    def rewind(self, keep: Keep) -> None:
        """Remove points from the files of all runs, see `rewind`. If the disk is full, the next write does it first.

        Raises:
            OSError: The file system refused for another reason.
        """
        self.close()
        self._mirror.pull()
        self._keep = keep
        with tolerating_full_disk():
            self.flush()


class _EventFile:
    """An event file, created with its first event, with the interface of tensorboard's `EventFileWriter`.

    Events that the file system refuses stay in memory, and the file never has half a record. An event is written
    together with the next event that comes after a second, if `may_write` returns True.
    """

    _numbers = itertools.count()

    def __init__(self, folder: Path, may_write: Callable[[], bool]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._folder = folder
        self._may_write = may_write
        self._path: Path | None = None
        self._pending = bytearray()
        self._written = time.monotonic()
        self.add_event(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def get_logdir(self) -> str:
        """Return the folder, for `SummaryWriter`."""
        return os.fspath(self._folder)

    def add_event(self, event: Any) -> None:
        """Add an event."""
        from tensorboard.summary.writer.record_writer import RecordWriter

        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        self._pending += record.getvalue()
        if time.monotonic() - self._written > _SECONDS and self._may_write():
            with suppress(OSError):  # the events stay in memory, and the next `write` reports the error
                self.write()

    def write(self) -> None:
        """Write all events.

        Raises:
            OSError: The file system refused; the events stay in memory.
        """
        self._written = time.monotonic()
        if not self._pending:
            return
        if self._path is None:
            name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
            self._folder.mkdir(parents=True, exist_ok=True)
            self._path = self._folder / f"{name}.{next(self._numbers)}"
        with open(self._path, "ab", buffering=0) as file:
            file.seek(0, os.SEEK_END)
            append_or_undo(file, bytes(self._pending))  # else half a record may remain
        self._pending.clear()

    def flush(self) -> None:
        """Write all events, for `SummaryWriter`."""
        self.write()

    def close(self) -> None:
        """Write all events, for `SummaryWriter`."""
        self.write()

    def reopen(self) -> None:
        """Do nothing, for `SummaryWriter`: the file is never closed."""
