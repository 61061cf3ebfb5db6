"""`CheckpointManager`: takes the checkpoints of a `fit` between its steps, and lets a `fit` go on from one."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ..callbacks.base import Callback
from ..callbacks.callback_list import CallbackList
from ..data import Stream
from ..errors import ArgumentError, CheckpointError, CheckpointMismatchError, CheckpointMissingError, DataError
from ..runtime import Placement
from ..step import StepRunner, Steps
from ..utils.random import RNGState
from .directory import Checkpoint, CheckpointDirectory, is_checkpoint, read, versions
from .json_codec import decode, encode
from .training_state import put_back, settings, take
from .writer import AsyncCheckpointWriter


@dataclass(slots=True)
class Progress:
    """How far a `fit` is.

    Attributes:
        epoch: The number of the epoch, from 0.
        batches: How many of its batches have been trained on; None: it has not begun yet.
        trained: The epoch's logs, if all batches have been trained on and its validation is due.
        validated: After how many batches of the epoch the last validation was, and its logs.
        stopped: Whether a callback has ended training,
        epochs: which was to have so many epochs.
    """

    epoch: int
    batches: int | None = None
    trained: Mapping[str, Any] | None = None
    validated: dict[str, Any] | None = None
    stopped: bool = False
    epochs: int = 0


_FIELDS = [field.name for field in fields(Progress)]


class CheckpointManager:
    """Takes checkpoints when callbacks have asked for them, once all callbacks have had their turn.

    Args:
        model: What is trained.
        train: The training data.
        callbacks: The callbacks, whose state goes into checkpoints too.
    """

    def __init__(self, model: Steps, train: Stream, callbacks: CallbackList) -> None:
        self._model, self._train, self._callbacks = model, train, callbacks
        self._writing: list[AsyncCheckpointWriter] = []
        self._taken: dict[AsyncCheckpointWriter, Progress] = {}  # how far training was at the last checkpoint
        self._open = True
        self._run: StepRunner | None = None
        self._progress: Progress | None = None
        model._wanted_saves.clear()
        train.keeps_draws = bool(keepers(callbacks))

    def at(self, progress: Progress, run: StepRunner | None = None) -> None:
        """Note how far training is, between two steps, and take the checkpoints that have been asked for.

        Args:
            progress: How far it is.
            run: What runs the epoch's steps, if it has begun.

        Raises:
            CheckpointNotWrittenError: One could not be written, once too often.
        """
        if not self._open:
            return
        self._progress, self._run = progress, run
        if self._model._wanted_saves:
            wanted, self._model._wanted_saves = self._model._wanted_saves, []
            for writer, metric in wanted:
                self._tell(writer.submit(self._checkpoint(metric)))
                self._taken[writer] = progress
                if writer not in self._writing:
                    self._writing.append(writer)
        elif self._writing:
            for writer in self._writing:
                self._tell(writer.poll())

    def save_now(self) -> None:
        """Take a last checkpoint for every callback that keeps some, and wait until it is written."""
        self._save_for(writer for _, writer in keepers(self._callbacks))

    @contextmanager
    def rescuing(self) -> Iterator[None]:
        """After an error, take one for the callbacks that want it: of the last step that was done, if none is torn."""
        try:
            yield
        except Exception:
            if self._progress is not None and (self._run is None or not self._run.inside):
                if self._run is not None:  # a callback may have raised after a step, before anybody noted it
                    self._progress.batches = self._run.batches
                self._save_for(writer for callback, writer in keepers(self._callbacks) if callback.save_on_exception)
            for writer in self._writing:
                try:
                    writer.finish()
                except CheckpointError as fault:  # it mustn't hide the error itself
                    warnings.warn(str(fault), stacklevel=4)
            raise

    def finish(self) -> None:
        """Wait until everything is written.

        Raises:
            CheckpointNotWrittenError: The last checkpoint could not be.
        """
        writing, self._writing = self._writing, []
        for writer in writing:
            self._tell(writer.finish())

    def go_on(self, checkpoint: Checkpoint, run: StepRunner | None = None) -> int:
        """Go on from a checkpoint: after the callbacks have begun, so that what they begin with gives way to it.

        Args:
            checkpoint: The checkpoint.
            run: What runs the steps of the epoch in whose middle it was taken.

        Returns:
            How many batches of the epoch have been trained on.

        Raises:
            CheckpointMismatchError: It is of another net, optimizer or data.
        """
        state = checkpoint.state
        put_back(self._model, checkpoint)
        self._load_callbacks(state["callbacks"], checkpoint.training)
        try:
            batches = self._train.load_state_dict(state["data"])
            if run is not None:
                own = {n.removeprefix("metric/"): t for n, t in checkpoint.training.items() if n.startswith("metric/")}
                run.load_sums(state["metrics"], own, batches)
        except DataError as error:
            raise CheckpointMismatchError(f"{error}. resume='next_epoch' leaves out the rest of that epoch") from error
        _warn_of_differences(checkpoint, self._model)
        RNGState.of(state["draws"]).restore()
        return batches

    def _save_for(self, writers: Iterable[AsyncCheckpointWriter]) -> None:
        if not self._open or self._progress is None or self._model._state.lost:
            return
        self._open = False
        used = list(writers)
        for writer in used:
            if self._taken.get(writer) != self._progress:  # else it is at it already
                self._tell(writer.submit(self._checkpoint(None)))
        for writer in used:
            self._tell(writer.finish())

    def _checkpoint(self, metric: Any) -> Checkpoint:
        progress, run = self._progress, self._run
        assert progress is not None
        extra: dict[str, Tensor] = {}
        state = outside_of_fit() | {
            "progress": {name: encode(getattr(progress, name), name, extra) for name in _FIELDS},
            "data": self._train.state_dict(progress.batches if run is not None else None),
            "callbacks": self._callback_states(extra),
            "compile": self._model._recipe,
        }
        if run is not None:
            state["metrics"], sums = run.sums()
            extra |= {f"metric/{name}": tensor for name, tensor in sums.items()}
        return take(self._model, state, extra, metric)

    def _callback_states(self, tensors: dict[str, Tensor]) -> list[dict[str, Any]]:
        states = []
        for i, callback in enumerate(self._callbacks):
            own = callback.state_dict() if hasattr(callback, "state_dict") else None
            if own:
                name = type(callback).__name__
                states.append({"class": name, "state": encode(own, f"callback/{i}/{name}", tensors)})
        return states

    def _load_callbacks(self, states: list[dict[str, Any]], tensors: Mapping[str, Tensor]) -> None:
        """Give each callback the state of the first of its class that nobody has had yet."""
        waiting = list(states)
        for callback in self._callbacks:
            own = next((state for state in waiting if state["class"] == type(callback).__name__), None)
            if own is not None and hasattr(callback, "load_state_dict"):
                waiting.remove(own)
                callback.load_state_dict(decode(own["state"], tensors))
        if waiting:
            names = ", ".join(state["class"] for state in waiting)
            warnings.warn(
                f"the checkpoint has the state of callbacks that are not there any more: {names}", stacklevel=4
            )

    def _tell(self, written: Any) -> None:
        if written is not None and self._callbacks.has("on_save"):
            self._callbacks.call("on_save", int(written.name.removeprefix("step-")), {"path": str(written)})


def outside_of_fit() -> dict[str, Any]:
    """The state of a checkpoint that isn't taken in the course of a `fit`."""
    return {"progress": None, "data": {}, "callbacks": [], "metrics": None, "draws": RNGState.now().state_dict()}


def keepers(callbacks: Iterable[object]) -> list[tuple[Callback, AsyncCheckpointWriter]]:
    """The callbacks that keep checkpoints, each with its writer. An object that is no `Callback` keeps none."""
    given = [callback for callback in callbacks if isinstance(callback, Callback)]
    return [(callback, callback.checkpoints) for callback in given if callback.checkpoints is not None]


def find_checkpoint(resume: bool | str | os.PathLike[str], callbacks: Sequence[object]) -> Checkpoint | None:
    """What `fit` shall go on from.

    Args:
        resume: As `fit` takes it.
        callbacks: As `fit` was given them.

    Returns:
        The checkpoint, or None if training begins.

    Raises:
        ArgumentError: No callback keeps checkpoints, and no path was given.
        CheckpointError: It is missing or damaged.
    """
    asked = resume is not False and resume is not None
    if asked and not isinstance(resume, bool) and resume not in ("best", "next_epoch"):
        return named_checkpoint(resume)
    runs = [writer.run for callback, writer in keepers(callbacks) if asked or callback.restores]
    if asked and not runs:
        raise ArgumentError(
            f"resume={resume!r} looks for checkpoints where a callback keeps them, and none does: pass "
            "callbacks=[ModelCheckpoint('a_folder')], or the path of a folder as resume"
        )
    found = [run.best() if resume == "best" else run.newest() for run in runs]
    newest = max((one for one in found if one is not None), key=lambda one: one.step, default=None)
    return _at_next_epoch(newest) if newest is not None and resume == "next_epoch" else newest


def named_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """A checkpoint that was named, or the newest of a run's folder that was.

    Raises:
        CheckpointError: There is none, or it is damaged.
    """
    path = Path(path)
    if is_checkpoint(path) or not path.is_dir():
        return read(path)
    newest = CheckpointDirectory(path).newest()
    if newest is None:
        raise CheckpointMissingError(f"there is no checkpoint in {path}: it has no folder such as step-0000000010")
    return newest


def _at_next_epoch(checkpoint: Checkpoint) -> Checkpoint:
    """The same, with the rest of its epoch left out."""
    own = checkpoint.state["progress"]
    if own is None or own["batches"] is None:
        return checkpoint
    progress = own | {"epoch": own["epoch"] + 1, "batches": None, "trained": None}
    model = checkpoint.state["model"] | {"batches_waiting": 0}
    return replace(checkpoint, state={**checkpoint.state, "progress": progress, "model": model, "data": {}})


def progress_of(checkpoint: Checkpoint, first: int = 0) -> Progress:
    """How far the `fit` was that a checkpoint was taken of.

    Args:
        checkpoint: The checkpoint.
        first: The epoch to begin with, if it was taken outside of `fit`.
    """
    own = checkpoint.state["progress"]
    if own is None:  # it was saved outside of fit
        return Progress(first)
    return Progress(**{name: decode(own[name], checkpoint.training) for name in _FIELDS})


def _warn_of_differences(checkpoint: Checkpoint, model: Steps) -> None:
    """Say what will make the numbers other ones than those of a run that was never broken off."""
    place: Placement = model._place
    others = [] if checkpoint.mesh["cores"] == place.count else [f"cores: {checkpoint.mesh['cores']} -> {place.count}"]
    now = settings(model)
    now |= {name: found for name, found in versions().items() if name != "tpufit"}
    before = {**checkpoint.state["settings"], **checkpoint.versions}
    others += [f"{name}: {before[name]} -> {value}" for name, value in now.items() if before[name] != value]
    if others:
        warnings.warn(f"going on from step {checkpoint.step} is not bit-exact: {', '.join(others)}", stacklevel=5)
