"""The messages between the user's process and the processes of other cores, over sockets and shared memory.

A tensor of several cores has a number, which is the same in all processes. A message is one packet of a socket. Large
data, such as the rows of a batch or the text of a program, are in a `Block`, whose file comes with the message that
announces it.
"""

from __future__ import annotations

import mmap
import os
import pickle
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...backend import block_of_rows

_ALIGNMENT = 64  # bytes, of a tensor in a block
_MAX_ON_ONE_THREAD = 1 << 24  # bytes; up to this size, waiting for other threads would take longer than the copy


@dataclass(frozen=True)
class Part:
    """A tensor in a block."""

    number: int
    offset: int  # in bytes
    shape: tuple[int, ...]
    dtype: torch.dtype
    axis: int | None  # the dimension that is split over the cores; None: each core gets the whole tensor


@dataclass(frozen=True)
class Map:
    """Map a block, whose file comes with the message."""

    block: int
    nbytes: int


@dataclass(frozen=True)
class Put:
    """Copy tensors from a block to the core."""

    block: int
    parts: list[Part]


@dataclass(frozen=True)
class Compile:
    """Compile a program, whose text is at the beginning of a block."""

    program: int
    block: int
    nbytes: int


@dataclass(frozen=True)
class Run:
    """Forget tensors, and run a program."""

    program: int
    inputs: list[int]
    first: int  # the number of the first output
    forgotten: list[int]


@dataclass(frozen=True)
class Fetch:
    """Copy the core's part of a tensor to a place in a block."""

    number: int
    block: int
    offset: int  # of the first core's part, in bytes
    stride: int  # from one core's part to the next


@dataclass(frozen=True)
class Begin:
    """Start the runtime: all processes have finished their imports."""


@dataclass(frozen=True)
class Probe:
    """Wait until all programs have run, and report failures."""


Message = Map | Put | Compile | Run | Fetch | Begin | Probe


@dataclass(frozen=True)
class Imported:
    """A core's answer: it can start the runtime."""


@dataclass(frozen=True)
class Started:
    """A core's answer: its runtime runs."""


@dataclass(frozen=True)
class Failed:
    """A core's answer: a message has failed. The core continues."""

    message: int  # the number of the message
    why: str
    stops_programs: bool  # True if the other cores wait for its part of a program


Answer = Imported | Started | Failed


class Sign(IntEnum):
    """The columns of a core's row in the first block."""

    DONE = 0  # the number of the last message that is done
    REPORTS = 1  # the number of reported failures
    BEAT = 2  # the time of its last heartbeat, in milliseconds of the system's clock; 0 before the first


class Block:
    """Memory that processes share. It has no name, and is freed with the last process that maps it."""

    def __init__(self, nbytes: int, descriptor: int | None = None) -> None:
        self.nbytes = nbytes
        self.descriptor = os.memfd_create("tpufit") if descriptor is None else descriptor
        if descriptor is None:
            os.ftruncate(self.descriptor, nbytes)
        self._memory = mmap.mmap(self.descriptor, nbytes)
        self.bytes = torch.frombuffer(self._memory, dtype=torch.uint8)

    def write(self, part: Part, tensor: Tensor) -> None:
        """Copy a tensor into the block."""
        here = self.tensor(part)
        if tensor.nbytes > _MAX_ON_ONE_THREAD or not tensor.is_contiguous():
            here.copy_(tensor)
        else:  # as bytes, because NumPy has no bfloat16
            source = tensor.detach().resolve_conj().resolve_neg()
            target_bytes, source_bytes = (x.view(-1).view(torch.uint8).numpy() for x in (here, source))
            np.copyto(target_bytes, source_bytes)

    def tensor(self, part: Part) -> Tensor:
        """Return the tensor of a part, in the block's memory."""
        return self.tensor_at(part.offset, part.shape, part.dtype)

    def tensor_at(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor in the block's memory."""
        size = torch.Size(shape).numel() * dtype.itemsize
        return self.bytes[offset : offset + size].view(dtype).view(tuple(shape))

    def close(self) -> None:
        """Close the file; the memory stays as long as a tensor uses it."""
        os.close(self.descriptor)


def align(nbytes: int) -> int:
    """Round a number of bytes up to the beginning of the next tensor in a block.

    Example:
        >>> align(65)
        128
    """
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def own_part(tensor: Tensor, axis: int | None, own: range, cores: int) -> Tensor:
    """Return the part of a tensor for a range of adjacent cores; the whole tensor if no dimension is split.

    Example:
        >>> own_part(torch.arange(8), 0, range(1, 2), 4)
        tensor([2, 3])
        >>> own_part(torch.arange(1, 8), 0, range(2, 4), 4)
        tensor([5, 6, 7, 0])
    """
    if axis is None:
        return tensor
    size = tensor.shape[axis]
    share = len(block_of_rows(0, cores, size))
    begin = block_of_rows(own.start, cores, size).start
    length = len(own) * share
    here = tensor.narrow(axis, begin, min(length, size - begin))
    if here.shape[axis] == length:
        return here.contiguous()
    part = tensor.new_zeros(*tensor.shape[:axis], length, *tensor.shape[axis + 1 :])
    part.narrow(axis, 0, here.shape[axis]).copy_(here)
    return part


def pack(message: Message | Answer, number: int = 0) -> bytes:
    """Return a message with its number as the packet of a socket. It never contains the user's objects."""
    return pickle.dumps((message, number), pickle.HIGHEST_PROTOCOL)


def receive(connection: socket.socket) -> tuple[Any, int, int | None]:
    """Wait for a message, and return it with its number and its file.

    The message is None after the other end was closed.
    """
    packet, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 1)
    message, number = pickle.loads(packet) if packet else (None, 0)
    return message, number, next(iter(descriptors), None)
