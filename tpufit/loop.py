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
            leave the epoch if a callback asked to stop
        read the epoch's logs           the epoch's one wait for the device
        if validation is due
            evaluate                    on_test_begin ... on_test_end, one wait
        on_epoch_end
        leave if a callback asked to stop
    on_train_end                        of every callback, also after an error
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch.utils._pytree import tree_map

from .callbacks.dispatch import CallbackList
from .data import Stream
from .data.direct import Direct
from .data.feed import Feed
from .data.meter import advice
from .diagnosis import Pass
from .runtime import add_seconds, agree, timing
from .step import Fed, StepRunner, Steps, fetch

# Outputs that may wait on the device before they are fetched: enough to keep it busy, few enough to fit.
_OUTPUTS_IN_FLIGHT = 2


class Trainee(Steps):
    """What the loop needs of a model: its steps, where a callback asks to stop, and the passes that there have been."""

    input_bound: float | None
    _passes: deque[Pass]
    stop_training: bool
    stop_evaluating: bool
    stop_predicting: bool


@dataclass(frozen=True)
class Validation:
    """What to validate on, and after which epochs.

    Attributes:
        stream: The data.
        due: The epochs, counted from 1, that end with a validation; or every how many.
    """

    stream: Stream
    due: int | Container[int]

    def is_due(self, epoch: int) -> bool:
        """Whether the epoch (from 0) ends with a validation."""
        return (epoch + 1) % self.due == 0 if isinstance(self.due, int) else epoch + 1 in self.due


def fit(
    model: Trainee,
    train: Stream,
    validation: Validation | None,
    callbacks: CallbackList,
    epochs: Iterable[int],
    max_time: float | None = None,
) -> None:
    """Train for some epochs.

    Args:
        model: What to train.
        train: The training data.
        validation: What to validate on, if anything.
        callbacks: Whom to tell.
        epochs: The epochs' numbers, from 0.
        max_time: After so many seconds it ends, with the batch under way.
    """
    deadline = None if max_time is None else perf_counter() + max_time

    def stops() -> bool:
        if deadline is not None and perf_counter() > deadline:
            model.stop_training = True
        return bool(agree(model.stop_training))

    model.stop_training = False
    model.swap_ema_weights(to=False)
    advised = False
    logs: dict[str, Any] = {}
    model.module.eval()  # what it is left in, ready to be used
    with _closing(callbacks, model):
        callbacks.call("on_train_begin")
        for epoch in epochs:
            callbacks.call("on_epoch_begin", epoch)
            run = StepRunner(model, "train", train.device_transform)
            model.module.train()
            began = perf_counter()
            waited = _run_pass(model, run, train, epoch, callbacks, "train", stops)
            logs = run.results()
            elapsed = perf_counter() - began
            model._passes.append(Pass("train", run.steps, run.rows, elapsed, waited))
            model.input_bound = waited / elapsed
            if not advised and (said := advice(waited, elapsed)):
                advised = True
                warnings.warn(said, stacklevel=3)
            if validation is not None and validation.is_due(epoch):
                logs |= {f"val_{name}": value for name, value in evaluate(model, validation.stream, callbacks).items()}
            callbacks.call("on_epoch_end", epoch, logs)
            if stops():
                break
        model.finish_averages()
        callbacks.call("on_train_end", logs)


def evaluate(model: Trainee, data: Stream, callbacks: CallbackList) -> dict[str, Any]:
    """Evaluate once over the data.

    Returns:
        The loss and the metrics over exactly the rows of the data.
    """
    model.stop_evaluating = False
    with _closing(callbacks, model):
        callbacks.call("on_test_begin")
        run = StepRunner(model, "eval", data.device_transform)
        model.module.eval()
        began = perf_counter()
        waited = _run_pass(model, run, data, 0, callbacks, "test", lambda: agree(model.stop_evaluating))
        logs = run.results()
        model._passes.append(Pass("eval", run.steps, run.rows, perf_counter() - began, waited))
        callbacks.call("on_test_end", logs)
    return logs


def predict(model: Trainee, data: Stream, callbacks: CallbackList) -> list[Any]:
    """Predict once over the data.

    Returns:
        The outputs of each batch, on the host, in order.
    """
    model.stop_predicting = False
    flying: deque[Any] = deque()
    landed: list[Any] = []
    with _closing(callbacks, model):
        callbacks.call("on_predict_begin")
        run = StepRunner(model, "predict", data.device_transform)
        model.module.eval()

        def collect(outputs: list[Any]) -> None:
            flying.extend(outputs)
            while len(flying) > _OUTPUTS_IN_FLIGHT:
                landed.append(fetch(flying.popleft(), "outputs"))

        _run_pass(model, run, data, 0, callbacks, "predict", lambda: agree(model.stop_predicting), collect)
        landed.extend(fetch(outputs, "outputs") for outputs in flying)
        callbacks.call("on_predict_end")
    return landed


@contextmanager
def _closing(callbacks: CallbackList, model: Trainee) -> Iterator[None]:
    """Whatever happens, end the callbacks, put the weights back, and leave each layer in the mode that it began in."""
    with modes_kept(model):
        try:
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
    stop: Callable[[], bool],
    collect: Callable[[list[Any]], None] | None = None,
) -> float:
    """Run the steps of one pass. Returns for how many seconds it waited for data."""
    begin, end = f"on_{name}_batch_begin", f"on_{name}_batch_end"
    tell_begin, tell_end = callbacks.has(begin), callbacks.has(end)
    index = started = 0
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
    alone = data.quick
    with Direct(batches, run.prepare) if alone else Feed(batches, run.prepare, ahead) as feed:
        accumulates = name == "train" and model._gradients.accumulate_steps > 1
        for group, last in _knowing_the_last(_groups(feed, lambda: run.group_size), look=accumulates):
            if tell_begin:
                callbacks.call(begin, index)
                run.hooked()
            outputs = step(group, feed.paused, last)
            index += len(group)
            if tell_end:
                callbacks.call(end, index - 1, {"outputs": outputs[-1]} if collect else run.logs())
                run.hooked()
            if collect:
                collect(outputs)
            if stop():
                break
    data.note_pace(feed.seconds_busy, feed.seconds_computed, feed.given)
    add_seconds("data", feed.seconds_busy if alone else feed.seconds_waited)
    add_seconds("read", feed.seconds_busy - feed.seconds_prepared, beside=True)
    add_seconds("prepare", feed.seconds_prepared, beside=True)
    return feed.seconds_waited


def _groups(feed: Iterable[Fed], size: Callable[[], int]) -> Iterator[list[Fed]]:
    """The batches in groups that run as one graph: of one structure, and no more than `size` says at the time.

    Batches that don't fill a group run one by one: a graph for each smaller size would have to be compiled.
    """
    group: list[Fed] = []
    for fed in feed:
        if group and fed.signature != group[0].signature:
            yield from ([one] for one in group)
            group = []
        group.append(fed)
        if len(group) >= size():
            yield group
            group = []
    yield from ([one] for one in group)


def _knowing_the_last(groups: Iterator[list[Fed]], look: bool) -> Iterator[tuple[list[Fed], bool]]:
    """The groups, each with whether it is the last one. Only `look` keeps a group back to find out."""
    if not look:
        yield from ((group, False) for group in groups)
        return
    group = next(groups, None)
    while group is not None:
        following = next(groups, None)
        yield group, following is None
        group = following


def concatenate(outputs: list[Any]) -> Any:
    """The outputs of all batches as one nest of NumPy arrays; bfloat16, which NumPy lacks, becomes float32."""

    def join(*parts: Any) -> Any:
        if not isinstance(parts[0], torch.Tensor):
            return list(parts)
        parts = tuple(p.float() if p.dtype is torch.bfloat16 else p for p in parts)
        return (torch.cat(parts) if parts[0].dim() else torch.stack(parts)).numpy()

    return tree_map(join, *outputs)
