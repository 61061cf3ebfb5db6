"""One pass over data: the loop that training, evaluation and prediction share, with `evaluate` and `predict`.

pass
    for each group of `steps_per_execution` steps, or as many as are left
        on_*_batch_begin
        on_train_step_begin             for each of the steps
        steps                           one graph, started and not waited for; each by itself if they can't be joined
        on_*_batch_end                  its logs wait only if one is read
        leave if asked to stop
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
from ..data.inline import BatchReader, InlineReader
from ..data.prefetch import PrefetchEndedError, Prefetcher
from ..data.sampling import rows_of
from ..data.workers import deaths_found_by_readers
from ..diagnostics.report import Pass
from ..hosts import all_reduce_max, collective
from ..runtime import fetch, fetch_rows, gather_rows, process_count
from ..step import DeviceGroup, Engine, StepRunner, joined, modes_kept
from ..utils.counters import add_seconds, timing
from .consistency import share_random_state
from .hosts import in_lockstep
from .interruption import Interruption

# Outputs that may wait on the device before they are fetched: enough to keep it busy, few enough to fit.
_OUTPUTS_IN_FLIGHT = 2

# A function that returns a context in which nobody else sends anything to the device.
Pause = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class PassLoop:
    """One pass over data."""

    name: str  # "train", "test" or "predict", as in the names of hooks
    run: StepRunner
    data: Stream
    callbacks: CallbackList
    stop: Callable[[Pause], bool]  # called after each group, with a `Pause`; True ends the pass
    interruption: Interruption | None = None  # which ends a wait for data; None outside `fit`
    # Called before each batch's end hook with the wait for data so far, in seconds.
    waited: Callable[[float], None] | None = None
    # Called with the outputs of each group's batches and their rows.
    collect: Callable[[list[Any], list[int]], None] | None = None
    most: int | None = None  # the number of batches after which the pass ends at the latest

    def __call__(self, epoch: int = 0, look_ahead: bool = False) -> float:
        """Run the pass, or the rest of it, and return the seconds spent waiting for data.

        With `look_ahead` the last group is known when it runs, by keeping one group back.
        """
        run = self.run
        callbacks = self.callbacks
        data = self.data
        begin = f"on_{self.name}_batch_begin"
        end = f"on_{self.name}_batch_end"
        tells_begin = callbacks.has(begin)
        tells_end = callbacks.has(end)
        step = timing("steps", run.__call__) if callbacks.measures else run.__call__
        if self.name == "train" and callbacks.has("on_train_step_begin"):
            run.before_step = self._step_hook()
        # On the host a step draws from PyTorch's own generator, as the data may: never at the same time.
        inline = data.pace.inline or run.on_host
        began = thread_time()

        def run_part(part: DeviceGroup, last: bool) -> Iterable[Any]:
            remaining = None
            if data.steps is not None:
                remaining = ceil((data.steps - run.tally.batches - len(part.forms)) / run.group_size)
            return step(part, feed.paused, last, remaining) or ()

        batches = _groups(islice(data.epoch(epoch), self.most), lambda: run.batches_per_hook)
        feed: BatchReader[list[DeviceGroup]] = (
            InlineReader(batches, run.send, data.pace)
            if inline
            else Prefetcher(batches, run.send, max(2, 4 // run.batches_per_hook))
        )
        with feed, _ending(feed, self.interruption):
            groups: Iterator[list[DeviceGroup]] = feed
            if process_count() > 1:
                groups = in_lockstep(groups, f"{self.name} of epoch {epoch + 1}", data.per_host, data.foreseen)
            for group, last in _knowing_the_last(groups, look_ahead):
                if tells_begin:
                    callbacks.call(begin, run.tally.batches)
                    run.note_hooks()
                before = run.tally.batches
                parts = joined(group, run.group_size)
                outputs = [made for part in parts for made in run_part(part, last and part is parts[-1])]
                if tells_end:
                    if self.waited is not None:  # first, because the hook may read `input_bound`
                        self.waited(feed.times.waited)
                    self._tell_end(end, run.tally.batches - before, outputs)
                    run.note_hooks()
                if self.collect:  # before `stop`, which may leave the pass
                    self.collect(outputs, [form.rows for part in parts for form in part.forms])
                if self.stop(feed.paused):
                    break
                if turns.waited_for:
                    with feed.paused():  # another thread may capture a graph
                        turns.give_way()
                    run.note_hooks()
        times = feed.times
        data.pace.note(times, thread_time() - began - times.paused - (times.computed if inline else 0.0))
        add_seconds("data", times.busy if inline else times.waited)
        add_seconds("read", times.busy - times.prepared, beside=True)
        add_seconds("prepare", times.prepared, beside=True)
        return times.waited

    def _step_hook(self) -> Callable[[int], None]:
        """Return the call of `on_train_step_begin`. It counts steps itself, because several may run as one graph."""
        started = self.run.tally.batches

        def begin_step(iterations: int) -> None:
            nonlocal started
            self.callbacks.call("on_train_step_begin", started, {"iterations": iterations})
            started += 1

        return begin_step

    def _tell_end(self, hook: str, steps: int, outputs: Any) -> None:
        done = self.run.tally.batches
        if self.collect is None:
            self.callbacks.call(hook, done - 1, self.run.logs())
            return
        for index, output in enumerate(outputs, done - steps):
            self.callbacks.call(hook, index, {"outputs": output})


def evaluate(
    engine: Engine, data: Stream, callbacks: CallbackList, interruption: Interruption | None = None
) -> dict[str, Any]:
    """Evaluate once over the data: the loss and the metrics over exactly their rows; none if a signal ended it."""
    model = engine.model
    model.stop_evaluating = False
    with closing(callbacks, engine):
        callbacks.call("on_test_begin")
        share_random_state(data)
        run = StepRunner(engine, "eval", data.device_transform, warm=data.passed)
        run.tally.seed = engine.seed_of_pass()
        engine.eval_mode()
        began = perf_counter()

        def stop(pause: Pause) -> bool:
            if interruption is None:
                return bool(all_reduce_max(model.stop_evaluating))
            (stop,) = interruption.settle(model.stop_evaluating)
            return stop or interruption.wanted

        waited = PassLoop("test", run, data, callbacks, stop, interruption)()
        broken_off = interruption is not None and interruption.wanted
        if broken_off:  # after no batch at all there are no logs to read
            logs: dict[str, Any] = {}
            engine.state.numbers.passes -= 1  # a resumed `fit` repeats it
        else:
            logs = run.results()
        engine.log.passes.append(Pass("eval", run.tally.steps, run.tally.rows, perf_counter() - began, waited))
        callbacks.call("on_test_end", logs)
    return logs


def predict(
    engine: Engine, data: Stream, callbacks: CallbackList, receive: Callable[[Any], None], local: bool = False
) -> None:
    """Predict once over the data, on a pod over those of all hosts or, if `local`, over this host's own rows only.

    `receive` is called with each batch's outputs, on the host, in order. Few others wait meanwhile.
    """
    model = engine.model
    model.stop_predicting = False
    under_way: deque[Any] = deque()
    with closing(callbacks, engine):
        callbacks.call("on_predict_begin")
        share_random_state(data)
        run = StepRunner(engine, "predict", data.device_transform, warm=data.passed)
        run.tally.seed = engine.seed_of_pass()
        engine.eval_mode()
        began = perf_counter()

        placement = engine.state.placement

        def collect(outputs: list[Any], rows: list[int]) -> None:
            under_way.extend(zip(outputs if local else gather_rows(outputs, placement), rows, strict=True))
            while len(under_way) > _OUTPUTS_IN_FLIGHT:
                fetch_oldest()

        def fetch_oldest() -> None:
            outputs, rows = under_way.popleft()
            if local and placement.hosts > 1:
                mine = rows_of(placement.local_shards or (), placement.count, rows)
                receive(fetch_rows(outputs, mine.tolist(), "outputs"))
            else:
                receive(fetch(outputs, "outputs"))

        def stop(pause: Pause) -> bool:
            return bool(all_reduce_max(model.stop_predicting))

        waited = PassLoop("predict", run, data, callbacks, stop, collect=collect)()
        while under_way:
            fetch_oldest()
        engine.log.passes.append(Pass("predict", run.tally.steps, run.tally.rows, perf_counter() - began, waited))
        callbacks.call("on_predict_end")


@contextmanager
def closing(callbacks: CallbackList, engine: Engine) -> Iterator[None]:
    """Whatever happens, end the callbacks, expose the weights, and restore the mode of each layer."""
    with modes_kept(*engine.state.modules), collective(), deaths_found_by_readers():
        try:
            # Innermost, so that callbacks get the error that the user gets.
            with engine.noticing_loss():
                yield
        except BaseException as error:
            callbacks.close_after_error(error)
            raise
        finally:
            engine.expose()


@contextmanager
def _ending(feed: BatchReader[list[DeviceGroup]], interruption: Interruption | None) -> Iterator[None]:
    """Let a signal end a wait for data, which may be long. Batches already read are not run."""
    if interruption is None or process_count() > 1:  # which all hosts wait for, and so end together
        yield
        return
    before = interruption.wakes
    interruption.wakes = feed.end
    if interruption.wanted:  # since it was last asked
        feed.end()
    try:
        with suppress(PrefetchEndedError):
            yield
    finally:
        interruption.wakes = before


def _groups(batches: Iterable[Any], size: Callable[[], int]) -> Iterator[list[Any]]:
    """Yield groups of `size()` batches, and at last the rest."""
    group: list[Any] = []
    for batch in batches:
        group.append(batch)
        if len(group) >= size():
            yield group
            group = []
    if group:
        yield group


def _knowing_the_last(groups: Iterator[list[DeviceGroup]], look: bool) -> Iterator[tuple[list[DeviceGroup], bool]]:
    """Yield each group, and True with the last one if `look`, which keeps a group back to know it."""
    if not look:
        yield from ((group, False) for group in groups)
        return
    group = next(groups, None)
    while group is not None:
        following = next(groups, None)
        yield group, following is None
        group = following
