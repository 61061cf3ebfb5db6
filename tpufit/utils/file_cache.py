"""`FileCache`: a bounded folder of files that later processes of the same user read.

With TorchTPU it has the compiled programs, so that a second run of a script compiles nothing.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import time

_DIGEST = 32  # bytes at a file's start
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OLD = 3600.0  # seconds after which a draft belongs to a killed process


def cache_folder() -> Path | None:
    """Return the user's folder for tpufit's caches, which may not exist yet; None if the user has no home.

    Example:
        >>> cache_folder().name
        'tpufit'
    """
    home = os.environ.get("XDG_CACHE_HOME")
    with suppress(RuntimeError):
        return Path(home or Path.home() / ".cache") / "tpufit"
    return None


@dataclass(frozen=True)
class FileCache:
    """A folder of files that later processes of the same user read.

    A file is written next to its place and renamed, so several processes may write and be killed at any time. Each file
    begins with a digest of its name and content, which reveals damage. The folder and its files are used only if they
    belong to this user, and no other user may write to them.

    Attributes:
        folder: The folder. It is created for the first file.
        suffix: The end of each file's name. Other files in the folder are left alone.
        limit: The bytes of all files. Beyond them, the files that were used least recently are removed.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     cache = FileCache(Path(folder, "kept"), ".bin", limit=100)
        ...     cache.write("ab12", b"content")
        ...     cache.read("ab12"), cache.read("cd34")
        (b'content', None)
    """

    folder: Path
    suffix: str
    limit: int

    def read(self, name: str) -> bytes | None:
        """Return the content of a file; None if there is none, it is damaged, or others may have written it."""
        try:
            with self._open() as folder:
                # A pipe would block.
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
                with open(os.open(name + self.suffix, flags, dir_fd=folder), "rb") as file:
                    if not _is_own(os.fstat(file.fileno()), stat.S_ISREG):
                        return None
                    digest, content = file.read(_DIGEST), file.read()
                    if digest != _digest(name, content):
                        return None
                    with suppress(OSError):  # a read-only file system
                        os.utime(file.fileno())
                    return content
        except OSError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """Write or replace a file, unless the disk is full, nothing can be written there, or it is above the limit."""
        if _DIGEST + len(content) > self.limit:
            return
        with suppress(OSError):
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            self.folder.mkdir(mode=0o700, exist_ok=True)
            with self._open() as folder:
                draft = f".{name}{self.suffix}.{secrets.token_hex(8)}"
                try:
                    made = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
                    with open(made, "wb") as file:
                        file.write(_digest(name, content))
                        file.write(content)
                    os.rename(draft, name + self.suffix, src_dir_fd=folder, dst_dir_fd=folder)
                except BaseException:
                    with suppress(OSError):
                        os.unlink(draft, dir_fd=folder)
                    raise
                self._shrink(folder)

    def find_refusal(self) -> str:
        """Return what is wrong with the owner or mode of a folder that therefore isn't used; "" otherwise."""
        try:
            with self._open():
                return ""
        except PermissionError as error:
            return str(error.strerror)
        except OSError:
            return ""

    @contextmanager
    def _open(self) -> Iterator[int]:
        """A context with a descriptor of the folder, which stays that of the checked folder even if it is renamed."""
        descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            found = os.fstat(descriptor)
            if not _is_own(found, stat.S_ISDIR):
                mode = stat.S_IMODE(found.st_mode)
                why = f"user {found.st_uid} owns it and its mode is {mode:o}, so others may write to it"
                raise PermissionError(errno.EPERM, why, str(self.folder))
            yield descriptor
        finally:
            os.close(descriptor)

    def _shrink(self, folder: int) -> None:
        """Remove drafts of killed processes, then the files that were used least recently, down to the limit."""
        ours = re.compile(rf"\.?[0-9a-z]+{re.escape(self.suffix)}(\.[0-9a-f]+)?")
        files: list[tuple[int, int, str]] = []
        for entry in os.scandir(folder):
            if not ours.fullmatch(entry.name):
                continue
            with suppress(FileNotFoundError):  # another process has removed it
                found = entry.stat(follow_symlinks=False)
                if entry.name.startswith(".") and time() - found.st_mtime > _OLD:
                    os.unlink(entry.name, dir_fd=folder)
                else:
                    files.append((found.st_mtime_ns, found.st_size, entry.name))
        size = sum(size for _, size, _ in files)
        for _, own, name in sorted(files):
            if size <= self.limit:
                return
            if not name.startswith("."):
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=folder)
                size -= own


def _is_own(found: os.stat_result, is_kind: Callable[[int], bool]) -> bool:
    """True if a file or folder is of this kind and belongs to this user, and no other user may write to it."""
    return is_kind(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & _OTHERS_WRITE


def _digest(name: str, content: bytes) -> bytes:
    digest = hashlib.blake2b(name.encode() + b"\0", digest_size=_DIGEST)
    digest.update(content)
    return digest.digest()
