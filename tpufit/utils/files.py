"""Files that are whole or not there, written beside their target and committed by a rename; and locks on folders."""

import errno
import fcntl
import json
import os
import re
import socket
import struct
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Give a draft to write beside a file; it takes the file's place when the block ends without an error.

    Whenever the process may die, the file is the old one or the new one. After an error nothing of the draft is left;
    only a killed process leaves one, which `drop_drafts` removes. The folder must exist.

    Raises:
        OSError: The file system refused.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with replacing(Path(folder, "a.txt")) as draft:
        ...         size = draft.write_text("whole")
        ...     os.listdir(folder)
        ['a.txt']
    """
    draft = target.with_name(f".{target.name}.tmp-{os.getpid()}")
    try:
        yield draft
        flush(draft)
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)
    flush(target.parent)  # else the rename itself may be lost with the power


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file of host tensors, no two of which share memory.

    Raises:
        OSError: The file system refused. With an errno of `DISK_FULL` there is no room.
    """
    try:
        safetensors.torch.save_file(dict(tensors), path, metadata=dict(metadata or {}))
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


def drop_drafts(folder: Path) -> None:
    """Remove the drafts that killed processes left. The caller makes sure that no other process is writing there."""
    for draft in folder.glob(".*.tmp-*"):
        draft.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Wait until the disk holds the bytes of a file, or the names in a folder, before anything that relies on them."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class HeldError(Exception):
    """Another process holds a lock; the message is what it wrote into it."""


class Lock:
    """A folder's lock against other processes. It ends with this process if not before, however that dies.

    Processes that this one forks, such as a loader's workers, don't have it: they may live on when this one is killed.
    To `release` it again is no error.

    Raises:
        HeldError: Another process holds it.
        OSError: The file system refused.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     lock = Lock(Path(folder))
        ...     lock.release()
    """

    def __init__(self, folder: Path) -> None:
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        self.release = weakref.finalize(self, os.close, descriptor)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            holder = os.read(descriptor, 1000).decode(errors="replace")
            self.release()
            raise HeldError(holder) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                self.release()
                raise
            warn(
                f"the file system of {folder} has no locks ({error.strerror}): make sure that no other process is at "
                "work there",
            )
        os.truncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
