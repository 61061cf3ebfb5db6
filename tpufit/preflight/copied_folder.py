"""`copied_folder`: a script runs in a copy of its folder, and what it writes elsewhere goes there too.

The copy is the working directory, and the script in it is the one that runs, so that relative paths, and those made of
`__file__`, lead into the copy whatever writes there, also C++ and other programs. Absolute paths are led there as the
script gives them to Python's functions, to `torch.save`, safetensors and sqlite3. Whatever else Python is about to
open for writing is refused. Folders of downloads, such as `~/.cache`, stay as they are.
"""

from __future__ import annotations

import builtins
import io
import os
import shutil
import sqlite3
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import safetensors.numpy
import safetensors.torch
import torch

# Larger files are links: a script reads them as they are, and what it writes in their place is a new file.
_LARGEST = 1 << 26
_IN_ALL = 1 << 30
_MOST_FILES = 20_000
_LINKED = {".git", ".venv", "venv", "node_modules", ".tox"}
_FREE = ("/dev", "/proc", "/sys")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

_READ = ("stat", "lstat", "listdir", "scandir", "access", "readlink", "chdir", "statvfs")
_CHANGE = ("mkdir", "chmod", "utime", "chown", "truncate", "mkfifo", "mknod", "setxattr")
_REMOVE = ("remove", "unlink", "rmdir")
_MOVE = ("rename", "replace", "link")


@contextmanager
def copied_folder(script: Path) -> Iterator[Path]:
    """A context in which the working directory is a copy, and nothing is written elsewhere. It gives the script's copy.

    In the end the copy is deleted, with all that was written.
    """
    here = Path.cwd().resolve()
    home = script.resolve().parent
    roots = [here] if home.is_relative_to(here) else [here, home]
    with tempfile.TemporaryDirectory(prefix="tpufit-preflight-", ignore_cleanup_errors=True) as name:
        scratch = Path(name).resolve()
        copies = [(str(root), str(scratch / f"folder{i}")) for i, root in enumerate(roots)]
        for root, copy in copies:
            _Copying(scratch).copy(Path(root), Path(copy))
        (scratch / "tmp").mkdir()
        paths = _Paths(copies, str(scratch))
        before = tempfile.tempdir
        os.chdir(copies[0][1])
        tempfile.tempdir = str(scratch / "tmp")
        try:
            with _led_there(paths):
                yield Path(paths.of(str(script.resolve())))
        finally:
            tempfile.tempdir = before
            os.chdir(here)


class _Copying:
    """Copies a folder: small files as they are, and links to what is large."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._files = 0
        self._bytes = 0

    def copy(self, source: Path, target: Path) -> None:
        target.mkdir()
        for entry in sorted(source.iterdir(), key=lambda path: path.is_dir()):
            place = target / entry.name
            try:
                if entry == self._scratch or not os.access(entry, os.R_OK):
                    continue
                if entry.is_dir() and not entry.is_symlink() and entry.name not in _LINKED and self._has_room(0):
                    self.copy(entry, place)
                elif entry.is_file() and self._has_room(entry.stat().st_size):
                    shutil.copy2(entry, place)
                else:
                    place.symlink_to(entry.resolve())
            except OSError:  # a socket, a broken link, or gone by now: it is no part of what a script reads
                continue

    def _has_room(self, size: int) -> bool:
        if size > _LARGEST or self._bytes + size > _IN_ALL or self._files >= _MOST_FILES:
            return False
        self._bytes += size
        self._files += 1
        return True


class _Paths:
    """Where paths lead: those of copied folders into the copies, and others to a place beside if they are written."""

    def __init__(self, copies: list[tuple[str, str]], scratch: str) -> None:
        self._copies = copies
        self._thread = threading.local()
        self._scratch = scratch
        self._elsewhere = os.path.join(scratch, "elsewhere")
        caches = [os.environ.get(name, "") for name in ("XDG_CACHE_HOME", "HF_HOME", "TORCH_HOME", "KAGGLEHUB_CACHE")]
        self._free = (*_FREE, os.path.expanduser("~/.cache"), *filter(None, caches))

    def is_free(self, path: str) -> bool:
        """True if a path may be written as it is."""
        before = getattr(self._thread, "looks", False)
        self._thread.looks = True
        try:
            return _is_in(os.path.realpath(path), (self._scratch, *self._free))
        finally:
            self._thread.looks = before

    def of(self, path: Any, writes: bool = False, keeps: bool = False) -> Any:
        """The path to use in place of one; if it is written to, and its contents are kept, with them."""
        if isinstance(path, int) or path is None or getattr(self._thread, "looks", False):
            return path
        self._thread.looks = True  # the functions that this calls itself take paths as they are
        try:
            return self._led(path, writes, keeps)
        finally:
            self._thread.looks = False

    def _led(self, path: Any, writes: bool, keeps: bool) -> Any:
        given = os.fsdecode(path)
        where = self._in_copies(os.path.abspath(given))
        if not writes:
            aside = self._elsewhere + self._real(where)
            found = aside if not _is_in(where, (self._scratch,)) and os.path.lexists(aside) else where
            return path if found == os.path.abspath(given) else found
        if self.is_free(where):
            return path if where == os.path.abspath(given) else where
        real = self._real(where)
        if os.path.islink(where) and _is_in(self._real(where), (self._scratch,)):  # to a large file
            target = os.path.realpath(where)
            os.unlink(where)
            if keeps:
                shutil.copyfile(target, where)
            return where
        aside = self._elsewhere + real
        if os.path.isdir(os.path.dirname(real)):
            os.makedirs(os.path.dirname(aside), exist_ok=True)
        if keeps and os.path.isfile(real) and not os.path.exists(aside):
            shutil.copyfile(real, aside)
        return aside

    def _in_copies(self, path: str) -> str:
        for root, copy in self._copies:
            if _is_in(path, (root,)) and not _is_in(path, (self._scratch,)):
                return copy + path[len(root.rstrip("/")) :]
        return path

    @staticmethod
    def _real(path: str) -> str:
        """The path with its folder's links resolved, but not its own."""
        return os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))


def _is_in(path: str, folders: tuple[str, ...]) -> bool:
    return any(path == folder or path.startswith(folder.rstrip("/") + "/") for folder in folders)


@contextmanager
def _led_there(paths: _Paths) -> Iterator[None]:
    """A context in which the functions that take paths get those of `paths`."""
    with ExitStack() as stack:

        def put(owner: Any, name: str, function: Callable[..., Any]) -> None:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, function)

        opened = io.open
        opened_by_os = os.open

        def open_file(file: Any, mode: str = "r", *args: Any, **named: Any) -> Any:
            writes = any(letter in mode for letter in "wax+")
            return opened(paths.of(file, writes, keeps="w" not in mode), mode, *args, **named)

        def open_descriptor(path: Any, flags: int, *args: Any, **named: Any) -> int:
            if named.get("dir_fd") is None:
                path = paths.of(path, bool(flags & _WRITING), keeps=not flags & os.O_TRUNC)
            return opened_by_os(path, flags, *args, **named)

        put(builtins, "open", open_file)
        put(io, "open", open_file)
        put(os, "open", open_descriptor)
        for name in _READ:
            put(os, name, _reading(paths, getattr(os, name)))
        for name in (*_CHANGE, *_REMOVE):
            put(os, name, _changing(paths, getattr(os, name), name in _REMOVE))
        for name in _MOVE:
            put(os, name, _moving(paths, getattr(os, name)))
        put(os, "symlink", _linking(paths, os.symlink))
        put(torch, "save", _saving(paths, torch.save, 1))
        for place in (safetensors.torch, safetensors.numpy):
            put(place, "serialize_file", _saving(paths, place.serialize_file, 1))
        put(sqlite3, "connect", _saving(paths, sqlite3.connect, 0))
        # numpy.savetxt keeps a function of its own.
        openers = getattr(sys.modules.get("numpy.lib._datasource"), "_file_openers", None)
        if openers is not None:
            native = openers[None]
            known: dict[Any, Any] = vars(openers)["_file_openers"]
            known[None] = open_file
            stack.callback(known.__setitem__, None, native)
        guard = _Guard(paths)
        sys.addaudithook(guard)
        stack.callback(guard.leave)
        yield


class _Guard:
    """Refuses what a function that isn't led opens for writing elsewhere: an audit hook, which stays for good."""

    def __init__(self, paths: _Paths) -> None:
        self._paths: _Paths | None = paths

    def leave(self) -> None:
        self._paths = None

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        paths = self._paths
        if paths is None or event != "open" or isinstance(args[0], int) or not args[2] & _WRITING:
            return
        self._paths = None  # while it looks
        try:
            free = paths.is_free(os.path.abspath(os.fsdecode(args[0])))
        finally:
            self._paths = paths
        if not free:
            raise PermissionError(
                f"preflight lets a script write nothing outside of its copy, but it opens {args[0]!r}"
            )


def _reading(paths: _Paths, native: Callable[..., Any]) -> Callable[..., Any]:
    def function(path: Any = ".", *args: Any, **named: Any) -> Any:
        return native(paths.of(path) if named.get("dir_fd") is None else path, *args, **named)

    return function


def _changing(paths: _Paths, native: Callable[..., Any], removes: bool) -> Callable[..., Any]:
    def function(path: Any, *args: Any, **named: Any) -> Any:
        folder = named.get("dir_fd")
        if folder is not None:
            return native(path, *args, **named) if paths.is_free(os.readlink(f"/proc/self/fd/{folder}")) else None
        where = paths.of(path) if removes else paths.of(path, writes=True, keeps=True)
        if removes and not paths.is_free(os.path.dirname(os.path.abspath(os.fsdecode(where)))):
            return None  # it stays, as if it had gone
        return native(where, *args, **named)

    return function


def _moving(paths: _Paths, native: Callable[..., Any]) -> Callable[..., Any]:
    def function(src: Any, dst: Any, **named: Any) -> Any:
        if named.get("src_dir_fd") is not None or named.get("dst_dir_fd") is not None:
            return native(src, dst, **named)
        source = paths.of(src)
        target = paths.of(dst)
        if not paths.is_free(os.path.dirname(os.path.abspath(os.fsdecode(target)))):
            target = paths.of(dst, writes=True)
        if paths.is_free(os.path.dirname(os.path.abspath(os.fsdecode(source)))):
            return native(source, target, **named)
        return shutil.copytree(source, target) if os.path.isdir(source) else shutil.copyfile(source, target)

    return function


def _linking(paths: _Paths, native: Callable[..., Any]) -> Callable[..., Any]:
    def function(src: Any, dst: Any, *args: Any, **named: Any) -> Any:
        return native(src, dst if named.get("dir_fd") is not None else paths.of(dst, writes=True), *args, **named)

    return function


def _saving(paths: _Paths, native: Callable[..., Any], at: int) -> Callable[..., Any]:
    """A function whose argument at this place, or by its usual names, is a path that is written to."""

    def function(*args: Any, **named: Any) -> Any:
        given = list(args)
        if len(given) > at and isinstance(given[at], (str, bytes, os.PathLike)) and given[at] != ":memory:":
            given[at] = paths.of(given[at], writes=True, keeps=True)
        for name in ("f", "filename", "database"):
            if isinstance(named.get(name), (str, bytes, os.PathLike)) and named[name] != ":memory:":
                named[name] = paths.of(named[name], writes=True, keeps=True)
        return native(*given, **named)

    return function
