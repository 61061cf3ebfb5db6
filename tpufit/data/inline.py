"""Batches read and prepared by the loop itself: for quick data, where a thread costs more than it saves."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Direct(Generic[T]):
    """As a `Prefetcher`, but without its thread: each batch is read and prepared when it is asked for.

    The device doesn't wait for it as long as the steps before keep it busy. What a thread could do meanwhile is less
    than it takes to hand a batch over, and two threads of Python are in each other's way.

    Args:
        batches: Any iterable; a generator is closed at the end.
        prepare: Called with each batch, e.g. to start its transfer to the device.

    Attributes:
        seconds_waited: How long `next` has read so far, beside the preparation.
        seconds_busy, seconds_computed: How long reading and preparing have taken so far,
        seconds_prepared: and how long the preparation.
        given: How many batches have been given.

    Example:
        >>> with Direct([1, 2, 3], lambda batch: batch * 10) as feed:
        ...     list(feed)
        [10, 20, 30]
    """

    def __init__(self, batches: Iterable[Any], prepare: Callable[[Any], T]) -> None:
        self.seconds_waited = self.seconds_busy = 0.0
        self.given = 0
        self._batches = iter(batches)
        self._prepare = prepare

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        began = perf_counter()
        batch = next(self._batches)
        read = perf_counter()
        try:
            prepared = self._prepare(batch)
        except StopIteration as error:  # raised by next() as it is, it would end the epoch in silence
            raise RuntimeError("prepare raised StopIteration") from error
        self.seconds_waited += read - began
        self.seconds_busy += perf_counter() - began
        self.given += 1
        return prepared

    def paused(self) -> AbstractContextManager[None]:
        """A context in which nothing is prepared: nothing is, unless it is asked for."""
        return nullcontext()

    def end(self) -> None:
        """Do nothing: it never waits for data."""

    def close(self) -> None:
        """Close the data if they are a generator."""
        if isinstance(self._batches, Generator):
            self._batches.close()

    @property
    def seconds_prepared(self) -> float:
        return self.seconds_busy - self.seconds_waited

    @property
    def seconds_computed(self) -> float:
        return self.seconds_busy

    def __enter__(self) -> Direct[T]:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
