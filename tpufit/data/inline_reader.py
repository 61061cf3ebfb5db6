"""`InlineReader` reads batches in the loop's thread, and `Pace` decides when to use it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter, thread_time
from typing import Any, Generic, TypeVar

from ..backend import turns

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Reader = TypeVar("Reader", bound="BatchReader[Any]")

# Data are read inline if reading takes little processor time compared with the loop: two Python threads take turns, and
# slow each other down. The loop's time is the measure, because machines differ. A reader that waits longer than the
# loop computes is waiting for a disk. A few batches prove nothing, as the first one opens files.
_MOST_COMPUTED = 1.5
_MOST_WAITED = 1.0
_ENOUGH = 8


@dataclass
class ReadTimes:
    """A reader's work so far, in seconds."""

    batches: int = 0  # or groups of batches, returned
    waited: float = 0.0  # for data, in `next`
    busy: float = 0.0  # reading and preparing
    prepared: float = 0.0  # the part of `busy` spent preparing
    computed: float = 0.0  # the part of `busy` in which the processor worked
    paused: float = 0.0  # processor time that the loop spent on other work than steps, such as capturing a graph


class BatchReader(Generic[T_co]):
    """Returns prepared batches in order, none lost or repeated: a `Prefetcher` or an `InlineReader`."""

    times: ReadTimes

    def __next__(self) -> T_co:
        """Return the next batch."""
        raise NotImplementedError

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Keep `prepare` from running while a graph is captured. Nothing to do if `prepare` runs in `next` only."""
        began = thread_time()
        try:
            yield
        finally:
            self.times.paused += thread_time() - began

    def end(self) -> None:
        """Make a `next` that waits for another thread raise `PrefetchEndedError`."""

    def close(self) -> None:
        """Stop reading, and close the data if it is a generator."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[T_co]:
        return self

    def __enter__(self: Reader) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class InlineReader(BatchReader[T_co]):
    """Reads and prepares each batch when `next` is called, without a thread.

    The device doesn't wait while earlier steps keep it busy. A thread would cost more than it saves: handing over a
    batch takes time, and two Python threads slow each other down. A generator is closed at the end.

    Example:
        >>> with InlineReader([1, 2, 3], lambda batch: batch * 10) as reader:
        ...     list(reader)
        [10, 20, 30]
    """

    def __init__(self, batches: Iterable[Any], prepare: Callable[[Any], T_co], pace: Pace | None = None) -> None:
        self.times = ReadTimes()
        self._clock = thread_time if pace is None or pace.decides else _zero_clock
        self._in_memory = pace is not None and pace.in_memory
        self._batches = iter(batches)
        self._prepare = prepare

    def __next__(self) -> T_co:
        began = perf_counter()
        computed = self._clock()
        batch = next(self._batches) if self._in_memory else self._read()
        read = perf_counter()
        prepared = call_prepare(self._prepare, batch)
        ended = perf_counter()
        times = self.times
        times.computed += self._clock() - computed
        times.waited += read - began
        times.prepared += ended - read
        times.busy += ended - began
        times.batches += 1
        return prepared

    def _read(self) -> Any:
        with turns.lending():
            return next(self._batches)

    def close(self) -> None:
        """Close the data if it is a generator."""
        if isinstance(self._batches, Generator):
            self._batches.close()


class Pace:
    """Decides before each pass whether data are read without a thread.

    Rows in memory never need a thread; other data always do unless they are `movable`.
    """

    def __init__(self, in_memory: bool, movable: bool) -> None:
        self.in_memory = in_memory
        self.inline = in_memory  # the next pass needs no thread
        self.passed = False  # there has been a pass
        self.decides = movable and not in_memory  # the times of a pass may change `inline`

    def note(self, times: ReadTimes, loop_seconds: float) -> None:
        """Decide by the times of a pass, and the seconds that the loop has computed.

        Data that were fast once but are slow now get a thread permanently.
        """
        if self.decides:
            before = self.inline
            waits = times.busy - times.computed
            quick = times.computed <= _MOST_COMPUTED * loop_seconds and waits <= _MOST_WAITED * loop_seconds
            self.inline = quick and times.batches >= _ENOUGH
            self.decides = self.inline or not before
        self.passed = True


def _zero_clock() -> float:
    """The clock where times aren't needed: the processor's clock is a system call."""
    return 0.0


def call_prepare(prepare: Callable[[Any], T], batch: Any) -> T:
    """Prepare a batch, and turn a `StopIteration` into an error: `next` would take it for the end of the data."""
    try:
        return prepare(batch)
    except StopIteration as error:
        raise RuntimeError("prepare raised StopIteration") from error
