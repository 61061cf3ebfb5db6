"""The loop: one for training and evaluation. Its order is part of the interface, so it is written out here.

fit
    on_train_begin
    for each epoch
        on_epoch_begin
        for each batch
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
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from ..callbacks.callback_list import CallbackList
from ..checkpoint import Checkpoint, CheckpointManager, Progress, progress_of
from ..data import Stream
from ..data.inline import Direct
from ..data.prefetch import PrefetchEndedError, Prefetcher
from ..diagnostics import messages as advice
from ..diagnostics.report import Pass
from ..runtime import add_seconds, agree, timing
from ..step import DeviceBatch, StepRunner, Steps, fetch
from .interruption import Interruption

# Outputs that may wait on the device before they are fetched: enough to keep it busy, few enough to fit.
_OUTPUTS_IN_FLIGHT = 2


# A context in which nothing is sent to the device but by whoever entered it.
_Pause = Callable[[], AbstractContextManager[object]]


class Trainee(Steps):
    """What the loop needs of a model: its steps, where a callback asks to stop, and the passes that there have been."""

    input_bound: float | None
    out_of_time: bool
    _passes: deque[Pass]
    stop_training: bool
    stop_evaluating: bool
    stop_predicting: bool


@dataclass(frozen=True)
class Validation:
    """What to validate on, and when.

    Attributes:
        stream: The data.
        due: The epochs, counted from 1, that end with a validation; or every how many.
        every: After how many steps of an epoch, again and again, there is one inside it (default: never).
    """

    stream: Stream
    due: int | Container[int]
    every: int | None = None

    def is_due(self, epoch: int) -> bool:
        """Whether the epoch (from 0) ends with a validation."""
        return (epoch + 1) % self.due == 0 if isinstance(self.due, int) else epoch + 1 in self.due


def fit(
    model: Trainee,
    train: Stream,
    validation: Validation | None,
    callbacks: CallbackList,
    epochs: range,
    max_time: float | None = None,
    resumed: Checkpoint | None = None,
) -> None:
    """Train for some epochs.

    Args:
        model: What to train.
        train: The training data.
        validation: What to validate on, if anything.
        callbacks: Whom to tell.
        epochs: The epochs' numbers, from 0.
        max_time: After so many seconds it ends, with the batch under way.
        resumed: What to go on from; the epochs before its own are left out.
    """
    model.stop_training = model.out_of_time = False
    model.first_bad_step = None
    model.swap_ema_weights(to=False)
    model.module.eval()  # what it is left in, ready to be used
    with _closing(callbacks, model), Interruption() as interruption:
        training = _Training(model, train, validation, callbacks, epochs.stop, max_time, interruption)
        callbacks.call("on_train_begin")
        begun = Progress(epochs.start) if resumed is None else training.begin_from(resumed, epochs.start)
        logs: dict[str, Any] = {}
        with training.saver.rescuing():
            for epoch in range(begun.epoch, epochs.stop):
                logs = training.run_epoch(epoch)
                if training.ends():
                    break
            training.saver.finish()
        model.finish_averages()
        callbacks.call("on_train_end", logs)


class _Training:
    """One `fit`: what its epochs have in common."""

    def __init__(
        self,
        model: Trainee,
        train: Stream,
        validation: Validation | None,
        callbacks: CallbackList,
        epochs: int,
        max_time: float | None,
        interruption: Interruption,
    ) -> None:
        self.model, self.train, self.callbacks = model, train, callbacks
        self.epochs, self.interruption = epochs, interruption
        self.validations = None if validation is None else _Validations(model, validation, callbacks, interruption)
        self.saver = CheckpointManager(model, train, callbacks)
        self._deadline = None if max_time is None else perf_counter() + max_time
        self._resumed: Checkpoint | None = None  # what the epoch about to begin goes on from
        self._advised = False

    def begin_from(self, checkpoint: Checkpoint, first: int) -> Progress:
        """Go on from a checkpoint, now or, if it is from the middle of an epoch, once that has begun."""
        begun = progress_of(checkpoint, first)
        if begun.stopped and self.epochs <= begun.epochs:  # it had come to its end
            begun = replace(begun, epoch=self.epochs)
        if begun.batches is None or begun.epoch >= self.epochs:
            self.saver.go_on(checkpoint)
        else:
            self._resumed = checkpoint
        return begun

    def run_epoch(self, epoch: int) -> dict[str, Any]:
        """Train for one epoch, and validate if it is time to. Returns the epoch's logs."""
        self.callbacks.call("on_epoch_begin", epoch)
        run = StepRunner(self.model, "train", self.train.device_transform)
        logs = self._go_on(epoch, run)
        if logs is None:
            logs = self._train_on(epoch, run)
        if self.validations is not None:
            self._note(epoch, run.batches, trained=logs)
            logs |= self.validations.close(epoch, run.batches)
            self._leave_if_interrupted()
        self.callbacks.call("on_epoch_end", epoch, logs)
        self._note(epoch + 1)
        self._leave_if_interrupted()
        return logs

    def ends(self) -> bool:
        """Whether training ends after this batch or epoch."""
        model = self.model
        model.out_of_time = self._deadline is not None and perf_counter() > self._deadline
        return bool(agree(model.stop_training or model.out_of_time or self.interruption.wanted))

    def _go_on(self, epoch: int, run: StepRunner) -> dict[str, Any] | None:
        """If a checkpoint is from this epoch, go on from it. Returns the epoch's logs if only its validation is due."""
        resumed, self._resumed = self._resumed, None
        if resumed is None:
            return None
        progress = progress_of(resumed)
        run.batches = self.saver.go_on(resumed, run if progress.trained is None else None)
        if self.validations is not None and progress.validated is not None:
            self.validations.last = progress.validated
        if progress.trained is None:
            return None
        run.batches = progress.batches or 0
        return dict(progress.trained)

    def _train_on(self, epoch: int, run: StepRunner) -> dict[str, Any]:
        """The steps of an epoch, or what is left of them. Returns their logs."""
        model, validations = self.model, self.validations

        def validate_and_save(pause: _Pause = nullcontext) -> None:
            if validations is not None and validations.is_due_inside(run.batches):
                with pause():  # the evaluation's first steps are captured, and nothing else may be sent meanwhile
                    validations.run(run.batches)
                run.hooked()
            self._note(epoch, run.batches, run)

        def ends(pause: _Pause) -> bool:
            validate_and_save(pause)
            return self.ends()

        model.module.train()
        began, waited = perf_counter(), 0.0
        validate_and_save()  # what it goes on from may be a step after which a validation was broken off
        if self.interruption.wanted:
            self.train.epoch(epoch)  # so that it is where the epoch begins, or goes on; nothing is read
        else:
            waited = _run_pass(model, run, self.train, epoch, self.callbacks, "train", ends, self.interruption)
        self._leave_if_interrupted()
        if model.out_of_time:
            self.saver.save_now()  # here, and not at the epoch's end: the rest of the epoch is still to be trained on
        logs = run.results()
        elapsed = perf_counter() - began - (validations.take_seconds() if validations is not None else 0.0)
        model._passes.append(Pass("train", run.steps, run.rows, elapsed, waited))
        model.input_bound = waited / elapsed
        if not self._advised and (said := advice.waiting(waited, elapsed)):
            self._advised = True
            warnings.warn(said, stacklevel=5)
        return logs

    def _note(self, epoch: int, batches: int | None = None, run: StepRunner | None = None, trained: Any = None) -> None:
        """Let the saver know how far training is, and save if that was asked for."""
        validated = None if self.validations is None or batches is None else self.validations.last
        stopped = self.model.stop_training
        self.saver.at(Progress(epoch, batches, trained, validated, stopped, self.epochs), run)

    def _leave_if_interrupted(self) -> None:
        if agree(self.interruption.wanted):
            self.saver.save_now()
            self.interruption.leave()


class _Validations:
    """The validations of one epoch after another.

    Args:
        model: What is trained.
        validation: On what, and when.
        callbacks: Whom to tell.
        interruption: What breaks one off; it is then as if it had never begun.

    Attributes:
        last: The epoch's last one: after how many of its batches it was, and its logs.
    """

    def __init__(
        self, model: Trainee, validation: Validation, callbacks: CallbackList, interruption: Interruption
    ) -> None:
        self._model, self._validation, self._callbacks = model, validation, callbacks
        self._interruption = interruption
        self.last: dict[str, Any] = _NOT_YET
        self._seconds = 0.0

    def is_due_inside(self, batches: int) -> bool:
        """Whether there is one inside the epoch, after so many batches, of which several may have come at once."""
        every = self._validation.every
        return every is not None and self.last["batches"] // every < batches // every

    def run(self, batches: int) -> None:
        """Validate, after so many batches of the epoch."""
        began = perf_counter()
        logs = evaluate(self._model, self._validation.stream, self._callbacks, self._interruption)
        if not self._interruption.wanted:
            self.last = {"batches": batches, "logs": {f"val_{name}": value for name, value in logs.items()}}
        self._seconds += perf_counter() - began

    def take_seconds(self) -> float:
        """How long those inside the epoch have taken."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def close(self, epoch: int, batches: int) -> dict[str, Any]:
        """The logs of the epoch's last validation, which is made now if it is due; empty if there was none."""
        if self._validation.is_due(epoch) and self.last["batches"] != batches:
            self.run(batches)
        logs, self.last = self.last["logs"], _NOT_YET
        self._seconds = 0.0
        return dict(logs)


_NOT_YET: dict[str, Any] = {"batches": 0, "logs": {}}


def evaluate(
    model: Trainee, data: Stream, callbacks: CallbackList, interruption: Interruption | None = None
) -> dict[str, Any]:
    """Evaluate once over the data.

    Args:
        model: What to evaluate.
        data: The data.
        callbacks: Whom to tell.
        interruption: What breaks it off after the batch under way, inside `fit`.

    Returns:
        The loss and the metrics over exactly the rows of the data.
    """
    model.stop_evaluating = False
    with _closing(callbacks, model):
        callbacks.call("on_test_begin")
        run = StepRunner(model, "eval", data.device_transform)
        model.module.eval()
        began = perf_counter()

        def stops(pause: _Pause) -> bool:
            return bool(agree(model.stop_evaluating or (interruption is not None and interruption.wanted)))

        waited = _run_pass(model, run, data, 0, callbacks, "test", stops, interruption)
        # Of a validation that was broken off nothing is used, and there may be nothing.
        logs = {} if interruption is not None and interruption.wanted else run.results()
        model._passes.append(Pass("eval", run.steps, run.rows, perf_counter() - began, waited))
        callbacks.call("on_test_end", logs)
    return logs


def predict(model: Trainee, data: Stream, callbacks: CallbackList, take: Callable[[Any], None]) -> None:
    """Predict once over the data.

    Args:
        model: What predicts.
        data: The data.
        callbacks: Whom to tell.
        take: Given the outputs of each batch, on the host, in order. No more than a few others wait meanwhile.
    """
    model.stop_predicting = False
    flying: deque[Any] = deque()
    with _closing(callbacks, model):
        callbacks.call("on_predict_begin")
        run = StepRunner(model, "predict", data.device_transform)
        model.module.eval()
        began = perf_counter()

        def collect(outputs: list[Any]) -> None:
            flying.extend(outputs)
            while len(flying) > _OUTPUTS_IN_FLIGHT:
                take(fetch(flying.popleft(), "outputs"))

        def stops(pause: _Pause) -> bool:
            return bool(agree(model.stop_predicting))

        waited = _run_pass(model, run, data, 0, callbacks, "predict", stops, None, collect)
        while flying:
            take(fetch(flying.popleft(), "outputs"))
        model._passes.append(Pass("predict", run.steps, run.rows, perf_counter() - began, waited))
        callbacks.call("on_predict_end")


@contextmanager
def _closing(callbacks: CallbackList, model: Trainee) -> Iterator[None]:
    """Whatever happens, end the callbacks, put the weights back, and leave each layer in the mode that it began in."""
    with modes_kept(model):
        try:
            with model._noticing_loss():
                yield
        except BaseException as error:
            callbacks.close_after_error(error)
            raise
        finally:
            model._expose()


@contextmanager
def modes_kept(model: Trainee) -> Iterator[None]:
    """Leave each layer in the mode, training or not, that it began in."""
    modes = [(module, module.training) for module in model.module.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _run_pass(
    model: Trainee,
    run: StepRunner,
    data: Stream,
    epoch: int,
    callbacks: CallbackList,
    name: str,
    stop: Callable[[_Pause], bool],
    interruption: Interruption | None,
    collect: Callable[[list[Any]], None] | None = None,
) -> float:
    """Run the steps of one pass, or what is left of it. Returns for how many seconds it waited for data."""
    begin, end = f"on_{name}_batch_begin", f"on_{name}_batch_end"
    tell_begin, tell_end = callbacks.has(begin), callbacks.has(end)
    started = run.batches
    began = perf_counter()
    step = timing("steps", run.__call__) if callbacks.measures else run.__call__
    run.warm = data.passed

    def begin_step() -> None:
        nonlocal started
        callbacks.call("on_train_step_begin", started)
        started += 1

    if name == "train" and callbacks.has("on_train_step_begin"):
        run.before_step = begin_step
    batches = data.epoch(epoch)
    ahead = max(4, 2 * run.group_size)
    accumulates = name == "train" and model._gradients.accumulate_steps > 1
    alone = data.quick
    feed = Direct(batches, run.prepare) if alone else Prefetcher(batches, run.prepare, ahead)
    with feed, _ending(feed, interruption):
        for group, last in _knowing_the_last(_groups(feed, lambda: run.group_size), look=accumulates):
            if tell_begin:
                callbacks.call(begin, run.batches)
                run.hooked()
            outputs = step(group, feed.paused, last)
            if tell_end:
                if name == "train":
                    model.input_bound = feed.seconds_waited / (perf_counter() - began)
                if collect:
                    for index, output in enumerate(outputs, run.batches - len(group)):
                        callbacks.call(end, index, {"outputs": output})
                else:
                    callbacks.call(end, run.batches - 1, run.logs())
                run.hooked()
            if collect:
                collect(outputs)
            if stop(feed.paused):
                break
    data.note_pace(feed.seconds_busy, feed.seconds_computed, feed.given)
    add_seconds("data", feed.seconds_busy if alone else feed.seconds_waited)
    add_seconds("read", feed.seconds_busy - feed.seconds_prepared, beside=True)
    add_seconds("prepare", feed.seconds_prepared, beside=True)
    return feed.seconds_waited


@contextmanager
def _ending(feed: Prefetcher[DeviceBatch] | Direct[DeviceBatch], interruption: Interruption | None) -> Iterator[None]:
    """Let a signal end the wait for data, which may be long. Batches that were read by then are not run."""
    if interruption is None:
        yield
        return
    before, interruption.wakes = interruption.wakes, feed.end
    try:
        with suppress(PrefetchEndedError):
            yield
    finally:
        interruption.wakes = before


def _groups(feed: Iterable[DeviceBatch], size: Callable[[], int]) -> Iterator[list[DeviceBatch]]:
    """The batches in groups that run as one graph: of one structure, and no more than `size` says at the time.

    Batches that don't fill a group run one by one: a graph for each smaller size would have to be compiled.
    """
    group: list[DeviceBatch] = []
    for fed in feed:
        if group and fed.signature != group[0].signature:
            yield from ([one] for one in group)
            group = []
        group.append(fed)
        if len(group) >= size():
            yield group
            group = []
    yield from ([one] for one in group)


def _knowing_the_last(groups: Iterator[list[DeviceBatch]], look: bool) -> Iterator[tuple[list[DeviceBatch], bool]]:
    """The groups, each with whether it is the last one. Only `look` keeps a group back to find out."""
    if not look:
        yield from ((group, False) for group in groups)
        return
    group = next(groups, None)
    while group is not None:
        following = next(groups, None)
        yield group, following is None
        group = following
