"""The loop of `fit`. Its order is part of the interface:

fit
    on_train_begin
    for each epoch
        on_epoch_begin
        for each batch                  see passes.py
            on_train_batch_begin
            on_train_step_begin         for each step that the graph runs
            step                        one graph, started without a wait
            on_train_batch_end          its logs wait only when they are read
            if a validation inside the epoch is due
                evaluate                on_test_begin ... on_test_end, one wait
            save what callbacks requested, waits for the device
            leave the epoch if a callback set stop_training
            save and end after SIGTERM or Ctrl-C
        read the epoch's logs           the epoch's one wait for the device
        if validation is due            unless it has run after the epoch's last step
            evaluate                    on_test_begin ... on_test_end, one wait
        on_epoch_end                    with the logs of the epoch's last validation, if any
        save what callbacks requested
        leave if a callback set stop_training
    wait until everything is saved
    on_train_end                        of every callback, even after an error
    end after SIGTERM or Ctrl-C that came since the last check

A resumed `fit` begins like any other. The checkpoint is loaded after `on_train_begin`, or after `on_epoch_begin` if it
is from the middle of an epoch, because these hooks would overwrite the loaded state.
"""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from ..callbacks.callback_list import CallbackList
from ..checkpoint import Checkpoint, CheckpointManager, Progress, closing_new_runs, read_progress
from ..data import Stream
from ..diagnostics import messages
from ..hosts import barrier
from ..step import Engine, StepRunner
from ..utils.user_code import warn
from .interruption import Interruption
from .passes import PassLoop, Pause, begin_pass, closing, end_pass
from .validation import Validation, Validations


@dataclass(frozen=True)
class Limits:
    """The limits of a `fit` other than its epochs."""

    min_epochs: int = 0  # callbacks can't end training before
    max_steps: int | None = None  # of the optimizer
    seconds: float | None = None  # training ends with the first batch after this time


def fit(
    engine: Engine,
    train: Stream,
    validation: Validation | None,
    callbacks: CallbackList,
    epochs: range,
    limits: Limits,
    resumed: Checkpoint | None = None,
) -> None:
    """Train for some epochs, numbered from 0; a resumed training skips the epochs that are done."""
    model = engine.model
    model.stop_training = model.out_of_time = False
    engine.state.swap_ema(averages=False)  # a callback may have left the averages in the module
    engine.note_modes()
    engine.leave_mode()  # `closing` restores this mode at the end
    with closing_new_runs(callbacks), closing(callbacks, engine), Interruption() as interruption:
        training = _Training(engine, train, validation, callbacks, epochs.stop, limits, interruption)
        if resumed is not None:
            training.manager.load_first(resumed)
        # `on_train_begin` comes before the checkpoint is loaded, which would be overwritten otherwise.
        callbacks.call("on_train_begin")
        training.manager.begin(resumed is not None)
        progress = Progress(epochs.start) if resumed is None else training.begin_from(resumed, epochs.start)
        logs: dict[str, Any] = {}
        with training.manager.save_after_error(lambda: interruption.wanted):
            for epoch in range(progress.epoch, epochs.stop):
                logs = training.run_epoch(epoch)
                if training.ends_here():
                    break
            training.manager.finish()
        engine.state.finish_ema()  # after the last checkpoint, which needs the trained weights
        callbacks.call("on_train_end", logs)
        interruption.agree()
        if interruption.wanted:
            interruption.leave()


class _Training:
    """The state of one `fit`."""

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
        self._resumed: Checkpoint | None = None  # to load when its epoch begins
        self._advised = False

    def begin_from(self, checkpoint: Checkpoint, first: int) -> Progress:
        """Load a checkpoint; if it is from the middle of an epoch, keep it until the epoch begins."""
        progress = read_progress(checkpoint, first)
        if progress.stopped and self._epochs <= progress.epochs:  # a callback ended it, and `epochs` wasn't raised
            progress = replace(progress, epoch=self._epochs)
        if progress.batches is None or progress.epoch >= self._epochs:
            self._load(checkpoint)
        else:
            self._resumed = checkpoint
        return progress

    def _load(self, checkpoint: Checkpoint, runner: StepRunner | None = None) -> int:
        """Load a checkpoint, and return the number of the epoch's batches that it has trained on."""
        batches = self.manager.resume(checkpoint, runner)
        self._steps_before = self._engine.state.optimizer_steps - read_progress(checkpoint).updates
        return batches

    def run_epoch(self, epoch: int) -> dict[str, Any]:
        """Train for one epoch, validate if due, and return the epoch's logs."""
        self._done = epoch
        self._callbacks.call("on_epoch_begin", epoch)
        runner = StepRunner(self._engine, "train", self._train.device_transform, warm=self._train.passed)
        logs = self._resume_epoch(runner)
        if logs is None:
            logs = self._train_on(epoch, runner)
        if self._validations is not None:
            self._enforce_min_epochs()
            # Noted before the validation: if a signal ends it, the checkpoint says that only the validation remains.
            self._record(epoch, runner.tally.batches, trained=dict(logs))  # a copy, because `logs` grows below
            logs |= self._validations.close(epoch, runner.tally.batches)
            self._leave_if_interrupted()
        self._callbacks.call("on_epoch_end", epoch, logs)
        self._done = epoch + 1
        self._enforce_min_epochs()
        self._record(epoch + 1)
        self._leave_if_interrupted()
        return logs

    def ends_here(self) -> bool:
        """True if training ends after this batch or epoch. All hosts decide together."""
        model = self._engine.model
        late = self._deadline is not None and perf_counter() > self._deadline
        model.stop_training, model.out_of_time = self._interruption.agree(model.stop_training, late)
        return model.stop_training or model.out_of_time or self._steps_left == 0 or self._interruption.wanted

    @property
    def _steps_taken(self) -> int:
        """The number of the optimizer's steps in this training, including steps before a resumption."""
        return self._engine.state.optimizer_steps - self._steps_before

    @property
    def _steps_left(self) -> int | None:
        """The number of the optimizer's steps until `max_steps`; None without it."""
        return None if self._limits.max_steps is None else max(0, self._limits.max_steps - self._steps_taken)

    def _resume_epoch(self, runner: StepRunner) -> dict[str, Any] | None:
        """Load the checkpoint if it is from this epoch. Return the epoch's logs if only its validation remains."""
        resumed = self._resumed
        self._resumed = None
        if resumed is None:
            return None
        progress = read_progress(resumed)
        runner.tally.batches = self._load(resumed, runner if progress.trained is None else None)
        if self._validations is not None and progress.validated is not None:
            self._validations.last = progress.validated
        if progress.trained is None:
            return None
        runner.tally.batches = progress.batches or 0
        return dict(progress.trained)

    def _train_on(self, epoch: int, runner: StepRunner) -> dict[str, Any]:
        """Run the remaining steps of an epoch, and return its logs."""
        engine = self._engine
        model = self._engine.model
        validations = self._validations
        tally = runner.tally

        def validate_and_save(pause: Pause = nullcontext) -> None:
            # Validate before the save, so that a resumed run doesn't repeat the validation.
            if validations is not None and validations.is_due_inside(tally.batches):
                with pause():  # while its first steps are captured, nothing else may be sent to the device
                    tally.validated += validations.run(tally.batches)
                runner.note_hooks()  # the validation's hooks may have changed the optimizer
            self._enforce_min_epochs()
            self._record(epoch, tally.batches, runner)

        def stop(pause: Pause) -> bool:
            validate_and_save(pause)
            return self.ends_here()

        def note_wait(seconds: float) -> None:
            model.input_bound = seconds / (perf_counter() - tally.began)

        begin_pass(engine, runner, self._train)
        validate_and_save()  # the checkpoint may be from a step whose validation was interrupted
        if self._interruption.wanted or self._steps_left == 0:
            self._train.epoch(epoch)  # sets the position that a checkpoint saves; reads nothing
        else:
            loop = PassLoop(
                "train",
                runner,
                self._train,
                self._callbacks,
                stop,
                self._interruption,
                note_wait,
                max_batches=None if self._steps_left is None else engine.state.count_batches_until(self._steps_left),
            )
            loop(epoch, look_ahead=engine.config.gradients.accumulate_steps > 1)
        self._leave_if_interrupted()
        if model.out_of_time or (self._steps_left == 0 and tally.batches != self._train.steps):
            self.manager.save_now()  # here, because a resumed run trains the rest of the epoch
        logs = runner.results()
        done = end_pass(engine, runner)
        model.input_bound = done.waited / done.seconds
        if not self._advised and (advice := messages.report_waiting(done.waited, done.seconds)):
            self._advised = True
            warn(advice)
        return logs

    def _record(
        self, epoch: int, batches: int | None = None, runner: StepRunner | None = None, trained: Any = None
    ) -> None:
        """Record the progress, and take the checkpoints that callbacks have requested."""
        validated = None if self._validations is None or batches is None else self._validations.last
        stopped = self._engine.model.stop_training
        progress = Progress(epoch, batches, trained, validated, stopped, self._epochs, self._steps_taken)
        self.manager.record(progress, runner)
        self.manager.save_requested()

    def _enforce_min_epochs(self) -> None:
        """Withdraw a callback's `stop_training` before `min_epochs` epochs are done."""
        if self._done < self._limits.min_epochs:
            self._engine.model.stop_training = False

    def _leave_if_interrupted(self) -> None:
        self._interruption.agree()
        if self._interruption.wanted:
            self.manager.save_now()
            barrier()  # no host leaves before process 0 has saved
            self._interruption.leave()
