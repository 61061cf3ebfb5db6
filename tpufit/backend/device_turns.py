"""`turns`: the threads of a process use its device one after another.

Tracing a step affects the whole process, and while steps are replayed the user's tensors have no values. So each method
of a model that traces, or touches weights, has the device to itself. Another thread waits until the call has ended, or
until `give_way` lets it in between two steps of a `fit`, an `evaluate` or a `predict`.
"""

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from time import monotonic
from types import CodeType
from typing import Any, TypeVar, cast

from .. import hosts
from ..errors import BusyError
from ..utils.garbage_collector import collector
from ..utils.tracebacks import fold
from ..utils.user_code import find_line_of_thread, warn

_POLL_SECONDS = 0.25  # between two checks of the thread that has the device
# Seconds for which that thread may stay at one instruction outside PyTorch and tpufit. After that it counts as blocked,
# perhaps in a callback that waits for the thread that waits here.
_PATIENCE = 10.0
_WARN_SECONDS = 60.0  # of waiting before a warning

_Method = TypeVar("_Method", bound=Callable[..., Any])


class _Waiter:
    """A thread that waits for the device."""

    def __init__(self, call: str, exclusive: bool = False, resumes: bool = False) -> None:
        self.thread = threading.get_ident()
        self.call = call
        self.exclusive = exclusive  # its call can't run between two steps of another call
        self.resumes = resumes  # its call has already begun, and has let another call in
        self.granted = threading.Lock()
        self.granted.acquire()


class Turns:
    """Lets one thread at a time use the device. The thread that has it may take it again, as a callback does.

    Example:
        >>> turns = Turns()
        >>> with turns.taking_turn("fit"), turns.taking_turn("predict"):
        ...     turns.give_way()
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._free = threading.Lock()  # held by the owner, and passed on with the ownership
        self._owner: int | None = None  # the identity of the thread that has the device
        self._calls: list[str] = []  # the owner's calls, outermost first
        self._waiting: deque[_Waiter] = deque()
        self._suspended: list[_Waiter] = []  # calls that have let other calls in, outermost first

    @contextmanager
    def taking_turn(self, call: str, exclusive: bool = False) -> Iterator[None]:
        """A context in which no other thread uses the device.

        Args:
            call: The calling method, for messages.
            exclusive: True for a call that can't run between two steps of another call (default False).

        Raises:
            BusyError: The thread that has the device may be waiting for this thread; or this is a host of a pod, where
                all hosts would have to let the same thread in at the same step.
        """
        self._take(call, exclusive)
        try:
            yield
        finally:
            self._leave()

    def give_way(self) -> None:
        """Let a waiting thread use the device, between two steps. Does nothing if no thread waits."""
        if self._waiting and self._owner == threading.get_ident():
            with self._suspending() as own:
                waiter = self._first_waiter()
                if waiter is not None:
                    self._waiting.appendleft(own)
                    self._grant(waiter)
                    self._resume(own)

    @property
    def waited_for(self) -> bool:
        """True if another thread waits for the device."""
        return bool(self._waiting)

    @contextmanager
    def lending(self) -> Iterator[None]:
        """A context in which other threads may use the device, while this thread reads the user's data."""
        if self._owner != threading.get_ident():
            yield
            return
        with self._suspending() as own:
            self._pass_on()
            try:
                yield
            finally:
                if not self._try_to_take(own):
                    self._waiting.appendleft(own)
                    if self._try_to_take(own):
                        self._waiting.remove(own)
                    else:
                        self._resume(own)

    def describe_other_call(self) -> str:
        """Describe the current call of another thread, e.g. `fit in thread 'MainThread'`; "" if there is none."""
        thread, call = self._find_current_call(outermost=True)
        return "" if thread in (0, threading.get_ident()) else _name_thread(thread, call)

    def _take(self, call: str, exclusive: bool) -> None:
        if self._process != os.getpid():  # a fork has none of the other threads
            self._begin()
        if self._owner != threading.get_ident():
            own = _Waiter(call, exclusive)
            if not self._try_to_take(own):
                self._wait(own)
        self._calls.append(call)

    def _leave(self) -> None:
        if self._owner == threading.get_ident():  # not if a second interrupt has ended the wait in `_resume`
            self._calls.pop()
            if not self._calls:
                self._pass_on()

    @contextmanager
    def _suspending(self) -> Iterator[_Waiter]:
        calls = self._calls
        own = _Waiter(calls[0], resumes=True)
        self._suspended.append(own)
        try:
            yield own
        finally:
            self._suspended.remove(own)
            if self._owner == own.thread:
                self._calls = calls

    def _try_to_take(self, waiter: _Waiter) -> bool:
        """Take the device for a waiter, if it is free and the waiter may have it now."""
        if not self._free.acquire(blocking=False):
            return False
        if not self._may_have(waiter):
            self._pass_on()
            return False
        self._owner = waiter.thread
        self._calls = []
        return True

    def _may_have(self, waiter: _Waiter) -> bool:
        if waiter.resumes:
            return self._suspended[-1:] == [waiter]
        return not (waiter.exclusive and self._suspended)

    def _pass_on(self) -> None:
        """Give the device to the first waiting thread that may have it; without such a thread, release it."""
        while (waiter := self._first_waiter()) is None:
            self._owner = None
            self._free.release()
            # A thread may have begun to wait just before the release.
            if not any(map(self._may_have, tuple(self._waiting))) or not self._free.acquire(blocking=False):
                return
        self._grant(waiter)

    def _first_waiter(self) -> _Waiter | None:
        for waiter in tuple(self._waiting):
            if self._may_have(waiter):
                try:
                    self._waiting.remove(waiter)
                except ValueError:  # the thread has just given up
                    continue
                return waiter
        return None

    def _grant(self, waiter: _Waiter) -> None:
        self._owner = waiter.thread
        self._calls = []
        waiter.granted.release()

    def _resume(self, own: _Waiter) -> None:
        """Wait until the call that was let in has ended."""
        try:
            own.granted.acquire()
        except BaseException:
            try:
                own.granted.acquire()  # the cleanup after an interrupt needs the device
            except BaseException:
                self._give_up(own)
                raise
            raise

    def _give_up(self, own: _Waiter) -> None:
        try:
            self._waiting.remove(own)
        except ValueError:  # the device has just been given to this thread
            self._pass_on()

    def _wait(self, own: _Waiter) -> None:
        """Wait until another thread gives the device to this one."""
        if (hosts.find_index_and_count() or (0, 1))[1] > 1:
            why = "On a pod all hosts must take the same steps, so call both methods in one thread"
            raise BusyError(f"{own.call} can't start during {_name_thread(*self._find_current_call())}. {why}")
        self._waiting.append(own)
        if self._try_to_take(own):  # the device has just become free
            self._waiting.remove(own)
            return
        began = since = monotonic()
        last_instruction: tuple[CodeType, int] | None = None
        told = False
        try:
            while not own.granted.acquire(timeout=_POLL_SECONDS):
                now = monotonic()
                instruction = self._find_instruction()
                if instruction is None or instruction != last_instruction:
                    last_instruction = instruction
                    since = now
                elif now - since > _PATIENCE:
                    thread, call = self._find_current_call()
                    raise BusyError(
                        f"{own.call} can't start: {_name_thread(thread, call)} hasn't moved from "
                        f"{find_line_of_thread(thread)} for {_PATIENCE:g} s, and may be waiting for this thread. Call "
                        f"{own.call} in that thread, or don't let that thread wait for this one"
                    )
                if not told and now - began > _WARN_SECONDS:
                    told = True
                    current = _name_thread(*self._find_current_call())
                    warn(f"{own.call} has been waiting for {current} for {_WARN_SECONDS:g} s")
        except BaseException:
            self._give_up(own)
            raise

    def _find_current_call(self, outermost: bool = False) -> tuple[int, str]:
        """Return the thread that others wait for, and its call. The thread is 0 if there is none.

        By default it is the thread that has the device, else the innermost call that has let others in. With
        `outermost` it is the outermost call that has let others in, if any.
        """
        suspended = self._suspended[:1] if outermost else self._suspended[-1:] if self._owner is None else []
        for waiter in suspended:
            return waiter.thread, waiter.call
        return self._owner or 0, (self._calls or [""])[0]

    def _find_instruction(self) -> tuple[CodeType, int] | None:
        """Return the instruction at which the current thread is; None if it is in PyTorch's or tpufit's code."""
        with collector.pausing():
            frame = sys._current_frames().get(self._find_current_call()[0])
        if frame is None:
            return None
        name = str(frame.f_globals.get("__name__"))
        works = name.startswith(("torch", "tpufit.")) and not name.startswith("tpufit.data.")
        return None if works else (frame.f_code, frame.f_lasti)


def _name_thread(thread: int, call: str) -> str:
    names = {one.ident: one.name for one in threading.enumerate()}
    return f"{call} in thread {names.get(thread, thread)!r}"


turns = Turns()


def in_turn(exclusive: bool = False) -> Callable[[_Method], _Method]:
    """Decorate a method that needs the device to itself, see `Turns.taking_turn`."""

    def decorate(method: _Method) -> _Method:
        @wraps(method)
        def waiting(*args: Any, **named: Any) -> Any:
            try:
                with turns.taking_turn(method.__name__, exclusive):
                    return method(*args, **named)
            except BaseException as error:
                fold(error)  # every public method that may compute passes through here
                raise

        return cast(_Method, waiting)

    return decorate
