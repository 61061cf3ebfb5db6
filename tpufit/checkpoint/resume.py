"""The checkpoint that `fit(resume=...)` or `tpufit.load` asks for."""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..data.position import at_next_pass
from ..errors import ArgumentError, CheckpointMissingError
from ..utils.urls import is_url
from .directory import CheckpointDirectory
from .format import Checkpoint, is_checkpoint, read
from .state import check_state
from .writer import AsyncCheckpointWriter


def find_checkpoint(resume: bool | str | os.PathLike[str], callbacks: Sequence[object]) -> Checkpoint | None:
    """Find the checkpoint that `fit(resume=...)` resumes from; None if training starts from the beginning.

    Raises:
        ArgumentError: No callback keeps checkpoints, and no path was given.
        CheckpointError: The checkpoint is missing or damaged.
    """
    asked = resume is not False and resume is not None
    if asked and not isinstance(resume, bool) and resume not in ("best", "next_epoch"):
        return named_checkpoint(resume)
    runs = [writer.run for callback, writer in checkpoint_callbacks(callbacks) if asked or callback.restores]
    if asked and not runs:
        cure = "none does. Pass callbacks=[ModelCheckpoint('a_folder')], or the path of a folder as resume"
        raise ArgumentError(f"resume={resume!r} looks for checkpoints where a callback keeps them: {cure}")
    # Where several callbacks keep checkpoints, the one that has come the furthest counts.
    found = [run.best(check_state) if resume == "best" else run.newest(check_state) for run in runs]
    newest = max((one for one in found if one is not None), key=lambda one: one.step, default=None)
    return _at_next_epoch(newest) if newest is not None and resume == "next_epoch" else newest


def named_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read the checkpoint at a path or URL, or the newest one of a run's folder there.

    Raises:
        CheckpointError: There is no checkpoint, or it is damaged.
    """
    if is_checkpoint(path) or not (is_url(path) or Path(path).is_dir()):
        found = read(path)
        check_state(found)
        return found
    newest = CheckpointDirectory(path).newest(check_state)
    if newest is None:
        raise CheckpointMissingError(f"there is no checkpoint in {path}: it has no folder such as step-0000000010")
    return newest


def checkpoint_callbacks(callbacks: Iterable[Any]) -> list[tuple[Any, AsyncCheckpointWriter]]:
    """Return the callbacks that keep checkpoints, as `Callback` declares it, each with its writer."""
    found = [(callback, getattr(callback, "checkpoints", None)) for callback in callbacks]
    return [(callback, writer) for callback, writer in found if isinstance(writer, AsyncCheckpointWriter)]


@contextmanager
def closing_runs(callbacks: Iterable[Any]) -> Iterator[None]:
    """A context that leaves each run directory as open as it was, however the callbacks' end is cut short.

    Else its lock would refuse the next `fit` of a notebook.
    """
    runs = [(writer.run, writer.run.opened) for _, writer in checkpoint_callbacks(callbacks)]
    try:
        yield
    finally:
        for run, before in runs:
            while run.opened > before:
                run.close()


def _at_next_epoch(checkpoint: Checkpoint) -> Checkpoint:
    """Return the same checkpoint without the rest of its epoch, and without what belongs to the part that was done.

    The gradients that wait in it are dropped by the next epoch's `StepRunner`, which finds their number in the state.
    """
    own = checkpoint.state["progress"]
    data = checkpoint.state["data"]
    if own is None or own["batches"] is None:
        return checkpoint
    progress = own | {"epoch": own["epoch"] + 1, "batches": None, "trained": None, "validated": None}
    state = {**checkpoint.state, "progress": progress, "metrics": None}
    if own["trained"] is None:
        state["data"] = at_next_pass(data)
        # Those after the last batch that was trained on: what was read ahead of it has drawn as chance would have it.
        state["draws"] = {**(data.get("draws") or state["draws"]), "own": []}  # the data's own are in the position
    return replace(checkpoint, state=state)
