"""Reading a `DataLoader`: its workers are forked safely, and named when they die or hang."""

import gc
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from traceback import walk_tb
from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from ..errors import DataError


def read(loader: DataLoader[Any]) -> Iterator[Any]:
    """Read the batches of a loader, with workers or without.

    Raises:
        DataError: A worker died, or gave nothing within the loader's `timeout`; or a sample raised `StopIteration`,
            which to PyTorch is the end of the data. Another error of the data set is raised as PyTorch raises it: of
            its own type, with the worker's number and traceback in its message.
    """
    with _iterating(loader) as batches:
        take = _reader(loader, batches)
        while True:
            try:
                batch = take()
            except StopIteration as end:
                if _is_of_a_sample(loader, end):
                    who = f"{type(loader.dataset).__name__}.__getitem__"
                    why = "which would end the epoch early: an iterator that it reads has ended"
                    raise DataError(f"{who} raised StopIteration, {why}") from end
                return
            except (RuntimeError, OSError, EOFError) as error:
                message = _explained(loader, batches, error)
                if message is None:
                    raise
                raise DataError(message) from error
            yield batch


@contextmanager
def _iterating(loader: DataLoader[Any]) -> Iterator[Any]:
    """An iterator over a loader, whose workers end with it.

    The traceback of an error keeps the iterator, until the garbage collector finds both. It would find the queues with
    them, and so wait five seconds for each worker, which nothing tells to end.
    """
    if not loader.num_workers:
        yield iter(loader)
        return
    with _forking():
        batches: Any = iter(loader)
    try:
        with deaths_found_by_readers():
            yield batches
    finally:
        end = getattr(batches, "_shutdown_workers", None)  # a loader may have an iterator of its own
        if end is not None and not loader.persistent_workers:
            end()


def _reader(loader: DataLoader[Any], batches: Any) -> Callable[[], Any]:
    """The function that reads the next batch. `next` marks each for PyTorch's profiler, which takes as long again."""
    plain = type(batches) is _SingleProcessDataLoaderIter and not isinstance(loader.dataset, IterableDataset)
    own: Callable[[], Any] = batches._next_data if plain else batches.__next__
    return own


@contextmanager
def _forking() -> Iterator[None]:
    """Start processes while threads run.

    A forked worker must never touch an object that the device's threads may have held at that moment. It runs nothing
    but the data set, so it could only do so in a garbage collection that meets one of the device's tensors: the objects
    that exist now are therefore never collected in a worker.
    """
    gc.freeze()
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns of just this, and so does JAX, whose kernels flash attention takes. The loop waits for
            # its first batch meanwhile, and no other code of ours could lose a warning.
            warnings.filterwarnings("ignore", r".*multi-threaded, use of fork", DeprecationWarning)
            warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
            yield
    finally:
        gc.unfreeze()


@contextmanager
def deaths_found_by_readers() -> Iterator[None]:
    """Let only a read notice that a worker died.

    PyTorch's handler of SIGCHLD raises in whatever the main thread runs when a worker dies, be it a callback or a save.
    Without it the loader looks at its workers after each 5 seconds of waiting, and raises where a batch is due.
    """
    handler = signal.getsignal(signal.SIGCHLD)
    raises = getattr(handler, "__module__", None) == "torch.utils.data._utils.signal_handling"
    if not raises or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, handler)


def _explained(loader: DataLoader[Any], batches: Any, error: Exception) -> str | None:
    """Say which worker died or hung, if the loader's error is about one."""
    message = str(error)
    workers = getattr(batches, "_workers", [])
    # A batch's tensors are fetched from the worker that sent it, which may have died since.
    gone = isinstance(error, (OSError, EOFError)) and "reraise" not in _functions(error)
    if gone and workers:
        ending = wait([worker.sentinel for worker in workers], timeout=1)
        for worker in (one for one in workers if one.sentinel in ending):
            worker.join()
    dead = [(i, worker) for i, worker in enumerate(workers) if worker.exitcode is not None]
    if "exited unexpectedly" in message or (gone and dead):
        ended = ", ".join(f"worker {i} (pid {worker.pid}, {_ending(worker.exitcode)})" for i, worker in dead)
        cure = "Killed workers have most often used up the machine's memory: take fewer of them, or smaller samples"
        return f"{ended or 'a worker'} of the DataLoader ended before its work was done. {cure}"
    if "timed out" in message:
        number, *_ = batches._task_info[batches._rcvd_idx]
        which = f"worker {number} (pid {workers[number].pid}) of the DataLoader"
        when = f"for {loader.timeout:g} s (its timeout), when batch {batches._rcvd_idx} was due"
        return f"{which} gave nothing {when}. Look at what its data set does there, or allow a longer timeout"
    return None


def _is_of_a_sample(loader: DataLoader[Any], end: StopIteration) -> bool:
    """True if the end of the loader came from reading a sample, here or in a worker, and not from its sampler."""
    return not isinstance(loader.dataset, IterableDataset) and not {"fetch", "reraise"}.isdisjoint(_functions(end))


def _functions(error: BaseException) -> list[str]:
    """The names of the functions that an error came through; PyTorch's `reraise` raises those of a worker's data."""
    return [frame.f_code.co_name for frame, _ in walk_tb(error.__traceback__)]


def _ending(exitcode: int) -> str:
    return f"killed by signal {-exitcode}" if exitcode < 0 else f"exit code {exitcode}"
