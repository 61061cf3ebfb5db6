"""`Interruption`: notes SIGTERM and Ctrl-C, so that training ends between two steps."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from traceback import print_exception, walk_tb
from types import FrameType
from typing import Any, NoReturn

from ..hosts import all_reduce_max
from ..runtime import process_count

_NOTES = {
    signal.SIGINT: b"\ninterrupted: finishing the step; press Ctrl-C again to leave at once\n",
    signal.SIGTERM: b"\nSIGTERM: finishing the step\n",
}


def _do_nothing() -> None: ...


class Interruption:
    """A context in which the first SIGTERM and the first SIGINT are only noted; a second signal acts as usual.

    It replaces only Python's handlers, not the user's, and only in the main thread, which receives all signals.

    Example:
        >>> try:
        ...     with Interruption() as interruption:
        ...         os.kill(os.getpid(), signal.SIGTERM)
        ...         print(interruption.wanted)
        ... except SystemExit as end:
        ...     print(end.code)
        True
        143
    """

    def __init__(self) -> None:
        # Called when a signal comes, to end a wait for data.
        self.on_signal: Callable[[], object] = _do_nothing
        self._signal = 0
        self._agreed = 0  # the signal that all hosts know of
        self._single_host = process_count() == 1
        self._process = os.getpid()
        self._before: dict[int, Any] = {}

    @property
    def wanted(self) -> bool:
        """True if a signal has come; on a pod, once all hosts know of it."""
        return bool(self._signal if self._single_host else self._agreed)

    def agree(self, *flags: bool) -> list[bool]:
        """Agree with all hosts: a flag is set if any host has set it, and a signal to any host counts on all."""
        if self._single_host:
            return list(flags)
        *agreed, signal_of_any = all_reduce_max([*flags, self._signal])
        self._agreed = int(signal_of_any)
        return [bool(flag) for flag in agreed]

    def leave(self) -> NoReturn:
        """End as the signal requests.

        Raises:
            KeyboardInterrupt: After SIGINT; see `shorten_interrupt`.
            SystemExit: After SIGTERM, with the exit status 143 that shells show for it.
        """
        if (self._agreed or self._signal) == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + signal.SIGTERM)

    def __enter__(self) -> Interruption:
        usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
        if threading.current_thread() is threading.main_thread():
            for number, handler in usual.items():
                if signal.getsignal(number) == handler:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        for number in list(self._before):
            self._restore_handler(number)
        # A signal that came after the last check, or together with an error, which the process may catch.
        if self._signal and (error is None or isinstance(error, Exception)):
            if error is not None and self._signal == signal.SIGTERM:  # SystemExit hides the error, so print it
                print_exception(error)
            self.leave()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a worker process that inherited the handler
            self._restore_handler(number)
            if number != signal.SIGINT:  # a terminal sends Ctrl-C to every process, and the parent ends its workers
                os.kill(os.getpid(), number)
            return
        self._signal = number
        self._restore_handler(number)  # before anything else, so that a second signal always gets through
        self.on_signal()
        with suppress(OSError):  # stderr may be closed
            os.write(2, _NOTES[signal.Signals(number)])  # not print, which the signal may have interrupted

    def _restore_handler(self, number: int) -> None:
        signal.signal(number, self._before.pop(number))


def shorten_interrupt(train: Callable[..., object], *args: object) -> None:
    """Call a function. Drop the traceback of a Ctrl-C after a finished step, because it shows only tpufit's code."""
    try:
        train(*args)
    except KeyboardInterrupt as error:
        *_, (frame, _) = walk_tb(error.__traceback__)
        if frame.f_code is Interruption.leave.__code__:
            raise error.with_traceback(None)  # noqa: B904 - the same error
        raise  # a second Ctrl-C: the traceback shows the interrupted line
