"""`copied_folder`: runs a script in a copy of its folder, and redirects its other writes into a temporary folder.

The preflight of an unchanged script mustn't replace the weights of a training.

The copy is the working directory, and the script's copy is run, so that relative paths and paths derived from
`__file__` lead into the copy for all writers, including C++ and other programs. Absolute paths are redirected when the
script passes them to Python's functions, `torch.save` and related functions, safetensors, or sqlite3. Python refuses to
open any other file for writing. Download folders, such as `~/.cache`, aren't redirected.
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

# Larger files are linked: a script reads the original, and writing creates a new file.
_LARGEST = 1 << 26
_IN_ALL = 1 << 30
_MOST_FILES = 20_000
_LINKED = {".git", ".venv", "venv", "node_modules", ".tox"}
NOT_REDIRECTED = ("/dev", "/proc", "/sys")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

_READ = ("stat", "lstat", "listdir", "scandir", "access", "readlink", "chdir", "statvfs")
_CHANGE = ("mkdir", "chmod", "utime", "chown", "truncate", "mkfifo", "mknod", "setxattr")
_REMOVE = ("remove", "unlink", "rmdir")
_MOVE = ("rename", "replace", "link")


@contextmanager
def copied_folder(script: Path) -> Iterator[Path]:
    """A context in which the working directory is a copy; yields the path of the script's copy.

    At the end the copy is deleted, with everything that was written.
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
            with _redirecting(paths):
                yield Path(paths.redirect(str(script.resolve())))
        finally:
            tempfile.tempdir = before
            os.chdir(here)


class _Copying:
    """Copies a folder: small files are copied, large files and folders are linked."""

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
            except OSError:  # a socket, a broken link, or a file that was just deleted: a script doesn't read it
                continue

    def _has_room(self, size: int) -> bool:
        if size > _LARGEST or self._bytes + size > _IN_ALL or self._files >= _MOST_FILES:
            return False
        self._bytes += size
        self._files += 1
        return True


class _Paths:
    """Redirects paths: in copied folders to the copies; elsewhere, if they are written, to a temporary folder."""

    def __init__(self, copies: list[tuple[str, str]], scratch: str) -> None:
        self._copies = copies
        self._thread = threading.local()
        self._scratch = scratch
        self._elsewhere = os.path.join(scratch, "elsewhere")
        caches = [os.environ.get(name, "") for name in ("XDG_CACHE_HOME", "HF_HOME", "TORCH_HOME", "KAGGLEHUB_CACHE")]
        self._exempt = (*NOT_REDIRECTED, os.path.expanduser("~/.cache"), *filter(None, caches))

    def is_exempt(self, path: str) -> bool:
        """True if a path may be written without redirection."""
        before = getattr(self._thread, "bypass", False)
        self._thread.bypass = True
        try:
            return _is_in(os.path.realpath(path), (self._scratch, *self._exempt))
        finally:
            self._thread.bypass = before

    def redirect(self, path: Any, writes: bool = False, keeps: bool = False) -> Any:
        """Return the redirected path.

        Args:
            path: The path, or a file descriptor, which is returned unchanged.
            writes: True if the file is written (default False).
            keeps: True if a write keeps the file's contents, which are then copied first (default False).
        """
        if isinstance(path, int) or path is None or getattr(self._thread, "bypass", False):
            return path
        self._thread.bypass = True  # the functions called here get unchanged paths
        try:
            return self._redirect_path(path, writes, keeps)
        finally:
            self._thread.bypass = False

    def _redirect_path(self, path: Any, writes: bool, keeps: bool) -> Any:
        original = os.path.abspath(os.fsdecode(path))
        where = self._find_copy(original)
        if not writes:
            aside = self._elsewhere + self._real(where)
            target = aside if not _is_in(where, (self._scratch,)) and os.path.lexists(aside) else where
            return path if target == original else target
        if self.is_exempt(where):
            return path if where == original else where
        real = self._real(where)
        if os.path.islink(where) and _is_in(self._real(where), (self._scratch,)):  # a link to a large file
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

    def _find_copy(self, path: str) -> str:
        for root, copy in self._copies:
            if _is_in(path, (root,)) and not _is_in(path, (self._scratch,)):
                return copy + path[len(root.rstrip("/")) :]
        return path

    @staticmethod
    def _real(path: str) -> str:
        """Return the path with the links of its folder resolved, but not a link at its end."""
        return os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))


def _is_in(path: str, folders: tuple[str, ...]) -> bool:
    return any(path == folder or path.startswith(folder.rstrip("/") + "/") for folder in folders)


@contextmanager
def _redirecting(paths: _Paths) -> Iterator[None]:
    """A context in which functions that take paths get the redirected paths."""
    with ExitStack() as stack:

        def put(owner: Any, name: str, function: Callable[..., Any]) -> None:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, function)

        opened = io.open
        opened_by_os = os.open

        def open_file(file: Any, mode: str = "r", *args: Any, **named: Any) -> Any:
            writes = any(letter in mode for letter in "wax+")
            return opened(paths.redirect(file, writes, keeps="w" not in mode), mode, *args, **named)

        def open_descriptor(path: Any, flags: int, *args: Any, **named: Any) -> int:
            if named.get("dir_fd") is None:
                path = paths.redirect(path, bool(flags & _WRITING), keeps=not flags & os.O_TRUNC)
            return opened_by_os(path, flags, *args, **named)

        put(builtins, "open", open_file)
        put(io, "open", open_file)
        put(os, "open", open_descriptor)
        for name in _READ:
            put(os, name, _redirect_read(paths, getattr(os, name)))
        for name in (*_CHANGE, *_REMOVE):
            put(os, name, _redirect_change(paths, getattr(os, name), name in _REMOVE))
        for name in _MOVE:
            put(os, name, _redirect_move(paths, getattr(os, name)))
        put(os, "symlink", _redirect_symlink(paths, os.symlink))
        for place, name in ((torch, "save"), (torch.jit, "save"), (torch.export, "save")):
            put(place, name, _redirect_save(paths, getattr(place, name), 1))
        for place in (safetensors.torch, safetensors.numpy):
            put(place, "serialize_file", _redirect_save(paths, place.serialize_file, 1))
        put(sqlite3, "connect", _redirect_save(paths, sqlite3.connect, 0))
        # numpy.savetxt keeps its own reference to `open`.
        openers = getattr(sys.modules.get("numpy.lib._datasource"), "_file_openers", None)
        if openers is not None:
            native = openers[None]
            by_suffix: dict[Any, Any] = vars(openers)["_file_openers"]
            by_suffix[None] = open_file
            stack.callback(by_suffix.__setitem__, None, native)
        guard = _Guard(paths)
        sys.addaudithook(guard)
        stack.callback(guard.leave)
        yield


class _Guard:
    """An audit hook that refuses writes by functions without redirection. Python can't remove an audit hook."""

    def __init__(self, paths: _Paths) -> None:
        self._paths: _Paths | None = paths

    def leave(self) -> None:
        self._paths = None

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        paths = self._paths
        if paths is None or event != "open" or isinstance(args[0], int) or not args[2] & _WRITING:
            return
        self._paths = None  # inactive during the check
        try:
            exempt = paths.is_exempt(os.path.abspath(os.fsdecode(args[0])))
        finally:
            self._paths = paths
        if not exempt:
            raise PermissionError(
                f"a preflight doesn't let a script write outside its copied folder, but the script opens {args[0]!r}: "
                "use a relative path, or one below the script's folder"
            )


def _redirect_read(paths: _Paths, native: Callable[..., Any]) -> Callable[..., Any]:
    def function(path: Any = ".", *args: Any, **named: Any) -> Any:
        return native(paths.redirect(path) if named.get("dir_fd") is None else path, *args, **named)

    return function


def _redirect_change(paths: _Paths, native: Callable[..., Any], removes: bool) -> Callable[..., Any]:
    def function(path: Any, *args: Any, **named: Any) -> Any:
        folder = named.get("dir_fd")
        if folder is not None:
            return native(path, *args, **named) if paths.is_exempt(os.readlink(f"/proc/self/fd/{folder}")) else None
        where = paths.redirect(path) if removes else paths.redirect(path, writes=True, keeps=True)
        if removes and not paths.is_exempt(os.path.dirname(os.path.abspath(os.fsdecode(where)))):
            return None  # the original stays, and the script continues
        return native(where, *args, **named)

    return function


def _redirect_move(paths: _Paths, native: Callable[..., Any]) -> Callable[..., Any]:
    def function(src: Any, dst: Any, **named: Any) -> Any:
        if named.get("src_dir_fd") is not None or named.get("dst_dir_fd") is not None:
            return native(src, dst, **named)
        source = paths.redirect(src)
        target = paths.redirect(dst)
        if not paths.is_exempt(os.path.dirname(os.path.abspath(os.fsdecode(target)))):
            target = paths.redirect(dst, writes=True)
        if paths.is_exempt(os.path.dirname(os.path.abspath(os.fsdecode(source)))):
            return native(source, target, **named)
        return shutil.copytree(source, target) if os.path.isdir(source) else shutil.copyfile(source, target)

    return function


def _redirect_symlink(paths: _Paths, native: Callable[..., Any]) -> Callable[..., Any]:
    def function(src: Any, dst: Any, *args: Any, **named: Any) -> Any:
        return native(src, dst if named.get("dir_fd") is not None else paths.redirect(dst, writes=True), *args, **named)

    return function


def _redirect_save(paths: _Paths, native: Callable[..., Any], at: int) -> Callable[..., Any]:
    """Redirect a path to be written, which is the argument at this position, or has one of the usual names."""

    def function(*args: Any, **named: Any) -> Any:
        arguments = list(args)
        if len(arguments) > at and isinstance(arguments[at], (str, bytes, os.PathLike)) and arguments[at] != ":memory:":
            arguments[at] = paths.redirect(arguments[at], writes=True, keeps=True)
        for name in ("f", "filename", "database"):
            if isinstance(named.get(name), (str, bytes, os.PathLike)) and named[name] != ":memory:":
                named[name] = paths.redirect(named[name], writes=True, keeps=True)
        return native(*arguments, **named)

    return function
