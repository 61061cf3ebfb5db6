"""TensorBoard's event files: written, sent to where they belong, and taken back to the step of a resumption."""

import io
import itertools
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...utils.files import DISK_FULL, drop_drafts, replacing
from ...utils.urls import Mirror

Keep = Callable[[str, int], bool]  # of the tag and the step of a point: False takes it out
_RUNS = ("train", "validation", ".")
_SECONDS = 1.0  # for which an event may wait


class EventFiles:
    """The event files of a training, in a folder, or behind a URL, where they are sent whenever they are flushed."""

    def __init__(self, place: str) -> None:
        self._mirror = Mirror(place)
        self._writers: dict[str, Any] = {}
        self._files: list[_EventFile] = []
        self._keep: Keep | None = None  # for a rewriting of the files that is due

    @property
    def folder(self) -> str:
        """The local folder that is written to."""
        return os.fspath(self._mirror.path)

    def writer(self, run: str) -> Any:
        """PyTorch's writer of a run; it is made at the first call."""
        if run not in self._writers:
            # Imported here, and made only for a run that has something to show: it takes a second.
            from torch.utils.tensorboard import writer

            class File(writer.FileWriter):
                """PyTorch's, with our event file: tensorboard's writer thread can't report a full disk."""

                def __init__(self, folder: str) -> None:
                    self.event_writer = file

            class Writer(writer.SummaryWriter):
                """PyTorch's, with a file of ours."""

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
            OSError: The file system refused; what could not be written stays in memory.
        """
        if self._keep is not None:
            for run in _RUNS:
                rewind(self._mirror.path / run, self._keep)
            self._keep = None
        for file in self._files:
            file.write()

    def flush(self) -> None:
        """Write the pending events, and send the files to their destination.

        Raises:
            OSError: The file system refused; what could not be written stays in memory.
        """
        self.write()
        self._mirror.push()

    def close(self) -> None:
        """Write the pending events, and begin new files with the next point.

        Raises:
            OSError: The file system refused, and some points are lost.
        """
        try:
            self.flush()
        finally:
            self._writers.clear()
            self._files.clear()

    def rewind(self, keep: Keep) -> None:
        """Rewrite the files of all runs without some points, see `rewind`; on a full disk before the next is written.

        Raises:
            OSError: The file system refused for another reason.
        """
        self.close()
        self._mirror.pull()
        self._keep = keep
        try:
            self.flush()
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise


class _EventFile:
    """An event file, which is made with its first event. It stands in for tensorboard's `EventFileWriter`.

    What the file system refuses stays in memory, and the file never has half a record. While it `may_write`, an event
    is written with the next one after a second.
    """

    _numbers = itertools.count()

    def __init__(self, folder: Path, may_write: Callable[[], bool]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._folder = folder
        self._may_write = may_write
        self._path: Path | None = None
        self._waiting = bytearray()
        self._written = time.monotonic()
        self.add_event(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def get_logdir(self) -> str:
        """The folder, as `SummaryWriter` asks for it."""
        return os.fspath(self._folder)

    def add_event(self, event: Any) -> None:
        """Add an event."""
        from tensorboard.summary.writer.record_writer import RecordWriter

        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        self._waiting += record.getvalue()
        if time.monotonic() - self._written > _SECONDS and self._may_write():
            with suppress(OSError):  # it stays, and `write` says why
                self.write()

    def write(self) -> None:
        """Write all events.

        Raises:
            OSError: The file system refused; they are kept.
        """
        self._written = time.monotonic()
        if not self._waiting:
            return
        if self._path is None:
            name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
            self._folder.mkdir(parents=True, exist_ok=True)
            self._path = self._folder / f"{name}.{next(self._numbers)}"
        with open(self._path, "ab", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            content = memoryview(bytes(self._waiting))
            try:
                while content:  # a full disk may take a part of it
                    content = content[file.write(content) :]
            except OSError:
                file.truncate(end)  # half a record
                raise
        self._waiting.clear()

    def flush(self) -> None:
        """Write all events, as `SummaryWriter.flush` asks for it."""
        self.write()

    def close(self) -> None:
        """As `flush`."""
        self.write()

    def reopen(self) -> None:
        """Do nothing: it is never closed."""


def rewind(folder: Path, keep: Keep) -> None:
    """Rewrite a run's files without the points that a resumed training will write again.

    TensorBoard's own way, a purge step, goes by the step alone, and so can't tell an epoch's number from a batch's.
    Half a record, as a killed process may leave, is left out. Whenever this is interrupted, the files are good, and a
    server that is open shows the new ones soon after. `keep` is called with the tag and the step of each point. The
    folder need not exist.
    """
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.summary.writer.record_writer import RecordWriter

    drop_drafts(folder, r".*tfevents.*\.resumed")
    old = sorted(folder.glob("*tfevents*"))
    if not old:
        return
    kept: list[Any] = []
    for path in old:
        for event in LegacyEventFileLoader(str(path)).Load():
            if event.session_log.status == SessionLog.START:
                kept = [one for one in kept if one.step < event.step]
            points = [point for point in event.summary.value if keep(point.tag, event.step)]
            if points:
                del event.summary.value[:]
                event.summary.value.extend(points)
                kept.append(event)
    # A session that starts at step 0 takes the place of all files before it, should they not get deleted.
    start = Event(step=0, session_log=SessionLog(status=SessionLog.START))
    with replacing(old[-1].with_name(f"{old[-1].name}.resumed")) as draft, draft.open("wb") as file:
        records = RecordWriter(file)
        for event in (Event(file_version="brain.Event:2"), start, *kept):
            records.write(event.SerializeToString())
    for path in old:
        path.unlink()
