"""`Interruption`: notes SIGTERM and Ctrl-C, so that training ends between two steps and no step is torn."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from traceback import print_exception
from types import FrameType
from typing import Any, NoReturn

from ..hosts import all_reduce_max
from ..runtime import process_count

_NOTES = {
    signal.SIGINT: b"\ninterrupted: finishing the step; once more leaves at once\n",
    signal.SIGTERM: b"\nSIGTERM: finishing the step\n",
}


def _nothing() -> None: ...


class Interruption:
    """A context in which the first SIGTERM and the first SIGINT are only noted; a second one acts as usual.

    It replaces Python's own handlers only, and only in the main thread, which alone gets signals. Handlers of the
    user's own stay.

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
        # Called when a signal comes, to end a wait for anything but the device.
        self.wakes: Callable[[], object] = _nothing
        self._signal = 0
        self._settled = 0  # the signal that all hosts know of
        self._alone = process_count() == 1
        self._process = os.getpid()
        self._before: dict[int, Any] = {}

    @property
    def wanted(self) -> bool:
        """True if a signal has come; on a pod, if all hosts know of one."""
        return bool(self._signal if self._alone else self._settled)

    def settle(self, *flags: bool) -> list[bool]:
        """Agree with all hosts on flags, which count if any host has set them, and on a signal that came to one."""
        if self._alone:
            return list(flags)
        *agreed, signal_of_any = all_reduce_max([*flags, self._signal])
        self._settled = int(signal_of_any)
        return [bool(flag) for flag in agreed]

    def leave(self) -> NoReturn:
        """Do what the signal asks for.

        Raises:
            KeyboardInterrupt: After SIGINT.
            SystemExit: After SIGTERM, with exit status 143, as a shell shows it.
        """
        if (self._settled or self._signal) == signal.SIGINT:
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
            self._give_back(number)
        # One that came after the last look, as in the last hook, or beside an error. The process may catch that.
        if self._signal and (error is None or isinstance(error, Exception)):
            if error is not None and self._signal == signal.SIGTERM:  # of whose end Python prints nothing
                print_exception(error)
            self.leave()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a worker that inherited the handler, and has no step to finish
            self._give_back(number)
            if number != signal.SIGINT:  # Ctrl-C goes to every process of the terminal, and the parent ends its workers
                os.kill(os.getpid(), number)
            return
        self._signal = number
        self._give_back(number)  # before anything else, so that a second signal always gets through
        self.wakes()
        with suppress(OSError):  # stderr may be closed
            os.write(2, _NOTES[signal.Signals(number)])  # not print: the signal may have interrupted one

    def _give_back(self, number: int) -> None:
        signal.signal(number, self._before.pop(number))
