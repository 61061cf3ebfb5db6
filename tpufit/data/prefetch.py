"""`Prefetcher`: a background thread that reads, prepares and sends batches ahead of the loop.

The prefetcher and its thread share two queues only. The prefetcher puts a slot for each batch that `next` requests, and
the thread takes a slot before it reads. `SimpleQueue` is written in C: Ctrl-C interrupts a `get` at once, and `put` is
reentrant, so that even a garbage collection that finalizes a prefetcher may call it.
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
from ..utils.user_code import warn
from .inline_reader import BatchReader, ReadTimes, T, T_co, call_prepare

_PATIENCE = 2.0  # seconds that close() waits for a thread that is inside the user's data
# Seconds after which a wait is restarted: the system may deliver a signal to another thread, e.g. while a profiler or
# debugger has stopped this one, and Python's handler then runs only when this thread wakes up.
_WAIT_SECONDS = 0.1
_WAITS_BEFORE_WARNING = 600  # the number of such waits without a batch before a warning
_NO_BATCH = object()


class PrefetchEndedError(Exception):
    """`Prefetcher.end` was called."""


class Prefetcher(BatchReader[T_co]):
    """Reads and prepares batches ahead, in order, none lost or repeated.

    It ends when the data end, when `close` is called (or a `with` block exits), or when the prefetcher is garbage
    collected. An exception in the data or in `prepare` is raised by `next`, unchanged and with its traceback, after all
    earlier batches. The thread reads the data, so a source must not share state, such as a random generator, with the
    loop. The thread also closes a generator. At most `depth` prepared batches are pending.

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
        self._owed = 0  # slots of returned batches that the thread hasn't got back yet
        self._half = (depth + 1) // 2
        self._channel: _Channel[T_co] = _Channel(depth, self.times)
        self._stop = weakref.finalize(self, self._channel.stop)  # on garbage collection, or in close()
        # A daemon, because data that never return must not keep the interpreter from exiting.
        work = batches, prepare
        self._thread = threading.Thread(target=self._channel.fill, args=work, name="tpufit-prefetch", daemon=True)
        _channels[self._thread] = self._channel
        # Registered again for each prefetcher: exit handlers run last in, first out, and this one must precede the
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
                raise RuntimeError("no batch is ready during a pause: call next after the pause")
            if not self._thread.is_alive() and channel.ready.empty():
                raise RuntimeError("the prefetcher's thread is in another process: this one was forked from it")
            began = perf_counter()
        # Half of the slots at once: waking a thread for each batch costs more than sending a small batch.
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
            del item  # the error's traceback refers to this frame, which must not refer to the error

    def _get(self) -> T_co | _End:
        waits = 0
        while True:
            with suppress(Empty):
                return self._channel.ready.get(timeout=_WAIT_SECONDS)
            if turns.waited_for:  # perhaps by the data, if they call a model
                with self.pausing():
                    turns.give_way()
            waits += 1
            if waits == _WAITS_BEFORE_WARNING:
                warn(
                    f"the data have returned no batch for {waits * _WAIT_SECONDS:g} s; still waiting. If a worker may "
                    "hang, DataLoader(..., timeout=60) raises an error that names the worker",
                )

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Keep `prepare` from running while a graph is captured.

        Entering waits for a running call. Inside, the data may still be read, and `next` returns batches that are
        ready, but can't wait for more. Don't nest it.

        Raises:
            RuntimeError: `next` was called inside, and no batch is ready.
        """
        with super().pausing(), self._channel.turn:
            self._paused = True
            try:
                yield
            finally:
                self._paused = False

    def end(self) -> None:
        """Make a `next` that waits for data, or a later one, raise `PrefetchEndedError`. For signal handlers."""
        self._channel.ready.put(_End(PrefetchEndedError()))

    def close(self) -> None:
        """Stop the thread, close the data if it is a generator, and drop prepared batches. May be called again.

        Waits for the thread, for at most 2 s if it is inside the data, and not at all in a pause; the thread then ends
        as soon as it can, without preparing more batches.
        """
        self._stop()
        self._thread.join(0 if self._paused else _PATIENCE)
        while not self._channel.ready.empty():
            self._channel.ready.get()


class _End(NamedTuple):
    """The mark after the last batch, with the error that ended the data, if any."""

    error: BaseException | None = None


class _Channel(Generic[T]):
    """Connects a prefetcher and its thread, which must not refer to the prefetcher, or it could never be collected."""

    def __init__(self, depth: int, times: ReadTimes) -> None:
        self.times = times
        self.ready: SimpleQueue[T | _End] = SimpleQueue()
        self.slots: SimpleQueue[None] = SimpleQueue()
        self.turn = threading.Lock()  # locked during `prepare`, or a pause
        self.stopped = False
        for _ in range(depth):
            self.slots.put(None)

    def stop(self) -> None:
        self.stopped = True
        self.slots.put(None)

    def fill(self, batches: Iterable[Any], prepare: Callable[[Any], T]) -> None:
        """Read and prepare batches until the data end; runs in the thread."""
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
                    self.ready.put(call_prepare(prepare, batch))
                    prepared = perf_counter() - began
                    times.prepared += prepared
                    times.busy += prepared
                    times.computed = thread_time()
                del batch  # free it while waiting for a slot
            self.ready.put(_End())
        except BaseException as error:
            self.ready.put(_End(error))
        finally:
            if isinstance(iterator, Generator):
                iterator.close()
            del batches, iterator  # an error's traceback refers to this frame, which must not refer to the data

    def next_slot(self) -> bool:
        self.slots.get()
        return not self.stopped


_channels: weakref.WeakKeyDictionary[threading.Thread, _Channel[Any]] = weakref.WeakKeyDictionary()


def _end_threads() -> None:
    """End all threads before the interpreter exits: a thread inside torch would abort the process."""
    running = list(_channels.items())
    deadline = monotonic() + _PATIENCE
    for _, channel in running:
        channel.stop()
    for thread, _ in running:
        thread.join(max(0, deadline - monotonic()))
