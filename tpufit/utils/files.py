"""Atomic file writes, by a draft next to the target and a rename; and locks on folders."""

import errno
import fcntl
import json
import os
import re
import socket
import stat
import struct
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from .user_code import warn

# safetensors' names of dtypes.
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
}
LOCK = ".lock"  # the lock file in a folder
# The errors of a full file system, and of a file system without locks.
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
_HOLDER = re.compile(rb"process \d+ on .+")  # the content of a lock file


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Return a context with a draft to write; the draft replaces the file when the context ends without an error.

    Even if the process is killed, the file is either the old or the new one. After an error the draft is deleted; only
    a killed process leaves a draft, which `drop_drafts` removes. The folder must exist. A link is replaced, not its
    target.

    Raises:
        OSError: The write failed, or the path is a folder, a device or a pipe, which a file can't replace.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with replacing(Path(folder, "a.txt")) as draft:
        ...         size = draft.write_text("whole")
        ...     os.listdir(folder)
        ['a.txt']
    """
    require_replaceable(target)
    draft = target.with_name(f".{target.name}.tmp-{os.getpid()}")
    try:
        yield draft
        flush(draft)
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)
    flush(target.parent)  # else a power cut may lose the rename


def append_or_undo(file: BinaryIO, content: bytes, durable: bool = False) -> None:
    """Append to an unbuffered file at its position; if the file system refuses, the file stays as it was.

    With `durable`, wait until the disk has the content.

    Raises:
        OSError: The file system refused.
    """
    end = file.tell()
    rest = memoryview(content)
    try:
        while rest:  # a full disk may accept only a part
            rest = rest[file.write(rest) :]
        if durable:
            os.fsync(file.fileno())
    except OSError:
        with suppress(OSError):
            file.truncate(end)
        raise


@contextmanager
def tolerating_full_disk() -> Iterator[None]:
    """A context that ends silently if the disk is full: the caller keeps the content, and writes it later.

    Raises:
        OSError: The file system refused for another reason.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise


def require_replaceable(target: Path) -> None:
    """Raise an `OSError` if the path exists and isn't a file: a folder, a device, a pipe, or a link to one of these."""
    if target.exists() and not target.is_file():
        raise FileExistsError(errno.EEXIST, "It isn't a file, and can't be replaced by one", str(target))


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file of host tensors, no two of which share memory.

    Raises:
        OSError: The write failed. With an errno in `DISK_FULL` the disk is full.
    """
    path.touch()  # safetensors would create a file that only its owner can read, whatever the umask
    mode = path.stat().st_mode
    try:
        safetensors.torch.save_file(dict(tensors), path, metadata=dict(metadata or {}))
        path.chmod(stat.S_IMODE(mode))
    except safetensors.SafetensorError as error:
        code = re.search(r"os error (\d+)", str(error))  # safetensors gives the number only in its message
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from error


def write_one_by_one(
    path: Path, tensors: Mapping[str, Tensor], values: Iterator[Tensor], metadata: Mapping[str, str]
) -> None:
    """Write a safetensors file of tensors that need not fit in memory together: their host values arrive in order.

    Only the tensors' shapes and dtypes are used. The widest dtypes must come first, so that all are aligned.

    Raises:
        OSError: The write failed.

    Example:
        >>> import tempfile, torch
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder, "a.safetensors")
        ...     write_one_by_one(file, {"a": torch.zeros(2)}, iter([torch.ones(2)]), {"format": "pt"})
        ...     safetensors.torch.load_file(file)
        {'a': tensor([1., 1.])}
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        start = end
        end = end + tensor.nbytes
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _ in tensors:
            value = next(values)
            file.write(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
            del value  # before the next value arrives


def drop_drafts(folder: Path, names: str) -> None:
    """Remove killed processes' drafts of files whose names match a pattern.

    The caller must ensure that no other process is writing there.
    """
    form = re.compile(rf"\.({names})\.tmp-\d+")
    for draft in folder.glob(".*.tmp-*"):
        if form.fullmatch(draft.name) and draft.is_file() and not draft.is_symlink():
            draft.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class LockedError(Exception):
    """The folder is locked; the message is what the lock's owner wrote to it.

    Attributes:
        here: True if this process has locked it.
    """

    def __init__(self, holder: str, here: bool) -> None:
        self.here = here
        super().__init__(holder)


class Lock:
    """A folder's lock against other processes, and other locks of this process. It ends with the process.

    Forked processes, such as a loader's workers, don't inherit it, since they may outlive this process. `release` may
    be called again.

    Raises:
        LockedError: The folder is locked.
        OSError: The file can't be written, or the folder's `.lock` is a link or another program's.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     lock = Lock(Path(folder))
        ...     lock.release()
    """

    def __init__(self, folder: Path) -> None:
        self._descriptor = _open(folder / LOCK)
        self.release = weakref.finalize(self, _unlock, self._descriptor)
        try:
            # The lock belongs to this open file, unlike `lockf`'s, which ends when any descriptor of the file is
            # closed.
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            holder = os.read(self._descriptor, 1000).decode(errors="replace")
            here = any(lock.is_on(self._descriptor) for lock in list(_active))
            self.release()
            raise LockedError(holder, here) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                self.release()
                raise
            warn(
                f"the file system of {folder} has no locks ({error.strerror}): make sure that no other process is "
                "writing there",
            )
        _active.add(self)
        os.truncate(self._descriptor, 0)
        os.write(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())

    def is_on(self, descriptor: int) -> bool:
        """True if this is a lock on the descriptor's file, and isn't released."""
        return self.release.alive and os.path.samestat(os.fstat(self._descriptor), os.fstat(descriptor))

    def forget(self) -> None:
        """Leave the lock to the parent of this forked process."""
        if self.release.detach() is not None:
            os.close(self._descriptor)


def _open(path: Path) -> int:
    """Open a lock file, and create it if necessary."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(error.errno, f"Its {LOCK} is a link, which is never followed: remove it", str(path)) from None
    content = os.pread(descriptor, 1000, 0) if stat.S_ISREG(os.fstat(descriptor).st_mode) else None
    if content is None or (content and not _HOLDER.fullmatch(content)):
        os.close(descriptor)
        raise FileExistsError(errno.EEXIST, f"Its {LOCK} is another program's", str(path))
    return descriptor


def _unlock(descriptor: int) -> None:
    with suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # also for a process forked at this moment
    os.close(descriptor)


# This process's locks, which forked processes leave to it.
_active: weakref.WeakSet[Lock] = weakref.WeakSet()


def _forget_all() -> None:
    for lock in list(_active):
        lock.forget()


os.register_at_fork(after_in_child=_forget_all)
