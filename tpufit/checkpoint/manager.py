"""`CheckpointManager`: takes a `fit`'s checkpoints between its steps, and resumes a `fit` from a checkpoint."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from ..runtime import copy_to_host
from ..runtime import versions as runtime_versions
from ..step import Engine, StepRunner, collect_state, load_state, named_tensors, trains_other_parameters
from ..utils.json_codec import decode, encode
from ..utils.random import RNGState
from ..utils.user_code import warn
from .find_checkpoint import checkpoint_callbacks
from .format import Checkpoint, Score
from .module_changes import ModuleChanges
from .objects import UserObjects
from .state_json import MALFORMED, PROGRESS, Progress, extract_saved_state
from .store import parse_step
from .weight_files import NotFiniteError, write_weights
from .writer import AsyncCheckpointWriter


class Callbacks(Protocol):
    """The callbacks of a `fit`: checkpoints contain their states, and `on_save` reports each checkpoint written."""

    def __iter__(self) -> Iterator[Any]: ...

    def call(self, hook: str, *args: Any) -> None:
        """Call a hook of the callbacks that override it."""


def take_checkpoint(
    engine: Engine,
    state: Mapping[str, Any],
    extra: Mapping[str, Tensor] | None = None,
    score: Score | None = None,
    save_frozen: bool = True,
) -> Checkpoint:
    """Copy everything that training changes to the host. **This waits** for the device, once.

    A state that is split over the cores stays there, and must be written before the next step.

    Args:
        engine: The engine of the model.
        state: The other entries of the checkpoint's `state`, as JSON values.
        extra: Further tensors, on the host or the device, by name.
        score: The value that ranks the checkpoint (default: none).
        save_frozen: False omits frozen parameters, but records their names (default True).

    Raises:
        WeightsError: The module's state has a value that isn't a tensor.
    """
    state_of_model = collect_state(engine.state)
    training = {**state_of_model.training, **(extra or {})}
    learned = {id(parameter) for parameter in engine.model.module.parameters() if parameter.requires_grad}
    frozen = set() if save_frozen else {id(p) for p in engine.model.module.parameters()} - learned
    weights = {name: tensor for name, tensor in state_of_model.weights.items() if id(tensor) not in frozen}
    omitted = {} if save_frozen else {"left_out": [name for name in state_of_model.weights if name not in weights]}
    host = _copy_to_host(engine, [*weights.values(), *training.values()], "checkpoint")
    return Checkpoint(
        step=engine.state.numbers.step,
        weights={name: host[id(tensor)] for name, tensor in weights.items()},
        training={name: host[id(tensor)] for name, tensor in training.items()},
        state={
            **state,
            "model": {**state_of_model.numbers, **omitted},
            "optimizers": state_of_model.optimizers,
            "settings": collect_settings(engine),
        },
        learned=[name for name, tensor in weights.items() if id(tensor) in learned],
        metric=score,
        mesh={"cores": engine.state.placement.count},
    )


def save_weights(engine: Engine, path: str | os.PathLike[str], finite_only: bool) -> None:
    """Write a model's weights to a file, see `Model.save_weights`. Split weights are copied one by one."""
    engine.state.write_back()
    module = engine.model.module
    weights = named_tensors(module)
    learned = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    with engine.translating_device_errors():
        host = _copy_to_host(engine, weights.values(), "state")
        try:
            write_weights(
                path, {name: host[id(tensor)] for name, tensor in weights.items()}, learned if finite_only else ()
            )
        except NotFiniteError as error:
            raise CheckpointNotWrittenError(f"{path} was not written: {error}") from error


def _copy_to_host(engine: Engine, tensors: Iterable[Tensor], reason: str) -> dict[int, Tensor]:
    """Copy tensors to the host, each once, and return them by id. A state that is split over the cores stays there."""
    unique = {id(tensor): tensor for tensor in tensors}
    if engine.state.device.shardings:
        return unique
    return dict(zip(unique, copy_to_host(list(unique.values()), reason), strict=True))


def restore(engine: Engine, checkpoint: Checkpoint) -> None:
    """Load a checkpoint's state into a model of the same net, compiled the same way, and already on its cores.

    Raises:
        CheckpointMismatchError: The checkpoint is from another net or optimizer. Nothing has changed.
    """
    load_state(engine.state, extract_saved_state(checkpoint))
    engine.register_new_state()


def collect_settings(engine: Engine) -> dict[str, Any]:
    """Return the settings, other than versions and cores, that the last digits of training depend on."""
    return {
        "precision": engine.config.precision,
        "steps_per_execution": engine.config.steps_per_execution,
        "accumulate_steps": engine.config.gradients.accumulate_steps,
        "run_on": "host" if engine.state.placement.on_host else "device",
    }


def make_state_outside_fit(engine: Engine) -> dict[str, Any]:
    """Return the entries of the state for a checkpoint outside `fit`."""
    return {
        "progress": None,
        "data": {},
        "validation": {},
        "callbacks": [],
        "objects": {},
        "metrics": None,
        "draws": RNGState.now().state_dict(),
        "compile": None if trains_other_parameters(engine.state) else engine.config.as_plain(engine.model.optimizer),
    }


class CheckpointManager:
    """Takes the checkpoints that callbacks request, after all callbacks have run, with the callbacks' states."""

    def __init__(self, engine: Engine, train: Stream, callbacks: Callbacks, validation: Stream | None = None) -> None:
        self._engine = engine
        self._train = train
        self._callbacks = callbacks
        self._validation = validation  # the validation data
        self._last_progress: dict[AsyncCheckpointWriter, Progress] = {}  # the progress at each writer's last checkpoint
        self._open = True
        self._runner: StepRunner | None = None
        self._progress: Progress | None = None
        self._objects: UserObjects | None = None
        self._changes: ModuleChanges | None = None
        self._unchecked: tuple[int, int] | None = None  # of a resumed `fit`: the checkpoint's step and batches
        engine.log.wanted_saves.clear()  # requests left over from an interrupted `fit`
        train.keeps_draws = bool(checkpoint_callbacks(callbacks))

    def begin(self, resumes: bool) -> None:
        """Record the state of the user's objects, after the callbacks have begun, and before `fit` resumes.

        Raises:
            WeightsError: The module's state has a value that isn't a tensor, and there will be checkpoints.
        """
        saves = bool(checkpoint_callbacks(self._callbacks))
        if saves:
            named_tensors(self._engine.model.module)  # raises now rather than when the first checkpoint is due
        if saves or resumes:
            streams = [self._train] if self._validation is None else [self._train, self._validation]
            self._objects = UserObjects(self._engine, self._callbacks, streams)
            self._changes = ModuleChanges(self._engine, self._callbacks)

    def load_first(self, checkpoint: Checkpoint) -> None:
        """Load the state of callbacks with `loads_before_train_begin`, before they begin and before `resume`."""
        self._load_callbacks(checkpoint, first=True)

    def record(self, progress: Progress, runner: StepRunner | None = None) -> None:
        """Record training's progress, between two steps; `runner` is that of the epoch's steps, if it has begun."""
        if self._open:
            self._progress = progress
            self._runner = runner
        if self._changes is not None and self._unchecked is not None:
            step, batches = self._unchecked
            if progress.batches is None or progress.batches > batches:  # the first step may change layers, too
                self._unchecked = None
                self._changes.check(step)

    def save_requested(self) -> None:
        """Take the checkpoints that callbacks have requested, at the recorded progress.

        Raises:
            CheckpointNotWrittenError: Too many checkpoints in a row could not be written.
        """
        progress = self._progress
        if not self._open or progress is None:
            return
        if self._engine.log.wanted_saves:
            # Emptied first, because `on_save` may request the next one.
            wanted = self._engine.log.wanted_saves
            self._engine.log.wanted_saves = []
            for writer, score in wanted:
                self._report_written(writer.wait())  # before the next write, which may remove this checkpoint
                self._report_written(writer.submit(self._checkpoint(score, writer.save_frozen)))
                self._last_progress[writer] = progress
        else:
            for writer in self._last_progress:
                self._report_written(writer.poll())

    def save_now(self) -> None:
        """Take a last checkpoint for every callback that keeps checkpoints, and wait until it is written."""
        self._save_for(writer for _, writer in checkpoint_callbacks(self._callbacks))

    @contextmanager
    def save_after_error(self, leaves_at_once: Callable[[], bool]) -> Iterator[None]:
        """Return a context that after an error saves the last step for callbacks that request this.

        A step that is only half done isn't saved.

        It waits for a checkpoint in progress, even after a `KeyboardInterrupt` in the user's code, but not if
        `leaves_at_once`, as after a second Ctrl-C.
        """
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Exception) and leaves_at_once():
                raise
            in_progress = self._runner is not None and self._runner.step_in_progress
            if isinstance(error, Exception) and self._progress is not None and not in_progress:
                if self._runner is not None:  # a callback may have raised after a step that isn't recorded yet
                    self._progress = replace(self._progress, batches=self._runner.tally.batches)
                self._save_for(
                    writer for callback, writer in checkpoint_callbacks(self._callbacks) if callback.save_on_exception
                )
            for writer in self._last_progress:
                try:
                    writer.finish()
                except CheckpointError as fault:  # a fault mustn't hide the error
                    warn(str(fault))
            raise

    def finish(self) -> None:
        """Wait until everything is written.

        Raises:
            CheckpointNotWrittenError: The last checkpoint could not be written. If a callback has ended training
                because the loss isn't finite, this is a warning instead.
        """
        ended = self._engine.model.stop_training and self._engine.log.first_bad_step is not None
        for writer in self._last_progress:
            try:
                self._report_written(writer.finish())
            except CheckpointNotWrittenError as error:
                if not ended:
                    raise
                warn(str(error))

    def resume(self, checkpoint: Checkpoint, runner: StepRunner | None = None) -> int:
        """Resume from a checkpoint, after the callbacks have begun: it overrides their initial states.

        `runner` is that of the epoch's steps, if the checkpoint is from the middle of an epoch.

        Returns:
            The number of the epoch's batches already trained on.

        Raises:
            CheckpointMismatchError: The checkpoint is from another net, optimizer or data.
            CheckpointDamagedError: Its state can't be loaded.
        """
        state = checkpoint.state
        if self._changes is not None and "changes" in state:
            self._changes.load_state_dict(state["changes"])  # first: optimizers have state for parameters that learn
        restore(self._engine, checkpoint)  # before the callbacks, which count from the model's steps
        with _translate_load_errors(checkpoint):
            if self._objects is not None:
                self._objects.load_state_dict(state["objects"])
        self._load_callbacks(checkpoint, first=False)
        with _translate_load_errors(checkpoint):
            batches = self._train.load_state_dict(state["data"])
            if self._validation is not None:
                self._validation.load_state_dict(state["validation"])
            if runner is not None:
                names = [name for name in checkpoint.training if name.startswith("metric/")]
                sums = {name.removeprefix("metric/"): checkpoint.training[name] for name in names}
                runner.load_sums(state["metrics"], sums, batches)
        self._unchecked = checkpoint.step, batches
        _warn_of_differences(checkpoint, self._engine)
        RNGState.of(state["draws"]).restore()  # last: everything above may draw random numbers
        return batches

    def _save_for(self, writers: Iterable[AsyncCheckpointWriter]) -> None:
        if not self._open or self._progress is None or self._engine.state.device.lost:
            return
        self._open = False  # so that no later request replaces the last checkpoint
        used = list(writers)
        for writer in used:
            if self._last_progress.get(writer) != self._progress:  # else it is already writing this checkpoint
                self._report_written(writer.submit(self._checkpoint(None, writer.save_frozen)))
        for writer in used:  # only now, so that all write at the same time
            self._report_written(writer.finish())

    def _checkpoint(self, score: Score | None, save_frozen: bool) -> Checkpoint:
        progress = self._progress
        runner = self._runner
        assert progress is not None
        extra: dict[str, Tensor] = {}
        state = make_state_outside_fit(self._engine) | {
            "progress": {name: encode(getattr(progress, name), name, extra) for name in PROGRESS},
            "data": self._train.state_dict(progress.batches if runner is not None else None),
            "validation": {} if self._validation is None else self._validation.state_dict(None),
            "callbacks": self._callback_states(extra),
            "objects": self._objects.state_dict() if self._objects is not None else {},
        }
        if self._changes is not None:
            state["changes"] = self._changes.state_dict()
        if runner is not None:
            state["metrics"], sums = runner.sums()
            extra |= {f"metric/{name}": tensor for name, tensor in sums.items()}
        return take_checkpoint(self._engine, state, extra, score, save_frozen)

    def _callback_states(self, tensors: dict[str, Tensor]) -> list[dict[str, Any]]:
        states = []
        for i, callback in enumerate(self._callbacks):
            state = callback.state_dict() if hasattr(callback, "state_dict") else None
            if state:
                name = type(callback).__name__
                states.append({"class": name, "state": encode(state, f"callback/{i}/{name}", tensors)})
        return states

    def _load_callbacks(self, checkpoint: Checkpoint, first: bool) -> None:
        """Load each callback with the first state of its class that no earlier callback has loaded.

        `first` selects the callbacks with `loads_before_train_begin`, else the others.
        """
        pending: list[dict[str, Any]] = list(checkpoint.state["callbacks"])
        for callback in self._callbacks:
            entry = next((state for state in pending if state["class"] == type(callback).__name__), None)
            if entry is not None and hasattr(callback, "load_state_dict"):
                pending.remove(entry)
                if getattr(callback, "loads_before_train_begin", False) == first:
                    state = decode(entry["state"], checkpoint.training)
                    try:
                        callback.load_state_dict(state)
                    except Exception as error:  # as from its hooks
                        name = f"{type(callback).__name__}.load_state_dict"
                        raise CallbackError(f"{name} raised {type(error).__name__}: {error}") from error
        if pending and not first:
            names = ", ".join(state["class"] for state in pending)
            warn(f"the checkpoint has the state of callbacks that are no longer there: {names}")

    def _report_written(self, written: Any) -> None:
        if written is not None:
            self._callbacks.call("on_save", parse_step(written.name), {"path": str(written)})


@contextmanager
def _translate_load_errors(checkpoint: Checkpoint) -> Iterator[None]:
    """Return a context that turns errors of loading a checkpoint's state into checkpoint errors."""
    try:
        yield
    except DataError as error:
        raise CheckpointMismatchError(f"{error}. resume='next_epoch' skips the rest of that epoch") from error
    except MALFORMED as error:
        raise CheckpointDamagedError(
            f"the state of the checkpoint of step {checkpoint.step} can't be loaded ({type(error).__name__}: "
            f"{str(error)[:200]}): resume from another checkpoint, by its path"
        ) from error


def _warn_of_differences(checkpoint: Checkpoint, engine: Engine) -> None:
    """Warn if the results will differ from an uninterrupted run's."""
    before = {**checkpoint.mesh, **checkpoint.state["settings"], **checkpoint.versions}
    now = {"cores": engine.state.placement.count, **collect_settings(engine), **runtime_versions()}
    others = [f"{name}: {before.get(name)} -> {value}" for name, value in now.items() if before.get(name) != value]
    if others:
        warn(f"resuming from step {checkpoint.step} is not bit-exact: {', '.join(others)}")
