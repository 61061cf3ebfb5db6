"""`Clock`: calls a function repeatedly in a thread."""

from collections.abc import Callable
from threading import Event, Thread


class Clock:
    """Calls a function repeatedly in a thread, with `interval` seconds between two calls, until it is stopped.

    Example:
        >>> ticked = Event()
        >>> clock = Clock(ticked.set, interval=0.001)
        >>> ticked.wait()
        True
        >>> clock.stop()
    """

    def __init__(self, tick: Callable[[], object], interval: float) -> None:
        self._tick = tick
        self._interval = interval
        self._stopped = Event()
        self._thread = Thread(target=self._run, name="tpufit-clock", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the clock; after this returns, the function isn't called again."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval):
            self._tick()
