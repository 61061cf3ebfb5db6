"""One pass over data: what training, evaluation and prediction share, and `evaluate` and `predict`.

pass
    on_epoch_begin, on_test_begin or on_predict_begin
    StepRunner                          resets the metrics
    begin_pass                          the hosts' random state, the modules' modes, the clock
    PassLoop
        for each group of `steps_per_execution` steps, or of the remaining steps
            on_*_batch_begin
            on_train_step_begin         for each step
            steps                       one graph, or one each if they can't be joined; started without a wait
            on_*_batch_end              its logs wait only when they are read
            leave if `stop` says so
    read the logs or the last outputs   waits for the device
    end_pass                            the pass's record for the report
    on_epoch_end, on_test_end or on_predict_end

For evaluation and prediction all of this is here. The pass of an epoch is in `loop.py`, because a checkpoint may be
loaded after its `StepRunner` is made, and a validation comes before `on_epoch_end`.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from math import ceil
from time import perf_counter, thread_time
from typing import Any

from ..backend import turns
from ..callbacks.callback_list import CallbackList
from ..data import Stream
from ..data.inline_reader import BatchReader, InlineReader
from ..data.prefetch import PrefetchEndedError, Prefetcher
from ..data.read_loader import raise_worker_deaths_in_reads
from ..data.reused_memory import copy_batch, group_batches
from ..data.sampling import select_shard_rows
from ..diagnostics.report import Pass
from ..errors import join_few
from ..hosts import all_reduce_max, collective
from ..runtime import fetch, fetch_rows, gather_rows, process_count
from ..step import DeviceGroup, Engine, StepRunner, join_groups, keeping_modes
from ..utils.counters import add_seconds, time_function
from ..utils.user_code import warn
from .host_agreement import keep_in_lockstep
from .host_consistency import share_random_state
from .interruption import Interruption

# The number of outputs that may be pending on the device: enough to keep it busy, few enough to fit.
_OUTPUTS_PENDING = 2

# A function that returns a context in which no other thread sends anything to the device.
Pause = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class PassLoop:
    """One pass over data."""

    name: str  # "train", "test" or "predict", as in the names of hooks
    runner: StepRunner
    data: Stream
    callbacks: CallbackList
    stop: Callable[[Pause], bool]  # called with a `Pause` after each group; True ends the pass
    interruption: Interruption | None = None  # ends a wait for data; None outside `fit`
    # Called before each batch's end hook with the wait for data so far, in seconds.
    on_wait: Callable[[float], None] | None = None
    # Called with the outputs of each group's batches and their rows.
    collect: Callable[[list[Any], list[int]], None] | None = None
    max_batches: int | None = None

    def __call__(self, epoch: int = 0, look_ahead: bool = False) -> None:
        """Run the pass from its position.

        With `look_ahead` the steps of the last group know that they are the last: one group is kept back.
        """
        runner = self.runner
        callbacks = self.callbacks
        data = self.data
        begin = f"on_{self.name}_batch_begin"
        end = f"on_{self.name}_batch_end"
        calls_begin = callbacks.has(begin)
        calls_end = callbacks.has(end)
        step = time_function("steps", runner.__call__) if callbacks.measures else runner.__call__
        if self.name == "train" and callbacks.has("on_train_step_begin"):
            runner.before_step = self._step_hook()
        # An eager step draws from PyTorch's generator, and so may the data. Inline, the order of their draws is fixed.
        inline = data.pace.inline or runner.eager
        began = thread_time()

        def run_part(part: DeviceGroup, last: bool) -> Iterable[Any]:
            remaining = None
            if data.steps is not None:
                remaining = ceil((data.steps - runner.tally.batches - len(part.forms)) / runner.group_size)
            return step(part, feed.pausing, last, remaining) or ()

        batches: Iterator[Any] = islice(data.epoch(epoch), self.max_batches)
        if look_ahead and runner.on_host and data.may_overwrite:
            batches = map(copy_batch, batches)  # a step gets the same memory, and the next group is read before it
        groups_read = group_batches(batches, lambda: runner.batches_per_hook, data.may_overwrite)
        feed: BatchReader[list[DeviceGroup]] = (
            InlineReader(groups_read, runner.send, data.pace)
            if inline
            else Prefetcher(groups_read, runner.send, max(2, 4 // runner.batches_per_hook))
        )
        with feed, _ending_by_signal(feed, self.interruption):
            groups: Iterator[list[DeviceGroup]] = feed
            if process_count() > 1:
                groups = keep_in_lockstep(groups, f"{self.name} of epoch {epoch + 1}", data.per_host, data.foreseen)
            for group, last in _mark_last(groups, look_ahead):
                if calls_begin:
                    with self._noticing_numbers(begin):
                        callbacks.call(begin, runner.tally.batches)
                    runner.note_hooks()
                before = runner.tally.batches
                parts = join_groups(group, runner.group_size)
                outputs = [output for part in parts for output in run_part(part, last and part is parts[-1])]
                if calls_end:
                    if self.on_wait is not None:  # before the hook, which may read `input_bound`
                        self.on_wait(feed.times.waited)
                    with self._noticing_numbers(end):
                        self._call_end(end, runner.tally.batches - before, outputs)
                    runner.note_hooks()
                if runner.tally.first is None:
                    runner.tally.first = runner.tally.record()
                if self.collect:  # before `stop`, which may leave the pass
                    self.collect(outputs, [form.rows for part in parts for form in part.forms])
                if self.stop(feed.pausing):
                    break
                if turns.waited_for:
                    with feed.pausing():  # another thread may capture a graph
                        turns.give_way()
                    runner.note_hooks()
        times = feed.times
        data.pace.note(times, thread_time() - began - times.paused - (times.computed if inline else 0.0))
        add_seconds("data", times.busy if inline else times.waited)
        add_seconds("read", times.busy - times.prepared, parallel=True)
        add_seconds("prepare", times.prepared, parallel=True)
        runner.tally.waited = times.waited

    def _step_hook(self) -> Callable[[int], None]:
        """Return a function that calls `on_train_step_begin` and counts the steps: several may run as one graph."""
        started = self.runner.tally.batches

        def begin_step(iterations: int) -> None:
            nonlocal started
            self.callbacks.call("on_train_step_begin", started, {"iterations": iterations})
            started += 1

        return begin_step

    @contextmanager
    def _noticing_numbers(self, hook: str) -> Iterator[None]:
        """A context for a batch hook, which warns if it changes the optimizer's numbers for several steps at once."""
        joined = self.runner.batches_per_hook if self.name == "train" else 1
        before = self.runner.list_group_numbers() if joined > 1 else []
        yield
        changed = {
            name for old, new in zip(before, self.runner.list_group_numbers(), strict=False) for name, _ in old ^ new
        }
        if changed:
            warn(
                f"a callback's {hook} has changed {join_few(sorted(changed))} of the optimizer. With "
                f"steps_per_execution it runs once for {joined} steps, which all use the new value: change it in "
                "on_train_step_begin, which runs before each step"
            )

    def _call_end(self, hook: str, steps: int, outputs: Any) -> None:
        done = self.runner.tally.batches
        if self.collect is None:
            self.callbacks.call(hook, done - 1, self.runner.logs())
            return
        for index, output in enumerate(outputs, done - steps):
            self.callbacks.call(hook, index, {"outputs": output})


def begin_pass(engine: Engine, runner: StepRunner, data: Stream) -> None:
    """Begin a pass: give all hosts one random state, put the modules into the role's mode, and start the clock."""
    share_random_state(data)
    if runner.learns:
        engine.train_mode()
    else:
        engine.eval_mode()
    runner.tally.began = perf_counter()


def end_pass(engine: Engine, runner: StepRunner) -> Pass:
    """End a pass whose logs or outputs have been read: record it for the report."""
    done = runner.tally.record()
    engine.log.passes.append(done)
    return done


@contextmanager
def _evaluating(
    engine: Engine, role: str, name: str, data: Stream, callbacks: CallbackList
) -> Iterator[tuple[StepRunner, dict[str, Any]]]:
    """A context for an evaluation or a prediction, from its first hook to its last, which gets the logs in the dict."""
    with closing(callbacks, engine):
        callbacks.call(f"on_{name}_begin")
        runner = StepRunner(engine, role, data.device_transform, warm=data.passed)
        begin_pass(engine, runner, data)
        runner.tally.seed = engine.seed_of_pass()
        logs: dict[str, Any] = {}
        yield runner, logs
        end_pass(engine, runner)
        callbacks.call(f"on_{name}_end", logs)


def evaluate(
    engine: Engine, data: Stream, callbacks: CallbackList, interruption: Interruption | None = None
) -> dict[str, Any]:
    """Evaluate once over the data: return the loss and the metrics over all rows; empty if a signal ended it."""
    model = engine.model
    model.stop_evaluating = False

    def stop(pause: Pause) -> bool:
        if interruption is None:
            return bool(all_reduce_max(model.stop_evaluating))
        (stopping,) = interruption.agree(model.stop_evaluating)
        return stopping or interruption.wanted

    with _evaluating(engine, "eval", "test", data, callbacks) as (runner, logs):
        PassLoop("test", runner, data, callbacks, stop, interruption)()
        if interruption is not None and interruption.wanted:  # there may be no batch, and so no logs
            engine.state.numbers.passes -= 1  # a resumed `fit` repeats the pass
        else:
            logs |= runner.results()
    return logs


def predict(
    engine: Engine, data: Stream, callbacks: CallbackList, receive: Callable[[Any], None], local: bool = False
) -> None:
    """Predict once over the data; with `local`, only over this host's rows on a pod.

    `receive` is called with each batch's outputs, on the host, in order. At most `_OUTPUTS_PENDING` batches stay
    pending on the device.
    """
    model = engine.model
    model.stop_predicting = False
    placement = engine.state.placement
    pending: deque[Any] = deque()

    def collect(outputs: list[Any], rows: list[int]) -> None:
        pending.extend(zip(outputs if local else gather_rows(outputs, placement), rows, strict=True))
        while len(pending) > _OUTPUTS_PENDING:
            fetch_oldest()

    def fetch_oldest() -> None:
        outputs, rows = pending.popleft()
        if local and placement.hosts > 1:
            local_rows = select_shard_rows(placement.local_shards or (), placement.count, rows)
            receive(fetch_rows(outputs, local_rows.tolist(), "outputs"))
        else:
            receive(fetch(outputs, "outputs"))

    def stop(pause: Pause) -> bool:
        return bool(all_reduce_max(model.stop_predicting))

    with _evaluating(engine, "predict", "predict", data, callbacks) as (runner, _):
        PassLoop("predict", runner, data, callbacks, stop, collect=collect)()
        while pending:
            fetch_oldest()


@contextmanager
def closing(callbacks: CallbackList, engine: Engine) -> Iterator[None]:
    """A context that at its end, even after an error, ends callbacks, exposes weights, and restores layers' modes."""
    with keeping_modes(*engine.state.modules), collective(), raise_worker_deaths_in_reads():
        try:
            # The innermost context, so that callbacks get the same error as the user.
            with engine.translating_device_errors():
                yield
        except BaseException as error:
            callbacks.close_after_error(error)
            raise
        finally:
            engine.expose()


@contextmanager
def _ending_by_signal(feed: BatchReader[list[DeviceGroup]], interruption: Interruption | None) -> Iterator[None]:
    """A context in which a signal ends a wait for data, which may be long. Batches already read are not run."""
    if interruption is None or process_count() > 1:  # the hosts of a pod must end together, after `agree`
        yield
        return
    before = interruption.on_signal
    interruption.on_signal = feed.end
    if interruption.wanted:  # the signal came before `on_signal` was set
        feed.end()
    try:
        with suppress(PrefetchEndedError):
            yield
    finally:
        interruption.on_signal = before


def _mark_last(groups: Iterator[list[DeviceGroup]], look_ahead: bool) -> Iterator[tuple[list[DeviceGroup], bool]]:
    """Yield each group, with True for the last group if `look_ahead`, which reads one group ahead."""
    if not look_ahead:
        yield from ((group, False) for group in groups)
        return
    group = next(groups, None)
    while group is not None:
        following = next(groups, None)
        yield group, following is None
        group = following
