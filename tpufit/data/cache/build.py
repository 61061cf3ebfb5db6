"""The warm-up: worker processes, each of which makes one file of a cache at a time, and a progress bar.

Workers are spawned, never forked: a fork would share the positions of the source's open files, and could hang on the
threads of a running XLA. Source and transform are therefore pickled, and imported by name in the worker.
"""

import errno
import linecache
import multiprocessing
import pickle
import shutil
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ...errors import ArgumentError, CacheBusyError, CacheDiskFullError, CacheError, DataError
from ...utils.files import DISK_FULL, Lock, LockedError, drop_drafts
from ...utils.hardware import count_cpus
from ...utils.terminal import standard_output
from ...utils.user_code import warn
from .maker import Maker, isolated
from .manifest import DRAFTED, Manifest

Workers = int | Literal["auto"]


@contextmanager
def lock_cache(folder: Path) -> Iterator[None]:
    """Return a context that locks a cache, and deletes the drafts of killed warm-ups. The lock ends with the process.

    Creates the folder if necessary.

    Raises:
        CacheBusyError: Another warm-up has locked it.
        CacheError: The folder can't be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = Lock(folder)
    except LockedError:
        raise CacheBusyError(f"another warm-up is running in {folder}. Wait for its end, then read the cache") from None
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ELOOP):
            raise
        cure = "Make the cache elsewhere, then read it from any folder with CachedDataset.open"
        raise CacheError(f"{folder} can't be written to ({error.strerror}). {cure}") from error
    drop_drafts(folder, DRAFTED)
    try:
        yield
    finally:
        drop_drafts(folder, DRAFTED)
        lock.release()


def build(maker: Maker, folder: Path, manifest: Manifest, workers: Workers, progress: bool) -> None:
    """Make the missing files of a locked cache.

    `workers` is the number of processes: 0 uses this process, `"auto"` starts one per CPU.

    Raises:
        CacheDiskFullError: The disk is full.
        CacheError: A worker died.
        DataError: A sample can't be made.
        ArgumentError: Source or transform can't be sent to the workers.
    """
    todo = manifest.list_missing(folder)
    count, payload = _prepare_workers(maker, workers, len(todo))
    try:
        with _progress_bar(_count_rows(manifest, todo), progress) as report:
            if count:
                _build_in_workers(folder, manifest, payload, todo, count, report)
                return
            with isolated():
                for number in todo:
                    maker.build(folder, manifest, number, report)
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        raise _make_disk_full_error(folder, manifest) from error


def check_room(folder: Path, manifest: Manifest) -> None:
    """Check that the missing files will fit on the disk, before making any.

    Raises:
        CacheDiskFullError: They won't fit.
    """
    error = _make_disk_full_error(folder, manifest)
    if error.need > error.free:
        raise error


def _make_disk_full_error(folder: Path, manifest: Manifest) -> CacheDiskFullError:
    todo = manifest.list_missing(folder)
    need = _count_rows(manifest, todo) * manifest.row_bytes
    free = shutil.disk_usage(folder).free
    return CacheDiskFullError(folder, need, free, manifest.files - len(todo), manifest.files)


def _count_rows(manifest: Manifest, files: Sequence[int]) -> int:
    return sum(len(manifest.span(number)) for number in files)


@contextmanager
def _progress_bar(rows: int, shown: bool) -> Iterator[Callable[[int], None]]:
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("samples"), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=standard_output(), disable=not shown) as progress:
        task = progress.add_task("", total=rows)
        yield lambda made: progress.advance(task, made)


def _prepare_workers(maker: Maker, workers: Workers, files: int) -> tuple[int, bytes]:
    """Return the number of workers, and the pickled maker for them; 0 if this process does the work."""
    count = min(count_cpus() if workers == "auto" else workers, files)
    if count == 0 or (count == 1 and workers == "auto"):
        return 0, b""
    payload, obstacle = _pickle(maker)
    if not obstacle:
        return count, payload
    if workers != "auto":
        raise ArgumentError(f"workers={workers}: {obstacle}, or pass workers=0")
    warn(f"one process makes all samples: {obstacle}, or pass workers=0")
    return 0, b""


def _pickle(maker: Maker) -> tuple[bytes, str]:
    """Return the pickled maker, or the reason why a worker can't read it."""
    try:
        payload = pickle.dumps(maker)
    except (pickle.PicklingError, AttributeError, TypeError, ValueError) as error:
        return b"", f"source or transform can't be pickled ({error}). Define their parts in a module"
    script = getattr(sys.modules["__main__"], "__file__", None)
    if script is None and b"__main__" in payload:
        return b"", "source or transform is defined in a notebook or prompt, where workers can't find it. Use a module"
    if script is not None and not any("__main__" in line for line in linecache.getlines(script)):
        cure = 'Put all but its definitions under `if __name__ == "__main__":`'
        return b"", f"each worker would run all of {script}. {cure}"
    return payload, ""


class _InWorkerError(Exception):
    """The traceback of an error in a worker, as the error's cause."""


class _Worker:
    """A worker process, as seen by its parent; workers are numbered from 0."""

    def __init__(self, folder: Path, manifest: Manifest, payload: bytes, index: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._manifest = manifest
        # Sent with the first file only: a pipe has little room, and writing to a full pipe blocks.
        self._payload = payload
        self._index = index
        self._activity = "before it made a file"
        self._process = context.Process(target=_run_worker, args=(theirs, folder, manifest), daemon=True)
        self._process.start()
        theirs.close()  # so that the pipe closes when the worker ends

    def request(self, number: int) -> None:
        """Request a file."""
        self._activity = f"while it made {self._manifest.name(number)}"
        with suppress(ConnectionError):  # it died, which `receive` reports
            if self._payload:
                self.connection.send_bytes(self._payload)
                self._payload = b""
            self.connection.send(number)

    def receive(self) -> int | None:
        """Return the number of rows made since the last report, or None if the worker is idle.

        Raises:
            CacheError: The worker died.
            DataError, OSError: An error ended the worker.
        """
        try:
            rows, error, text = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            code = self._process.exitcode or 0
            end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            why = ", as the kernel does when memory runs out," if code == -signal.SIGKILL else ""
            who = f"worker {self._index} (process {self._process.pid})"
            cure = "Finished files are kept: call warm_up() again, with fewer workers if memory is short"
            raise CacheError(f"{who} {end}{why} {self._activity}. Its output is above. {cure}") from None
        if error is not None:
            raise error from _InWorkerError(f"\n{text}")
        return rows if rows is None else int(rows)

    def kill(self) -> None:
        """Kill the worker: an interrupted worker has nothing to clean up."""
        self._process.kill()
        self._process.join()
        self.connection.close()


def _build_in_workers(
    folder: Path, manifest: Manifest, payload: bytes, todo: Sequence[int], count: int, report: Callable[[int], None]
) -> None:
    pending = deque(todo)
    crew: dict[Any, _Worker] = {}
    try:
        for index in range(count):
            worker = _Worker(folder, manifest, payload, index)
            crew[worker.connection] = worker
        busy = set(crew)
        while busy:
            for connection in wait(busy):
                rows = crew[connection].receive()
                if rows is not None:
                    report(rows)
                elif pending:
                    crew[connection].request(pending.popleft())
                else:
                    busy.discard(connection)
    finally:
        for worker in crew.values():
            worker.kill()


def _run_worker(connection: Connection, folder: Path, manifest: Manifest) -> None:
    """Run a worker, which sends triples: the number of rows made, an error, and the error's traceback.

    The number is None if the worker is idle or has failed; without an error the others are None and "".
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends its workers
    torch.set_num_threads(1)
    try:
        connection.send((None, None, ""))
        maker: Maker = pickle.loads(connection.recv_bytes())
        while True:
            maker.build(folder, manifest, connection.recv(), lambda rows: connection.send((rows, None, "")))
            connection.send((None, None, ""))
    except (EOFError, ConnectionError):  # the parent was killed: leave no worker behind
        sys.exit()
    except Exception as error:
        known = error if isinstance(error, (DataError, OSError)) else CacheError(f"{type(error).__name__}: {error}")
        connection.send((None, known, traceback.format_exc()))
