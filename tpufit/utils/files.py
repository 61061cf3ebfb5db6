"""Files that are whole or not there, written beside their target and committed by a rename; and locks on folders."""

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
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from .users_code import warn

# The names of safetensors for dtypes.
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
LOCK = ".lock"  # the file in a folder that is locked
# The errors of a file system that has no room for more, and of one that has no locks.
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
_HOLDER = re.compile(rb"process \d+ on .+")  # the content of a lock


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Give a draft to write beside a file; it takes the file's place when the block ends without an error.

    Whenever the process may die, the file is the old one or the new one. After an error nothing of the draft is left;
    only a killed process leaves one, which `drop_drafts` removes. The folder must exist. A link is replaced, and not
    the file that it leads to.

    Raises:
        OSError: The file system refused, or the path is a folder, a device or a pipe, which no file may replace.

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
    flush(target.parent)  # else the rename itself may be lost with the power


def require_replaceable(target: Path) -> None:
    """Raise an `OSError` if something is there that isn't a file: a folder, a device, a pipe, or a link to one."""
    if target.exists() and not target.is_file():
        raise FileExistsError(errno.EEXIST, "It isn't a file, and can't be replaced by one", str(target))


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file of host tensors, no two of which share memory.

    Raises:
        OSError: The file system refused. With an errno of `DISK_FULL` there is no room.
    """
    path.touch()  # safetensors would make a file that only its owner may read, whatever the umask says
    mode = path.stat().st_mode
    try:
        safetensors.torch.save_file(dict(tensors), path, metadata=dict(metadata or {}))
        path.chmod(stat.S_IMODE(mode))
    except safetensors.SafetensorError as error:
        found = re.search(r"os error (\d+)", str(error))  # it says so in words only
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error


def write_one_by_one(
    path: Path, tensors: Mapping[str, Tensor], values: Iterator[Tensor], metadata: Mapping[str, str]
) -> None:
    """Write a safetensors file of tensors that need not be in memory together: their values come on the host, in order.

    Of the tensors only shape and dtype count. The widest dtypes come first, so that all lie at whole multiples of their
    width.

    Raises:
        OSError: The file system refused.

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
            del value  # before the next one comes


def drop_drafts(folder: Path, names: str) -> None:
    """Remove the drafts that killed processes left of files whose names match a pattern.

    The caller makes sure that no other process is writing there.
    """
    form = re.compile(rf"\.({names})\.tmp-\d+")
    for draft in folder.glob(".*.tmp-*"):
        if form.fullmatch(draft.name) and draft.is_file() and not draft.is_symlink():
            draft.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Wait until the disk holds the bytes of a file, or the names in a folder, before anything that relies on them."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class HeldError(Exception):
    """A lock is held; the message is what its holder wrote into it.

    Attributes:
        here: True if this process holds it.
    """

    def __init__(self, holder: str, here: bool) -> None:
        self.here = here
        super().__init__(holder)


class Lock:
    """A folder's lock against other processes, and against other locks of this one. It ends with its process.

    A process that this one forks, such as a loader's worker, doesn't have it: it may live on when this one is killed.
    To `release` it again is no error.

    Raises:
        HeldError: The folder is locked.
        OSError: The file system refused, or the folder's `.lock` is a link or another program's.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     lock = Lock(Path(folder))
        ...     lock.release()
    """

    def __init__(self, folder: Path) -> None:
        self._descriptor = _opened(folder / LOCK)
        self.release = weakref.finalize(self, _unlock, self._descriptor)
        try:
            # Of this open file, unlike `lockf`, whose locks end when any other descriptor of the file is closed.
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            holder = os.read(self._descriptor, 1000).decode(errors="replace")
            here = any(lock.is_of(self._descriptor) for lock in list(_held))
            self.release()
            raise HeldError(holder, here) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                self.release()
                raise
            warn(
                f"the file system of {folder} has no locks ({error.strerror}): make sure that no other process is at "
                "work there",
            )
        _held.add(self)
        os.truncate(self._descriptor, 0)
        os.write(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())

    def is_of(self, descriptor: int) -> bool:
        """True if this is a lock on the same file, and isn't released."""
        return self.release.alive and os.path.samestat(os.fstat(self._descriptor), os.fstat(descriptor))

    def forget(self) -> None:
        """Leave the lock to the process that this one was forked from."""
        if self.release.detach() is not None:
            os.close(self._descriptor)


def _opened(path: Path) -> int:
    """Open a file for a lock, and make it if it isn't there."""
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
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # also for a process that was forked this moment
    os.close(descriptor)


# The locks of this process, to be left to it by those that it forks.
_held: weakref.WeakSet[Lock] = weakref.WeakSet()


def _forget_all() -> None:
    for lock in list(_held):
        lock.forget()


os.register_at_fork(after_in_child=_forget_all)
