"""`CheckpointManager`: takes the checkpoints of a `fit` between its steps, and resumes a `fit` from one."""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor

from ..data import Stream
from ..errors import (
    CallbackError,
    CheckpointDamagedError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotWrittenError,
    DataError,
)
from ..runtime import copies
from ..runtime import versions as runtime_versions
from ..step import Engine, StepRunner, named_tensors
from ..utils.json_codec import decode, encode
from ..utils.random import RNGState
from ..utils.users_code import warn
from .format import Checkpoint, Score
from .objects import UsersObjects
from .resume import checkpoint_callbacks
from .state import MALFORMED, PROGRESS, Progress, saved_state
from .store import step_of
from .weight_files import NotFiniteError, write_weights
from .writer import AsyncCheckpointWriter


class Callbacks(Protocol):
    """The callbacks of a `fit`: checkpoints contain their states, and `on_save` reports each checkpoint written."""

    def __iter__(self) -> Iterator[Any]: ...

    def call(self, hook: str, *args: Any) -> None:
        """Call a hook of those that override it."""


def take_checkpoint(
    engine: Engine,
    state: Mapping[str, Any],
    extra: Mapping[str, Tensor] | None = None,
    score: Score | None = None,
    save_frozen: bool = True,
) -> Checkpoint:
    """Copy all that training changes to the host. **This waits** for the device, once.

    A state that is split over the cores is left on them, and must be written before the next step.

    Args:
        state: The other entries of the checkpoint's `state`, as JSON holds them.
        extra: Further tensors, on the host or the device, by name.
        save_frozen: False to leave out the parameters that don't learn; their names are kept (default True).

    Raises:
        WeightsError: The module keeps something in its state that isn't a tensor.
    """
    own = engine.state.state_dict()
    training = {**own.training, **(extra or {})}
    learned = {id(parameter) for parameter in engine.model.module.parameters() if parameter.requires_grad}
    frozen = set() if save_frozen else {id(p) for p in engine.model.module.parameters()} - learned
    weights = {name: tensor for name, tensor in own.weights.items() if id(tensor) not in frozen}
    left_out = {} if save_frozen else {"left_out": [name for name in own.weights if name not in weights]}
    host = _on_host(engine, [*weights.values(), *training.values()], "checkpoint")
    return Checkpoint(
        step=engine.state.numbers.step,
        weights={name: host[id(tensor)] for name, tensor in weights.items()},
        training={name: host[id(tensor)] for name, tensor in training.items()},
        state={
            **state,
            "model": {**own.numbers, **left_out},
            "optimizers": own.optimizers,
            "settings": settings(engine),
        },
        learned=[name for name, tensor in weights.items() if id(tensor) in learned],
        metric=score,
        mesh={"cores": engine.state.placement.count},
    )


def save_weights(engine: Engine, path: str | os.PathLike[str], finite_only: bool) -> None:
    """Write a model's weights to a file, see `Model.save_weights`. Those that are split come one by one."""
    engine.state.write_back()
    module = engine.model.module
    weights = named_tensors(module)
    learned = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    with engine.noticing_loss():
        host = _on_host(engine, weights.values(), "state")
        try:
            write_weights(
                path, {name: host[id(tensor)] for name, tensor in weights.items()}, learned if finite_only else ()
            )
        except NotFiniteError as error:
            raise CheckpointNotWrittenError(f"{path} was not written: {error} holds NaN or infinities") from error


def _on_host(engine: Engine, tensors: Iterable[Tensor], reason: str) -> dict[int, Tensor]:
    """Copy tensors to the host, each once, by the tensors' ids. A state that is split over the cores stays on them."""
    unique = {id(tensor): tensor for tensor in tensors}
    if engine.state.device.shardings:
        return unique
    return dict(zip(unique, copies(list(unique.values()), reason), strict=True))


def restore(engine: Engine, checkpoint: Checkpoint) -> None:
    """Load a checkpoint's state into a model over the same net, compiled in the same way and already on its cores.

    Raises:
        CheckpointMismatchError: The checkpoint is of another net or optimizer. Nothing has changed.
    """
    engine.state.load_state_dict(saved_state(checkpoint))
    engine.register_new_state()


def settings(engine: Engine) -> dict[str, Any]:
    """Return the settings, besides versions and cores, that the last digits of training depend on."""
    return {
        "precision": engine.config.precision,
        "steps_per_execution": engine.config.steps_per_execution,
        "accumulate_steps": engine.config.gradients.accumulate_steps,
        "run_on": "host" if engine.state.placement.on_host else "device",
    }


def outside_of_fit(engine: Engine) -> dict[str, Any]:
    """Return the entries of the state of a checkpoint that is taken outside `fit`."""
    return {
        "progress": None,
        "data": {},
        "validation": {},
        "callbacks": [],
        "objects": {},
        "metrics": None,
        "draws": RNGState.now().state_dict(),
        "compile": None if engine.state.trains_beside() else engine.config.as_plain(engine.model.optimizer),
    }


class CheckpointManager:
    """Takes the checkpoints that callbacks request, after all callbacks have had their turn, with their state."""

    def __init__(self, engine: Engine, train: Stream, callbacks: Callbacks, held_out: Stream | None = None) -> None:
        self._engine = engine
        self._train = train
        self._callbacks = callbacks
        self._held_out = held_out  # the data to validate on
        self._taken: dict[AsyncCheckpointWriter, Progress] = {}  # the point of each one's last checkpoint
        self._open = True
        self._run: StepRunner | None = None
        self._progress: Progress | None = None
        self._objects: UsersObjects | None = None
        engine.log.wanted_saves.clear()  # requests left over from a `fit` that broke off
        train.keeps_draws = bool(checkpoint_callbacks(callbacks))

    def begin(self, resumes: bool) -> None:
        """Note what the user's objects keep, once the callbacks have begun, and before `fit` resumes.

        Raises:
            WeightsError: The module keeps something in its state that isn't a tensor, and there will be checkpoints.
        """
        saves = bool(checkpoint_callbacks(self._callbacks))
        if saves:
            named_tensors(self._engine.model.module)  # now, and not when the first is due
        if saves or resumes:
            streams = [self._train] if self._held_out is None else [self._train, self._held_out]
            self._objects = UsersObjects(self._engine, self._callbacks, streams)

    def load_first(self, checkpoint: Checkpoint) -> None:
        """Load the callbacks that want their state before they begin (`Callback.loads_first`), ahead of `go_on`."""
        self._load_callbacks(checkpoint, first=True)

    def note(self, progress: Progress, run: StepRunner | None = None) -> None:
        """Note the point that training has reached, between two steps, and take the requested checkpoints.

        `run` is the runner of the epoch's steps, if it has begun.

        Raises:
            CheckpointNotWrittenError: Too many checkpoints in a row could not be written.
        """
        if not self._open:
            return
        self._progress = progress
        self._run = run
        if self._engine.log.wanted_saves:
            # Emptied first, because `on_save` may request the next one.
            wanted = self._engine.log.wanted_saves
            self._engine.log.wanted_saves = []
            for writer, score in wanted:
                self._tell(writer.wait())  # before the next one is written, which may remove it
                self._tell(writer.submit(self._checkpoint(score, writer.save_frozen)))
                self._taken[writer] = progress
        else:
            for writer in self._taken:
                self._tell(writer.poll())

    def save_now(self) -> None:
        """Take a last checkpoint for every callback that keeps checkpoints, and wait until it is written."""
        self._save_for(writer for _, writer in checkpoint_callbacks(self._callbacks))

    @contextmanager
    def rescuing(self) -> Iterator[None]:
        """After an error, save the last whole step for the callbacks that want it, unless a step is half done."""
        try:
            yield
        except Exception:
            if self._progress is not None and (self._run is None or not self._run.inside):
                if self._run is not None:  # a callback may have raised after a step that nobody had noted yet
                    self._progress = replace(self._progress, batches=self._run.tally.batches)
                self._save_for(
                    writer for callback, writer in checkpoint_callbacks(self._callbacks) if callback.save_on_exception
                )
            for writer in self._taken:
                try:
                    writer.finish()
                except CheckpointError as fault:  # it mustn't hide the error itself
                    warn(str(fault))
            raise

    def finish(self) -> None:
        """Wait until everything is written.

        Raises:
            CheckpointNotWrittenError: The last checkpoint could not be written. If a callback has ended training
                because the loss isn't finite, that is a warning.
        """
        ended = self._engine.model.stop_training and self._engine.log.first_bad_step is not None
        for writer in self._taken:
            try:
                self._tell(writer.finish())
            except CheckpointNotWrittenError as error:
                if not ended:
                    raise
                warn(str(error))

    def go_on(self, checkpoint: Checkpoint, run: StepRunner | None = None) -> int:
        """Resume from a checkpoint, after the callbacks have begun: it overrides what they begin with.

        `run` is the runner of the epoch's steps, if the checkpoint is from the middle of one.

        Returns:
            The number of the epoch's batches that are trained on.

        Raises:
            CheckpointMismatchError: The checkpoint is of another net, optimizer or data.
            CheckpointDamagedError: Its state can't be loaded.
        """
        state = checkpoint.state
        restore(self._engine, checkpoint)  # before the callbacks, which count steps from the model's own
        with _loading(checkpoint):
            if self._objects is not None:
                self._objects.load_state_dict(state["objects"])
        self._load_callbacks(checkpoint, first=False)
        with _loading(checkpoint):
            batches = self._train.load_state_dict(state["data"])
            if self._held_out is not None:
                self._held_out.load_state_dict(state["validation"])
            if run is not None:
                own = {n.removeprefix("metric/"): t for n, t in checkpoint.training.items() if n.startswith("metric/")}
                run.load_sums(state["metrics"], own, batches)
        _warn_of_differences(checkpoint, self._engine)
        RNGState.of(state["draws"]).restore()  # last: everything above may draw random numbers
        return batches

    def _save_for(self, writers: Iterable[AsyncCheckpointWriter]) -> None:
        if not self._open or self._progress is None or self._engine.state.device.lost:
            return
        self._open = False  # no later request may replace the last checkpoint
        used = list(writers)
        for writer in used:
            if self._taken.get(writer) != self._progress:  # else it is writing this one already
                self._tell(writer.submit(self._checkpoint(None, writer.save_frozen)))
        for writer in used:  # only now, so that all write at the same time
            self._tell(writer.finish())

    def _checkpoint(self, score: Score | None, save_frozen: bool) -> Checkpoint:
        progress = self._progress
        run = self._run
        assert progress is not None
        extra: dict[str, Tensor] = {}
        state = outside_of_fit(self._engine) | {
            "progress": {name: encode(getattr(progress, name), name, extra) for name in PROGRESS},
            "data": self._train.state_dict(progress.batches if run is not None else None),
            "validation": {} if self._held_out is None else self._held_out.state_dict(None),
            "callbacks": self._callback_states(extra),
            "objects": self._objects.state_dict() if self._objects is not None else {},
        }
        if run is not None:
            state["metrics"], sums = run.sums()
            extra |= {f"metric/{name}": tensor for name, tensor in sums.items()}
        return take_checkpoint(self._engine, state, extra, score, save_frozen)

    def _callback_states(self, tensors: dict[str, Tensor]) -> list[dict[str, Any]]:
        states = []
        for i, callback in enumerate(self._callbacks):
            own = callback.state_dict() if hasattr(callback, "state_dict") else None
            if own:
                name = type(callback).__name__
                states.append({"class": name, "state": encode(own, f"callback/{i}/{name}", tensors)})
        return states

    def _load_callbacks(self, checkpoint: Checkpoint, first: bool) -> None:
        """Give each callback the first state of its class that no callback before it has taken.

        `first` is for the callbacks that want it before they begin, else it is for the others.
        """
        waiting: list[dict[str, Any]] = list(checkpoint.state["callbacks"])
        for callback in self._callbacks:
            own = next((state for state in waiting if state["class"] == type(callback).__name__), None)
            if own is not None and hasattr(callback, "load_state_dict"):
                waiting.remove(own)
                if getattr(callback, "loads_first", False) == first:
                    state = decode(own["state"], checkpoint.training)
                    try:
                        callback.load_state_dict(state)
                    except Exception as error:  # as in its hooks
                        name = f"{type(callback).__name__}.load_state_dict"
                        raise CallbackError(f"{name} raised {type(error).__name__}: {error}") from error
        if waiting and not first:
            names = ", ".join(state["class"] for state in waiting)
            warn(f"the checkpoint has the state of callbacks that are no longer there: {names}")

    def _tell(self, written: Any) -> None:
        if written is not None:
            self._callbacks.call("on_save", step_of(written.name), {"path": str(written)})


@contextmanager
def _loading(checkpoint: Checkpoint) -> Iterator[None]:
    """A context in which a part of a checkpoint's state is loaded."""
    try:
        yield
    except DataError as error:
        raise CheckpointMismatchError(f"{error}. resume='next_epoch' leaves out the rest of that epoch") from error
    except MALFORMED as error:
        raise CheckpointDamagedError(
            f"the state of the checkpoint of step {checkpoint.step} can't be loaded ({type(error).__name__}: "
            f"{str(error)[:200]}): resume from another one, by its path"
        ) from error


def _warn_of_differences(checkpoint: Checkpoint, engine: Engine) -> None:
    """Warn if the results will differ from those of a run that was never broken off."""
    before = {**checkpoint.mesh, **checkpoint.state["settings"], **checkpoint.versions}
    now = {"cores": engine.state.placement.count, **settings(engine), **runtime_versions()}
    others = [f"{name}: {before.get(name)} -> {value}" for name, value in now.items() if before.get(name) != value]
    if others:
        warn(f"going on from step {checkpoint.step} is not bit-exact: {', '.join(others)}")
