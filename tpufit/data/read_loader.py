"""`read_loader`: reads a `DataLoader`. Its workers are forked safely, and named when they die or hang."""

import gc
import multiprocessing
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from traceback import walk_tb
from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from ..errors import DataError


def read_loader(loader: DataLoader[Any]) -> Iterator[Any]:
    """Read the batches of a loader, with workers or without.

    Raises:
        DataError: A worker died, or returned nothing within the loader's `timeout`; or a sample raised `StopIteration`,
            which PyTorch takes for the end of the data. Other errors of the data set are raised as PyTorch raises them:
            with their type, and the worker's number and traceback in the message.
    """
    with _open_iterator(loader) as batches:
        take = _choose_reader(loader, batches)
        while True:
            try:
                batch = take()
            except StopIteration as end:
                if _came_from_sample(loader, end):
                    who = f"{type(loader.dataset).__name__}.__getitem__"
                    why = "which would end the epoch early: an iterator that it reads has ended"
                    raise DataError(f"{who} raised StopIteration, {why}") from end
                return
            except (RuntimeError, OSError, EOFError) as error:
                message = _explain_error(loader, batches, error)
                if message is None:
                    raise
                raise DataError(message) from error
            yield batch


@contextmanager
def _open_iterator(loader: DataLoader[Any]) -> Iterator[Any]:
    """Return a context with an iterator over a loader, whose workers end with the context.

    Otherwise an error's traceback would keep the iterator alive until a garbage collection, which would also collect
    the queues, and wait five seconds for each worker, because nothing tells the workers to end.
    """
    if not loader.num_workers:
        yield iter(loader)
        return
    with _fork_safely(), _block_ctrl_c(loader):
        batches: Any = iter(loader)
    try:
        with raise_worker_deaths_in_reads():
            yield batches
    finally:
        end = getattr(batches, "_shutdown_workers", None)  # a subclass of DataLoader may have another iterator
        if end is not None and not loader.persistent_workers:
            end()


def _choose_reader(loader: DataLoader[Any], batches: Any) -> Callable[[], Any]:
    """Return the function that reads the next batch. `next` takes twice as long: it marks PyTorch's profile."""
    plain = type(batches) is _SingleProcessDataLoaderIter and not isinstance(loader.dataset, IterableDataset)
    function: Callable[[], Any] = batches._next_data if plain else batches.__next__
    return function


@contextmanager
def _fork_safely() -> Iterator[None]:
    """Return a context in which processes can be forked safely while threads run.

    A forked worker must never touch an object that the device's threads may have locked at that moment. It runs only
    the data set, so only a garbage collection could reach a device tensor. Objects that exist now are therefore never
    collected in a worker.
    """
    gc.freeze()
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns about this, and so does JAX, whose kernels flash attention uses. The loop is waiting for
            # its first batch, so no other code of ours loses a warning.
            warnings.filterwarnings("ignore", r".*multi-threaded, use of fork", DeprecationWarning)
            warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
            yield
    finally:
        gc.unfreeze()


@contextmanager
def _block_ctrl_c(loader: DataLoader[Any]) -> Iterator[None]:
    """Return a context whose new processes ignore Ctrl-C: the parent ends its workers, which would print tracebacks.

    The `forkserver` method is left alone, because Python's fork server would pass this on to the user's processes.
    """
    context = loader.multiprocessing_context or multiprocessing
    method = context.get_start_method()
    if method == "forkserver":
        yield
        return
    if method == "spawn":
        resource_tracker.ensure_running()  # starting later, it would unblock the signal
    # A process inherits the blocked signals of its parent's thread. A signal that arrives now is delivered afterwards.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def raise_worker_deaths_in_reads() -> Iterator[None]:
    """Return a context in which only a read raises the death of a worker.

    PyTorch's SIGCHLD handler raises in whatever code the main thread runs when a worker dies, even a callback or a
    save. Without the handler, the loader checks its workers after each 5 seconds of waiting, and raises where a batch
    is due.
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


def _explain_error(loader: DataLoader[Any], batches: Any, error: Exception) -> str | None:
    """Explain which worker died or hung, if the loader's error is about a worker; else return None."""
    message = str(error)
    workers = getattr(batches, "_workers", [])
    # A batch's tensors are fetched from the worker that sent them, which may have died since.
    gone = isinstance(error, (OSError, EOFError)) and "reraise" not in _list_functions(error)
    if gone and workers:
        ending = wait([worker.sentinel for worker in workers], timeout=1)
        for worker in (each for each in workers if each.sentinel in ending):
            worker.join()
    dead = [(i, worker) for i, worker in enumerate(workers) if worker.exitcode is not None]
    if "exited unexpectedly" in message or (gone and dead):
        ended = ", ".join(f"worker {i} (pid {worker.pid}, {_describe_exit(worker.exitcode)})" for i, worker in dead)
        cure = "Workers are usually killed because memory ran out: use fewer workers, or smaller samples"
        return f"{ended or 'a worker'} of the DataLoader ended before its work was done. {cure}"
    if "timed out" in message:
        number, *_ = batches._task_info[batches._rcvd_idx]
        which = f"worker {number} (pid {workers[number].pid}) of the DataLoader"
        when = f"for {loader.timeout:g} s (its timeout), when batch {batches._rcvd_idx} was due"
        return f"{which} returned nothing {when}. Check what its data set does there, or allow a longer timeout"
    return None


def _came_from_sample(loader: DataLoader[Any], end: StopIteration) -> bool:
    """True if a sample, here or in a worker, raised the `StopIteration`, rather than the sampler."""
    return not isinstance(loader.dataset, IterableDataset) and not {"fetch", "reraise"}.isdisjoint(_list_functions(end))


def _list_functions(error: BaseException) -> list[str]:
    """Return the names of the functions in an error's traceback; PyTorch's `reraise` raises a worker's errors."""
    return [frame.f_code.co_name for frame, _ in walk_tb(error.__traceback__)]


def _describe_exit(exitcode: int) -> str:
    return f"killed by signal {-exitcode}" if exitcode < 0 else f"exit code {exitcode}"
