"""`collector`: Python's garbage collector, which has to stand still now and then."""

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Collector:
    """Python's garbage collector.

    Example:
        >>> with collector.pausing():
        ...     gc.isenabled()
        False
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._one_at_a_time = threading.RLock()
        self._pauses = 0
        self._runs = False  # whether it did before the first pause

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Return a context in which the garbage collector doesn't run.

        It is needed to read frames of other threads: Python 3.11 creates objects for them, and may collect garbage
        meanwhile. If collecting an object lets another thread continue, its frame may end, and memory is overwritten.
        """
        if self._process != os.getpid():  # a fork has none of the other threads
            self._begin()
        with self._one_at_a_time:
            if not self._pauses:
                self._runs = gc.isenabled()
            self._pauses += 1
            gc.disable()
        try:
            yield
        finally:
            with self._one_at_a_time:
                self._pauses -= 1
                if not self._pauses and self._runs:
                    gc.enable()


collector = Collector()
