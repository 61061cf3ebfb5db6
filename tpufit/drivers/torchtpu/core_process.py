"""The process of another core: it runs the programs that it gets, without any Python of the user.

`core_connections` starts it as `python -m tpufit.drivers.torchtpu.core_process SOCKET CORE CORES`; it ends with the
user's process. It reports an error of a program, and continues; `core_connections` reads a fatal error from its stderr.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Sequence
from time import monotonic, sleep

import torch
from torch import Tensor

from . import start
from .compute_modes import computing
from .messages import (
    Begin,
    Block,
    Compile,
    Failed,
    Fetch,
    Imported,
    Map,
    Message,
    Part,
    Probe,
    Put,
    Run,
    Sign,
    Started,
    own_part,
    pack,
    receive,
)
from .private_names import names
from .programs import Runner, compile_text

_HEARTBEAT_SECONDS = 0.5  # between two heartbeats
_MAX_CHARACTERS = 4000  # of a reported error


class _MissingError(RuntimeError):
    """A program or tensor is missing, because an earlier message has failed."""


class CoreProcess:
    """Runs a core, which has a number among this host's cores; keeps its tensors and its programs by their numbers."""

    def __init__(self, connection: socket.socket, core: int, cores: int) -> None:
        self._connection = connection
        self._core = core
        self._cores = cores
        self._blocks: dict[int, Block] = {}
        self._tensors: dict[int, Tensor] = {}
        self._programs: dict[int, Runner] = {}
        self._latest: list[Tensor] = []  # the results of the last program
        self._missing_because = ""  # the error that left out some tensors or programs
        self._place = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])  # among the cores of all hosts
        self._waits_for_programs = start.platform() == "CPU"  # see `max_in_flight` in `runtime.placement`

    def serve(self) -> None:
        """Handle messages until the other end is closed."""
        first, number, descriptor = receive(self._connection)
        assert isinstance(first, Map)
        self._handle(first, descriptor)
        signs = self._blocks[0].tensor_at(self._core * len(Sign) * 8, (len(Sign),), torch.int64).numpy()
        threading.Thread(target=self._send_heartbeats, args=(signs,), daemon=True).start()
        start.load()
        self._connection.send(pack(Imported()))
        while True:
            signs[Sign.DONE] = number
            message, number, descriptor = receive(self._connection)
            if message is None:
                return
            try:
                self._handle(message, descriptor)
            except (RuntimeError, ValueError, MemoryError) as error:
                if isinstance(message, (Map, Begin)):
                    raise
                why = (str(error) or repr(error))[:_MAX_CHARACTERS]
                if not isinstance(error, _MissingError):
                    self._missing_because = why
                failed = Failed(number, why, isinstance(message, (Run, Probe)))
                signs[Sign.REPORTS] += 1
                self._connection.send(pack(failed))

    @staticmethod
    def _send_heartbeats(signs: Sequence[int]) -> None:
        while True:
            signs[Sign.BEAT] = int(monotonic() * 1e3)  # type: ignore[index]
            sleep(_HEARTBEAT_SECONDS)

    def _handle(self, message: Message, descriptor: int | None) -> None:
        match message:
            case Map(block, nbytes):
                self._blocks[block] = Block(nbytes, descriptor)
            case Begin():
                start.start_core()
                self._connection.send(pack(Started()))
            case Put(block, parts):
                self._put(block, parts)
            case Compile(program, block, nbytes):
                text = bytes(self._blocks[block].bytes[:nbytes].numpy()).decode()
                self._programs[program], _ = compile_text(text, *self._place)
            case Run():
                self._run(message)
            case Fetch(number, block, offset, stride):
                part = self._tensors[number].cpu()
                place = self._blocks[block].tensor_at(offset + self._core * stride, part.shape, part.dtype)
                place.copy_(part)
            case Probe():
                latest, self._latest = self._latest, []
                names().synchronize_list(latest, True)

    def _put(self, block: int, parts: Sequence[Part]) -> None:
        with computing(), torch.no_grad():
            sent = []
            for part in parts:
                own = own_part(
                    self._blocks[block].tensor(part), part.axis, range(self._core, self._core + 1), self._cores
                )
                self._tensors[part.number] = own.to("tpu")
                sent.append(self._tensors[part.number])
            names().synchronize_list(sent, True)  # the block will be reused

    def _run(self, message: Run) -> None:
        for number in message.forgotten:
            self._tensors.pop(number, None)
        self._latest = []
        if message.program not in self._programs or any(number not in self._tensors for number in message.inputs):
            raise _MissingError(f"a program can't run because of an earlier error: {self._missing_because}")
        self._latest = self._programs[message.program]([self._tensors[number] for number in message.inputs])
        self._tensors.update(enumerate(self._latest, message.first))
        if self._waits_for_programs:
            names().synchronize_list(self._latest, True)


if __name__ == "__main__":
    CoreProcess(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])).serve()
