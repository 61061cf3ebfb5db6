"""The warm-up: worker processes that each make one file of a cache at a time, and a bar that shows their progress.

Workers are spawned, never forked: a fork would share the file positions of the source's open files, and could hang in
the threads of an XLA that already runs. So source and transform are pickled, and looked up by name in the worker.
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
from ...utils.files import DISK_FULL, HeldError, Lock, drop_drafts
from ...utils.hardware import cpus
from ...utils.terminal import standard_output
from ...utils.users_code import warn
from .maker import Maker, alone
from .manifest import DRAFTED, Manifest

Workers = int | Literal["auto"]


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold a cache's lock, which ends with the process if not before, and clear the drafts that killed warm-ups left.

    The folder is made if need be.

    Raises:
        CacheBusyError: Another warm-up holds it.
        CacheError: Nothing may be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = Lock(folder)
    except HeldError:
        raise CacheBusyError(f"another warm-up is at work in {folder}. Wait for its end, then read it") from None
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ELOOP):
            raise
        cure = "Make the cache where that is possible, then read it from wherever it lies with CachedDataset.open"
        raise CacheError(f"{folder} can't be written to ({error.strerror}). {cure}") from error
    drop_drafts(folder, DRAFTED)
    try:
        yield
    finally:
        drop_drafts(folder, DRAFTED)
        lock.release()


def build(maker: Maker, folder: Path, manifest: Manifest, workers: Workers, progress: bool) -> None:
    """Make the files of a cache that are missing, while its lock is held.

    It takes so many processes: 0 is this one, `"auto"` one for each CPU.

    Raises:
        CacheDiskFullError: There is no room any more.
        CacheError: A worker died.
        DataError: A sample can't be made.
        ArgumentError: Source or transform can't be sent to the workers.
    """
    todo = manifest.missing(folder)
    count, payload = _crew(maker, workers, len(todo))
    try:
        with _bar(_rows(manifest, todo), progress) as tell:
            if count:
                _build_in_workers(folder, manifest, payload, todo, count, tell)
                return
            with alone():
                for number in todo:
                    maker.build(folder, manifest, number, tell)
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        raise _disk_full(folder, manifest) from error


def check_room(folder: Path, manifest: Manifest) -> None:
    """Make sure that the missing files will fit on the disk, before any work is done.

    Raises:
        CacheDiskFullError: They won't.
    """
    error = _disk_full(folder, manifest)
    if error.need > error.free:
        raise error


def _disk_full(folder: Path, manifest: Manifest) -> CacheDiskFullError:
    todo = manifest.missing(folder)
    need = _rows(manifest, todo) * manifest.row_bytes
    free = shutil.disk_usage(folder).free
    return CacheDiskFullError(folder, need, free, manifest.files - len(todo), manifest.files)


def _rows(manifest: Manifest, files: Sequence[int]) -> int:
    return sum(len(manifest.span(number)) for number in files)


@contextmanager
def _bar(rows: int, shown: bool) -> Iterator[Callable[[int], None]]:
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("samples"), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=standard_output(), disable=not shown) as progress:
        task = progress.add_task("", total=rows)
        yield lambda made: progress.advance(task, made)


def _crew(maker: Maker, workers: Workers, files: int) -> tuple[int, bytes]:
    """The number of workers, and what they are sent; none if this process does the work."""
    count = min(cpus() if workers == "auto" else workers, files)
    if count == 0 or (count == 1 and workers == "auto"):
        return 0, b""
    payload, obstacle = _pickled(maker)
    if not obstacle:
        return count, payload
    if workers != "auto":
        raise ArgumentError(f"workers={workers}: {obstacle}, or pass workers=0")
    warn(f"one process makes all the samples: {obstacle}, or pass workers=0")
    return 0, b""


def _pickled(maker: Maker) -> tuple[bytes, str]:
    """The maker's pickle, or the reason why a worker can't read it."""
    try:
        payload = pickle.dumps(maker)
    except (pickle.PicklingError, AttributeError, TypeError, ValueError) as error:
        return b"", f"source or transform can't be pickled ({error}). Define in a module what they are made of"
    script = getattr(sys.modules["__main__"], "__file__", None)
    if script is None and b"__main__" in payload:
        return b"", "source or transform is defined in a notebook or prompt, where no worker finds it. Use a module"
    if script is not None and not any("__main__" in line for line in linecache.getlines(script)):
        cure = 'Put all but its definitions under `if __name__ == "__main__":`'
        return b"", f"each worker would run {script} as a whole. {cure}"
    return payload, ""


class _InWorkerError(Exception):
    """The traceback of an error in a worker, shown as the error's cause."""


class _Worker:
    """A worker process, as its parent sees it; they are numbered from 0."""

    def __init__(self, folder: Path, manifest: Manifest, payload: bytes, index: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._manifest = manifest
        # The pickled maker, sent only when asked for: a pipe holds little, and who fills it waits.
        self._payload = payload
        self._index = index
        self._doing = "before it made a file"
        self._process = context.Process(target=_work, args=(theirs, folder, manifest), daemon=True)
        self._process.start()
        theirs.close()  # so that the end of the worker is the end of the pipe

    def give(self, number: int) -> None:
        """Ask for a file."""
        self._doing = f"while it made {self._manifest.name(number)}"
        with suppress(ConnectionError):  # it died; `news` will say so
            if self._payload:
                self.connection.send_bytes(self._payload)
                self._payload = b""
            self.connection.send(number)

    def news(self) -> int | None:
        """The number of rows it has made since the last news, or None if it has nothing to do.

        Raises:
            CacheError: It died.
            DataError, OSError: An error ended it.
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
            raise CacheError(f"{who} {end}{why} {self._doing}. Its output is above. {cure}") from None
        if error is not None:
            raise error from _InWorkerError(f"\n{text}")
        return rows if rows is None else int(rows)

    def end(self) -> None:
        """End it by force: an interrupted worker has nothing to tidy up."""
        self._process.kill()
        self._process.join()
        self.connection.close()


def _build_in_workers(
    folder: Path, manifest: Manifest, payload: bytes, todo: Sequence[int], count: int, tell: Callable[[int], None]
) -> None:
    waiting = deque(todo)
    crew: dict[Any, _Worker] = {}
    try:
        for index in range(count):
            worker = _Worker(folder, manifest, payload, index)
            crew[worker.connection] = worker
        busy = set(crew)
        while busy:
            for connection in wait(busy):
                rows = crew[connection].news()
                if rows is not None:
                    tell(rows)
                elif waiting:
                    crew[connection].give(waiting.popleft())
                else:
                    busy.discard(connection)
    finally:
        for worker in crew.values():
            worker.end()


def _work(connection: Connection, folder: Path, manifest: Manifest) -> None:
    """The worker. It sends rows made, an error, and the error's traceback; all None if it has nothing to do."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the parent ends its workers
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
