"""`collector`: Python's garbage collector, which must be paused at times."""

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
        self._was_enabled = False  # True if it ran before the first pause

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Return a context in which the garbage collector doesn't run.

        Reading frames of other threads needs it: Python 3.11 creates objects for the frames, and may then collect
        garbage. If collecting an object lets another thread run, its frame may end, and memory is overwritten.
        """
        if self._process != os.getpid():  # a fork has none of the other threads
            self._begin()
        with self._one_at_a_time:
            if not self._pauses:
                self._was_enabled = gc.isenabled()
            self._pauses += 1
            gc.disable()
        try:
            yield
        finally:
            with self._one_at_a_time:
                self._pauses -= 1
                if not self._pauses and self._was_enabled:
                    gc.enable()


collector = Collector()
