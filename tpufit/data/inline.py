"""`InlineReader`: batches read by the loop itself, for quick data; and `Pace`, which decides what data are quick."""

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Generic, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Reader = TypeVar("Reader", bound="BatchReader[Any]")

# Data that take less than this for a batch, in seconds, are read without a thread: a hand-over between threads takes
# about 0.1 ms, and slows both down. A thread waits for the other one, so that of its time only what it computes counts,
# if it doesn't also wait for something slow. A few batches say nothing; the first opens files.
_QUICK = 3e-4
_WAITS = 2e-3
_ENOUGH = 8


@dataclass
class ReadTimes:
    """The work of a reader so far, in seconds.

    Attributes:
        batches: The number of batches that it has given.
        waited: The time that `next` has waited for data.
        busy: The time spent on reading and preparing.
        prepared: The part of `busy` that was spent on preparing.
        computed: The part of `busy` in which the processor worked.
    """

    batches: int = 0
    waited: float = 0.0
    busy: float = 0.0
    prepared: float = 0.0
    computed: float = 0.0


class BatchReader(Generic[T_co]):
    """Gives prepared batches in order, none lost or repeated: a `Prefetcher` or an `InlineReader`.

    Attributes:
        times: The reader's work so far.
    """

    times: ReadTimes

    def __next__(self) -> T_co:
        """Give the next batch."""
        raise NotImplementedError

    def paused(self) -> AbstractContextManager[None]:
        """Keep `prepare` from running, as a graph is being captured; nothing to do if it runs in `next` only."""
        return nullcontext()

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
    takes to hand a batch over, and two threads of Python are in each other's way.

    Args:
        batches: Any iterable; a generator is closed at the end.
        prepare: Called with each batch, e.g. to start its transfer to the device.

    Example:
        >>> with InlineReader([1, 2, 3], lambda batch: batch * 10) as reader:
        ...     list(reader)
        [10, 20, 30]
    """

    def __init__(self, batches: Iterable[Any], prepare: Callable[[Any], T_co]) -> None:
        self.times = ReadTimes()
        self._batches = iter(batches)
        self._prepare = prepare

    def __next__(self) -> T_co:
        began = perf_counter()
        batch = next(self._batches)
        read = perf_counter()
        prepared = prepared_by(self._prepare, batch)
        ended, times = perf_counter(), self.times
        times.waited += read - began
        times.prepared += ended - read
        times.busy = times.computed = times.busy + ended - began
        times.batches += 1
        return prepared

    def close(self) -> None:
        """Close the data if they are a generator."""
        if isinstance(self._batches, Generator):
            self._batches.close()


class Pace:
    """Decides, pass after pass, if some data are quick enough to be read without a thread.

    Args:
        movable: False for data that are always read in a thread.

    Attributes:
        quick: True if the last pass showed that the data need no thread.
        passed: True once there has been a pass.
    """

    def __init__(self, movable: bool) -> None:
        self.quick = self.passed = False
        self._movable = movable

    def note(self, times: ReadTimes) -> None:
        """Decide by the times of a pass. Data that were quick once and are no more get their thread back for good."""
        enough, least = times.batches >= _ENOUGH, max(1, times.batches)
        was_quick = self.quick
        self.quick = self._movable and enough and times.computed / least < _QUICK and times.busy / least < _WAITS
        self._movable = self._movable and (self.quick or not was_quick)
        self.passed = True


def prepared_by(prepare: Callable[[Any], T], batch: Any) -> T:
    """Prepare a batch. A `StopIteration` becomes an error: `next` would take it for the end of the data."""
    try:
        return prepare(batch)
    except StopIteration as error:
        raise RuntimeError("prepare raised StopIteration") from error
