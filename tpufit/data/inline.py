"""`InlineReader`: batches read by the loop itself, without a thread; and `Pace`, which decides when."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from time import perf_counter, thread_time
from typing import Any, Generic, TypeVar

from ..backend import turns

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Reader = TypeVar("Reader", bound="BatchReader[Any]")

# Data are read without a thread if to read them takes little of the processor beside the loop itself: two threads of
# Python work in turns, and slow each other down. What is quick on one machine is slow on another, so the loop's own
# time is the measure. A thread waits for the loop too; what waits longer than the loop works waits for a disk.
# A few batches say nothing; the first opens files.
_MOST_COMPUTED = 1.5
_MOST_WAITED = 1.0
_ENOUGH = 8


@dataclass
class ReadTimes:
    """The work of a reader so far, in seconds."""

    batches: int = 0  # or groups of them, that it has given
    waited: float = 0.0  # by `next`, for data
    busy: float = 0.0  # with reading and preparing
    prepared: float = 0.0  # the part of `busy` that was spent on preparing
    computed: float = 0.0  # the part of `busy` in which the processor worked
    paused: float = 0.0  # the loop's processor, on other things than steps, as on capturing a graph


class BatchReader(Generic[T_co]):
    """Gives prepared batches in order, none lost or repeated: a `Prefetcher` or an `InlineReader`."""

    times: ReadTimes

    def __next__(self) -> T_co:
        """Give the next batch."""
        raise NotImplementedError

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep `prepare` from running, as a graph is being captured; it does so by itself if it runs in `next` only."""
        began = thread_time()
        try:
            yield
        finally:
            self.times.paused += thread_time() - began

    def end(self) -> None:
        """Let a `next` that waits for another thread raise `PrefetchEndedError`."""

    def close(self) -> None:
        """Stop reading, and close the data if they are a generator."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[T_co]:
        return self

    def __enter__(self: Reader) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class InlineReader(BatchReader[T_co]):
    """Reads and prepares each batch when it is asked for, without a thread.

    The device doesn't wait for it as long as the steps before keep it busy. A thread could do less meanwhile than it
    takes to hand a batch over, and two threads of Python are in each other's way. A generator is closed at the end.

    Example:
        >>> with InlineReader([1, 2, 3], lambda batch: batch * 10) as reader:
        ...     list(reader)
        [10, 20, 30]
    """

    def __init__(self, batches: Iterable[Any], prepare: Callable[[Any], T_co], pace: Pace | None = None) -> None:
        self.times = ReadTimes()
        self._clock = thread_time if pace is None or pace.decides else _no_time
        self._lends: Callable[[], AbstractContextManager[None]]
        self._lends = turns.lent if pace is None or not pace.in_memory else nullcontext
        self._batches = iter(batches)
        self._prepare = prepare

    def __next__(self) -> T_co:
        began = perf_counter()
        computed = self._clock()
        with self._lends():
            batch = next(self._batches)
        read = perf_counter()
        prepared = prepared_by(self._prepare, batch)
        ended = perf_counter()
        times = self.times
        times.computed += self._clock() - computed
        times.waited += read - began
        times.prepared += ended - read
        times.busy += ended - began
        times.batches += 1
        return prepared

    def close(self) -> None:
        """Close the data if they are a generator."""
        if isinstance(self._batches, Generator):
            self._batches.close()


class Pace:
    """Decides, pass after pass, if some data are read without a thread.

    Rows that lie in memory never need one; of other data, those that aren't `movable` always do.
    """

    def __init__(self, in_memory: bool, movable: bool) -> None:
        self.in_memory = in_memory
        self.inline = in_memory  # the next pass needs no thread
        self.passed = False  # there has been a pass
        self.decides = movable and not in_memory  # the times of a pass may change `inline`

    def note(self, times: ReadTimes, own: float) -> None:
        """Decide by the times of a pass, and the seconds that the loop itself has computed.

        Data that were quick once and are no more get their thread back for good.
        """
        if self.decides:
            before = self.inline
            waits = times.busy - times.computed
            quick = times.computed <= _MOST_COMPUTED * own and waits <= _MOST_WAITED * own
            self.inline = quick and times.batches >= _ENOUGH
            self.decides = self.inline or not before
        self.passed = True


def _no_time() -> float:
    """The clock where nobody asks for the time: the processor's is a call of the system."""
    return 0.0


def prepared_by(prepare: Callable[[Any], T], batch: Any) -> T:
    """Prepare a batch. A `StopIteration` becomes an error: `next` would take it for the end of the data."""
    try:
        return prepare(batch)
    except StopIteration as error:
        raise RuntimeError("prepare raised StopIteration") from error
