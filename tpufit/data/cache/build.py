"""The warm-up: worker processes that each make one file of a cache at a time, and a bar that shows how far they are.

Workers are spawned, never forked: a fork would share the file positions of the source's open files, and could hang in
the threads of an XLA that already runs. So source and transform are pickled, and looked up by name in the worker.
"""

from __future__ import annotations

import ctypes
import errno
import linecache
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ...errors import ArgumentError, CacheBusyError, CacheDiskFullError, CacheError, DataError
from ...utils.files import DISK_FULL, HeldError, Lock, drop_drafts
from ...utils.hardware import cpus
from .maker import Maker, alone
from .manifest import Manifest

Workers = int | Literal["auto"]

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold a cache's lock, which ends with the process if not before, and clear what killed warm-ups left.

    Args:
        folder: The cache; it is made if need be.

    Raises:
        CacheBusyError: Another warm-up holds it.
        CacheError: Nothing may be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = Lock(folder)
    except HeldError:
        raise CacheBusyError(
            f"another warm-up is at work in {folder}. Wait for its end; what it makes can then be read"
        ) from None
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        raise CacheError(
            f"{folder} can't be written to ({error.strerror}). Make the cache where that is possible, then read it "
            "from wherever it lies with CachedDataset.open"
        ) from error
    drop_drafts(folder)
    try:
        yield
    finally:
        drop_drafts(folder)
        lock.release()


def build(maker: Maker, folder: Path, layout: Manifest, workers: Workers, progress: bool) -> None:
    """Make the files of a cache that are missing.

    Args:
        maker: What makes the samples.
        folder: The cache, whose lock is held.
        layout: What it is to hold.
        workers: How many processes; 0 is this one, `"auto"` one for each CPU.
        progress: Whether to show a bar.

    Raises:
        CacheDiskFullError: There is no room any more.
        CacheError: A worker died.
        DataError: A sample can't be made.
        ArgumentError: What is to go to the workers can't.
    """
    todo = missing(folder, layout)
    crew, payload = _crew(maker, workers, len(todo))
    rows = sum(len(layout.span(number)) for number in todo)
    with _bar(rows, progress) as tell:
        try:
            if crew:
                _build_in_workers(_Task(folder, layout, os.getpid()), payload, todo, crew, tell)
            else:
                with alone():
                    for number in todo:
                        maker.build(folder, layout, number, tell)
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            raise _disk_full(folder, layout) from error


def missing(folder: Path, layout: Manifest) -> list[int]:
    """The files of a cache that are still to be made. One that is there is finished.

    Args:
        folder: The cache.
        layout: What it is to hold.
    """
    return [number for number in range(layout.files) if not (folder / layout.name(number)).exists()]


def check_room(folder: Path, layout: Manifest) -> None:
    """Make sure that the missing files will fit on the disk, before any work is done.

    Args:
        folder: The cache.
        layout: What it is to hold.

    Raises:
        CacheDiskFullError: They won't.
    """
    error = _disk_full(folder, layout)
    if error.need > error.free:
        raise error


def _disk_full(folder: Path, layout: Manifest) -> CacheDiskFullError:
    todo = missing(folder, layout)
    need = sum(len(layout.span(number)) for number in todo) * layout.row_bytes
    free = shutil.disk_usage(folder).free
    return CacheDiskFullError(folder, need, free, layout.files - len(todo), layout.files)


@contextmanager
def _bar(rows: int, shown: bool) -> Iterator[Callable[[int], None]]:
    # Not misled by FORCE_COLOR: in a log that can't be drawn on, the bar is one line at the end.
    console = Console(force_terminal=None if sys.stdout.isatty() else False)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("samples"), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not shown) as progress:
        task = progress.add_task("", total=rows)
        yield lambda made: progress.advance(task, made)


def _crew(maker: Maker, workers: Workers, files: int) -> tuple[int, bytes]:
    """How many workers there will be, and what they are sent; none if this process does the work."""
    crew = min(cpus() if workers == "auto" else workers, files)
    if crew == 0 or (crew == 1 and workers == "auto"):
        return 0, b""
    payload, obstacle = _pickled(maker)
    if not obstacle:
        return crew, payload
    if workers != "auto":
        raise ArgumentError(f"workers={workers}: {obstacle}, or pass workers=0")
    warnings.warn(f"one process makes all the samples: {obstacle}, or pass workers=0", stacklevel=4)
    return 0, b""


def _pickled(maker: Maker) -> tuple[bytes, str]:
    """The maker's pickle, and what keeps a worker from reading it, if anything does."""
    try:
        payload = pickle.dumps(maker)
    except (pickle.PicklingError, AttributeError, TypeError, ValueError) as error:
        return b"", f"source or transform can't be pickled ({error}). Define in a module what they are made of"
    script = getattr(sys.modules["__main__"], "__file__", None)
    if script is None and b"__main__" in payload:
        return b"", "source or transform is defined in a notebook or prompt, where no worker finds it. Use a module"
    if script is not None and not any("__main__" in line for line in linecache.getlines(script)):
        return b"", (
            f'each worker would run {script} as a whole. Put all but its definitions under `if __name__ == "__main__":`'
        )
    return payload, ""


@dataclass(frozen=True)
class _Task:
    """What a worker is started with: what to make, and who its parent is."""

    folder: Path
    layout: Manifest
    parent: int


@dataclass(frozen=True)
class _Failure:
    """What ended a worker."""

    error: Exception
    traceback: str


class _InWorkerError(Exception):
    """The traceback of an error in a worker, shown as the error's cause."""


class _Worker:
    """A worker process, as its parent sees it.

    Args:
        task: What it is to make.
        payload: The pickled maker. It is sent only when asked for: a pipe holds little, and who fills it waits.
        index: Which worker it is, from 0.
    """

    def __init__(self, task: _Task, payload: bytes, index: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._layout, self._payload, self._index = task.layout, payload, index
        self._doing = "before it made a file"
        self._process = context.Process(target=_work, args=(theirs, task), name=f"tpufit-warm-up-{index}", daemon=True)
        self._process.start()
        theirs.close()  # so that the end of the worker is the end of the pipe

    def give(self, number: int) -> None:
        """Ask for a file."""
        self._doing = f"while it made {self._layout.name(number)}"
        with suppress(ConnectionError):  # it died; `news` will say so
            if self._payload:
                self.connection.send_bytes(self._payload)
                self._payload = b""
            self.connection.send(number)

    def news(self) -> int | None:
        """How many rows it has made since the last news, or None if it has nothing to do.

        Raises:
            CacheError: It died.
            DataError, OSError: What ended it.
        """
        try:
            news = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            code = self._process.exitcode or 0
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            why = ", as the kernel does when memory runs out," if code == -signal.SIGKILL else ""
            raise CacheError(
                f"worker {self._index} (process {self._process.pid}) {how}{why} {self._doing}. What it had to say is "
                "above. Finished files are kept: call warm_up() again, with fewer workers if memory is short"
            ) from None
        if isinstance(news, _Failure):
            raise news.error from _InWorkerError(f"\n{news.traceback}")
        return None if news is None else int(news)

    def end(self) -> None:
        """End it by force: an interrupted worker has nothing to tidy up."""
        self._process.kill()
        self._process.join()
        self.connection.close()


def _build_in_workers(
    task: _Task, payload: bytes, todo: Sequence[int], count: int, tell: Callable[[int], None]
) -> None:
    waiting = deque(todo)
    crew: dict[Any, _Worker] = {}
    try:
        for index in range(count):
            worker = _Worker(task, payload, index)
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


def _work(connection: Connection, task: _Task) -> None:
    """The worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the parent ends its workers
    _die_with(task.parent)
    torch.set_num_threads(1)
    connection.send(None)
    try:
        maker: Maker = pickle.loads(connection.recv_bytes())
        while True:
            maker.build(task.folder, task.layout, connection.recv(), connection.send)
            connection.send(None)
    except Exception as error:
        known = error if isinstance(error, (DataError, OSError)) else CacheError(f"{type(error).__name__}: {error}")
        connection.send(_Failure(known, traceback.format_exc()))


def _die_with(parent: int) -> None:
    """Leave no worker behind when the parent is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was killed before
        sys.exit()
