"""`rewind`: removes the points after a checkpoint from TensorBoard's event files, when a training is resumed there."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...utils.files import drop_drafts, replacing

Keep = Callable[[str, int], bool]  # of the tag and the step of a point; False removes it

# The steps of these tags are epochs; all others are training steps.
_BY_EPOCH = ("epoch_", "weights/")
# Written at the end of the first epoch, also of a resumed training.
_WRITTEN_ONCE = ("summary/text_summary", "_hparams_/")


def keep_until(epoch: int, steps: int, within: bool) -> Keep:
    """Return the rule that keeps the points before a checkpoint.

    Args:
        epoch: The epoch (from 0) in which the training resumes.
        steps: The training steps before the checkpoint.
        within: True if the checkpoint is from the middle of the epoch.
    """

    def keep(tag: str, step: int) -> bool:
        if tag.startswith(_WRITTEN_ONCE):
            return False
        if tag.startswith(_BY_EPOCH):
            return step < epoch
        # In the middle of an epoch its validation is still pending, even if it is due at this step.
        again = within and tag.startswith("evaluation_")
        return step < steps if again else step <= steps

    return keep


def rewind(folder: Path, keep: Keep) -> None:
    """Rewrite a run's files without the points that a resumed training will write again.

    TensorBoard's own way, a purge step, compares only steps, and an epoch's number isn't a step. Half a record that a
    killed process has left is removed, too. The files stay valid if this is interrupted, and an open TensorBoard soon
    shows the new files.

    Args:
        folder: The run's folder, which need not exist.
        keep: Called with the tag and the step of each point; False removes the point.
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
                kept = [earlier for earlier in kept if earlier.step < event.step]
            points = [point for point in event.summary.value if keep(point.tag, event.step)]
            if points:
                del event.summary.value[:]
                event.summary.value.extend(points)
                kept.append(event)
    # A session that starts at step 0 replaces all earlier files, in case they can't be deleted.
    start = Event(step=0, session_log=SessionLog(status=SessionLog.START))
    with replacing(old[-1].with_name(f"{old[-1].name}.resumed")) as draft, draft.open("wb") as file:
        records = RecordWriter(file)
        for event in (Event(file_version="brain.Event:2"), start, *kept):
            records.write(event.SerializeToString())
    for path in old:
        path.unlink()
