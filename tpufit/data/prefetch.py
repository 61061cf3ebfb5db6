"""`Prefetcher`: a background thread that keeps batches ahead of the loop, prepared and on their way to the device.

The prefetcher and its thread meet in two queues only. A slot is put back for each batch that is asked for, and the
thread takes one before it reads. `SimpleQueue` is written in C: a wait for one ends at once on Ctrl-C, and its `put`
may run in the middle of anything, also in a garbage collection that finds a dropped prefetcher.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from time import monotonic, perf_counter, thread_time
from typing import Any, Generic, NamedTuple

from ..backend import turns
from ..errors import require_whole
from ..utils.users_code import warn
from .inline import BatchReader, ReadTimes, T, T_co, prepared_by

_PATIENCE = 2.0  # seconds that close() waits for a thread which is inside the user's data
# Seconds after which a wait is begun again: the system may give a signal to another thread, as it does while a profiler
# or debugger has stopped this one, and Python's handler then runs only when this one wakes up.
_LOOK = 0.1
_SILENCE = 600  # such waits without a batch after which it is said that one is waited for
_NO_BATCH = object()


class PrefetchEndedError(Exception):
    """`Prefetcher.end` was called."""


class Prefetcher(BatchReader[T_co]):
    """Reads and prepares batches ahead, in order, none lost or repeated.

    It ends when the data end, when `close` is called (or a `with` block left), or when nobody holds it any more. An
    exception in the data or in `prepare` is raised by `next`, itself and with its own traceback, after all batches
    before it. The thread reads the data, so a source must not share state, such as a random generator, with the loop. A
    generator is closed in it, too. No more than `depth` prepared batches wait.

    Raises:
        ArgumentError: `depth` is not a whole number of at least 1.

    Example:
        >>> with Prefetcher([1, 2, 3], lambda batch: batch * 10) as reader:
        ...     list(reader)
        [10, 20, 30]
    """

    def __init__(self, batches: Iterable[Any], prepare: Callable[[Any], T_co], depth: int = 2) -> None:
        require_whole("depth", depth)
        self.times = ReadTimes()
        self._paused = False
        self._owed = 0  # slots of batches given out that the thread doesn't have back yet
        self._half = (depth + 1) // 2
        self._channel: _Channel[T_co] = _Channel(depth, self.times)
        self._stop = weakref.finalize(self, self._channel.stop)  # when dropped, or by close()
        # A daemon: data that never return must not keep the interpreter from exiting.
        work = batches, prepare
        self._thread = threading.Thread(target=self._channel.fill, args=work, name="tpufit-prefetch", daemon=True)
        _channels[self._thread] = self._channel
        # Registered again for each prefetcher: exit handlers run last in, first out, and this one must run before the
        # device's.
        atexit.unregister(_end_threads)
        atexit.register(_end_threads)
        self._thread.start()

    def __next__(self) -> T_co:
        channel = self._channel
        began = None
        if channel.stopped:
            raise StopIteration
        self._owed += 1
        if channel.ready.empty():
            if self._paused:
                self._owed -= 1
                raise RuntimeError("no batch is ready in a pause: ask for the next one after it")
            if not self._thread.is_alive() and channel.ready.empty():
                raise RuntimeError("the prefetcher's thread is in another process: this one was forked from it")
            began = perf_counter()
        # Half of them at once: a thread that is woken for each batch costs more than sending a small one does.
        if began is not None or self._owed >= self._half:
            for _ in range(self._owed):
                channel.slots.put(None)
            self._owed = 0
        try:
            item = self._get()
        finally:
            if began is not None:
                self.times.waited += perf_counter() - began
        if not isinstance(item, _End):
            self.times.batches += 1
            return item
        self.close()
        try:
            raise StopIteration if item.error is None else item.error
        finally:
            del item  # the error's traceback holds this frame, which must not hold the error

    def _get(self) -> T_co | _End:
        waits = 0
        while True:
            with suppress(Empty):
                return self._channel.ready.get(timeout=_LOOK)
            if turns.waited_for:  # maybe by the data, if they ask a model
                with self.paused():
                    turns.give_way()
            waits += 1
            if waits == _SILENCE:
                warn(
                    f"the data have given no batch for {_SILENCE * _LOOK:g} s, and are still being waited for. If a "
                    "worker may hang, DataLoader(..., timeout=60) makes an error of it that names the worker",
                )

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep `prepare` from running, as a graph is being captured.

        Entering waits for the call that runs. Inside, the data may still be read, and `next` gives the batches that
        are ready; if none is, it can't wait for one. Not to be nested.

        Raises:
            RuntimeError: From `next`, inside: no batch is ready.
        """
        with super().paused(), self._channel.turn:
            self._paused = True
            try:
                yield
            finally:
                self._paused = False

    def end(self) -> None:
        """Let a `next` that waits for data, or a later one, raise `PrefetchEndedError`. For handlers of signals."""
        self._channel.ready.put(_End(PrefetchEndedError()))

    def close(self) -> None:
        """Stop the thread, close the data if they are a generator, and drop what was prepared; again is no error.

        It waits for the thread, but no longer than 2 s if that is inside the data, and not in a pause; the thread then
        ends as soon as it can, without preparing anything more.
        """
        self._stop()
        self._thread.join(0 if self._paused else _PATIENCE)
        while not self._channel.ready.empty():
            self._channel.ready.get()


class _End(NamedTuple):
    """The mark after the last batch, with the error that ended the data, if one did."""

    error: BaseException | None = None


class _Channel(Generic[T]):
    """Joins a prefetcher and its thread. The thread must not hold the prefetcher, or that could never be dropped."""

    def __init__(self, depth: int, times: ReadTimes) -> None:
        self.times = times
        self.ready: SimpleQueue[T | _End] = SimpleQueue()
        self.slots: SimpleQueue[None] = SimpleQueue()
        self.turn = threading.Lock()  # held by `prepare`, or by a pause
        self.stopped = False
        for _ in range(depth):
            self.slots.put(None)

    def stop(self) -> None:
        self.stopped = True
        self.slots.put(None)

    def fill(self, batches: Iterable[Any], prepare: Callable[[Any], T]) -> None:
        """Read and prepare until the end: the thread's work."""
        times = self.times
        iterator: Iterator[Any] = iter(())
        try:
            iterator = iter(batches)
            while self.next_slot():
                began = perf_counter()
                batch = next(iterator, _NO_BATCH)
                times.busy += perf_counter() - began
                times.computed = thread_time()
                if batch is _NO_BATCH:
                    break
                with self.turn:
                    if self.stopped:
                        break
                    began = perf_counter()
                    self.ready.put(prepared_by(prepare, batch))
                    prepared = perf_counter() - began
                    times.prepared += prepared
                    times.busy += prepared
                    times.computed = thread_time()
                del batch  # not held while waiting for a slot
            self.ready.put(_End())
        except BaseException as error:
            self.ready.put(_End(error))
        finally:
            if isinstance(iterator, Generator):
                iterator.close()
            del batches, iterator  # an error's traceback holds this frame, which must not hold the data

    def next_slot(self) -> bool:
        self.slots.get()
        return not self.stopped


_channels: weakref.WeakKeyDictionary[threading.Thread, _Channel[Any]] = weakref.WeakKeyDictionary()


def _end_threads() -> None:
    """Leave no thread inside torch when the interpreter ends: that aborts the process."""
    running = list(_channels.items())
    deadline = monotonic() + _PATIENCE
    for _, channel in running:
        channel.stop()
    for thread, _ in running:
        thread.join(max(0, deadline - monotonic()))
