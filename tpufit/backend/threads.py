"""`turns`: the threads of a process use its device one after another.

A step is traced for the whole process, and the weights are out of the user's tensors while steps are replayed. So each
method of a model that touches either has the device to itself. Another thread waits for the end of the call, or for a
place between two steps of a `fit`, an `evaluate` or a `predict`, where `give_way` lets it in.
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
from ..utils.collector import collector
from ..utils.tracebacks import fold
from ..utils.users_code import find_line_of_thread, warn

_LOOK = 0.25  # seconds between two looks at the thread that is waited for
# Seconds for which that thread may stand still in code that is neither PyTorch's nor ours: a callback may be waiting
# for the very thread that waits here.
_PATIENCE = 10.0
_SILENCE = 60.0  # seconds of waiting after which a warning says so

_Method = TypeVar("_Method", bound=Callable[..., Any])


class _Waiter:
    """A thread that waits for the device."""

    def __init__(self, call: str, alone: bool = False, resumes: bool = False) -> None:
        self.thread = threading.get_ident()
        self.call = call
        self.alone = alone  # its call can't run between two steps of another
        self.resumes = resumes  # its call has begun, and has let in another
        self.granted = threading.Lock()
        self.granted.acquire()


class Turns:
    """Lets one thread at a time use the device. The thread that has it may ask again, as a callback does.

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
        self._owner: int | None = None  # the thread's identity
        self._calls: list[str] = []  # of the owner, each inside the one before
        self._waiting: deque[_Waiter] = deque()
        self._suspended: list[_Waiter] = []  # calls that have let in others, each inside the one before

    @contextmanager
    def taking_turn(self, call: str, alone: bool = False) -> Iterator[None]:
        """A context in which no other thread uses the device.

        Args:
            call: The method that asks, for messages.
            alone: True for a call that can't run between two steps of another (default False).

        Raises:
            BusyError: The other thread may be waiting for this one; or this is a host of a pod, where all hosts would
                have to let the same thread in at the same step.
        """
        self._take(call, alone)
        try:
            yield
        finally:
            self._leave()

    def give_way(self) -> None:
        """Let in a thread that waits, between two steps; nothing happens if there is none."""
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
        """A context in which other threads may use the device, as the user's data are read here."""
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
        """Say which call of another thread is under way, e.g. `fit in thread 'MainThread'`; nothing if none is."""
        thread, call = self._find_current_call(outermost=True)
        return "" if thread in (0, threading.get_ident()) else _name_thread(thread, call)

    def _take(self, call: str, alone: bool) -> None:
        if self._process != os.getpid():  # a fork has none of the other threads
            self._begin()
        if self._owner != threading.get_ident():
            own = _Waiter(call, alone)
            if not self._try_to_take(own):
                self._wait(own)
        self._calls.append(call)

    def _leave(self) -> None:
        if self._owner == threading.get_ident():  # else a second interrupt has ended the wait of `_resume`
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
        """Take the device if it is free, and the waiter may have it now."""
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
        return not (waiter.alone and self._suspended)

    def _pass_on(self) -> None:
        """Give the device to the first thread that waits and may have it, or to the next one that asks."""
        while (waiter := self._first_waiter()) is None:
            self._owner = None
            self._free.release()
            # One may have begun to wait in this moment.
            if not any(map(self._may_have, tuple(self._waiting))) or not self._free.acquire(blocking=False):
                return
        self._grant(waiter)

    def _first_waiter(self) -> _Waiter | None:
        for waiter in tuple(self._waiting):
            if self._may_have(waiter):
                try:
                    self._waiting.remove(waiter)
                except ValueError:  # it has just given up
                    continue
                return waiter
        return None

    def _grant(self, waiter: _Waiter) -> None:
        self._owner = waiter.thread
        self._calls = []
        waiter.granted.release()

    def _resume(self, own: _Waiter) -> None:
        """Wait for the end of the call that was let in."""
        try:
            own.granted.acquire()
        except BaseException:
            try:
                own.granted.acquire()  # what cleans up after an interrupt needs the device
            except BaseException:
                self._give_up(own)
                raise
            raise

    def _give_up(self, own: _Waiter) -> None:
        try:
            self._waiting.remove(own)
        except ValueError:  # it was granted in this moment
            self._pass_on()

    def _wait(self, own: _Waiter) -> None:
        """Wait until another thread gives the device to this one."""
        if (hosts.find_index_and_count() or (0, 1))[1] > 1:
            why = "On a pod all hosts take the same steps, so call both methods in one thread"
            raise BusyError(f"{own.call} can't begin beside {_name_thread(*self._find_current_call())}. {why}")
        self._waiting.append(own)
        if self._try_to_take(own):  # it has become free in this moment
            self._waiting.remove(own)
            return
        began = since = monotonic()
        stands: tuple[CodeType, int] | None = None
        told = False
        try:
            while not own.granted.acquire(timeout=_LOOK):
                now = monotonic()
                place = self._find_instruction()
                if place is None or place != stands:
                    stands = place
                    since = now
                elif now - since > _PATIENCE:
                    thread, call = self._find_current_call()
                    raise BusyError(
                        f"{own.call} can't begin beside {_name_thread(thread, call)}, which has stood at "
                        f"{find_line_of_thread(thread)} for {_PATIENCE:g} s, maybe waiting for this thread. Call "
                        f"{own.call} in that thread, or don't let it wait for this one"
                    )
                if not told and now - began > _SILENCE:
                    told = True
                    current = _name_thread(*self._find_current_call())
                    warn(f"{own.call} has been waiting for {_SILENCE:g} s, for {current}")
        except BaseException:
            self._give_up(own)
            raise

    def _find_current_call(self, outermost: bool = False) -> tuple[int, str]:
        """The thread that others wait for, and its call: the innermost one if it has let in others. 0 if none is."""
        suspended = self._suspended[:1] if outermost else self._suspended[-1:] if self._owner is None else []
        for waiter in suspended:
            return waiter.thread, waiter.call
        return self._owner or 0, (self._calls or [""])[0]

    def _find_instruction(self) -> tuple[CodeType, int] | None:
        """The instruction that the owner is at; None if it works for PyTorch or for us."""
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


def in_turn(alone: bool = False) -> Callable[[_Method], _Method]:
    """Let a method have the device to itself, see `Turns.taking_turn`."""

    def decorate(method: _Method) -> _Method:
        @wraps(method)
        def waiting(*args: Any, **named: Any) -> Any:
            try:
                with turns.taking_turn(method.__name__, alone):
                    return method(*args, **named)
            except BaseException as error:
                fold(error)  # every public method that may compute comes through here
                raise

        return cast(_Method, waiting)

    return decorate
