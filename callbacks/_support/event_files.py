"""TensorBoard's event files: written, sent to where they belong, and taken back to the step of a resumption."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...utils.files import drop_drafts, replacing
from ...utils.urls import Mirror


class EventFiles:
    """The event files of a training, in a folder, or behind a URL, where they are sent whenever they are flushed."""

    def __init__(self, place: str) -> None:
        self._mirror = Mirror(place)
        self._writers: dict[str, Any] = {}

    @property
    def folder(self) -> str:
        """The local folder that is written to."""
        return os.fspath(self._mirror.path)

    def writer(self, run: str) -> Any:
        """PyTorch's writer of a run; it is made at the first call."""
        if run not in self._writers:
            # Imported here, and made only for a run that has something to show: it takes a second, and makes a file.
            from torch.utils.tensorboard import SummaryWriter

            self._writers[run] = SummaryWriter(os.path.join(self.folder, run))
        return self._writers[run]

    def flush(self) -> None:
        """Write what is still in memory."""
        for writer in self._writers.values():
            writer.flush()
        self._mirror.push()

    def close(self) -> None:
        """Close all files."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()
        self._mirror.push()

    def rewind(self, keep: Callable[[str, int], bool]) -> None:
        """Rewrite the files of all runs without some points; see `rewind`."""
        self.close()
        self._mirror.pull()
        for run in ("train", "validation", "."):
            rewind(self._mirror.path / run, keep)
        self._mirror.push()


def rewind(folder: Path, keep: Callable[[str, int], bool]) -> None:
    """Rewrite a run's files without the points that a resumed training will write again.

    TensorBoard's own way, a purge step, goes by the step alone, and so can't tell an epoch's number from a batch's.
    Half a record, as a killed process may leave, is left out. Whenever this is interrupted, the files are good, and a
    server that is open shows the new ones soon after. `keep` is called with the tag and the step of each point. The
    folder need not exist.
    """
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.summary.writer.record_writer import RecordWriter

    drop_drafts(folder)
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
