"""`defer_interrupt`: Ctrl-C waits until the end of a call that an interrupt would break for the whole process."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def defer_interrupt() -> Iterator[None]:
    """A context in which SIGINT is only noted. At its end the usual handler gets the signal, if one came.

    Python runs handlers of signals in the main thread alone; in another thread this context does nothing.

    Example:
        >>> with defer_interrupt():
        ...     import json
    """
    usual = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(usual):
        yield
        return
    received: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        if received:  # also after an error
            signal.raise_signal(signal.SIGINT)
