"""TensorBoard's event files, taken back to the step from which a training is resumed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...utils.files import drop_drafts, replacing


def rewind(folder: Path, keep: Callable[[str, int], bool]) -> None:
    """Rewrite a run's files without the points that a resumed training will write again.

    TensorBoard's own way, a purge step, goes by the step alone, and so can't tell an epoch's number from a batch's.
    Half a record, as a killed process may leave, is left out. Whenever this is interrupted, the files are good, and a
    server that is open shows the new ones soon after.

    Args:
        folder: The run's; it need not exist.
        keep: Called with the tag and the step of each point; True keeps it.
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
