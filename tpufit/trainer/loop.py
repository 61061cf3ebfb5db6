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
            save what callbacks asked for, which waits for the device
            leave the epoch if a callback asked to stop
            leave for good after SIGTERM or Ctrl-C, and save first
        read the epoch's logs           the epoch's one wait for the device
        if validation is due            unless there has been one after the epoch's last step
            evaluate                    on_test_begin ... on_test_end, one wait
        on_epoch_end                    with the logs of the epoch's last validation, if there was one
        save what callbacks asked for
        leave if a callback asked to stop
    wait until everything is saved
    on_train_end                        of every callback, also after an error

A `fit` that goes on from a checkpoint begins like any other. Once the callbacks have begun, and with them the epoch if
the checkpoint is from the middle of one, everything is made what it was.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import replace
from time import perf_counter
from typing import Any

from ..callbacks.callback_list import CallbackList
from ..checkpoint import Checkpoint, CheckpointManager, Progress, progress_of
from ..data import Stream
from ..diagnostics import messages
from ..diagnostics.report import Pass
from ..runtime import agree
from ..step import Engine, StepRunner
from .interruption import Interruption
from .passes import PassLoop, Pause, closing
from .validation import Validation, Validations


def fit(
    engine: Engine,
    train: Stream,
    validation: Validation | None,
    callbacks: CallbackList,
    epochs: range,
    max_time: float | None = None,
    resumed: Checkpoint | None = None,
) -> None:
    """Train for some epochs.

    Args:
        engine: The engine of the model to train.
        train: The training data.
        validation: The data to validate on and the schedule, if any.
        callbacks: The callbacks to tell.
        epochs: The epochs' numbers, from 0.
        max_time: The time after which training ends, with the batch under way, in seconds (default: none).
        resumed: The checkpoint to go on from; the epochs before its own are left out (default: none).
    """
    model = engine.model
    model.stop_training = model.out_of_time = False
    engine.state.swap_ema(to=False)
    model.module.eval()  # the mode that it is left in, ready to be used
    with closing(callbacks, engine), Interruption() as interruption:
        training = _Training(engine, train, validation, callbacks, epochs.stop, max_time, interruption)
        callbacks.call("on_train_begin")
        begun = Progress(epochs.start) if resumed is None else training.begin_from(resumed, epochs.start)
        logs: dict[str, Any] = {}
        with training.manager.rescuing():
            for epoch in range(begun.epoch, epochs.stop):
                logs = training.run_epoch(epoch)
                if training.ends():
                    break
            training.manager.finish()
        engine.state.finish_ema()
        callbacks.call("on_train_end", logs)


class _Training:
    """One `fit`, over its epochs."""

    def __init__(
        self,
        engine: Engine,
        train: Stream,
        validation: Validation | None,
        callbacks: CallbackList,
        epochs: int,
        max_time: float | None,
        interruption: Interruption,
    ) -> None:
        self._engine, self._train, self._callbacks = engine, train, callbacks
        self._epochs, self._interruption = epochs, interruption
        self._validations = None if validation is None else Validations(engine, validation, callbacks, interruption)
        self.manager = CheckpointManager(engine, train, callbacks)
        self._deadline = None if max_time is None else perf_counter() + max_time
        self._resumed: Checkpoint | None = None  # for the epoch about to begin
        self._advised = False

    def begin_from(self, checkpoint: Checkpoint, first: int) -> Progress:
        """Go on from a checkpoint, now or, if it is from the middle of an epoch, once that has begun."""
        begun = progress_of(checkpoint, first)
        if begun.stopped and self._epochs <= begun.epochs:  # it had come to its end
            begun = replace(begun, epoch=self._epochs)
        if begun.batches is None or begun.epoch >= self._epochs:
            self.manager.go_on(checkpoint)
        else:
            self._resumed = checkpoint
        return begun

    def run_epoch(self, epoch: int) -> dict[str, Any]:
        """Train for one epoch, and validate if it is time to. Returns the epoch's logs."""
        self._callbacks.call("on_epoch_begin", epoch)
        run = StepRunner(self._engine, "train", self._train.device_transform, warm=self._train.passed)
        logs = self._go_on(epoch, run)
        if logs is None:
            logs = self._train_on(epoch, run)
        if self._validations is not None:
            self._note(epoch, run.tally.batches, trained=logs)
            logs |= self._validations.close(epoch, run.tally.batches)
            self._leave_if_interrupted()
        self._callbacks.call("on_epoch_end", epoch, logs)
        self._note(epoch + 1)
        self._leave_if_interrupted()
        return logs

    def ends(self) -> bool:
        """True if training ends after this batch or epoch. All hosts decide it together."""
        model = self._engine.model
        model.out_of_time = self._deadline is not None and perf_counter() > self._deadline
        return bool(agree(model.stop_training or model.out_of_time or self._interruption.wanted))

    def _go_on(self, epoch: int, run: StepRunner) -> dict[str, Any] | None:
        """If a checkpoint is from this epoch, go on from it. Returns the epoch's logs if only its validation is due."""
        resumed, self._resumed = self._resumed, None
        if resumed is None:
            return None
        progress = progress_of(resumed)
        run.tally.batches = self.manager.go_on(resumed, run if progress.trained is None else None)
        if self._validations is not None and progress.validated is not None:
            self._validations.last = progress.validated
        if progress.trained is None:
            return None
        run.tally.batches = progress.batches or 0
        return dict(progress.trained)

    def _train_on(self, epoch: int, run: StepRunner) -> dict[str, Any]:
        """Run the steps of an epoch, or the rest of them. Returns their logs."""
        engine, model, validations = self._engine, self._engine.model, self._validations

        def validate_and_save(pause: Pause = nullcontext) -> None:
            if validations is not None and validations.is_due_inside(run.tally.batches):
                with pause():  # the evaluation's first steps are captured, and nothing else may be sent meanwhile
                    validations.run(run.tally.batches)
                run.note_hooks()
            self._note(epoch, run.tally.batches, run)

        def stop(pause: Pause) -> bool:
            validate_and_save(pause)
            return self.ends()

        def note_waited(seconds: float) -> None:
            model.input_bound = seconds / (perf_counter() - began)

        model.module.train()
        began, waited = perf_counter(), 0.0
        validate_and_save()  # a checkpoint may be from a step after which a validation was broken off
        if self._interruption.wanted:
            self._train.epoch(epoch)  # so that it is where the epoch begins, or goes on; nothing is read
        else:
            loop = PassLoop("train", run, self._train, self._callbacks, stop, self._interruption, note_waited)
            waited = loop(epoch, look_ahead=engine.config.gradients.accumulate_steps > 1)
        self._leave_if_interrupted()
        if model.out_of_time:
            self.manager.save_now()  # here, and not at the epoch's end: the rest of it is still to be trained on
        logs = run.results()
        elapsed = perf_counter() - began - (validations.take_seconds() if validations is not None else 0.0)
        engine.log.passes.append(Pass("train", run.tally.steps, run.tally.rows, elapsed, waited))
        model.input_bound = waited / elapsed
        if not self._advised and (said := messages.waiting(waited, elapsed)):
            self._advised = True
            warnings.warn(said, stacklevel=6)
        return logs

    def _note(self, epoch: int, batches: int | None = None, run: StepRunner | None = None, trained: Any = None) -> None:
        """Tell the manager how far training is, and save if that was asked for."""
        validated = None if self._validations is None or batches is None else self._validations.last
        stopped = self._engine.model.stop_training
        self.manager.at(Progress(epoch, batches, trained, validated, stopped, self._epochs), run)

    def _leave_if_interrupted(self) -> None:
        if agree(self._interruption.wanted):
            self.manager.save_now()
            self._interruption.leave()
