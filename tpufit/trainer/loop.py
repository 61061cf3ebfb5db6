"""The loop of `fit`. Its order is part of the interface, so it is written out here.

fit
    on_train_begin
    for each epoch
        on_epoch_begin
        for each batch                  see passes.py
            on_train_batch_begin
            on_train_step_begin         for each of the steps that run as one
            step                        one graph, started and not waited for
            on_train_batch_end          its logs wait only if one is read
            if a validation inside the epoch is due
                evaluate                on_test_begin ... on_test_end, one wait
            save what callbacks requested, which waits for the device
            leave the epoch if a callback asked to stop
            leave for good after SIGTERM or Ctrl-C, and save first
        read the epoch's logs           the epoch's one wait for the device
        if validation is due            unless there has been one after the epoch's last step
            evaluate                    on_test_begin ... on_test_end, one wait
        on_epoch_end                    with the logs of the epoch's last validation, if there was one
        save what callbacks requested
        leave if a callback asked to stop
    wait until everything is saved
    on_train_end                        of every callback, also after an error
    leave after SIGTERM or Ctrl-C that came since the last look

A resumed `fit` begins like any other. The checkpoint is loaded once the callbacks have begun, and the epoch too if the
checkpoint is from the middle of one: loaded earlier, it would be overwritten by what they begin with.
"""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from ..callbacks.callback_list import CallbackList
from ..checkpoint import Checkpoint, CheckpointManager, Progress, closing_runs, progress_of
from ..data import Stream
from ..diagnostics import messages
from ..diagnostics.report import Pass
from ..hosts import barrier
from ..step import Engine, StepRunner
from ..utils.users_code import warn
from .arguments import Validation
from .consistency import share_random_state
from .interruption import Interruption
from .passes import PassLoop, Pause, closing
from .validation import Validations


@dataclass(frozen=True)
class Limits:
    """The limits of a `fit` besides its epochs."""

    min_epochs: int = 0  # before which callbacks can't end training
    max_steps: int | None = None  # of the optimizer
    seconds: float | None = None  # after which it ends, with the batch under way


def fit(
    engine: Engine,
    train: Stream,
    validation: Validation | None,
    callbacks: CallbackList,
    epochs: range,
    limits: Limits,
    resumed: Checkpoint | None = None,
) -> None:
    """Train for some epochs, numbered from 0; those before the one that is resumed are skipped."""
    model = engine.model
    model.stop_training = model.out_of_time = False
    engine.state.swap_ema(to=False)  # a callback may have left the averages in the weights' place
    engine.note_modes()
    engine.leave_mode()  # `closing` restores this mode at the end
    with closing_runs(callbacks), closing(callbacks, engine), Interruption() as interruption:
        training = _Training(engine, train, validation, callbacks, epochs.stop, limits, interruption)
        if resumed is not None:
            training.manager.load_first(resumed)
        # The callbacks begin before the resumption, so that the checkpoint overrides what they begin with.
        callbacks.call("on_train_begin")
        training.manager.begin(resumed is not None)
        begun = Progress(epochs.start) if resumed is None else training.begin_from(resumed, epochs.start)
        logs: dict[str, Any] = {}
        with training.manager.rescuing():
            for epoch in range(begun.epoch, epochs.stop):
                logs = training.run_epoch(epoch)
                if training.ends():
                    break
            training.manager.finish()
        engine.state.finish_ema()  # after the last checkpoint, which needs the weights that training goes on with
        callbacks.call("on_train_end", logs)
        interruption.settle()
        if interruption.wanted:
            interruption.leave()


class _Training:
    """One `fit`, over its epochs."""

    def __init__(
        self,
        engine: Engine,
        train: Stream,
        validation: Validation | None,
        callbacks: CallbackList,
        epochs: int,
        limits: Limits,
        interruption: Interruption,
    ) -> None:
        self._engine = engine
        self._train = train
        self._callbacks = callbacks
        self._epochs = epochs
        self._interruption = interruption
        self._validations = None if validation is None else Validations(engine, validation, callbacks, interruption)
        self.manager = CheckpointManager(engine, train, callbacks, None if validation is None else validation.stream)
        self._limits = limits
        self._deadline = None if limits.seconds is None else perf_counter() + limits.seconds
        self._steps_before = engine.state.optimizer_steps
        self._done = 0  # epochs
        self._resumed: Checkpoint | None = None  # for the epoch about to begin
        self._advised = False

    def begin_from(self, checkpoint: Checkpoint, first: int) -> Progress:
        """Load a checkpoint, or keep it until its epoch has begun if it is from the middle of one."""
        begun = progress_of(checkpoint, first)
        if begun.stopped and self._epochs <= begun.epochs:  # a callback had ended it, and no more epochs are wanted
            begun = replace(begun, epoch=self._epochs)
        if begun.batches is None or begun.epoch >= self._epochs:
            self._load(checkpoint)
        else:
            self._resumed = checkpoint
        return begun

    def _load(self, checkpoint: Checkpoint, run: StepRunner | None = None) -> int:
        """Load a checkpoint, and return the number of the epoch's batches that are trained on."""
        batches = self.manager.go_on(checkpoint, run)
        self._steps_before = self._engine.state.optimizer_steps - progress_of(checkpoint).updates
        return batches

    def run_epoch(self, epoch: int) -> dict[str, Any]:
        """Train for one epoch, validate if that is due, and return the epoch's logs."""
        self._done = epoch
        self._callbacks.call("on_epoch_begin", epoch)
        run = StepRunner(self._engine, "train", self._train.device_transform, warm=self._train.passed)
        logs = self._go_on(epoch, run)
        if logs is None:
            logs = self._train_on(epoch, run)
        if self._validations is not None:
            # Noted before: if a signal ends the validation, the checkpoint says that only the validation is left.
            self._note(epoch, run.tally.batches, trained=dict(logs))  # as they are now: more is added below
            logs |= self._validations.close(epoch, run.tally.batches)
            self._leave_if_interrupted()
        self._callbacks.call("on_epoch_end", epoch, logs)
        self._done = epoch + 1
        self._note(epoch + 1)
        self._leave_if_interrupted()
        return logs

    def ends(self) -> bool:
        """True if training ends after this batch or epoch. All hosts decide together."""
        model = self._engine.model
        late = self._deadline is not None and perf_counter() > self._deadline
        model.stop_training, model.out_of_time = self._interruption.settle(model.stop_training, late)
        return model.stop_training or model.out_of_time or self._steps_left == 0 or self._interruption.wanted

    @property
    def _steps_taken(self) -> int:
        """The number of the optimizer's steps in this training, with those before a resumption."""
        return self._engine.state.optimizer_steps - self._steps_before

    @property
    def _steps_left(self) -> int | None:
        """The number of the optimizer's steps until `max_steps`; None without it."""
        return None if self._limits.max_steps is None else max(0, self._limits.max_steps - self._steps_taken)

    def _go_on(self, epoch: int, run: StepRunner) -> dict[str, Any] | None:
        """Load the checkpoint if it is from this epoch. Return the epoch's logs if only its validation is left."""
        resumed = self._resumed
        self._resumed = None
        if resumed is None:
            return None
        progress = progress_of(resumed)
        run.tally.batches = self._load(resumed, run if progress.trained is None else None)
        if self._validations is not None and progress.validated is not None:
            self._validations.last = progress.validated
        if progress.trained is None:
            return None
        run.tally.batches = progress.batches or 0
        return dict(progress.trained)

    def _train_on(self, epoch: int, run: StepRunner) -> dict[str, Any]:
        """Run the steps of an epoch, or the rest of them, and return their logs."""
        engine = self._engine
        model = self._engine.model
        validations = self._validations

        def validate_and_save(pause: Pause = nullcontext) -> None:
            # Validation comes before the save: a resumed run would repeat it otherwise.
            if validations is not None and validations.is_due_inside(run.tally.batches):
                with pause():  # its first steps are captured, while nothing else may be sent to the device
                    validations.run(run.tally.batches)
                run.note_hooks()  # those of the validation may have changed the optimizer
            self._note(epoch, run.tally.batches, run)

        def stop(pause: Pause) -> bool:
            validate_and_save(pause)
            return self.ends()

        def note_waited(seconds: float) -> None:
            model.input_bound = seconds / (perf_counter() - began)

        share_random_state(self._train)
        engine.train_mode()
        began = perf_counter()
        waited = 0.0
        validate_and_save()  # the checkpoint may be from a step whose validation was broken off
        if self._interruption.wanted or self._steps_left == 0:
            self._train.epoch(epoch)  # sets the position that a checkpoint saves; reads nothing
        else:
            loop = PassLoop(
                "train",
                run,
                self._train,
                self._callbacks,
                stop,
                self._interruption,
                note_waited,
                most=None if self._steps_left is None else engine.state.batches_of(self._steps_left),
            )
            waited = loop(epoch, look_ahead=engine.config.gradients.accumulate_steps > 1)
        self._leave_if_interrupted()
        if model.out_of_time or (self._steps_left == 0 and run.tally.batches != self._train.steps):
            self.manager.save_now()  # here, not at the epoch's end: the rest of the epoch is still to be trained on
        logs = run.results()
        elapsed = perf_counter() - began - (validations.take_seconds() if validations is not None else 0.0)
        tally = run.tally
        engine.log.passes.append(
            Pass("train", tally.steps, tally.rows, elapsed, waited, tally.tokens, tally.operations)
        )
        model.input_bound = waited / elapsed
        if not self._advised and (said := messages.waiting(waited, elapsed)):
            self._advised = True
            warn(said)
        return logs

    def _note(self, epoch: int, batches: int | None = None, run: StepRunner | None = None, trained: Any = None) -> None:
        """Tell the manager how far training is; it saves if a callback has requested that."""
        validated = None if self._validations is None or batches is None else self._validations.last
        model = self._engine.model
        if self._done < self._limits.min_epochs:
            model.stop_training = False
        stopped = model.stop_training
        progress = Progress(epoch, batches, trained, validated, stopped, self._epochs, self._steps_taken)
        self.manager.note(progress, run)

    def _leave_if_interrupted(self) -> None:
        self._interruption.settle()
        if self._interruption.wanted:
            self.manager.save_now()
            barrier()  # no host leaves before process 0 has saved
            self._interruption.leave()
