"""`CoreGroup`: several cores, each driven by its own process, and their copies or parts of the user's tensors.

The user's process drives the first core. All processes compile and run each program together: XLA has split it, and its
parts communicate. So before the first core runs a program, it tells the other cores to run it.

A tensor that is split over the cores is one of TorchTPU's placeholders: it has the shape of the whole tensor, but no
memory. The first core's part is kept here.

Each of several hosts has a user's process, which drives the host's first core, and sends messages to the host's other
cores. All users' processes run the same script, and so the same programs in the same order.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count

import torch
from torch import Tensor

from ...errors import PlacementError, StartError
from ...hosts import all_reduce_max
from ...utils.uninterrupted import uninterrupted
from .compute_modes import computing, recording
from .core_connections import CoreConnections
from .core_tensors import CorePart, CoreTensors, TensorRecord
from .host import Host
from .messages import Compile, Fetch, Part, Put, Run, align, own_part
from .one_core import OneCore, Program
from .private_names import names
from .programs import compile_text, shard_text, text_of
from .tensor_identity import handle_of, place_of

_NUMBERS_PER_PROGRAM = 1 << 16  # reserved for a program's outputs


@dataclass(frozen=True)
class _Split:
    """A program's output that is split over the cores."""

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    axis: int


@dataclass
class _Start:
    """The start of a program.

    The first core's outputs are added to `outputs`. Until `note_start` notes the part of each split output, parts are
    looked up in `outputs`. So a split tensor has its part even if an interrupt comes in between.
    """

    first: int = 0  # the number of its first output
    forgotten: int = 0  # the number of tensors that the other cores forget
    outputs: list[Tensor] = field(default_factory=list)
    parts: list[CorePart | None] = field(default_factory=list)  # this core's parts of the split outputs


class CoreGroup(OneCore):
    """Several cores. This process drives the first core of its host.

    Args:
        environments: The environment variables that TorchTPU reads, for each core of this host.
        start: See `CoreConnections`.
        on_loss: See `CoreConnections`.
        host: This host's place among the hosts that compute together.
    """

    def __init__(
        self,
        environments: Sequence[Mapping[str, str]],
        start: Callable[[], None],
        on_loss: Callable[[], None],
        host: Host,
    ) -> None:
        own = len(environments)
        self.count = own * host.count
        self.hosts = host.count
        self.own = range(own * host.index, own * (host.index + 1))
        self.connections = CoreConnections(environments, start, on_loss, self.own.start)
        self._tensors = CoreTensors()
        self._next = 0  # the number of the next tensor
        self._start = _Start()  # of the latest program
        self._programs = 0
        self._gathers: dict[Hashable, Program] = {}  # programs that gather a split tensor on all hosts

    def begin(self) -> None:
        """Start all cores, or continue a start that was interrupted.

        Raises:
            StartError: A core doesn't start.
        """
        try:
            self.connections.begin()
        except RuntimeError as error:
            cure = "Run python -m tpufit doctor, or compute on one core, with cores=1"
            raise StartError(
                f"{self.count} cores of torch_tpu did not start. {cure}. The reason: {self.connections.failure}"
            ) from error

    # Tensors

    def send(self, tensors: Sequence[Tensor], axes: Sequence[int | None]) -> list[Tensor]:
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if self.hosts > 1:
            tensors = [own_part(t, axis, self.own, self.count) for t, axis in zip(tensors, axes, strict=True)]
        return self._send_own(tensors, axes, shapes)

    def send_rows(self, here: Tensor, axis: int, block: int, rows: int) -> Tensor:
        """Send this host's rows of a tensor that has `rows` rows along `axis`; each core gets `block` of them."""
        before, after = here.shape[:axis], here.shape[axis + 1 :]
        missing = block * len(self.own) - here.shape[axis]
        filled = torch.cat([here, here.new_zeros(*before, missing, *after)], axis) if missing else here
        return self._send_own([filled], [axis], [(*before, rows, *after)])[0]

    def _send_own(
        self, tensors: Sequence[Tensor], axes: Sequence[int | None], shapes: Sequence[tuple[int, ...]]
    ) -> list[Tensor]:
        """Send this host's parts of tensors with these shapes to its cores."""
        with self.connections.lock:
            parts = self._put(tensors, axes)
        sent: list[Tensor] = []
        numbers = [part.number for part in parts]
        noted = False
        try:
            with computing(), torch.no_grad():
                own = [
                    own_part(t, axis, range(1), self.connections.count) for t, axis in zip(tensors, axes, strict=True)
                ]
                own = [tensor.contiguous().to("tpu") for tensor in own]
            for tensor, shape, axis in zip(own, shapes, axes, strict=True):
                sent.append(tensor if axis is None else self._placeholder(shape, tensor.dtype))
            parts_here = [None if axis is None else CorePart([tensor]) for tensor, axis in zip(own, axes, strict=True)]
            self._tensors.note(sent, numbers, axes, parts_here)
            noted = True
        finally:
            if not noted:
                self._tensors.forgotten += numbers
        return sent

    def _put(self, tensors: Sequence[Tensor], axes: Sequence[int | None]) -> list[Part]:
        """Send host tensors to the other cores of this host. The caller holds the lock."""
        parts = []
        offset = 0
        for tensor, axis in zip(tensors, axes, strict=True):
            parts.append(Part(self._next, offset, tuple(tensor.shape), tensor.dtype, axis))
            self._next += 1
            offset += align(tensor.nbytes)
        if self.connections.count == 1:
            return parts
        number, block = self.connections.block(max(offset, 1))
        for part, tensor in zip(parts, tensors, strict=True):
            block.write(part, tensor)
        self.connections.tell_with_block(Put(number, parts), number)
        return parts

    @staticmethod
    def _placeholder(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a new tensor that stands for one that is split over the cores."""
        with recording():
            tensor: Tensor = names().placeholder(list(shape), dtype, False)
        return tensor

    def axis_of(self, tensor: Tensor) -> int | None:
        record = self._tensors.find(tensor)
        return None if record is None else record.axis

    def _part(self, tensor: Tensor) -> Tensor:
        """Return the first core's part of a split tensor, or a whole tensor itself."""
        record = self._tensors.find(tensor)
        return tensor if record is None or record.axis is None else record.stand_in(tensor)

    def has_value(self, tensor: Tensor) -> bool:
        return super().has_value(self._part(tensor))

    def compute(self, tensors: Sequence[Tensor], wait: bool = False) -> None:
        super().compute(list(map(self._part, tensors)), wait)

    def copy(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return self._copy_whole(tensors, super().copy)

    def copy_apart(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        # On several cores, whole tensors that the user may have changed are sent again, and programs take the copies.
        return list(tensors) if self.connections.count > 1 else self._copy_whole(tensors, super().copy_apart)

    def _copy_whole(self, tensors: Sequence[Tensor], copy: Callable[[Sequence[Tensor]], list[Tensor]]) -> list[Tensor]:
        """Copy whole tensors. The parts of split tensors never change: a step returns new parts."""
        whole = iter(copy([tensor for tensor in tensors if self.axis_of(tensor) is None]))
        return [next(whole) if self.axis_of(tensor) is None else tensor.detach() for tensor in tensors]

    def forget(self, tensors: Sequence[Tensor]) -> None:
        with self.connections.lock:
            for tensor in tensors:
                if self.axis_of(tensor) is None:
                    self._tensors.drop(tensor)
                elif names().is_materializing(tensor):  # an operation that changes the placeholder was recorded
                    raise PlacementError(
                        f"user code has changed a tensor of shape {tuple(tensor.shape)} in place, outside of a step. "
                        "The tensor is split over the cores, and on torch_tpu only a step can change it. Load other "
                        "values with load_state_dict, or keep it whole: shard={'its name': None, ...} in compile"
                    )

    def _share_missing(self, tensors: Sequence[Tensor]) -> list[TensorRecord]:
        """Return the record of each tensor, and send tensors to cores that lack them. The caller holds the lock."""
        found = list(map(self._tensors.find, tensors))
        lacking = {handle_of(t): t for t, record in zip(tensors, found, strict=True) if record is None}
        if lacking:
            self._share(list(lacking.values()))
            found = list(map(self._tensors.find, tensors))
        return [record for record in found if record is not None]  # all have one now

    def _share(self, tensors: Sequence[Tensor]) -> None:
        """Send tensors that only the first core has computed to the other cores. The caller holds the lock."""
        if self.connections.count == 1:
            self._tensors.note(tensors, range(self._next, self._next + len(tensors)))
            self._next += len(tensors)
            return
        with computing():
            values = [tensor.detach().cpu() for tensor in tensors]
        sent = self._put(values, [None] * len(values))
        # This core gets a copy, too: a program may write over it, and the tests' pod requires a copy on each core.
        with computing():
            copies = [value.to("tpu") for value in values]
        self._tensors.note(tensors, [part.number for part in sent], parts=[CorePart([copy]) for copy in copies])

    def read(self, tensors: Sequence[Tensor], collective: bool = False) -> list[Tensor]:
        if self.hosts > 1:
            tensors = [t if self.axis_of(t) is None else self._gather(t, collective) for t in tensors]
        return self._read(tensors)

    def wait_for(self, tensor: Tensor) -> None:
        self._read([tensor])

    def read_rows(self, tensor: Tensor) -> Tensor:
        """Read this host's rows of a tensor. **This waits**."""
        return self._read([tensor])[0]

    def _gather(self, tensor: Tensor, collective: bool) -> Tensor:
        """Gather a tensor that is split over the cores of several hosts: the whole of it on each host."""
        if not collective:
            raise PlacementError(
                f"a tensor of shape {tuple(tensor.shape)} is split over the cores of several hosts, so one host alone "
                "can't read it. Return means from steps, or use predict or state_dict, which gather it"
            )
        all_reduce_max([])  # waits until all hosts are here
        kind = tuple(tensor.shape), tensor.dtype, self.axis_of(tensor)
        if kind not in self._gathers:
            with recording():
                argument: Tensor = names().placeholder(list(tensor.shape), tensor.dtype, False)
                text = text_of([argument.clone()], [argument])
            with computing():
                self._gathers[kind] = self.compile(text, [tensor])
        return self._gathers[kind]([tensor])[0]

    def _read(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Read this host's parts of tensors."""
        parts = list(map(self._part, tensors))
        self._wait_for_all(parts)
        try:
            with computing():
                own = [part.detach().cpu() for part in parts]
        except RuntimeError as error:
            self._await_same_failure(str(error))
            raise
        return [self._join(t, value) for t, value in zip(tensors, own, strict=True)]

    def prepare_read(self, tensor: Tensor) -> Tensor | None:
        if self.axis_of(tensor) is not None:
            return self.read([tensor])[0]
        if not names().is_materialized(tensor):
            self._wait_for_all([tensor])
        return None

    def _join(self, tensor: Tensor, own: Tensor) -> Tensor:
        record = self._tensors.find(tensor)
        if record is None or record.axis is None:
            return own
        stride = align(own.nbytes)
        with self.connections.lock:
            number, block = self.connections.block(stride * self.connections.count)
            message = self.connections.tell_with_block(Fetch(record.number, number, 0, stride), number)
        self.connections.wait_for(message)
        others = [block.tensor_at(core * stride, own.shape, own.dtype) for core in range(1, self.connections.count)]
        share = own.shape[record.axis]
        here = max(min(tensor.shape[record.axis] - self.own.start * share, len(self.own) * share), 0)
        return torch.cat([own, *others], record.axis).narrow(record.axis, 0, here)  # the rest is padding

    def _wait_for_all(self, tensors: Sequence[Tensor]) -> None:
        """Wait until tensors are computed, or raise an error if the cores have failed."""
        with computing():
            names().synchronize_list(list(tensors), False)
        for tensor in tensors:
            self.connections.wait_until(partial(names().is_materialized, tensor), programs=True)

    def wait(self) -> None:
        self.connections.watch_while(super().wait)

    def _await_same_failure(self, why: str) -> None:
        """After an error of the first core, wait until the other cores have it too, or else fail."""
        with suppress(RuntimeError):  # the same error
            self.wait()
        self.connections.await_same_failure(why)

    # Programs

    def compile(
        self, text: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor] = (), axes: Sequence[int | None] = ()
    ) -> Program:
        text = shard_text(text, [self.axis_of(tensor) for tensor in inputs], self.count, axes)
        data = text.encode()
        with self.connections.lock:
            program = self._programs
            self._programs += 1
            number, block = self.connections.block(len(data))
            block.bytes[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            message = self.connections.tell_with_block(Compile(program, number, len(data)), number)
        run, loaded = compile_text(text, self.own.start, self.count)
        self.connections.wait_for(message)
        split = [
            _Split(i, tuple(outputs[i].shape), outputs[i].dtype, axis)
            for i, axis in enumerate(axes)
            if axis is not None
        ]
        return _GroupProgram(run, loaded, program, self, split)

    def prepare_start(self, program: _GroupProgram, inputs: list[Tensor]) -> Iterator[list[Tensor]]:
        """See `Program.prepare_start`."""
        with self.connections.lock:
            records = self._share_missing(inputs)
            own_inputs = [record.stand_in(tensor) for tensor, record in zip(inputs, records, strict=True)]
            forgotten = list(self._tensors.forgotten)
            start = _Start(self._next, len(forgotten))
            self._next += _NUMBERS_PER_PROGRAM
            placeholders = {one.index: self._placeholder(one.shape, one.dtype) for one in program.split}
            start.parts += [CorePart(start.outputs, i) for i in placeholders]
            numbers = [start.first + i for i in placeholders]
            self._tensors.note([*placeholders.values()], numbers, [one.axis for one in program.split], start.parts)
            self._start = start
            sends = self.connections.prepare_sending(
                Run(program.number, [record.number for record in records], start.first, forgotten)
            )
        outputs = chain.from_iterable(map(program.run, [own_inputs]))
        shown = map(placeholders.get, count(), start.outputs)  # a placeholder in place of each part
        return uninterrupted([*sends, partial(start.outputs.extend, outputs), partial(list, shown)])

    def note_start(self, program: _GroupProgram, outputs: Sequence[list[Tensor]]) -> None:
        """See `Program.note_start`."""
        start = self._start
        self._start = _Start()
        if not outputs:
            self._await_same_failure(repr(sys.exc_info()[1]))
            return
        with self.connections.lock:
            del self._tensors.forgotten[: start.forgotten]
            # One list for each part, so that a part lives only as long as its tensor.
            start.parts[:] = [CorePart([start.outputs[one.index]]) for one in program.split]
            if not program.places:
                split = {one.index for one in program.split}
                program.places.update({i: place_of(t) for i, t in enumerate(outputs[0]) if i not in split})
            results = [outputs[0][i] for i in program.places]
            numbers = [start.first + i for i in program.places]
            self._tensors.note(results, numbers, places=[*program.places.values()])
            self._tensors.forget_freed()


@dataclass(frozen=True)
class _GroupProgram(Program):
    """A program of several cores, which has a number."""

    number: int
    cores: CoreGroup
    split: Sequence[_Split]
    # The places of its whole outputs in their storages, by their positions; known after its first start.
    places: dict[int, Hashable] = field(default_factory=dict)

    def prepare_start(self, inputs: list[Tensor]) -> Iterator[list[Tensor]]:
        return self.cores.prepare_start(self, inputs)

    def note_start(self, outputs: Sequence[list[Tensor]]) -> None:
        self.cores.note_start(self, outputs)
