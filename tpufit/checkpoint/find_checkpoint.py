"""Finds the checkpoint for `fit(resume=...)` or `tpufit.load`."""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..data.data_position import start_of_next_pass
from ..errors import ArgumentError, CheckpointDamagedError, CheckpointMissingError, join_few
from ..utils.urls import is_url
from .directory import CheckpointDirectory
from .format import Checkpoint, is_checkpoint, read
from .state_json import check_state
from .store import checkpoint_name, is_step, parse_step
from .writer import AsyncCheckpointWriter


def find_checkpoint(resume: bool | str | os.PathLike[str], callbacks: Sequence[object]) -> Checkpoint | None:
    """Find the checkpoint that `fit(resume=...)` resumes from; None if training starts from the beginning.

    Raises:
        ArgumentError: No callback keeps checkpoints, and `resume` isn't a path.
        CheckpointError: The checkpoint is missing or damaged.
    """
    asked = resume is not False and resume is not None
    if asked and not isinstance(resume, bool) and resume not in ("best", "next_epoch"):
        return read_checkpoint_at(resume)
    runs = [writer.run for callback, writer in checkpoint_callbacks(callbacks) if asked or callback.always_resumes]
    if asked and not runs:
        cure = "none does. Pass callbacks=[ModelCheckpoint('a_folder')], or the path of a folder as resume"
        raise ArgumentError(f"resume={resume!r} looks for the checkpoints of a callback: {cure}")
    # If several callbacks keep checkpoints, the latest step counts.
    candidates = [run.best(check_state) if resume == "best" else run.newest(check_state) for run in runs]
    newest = max((each for each in candidates if each is not None), key=lambda each: each.step, default=None)
    return _move_to_next_epoch(newest) if newest is not None and resume == "next_epoch" else newest


def read_checkpoint_at(path: str | os.PathLike[str], best: bool = False) -> Checkpoint:
    """Read the checkpoint at a path or URL; of a run's folder the newest checkpoint, or the `best` by its metric.

    Raises:
        ArgumentError: The best is requested, and the path is a single checkpoint.
        CheckpointError: There is no checkpoint, or it is damaged.
    """
    _require_step(path)
    if is_checkpoint(path) or not (is_url(path) or Path(path).is_dir()):
        try:
            checkpoint = read(path)
            check_state(checkpoint)
        except CheckpointDamagedError as error:
            cure = "Pass another checkpoint, or its run's folder, of which the newest intact checkpoint is read"
            raise CheckpointDamagedError(f"{error}. {cure}") from error
        if best:
            raise ArgumentError(
                f"which='best' chooses among a run's checkpoints, but {path} is a single checkpoint: pass the run's "
                "folder, or leave out which"
            )
        return checkpoint
    run = CheckpointDirectory(path)
    chosen = run.best(check_state) if best else run.newest(check_state)
    if chosen is None and run.steps():
        raise CheckpointMissingError(
            f"no checkpoint in {path} has a metric: ModelCheckpoint(monitor=...) names the log, which must exist when "
            "a checkpoint is saved. Load the newest with which='newest'"
        )
    if chosen is None:
        raise CheckpointMissingError(f"there is no checkpoint in {path}: it has no folder such as step-0000000010")
    return chosen


def _require_step(path: str | os.PathLike[str]) -> None:
    """Raise a `CheckpointMissingError` if a run's folder has other checkpoints, but not this one."""
    folder, name = os.path.split(os.fspath(path))
    steps = CheckpointDirectory(folder or ".").steps() if is_step(name) else []
    if steps and parse_step(name) not in steps:
        raise CheckpointMissingError(
            f"there is no {path}: {folder or 'this folder'} has {join_few([*map(checkpoint_name, steps)])}. "
            "ModelCheckpoint(keep_last=...) sets how many are kept"
        )


def checkpoint_callbacks(callbacks: Iterable[Any]) -> list[tuple[Any, AsyncCheckpointWriter]]:
    """Return the callbacks that keep checkpoints, each with its writer."""
    pairs = [(callback, getattr(callback, "checkpoint_writer", None)) for callback in callbacks]
    return [(callback, writer) for callback, writer in pairs if isinstance(writer, AsyncCheckpointWriter)]


@contextmanager
def closing_new_runs(callbacks: Iterable[Any]) -> Iterator[None]:
    """A context that closes run directories opened in it, even if the callbacks' end hooks are interrupted.

    Otherwise the lock would block the next `fit` in a notebook.
    """
    runs = [(writer.run, writer.run.opened) for _, writer in checkpoint_callbacks(callbacks)]
    try:
        yield
    finally:
        for run, before in runs:
            while run.opened > before:
                run.close()


def _move_to_next_epoch(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint moved to the start of the next epoch, without the state of its incomplete epoch.

    The next epoch's `StepRunner` drops the checkpoint's accumulated gradients, whose number is in the state.
    """
    before = checkpoint.state["progress"]
    data = checkpoint.state["data"]
    if before is None or before["batches"] is None:
        return checkpoint
    progress = before | {"epoch": before["epoch"] + 1, "batches": None, "trained": None, "validated": None}
    state = {**checkpoint.state, "progress": progress, "metrics": None}
    if before["trained"] is None:
        state["data"] = start_of_next_pass(data)
        # The random state after the last trained batch: reading ahead draws an arbitrary number of times.
        state["draws"] = {**(data.get("draws") or state["draws"]), "own": []}  # the position has the data's generators
    return replace(checkpoint, state=state)
