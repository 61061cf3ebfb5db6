"""`Recorder`: takes a device's place where there is none. It keeps the programs that steps would run, and runs nothing.

Large tensors of the absent device are placeholders: they have a shape and a dtype, take no memory, and have no value.
To read one ends the process, in C++, so this is for a process of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .bindings import xla
from .kinds import traced_for

_SMALL = 4096  # bytes


@dataclass(frozen=True)
class Trace:
    """A trace whose graph is to be compiled."""

    graph: Any
    roots: list[Tensor]  # its outputs
    values: list[Tensor]  # its inputs
    axes: Sequence[int | None]  # the dimension of each tensor of the state that is split over the cores
    role: str
    cause: str  # why it is needed, for the report


@dataclass(frozen=True)
class Argument:
    """An input of a program."""

    source: str  # the list that it is in: "state", "sum", "input", "seed" or "constant"
    index: int  # in that list
    shape: tuple[int, ...]
    dtype: torch.dtype
    donated: bool  # the program may write over it
    axis: int | None  # the dimension that is split over the cores; None if it is whole on every core
    nbytes: int  # over all cores


@dataclass(frozen=True)
class Recorded:
    """A program that a device would run."""

    role: str
    cause: str  # why it is needed
    hlo: bytes  # XLA's own serialised proto
    arguments: list[Argument]  # in its order


@dataclass
class Recorder:
    """Keeps the programs that steps would run, and runs nothing."""

    programs: list[Recorded] = field(default_factory=list)
    outputs: dict[Any, list[Tensor]] = field(default_factory=dict)  # of each graph by its hash, as meta tensors
    _axes: dict[int, int | None] = field(default_factory=dict)  # by the identity of a tensor's memory

    def note(self, tensors: Sequence[Tensor], axes: Sequence[int | None]) -> None:
        """Note how tensors that were just sent lie over the cores: the dimension of each that is split, or None."""
        self._axes |= zip(xla()._get_tensors_handle(list(tensors)), axes, strict=True)

    def keep(self, trace: Trace) -> None:
        """Keep the program of a trace, unless it is known: a device would have it compiled already."""
        graph = trace.graph
        if graph.hash in self.outputs:
            return
        # Sums are whole, as are seeds and constants, which may have the freed memory of a batch.
        axes = [self._axes.get(handle) for handle in xla()._get_tensors_handle(trace.values)]
        arguments = [
            Argument(
                name,
                i,
                tuple(value.shape),
                value.dtype,
                donated=name == "state" and i in graph.consumed,
                axis=axis if name == "input" else trace.axes[i] if name == "state" else None,
                nbytes=value.nbytes,
            )
            for value, (name, i), axis in zip(trace.values, graph.sources, axes, strict=True)
        ]
        self.outputs[graph.hash] = [torch.empty(root.shape, dtype=root.dtype, device="meta") for root in trace.roots]
        hlo = xla()._get_xla_tensors_hlo_proto(trace.roots)
        self.programs.append(Recorded(trace.role, trace.cause, hlo, arguments))


@contextmanager
def tracing_for(kind: str) -> Iterator[None]:
    """A context in which operations are traced as for a kind of TPU: torch_xla lowers a few otherwise than for a CPU.

    In SPMD mode, which the environment may ask for on one core too, it asks the environment for the kind of device at
    each of them. See `CheckTpuDevice` in torch_xla's csrc/device.cpp.
    """
    before = os.environ["PJRT_DEVICE"]
    os.environ["PJRT_DEVICE"] = "TPU"
    try:
        with traced_for(kind):
            yield
    finally:
        os.environ["PJRT_DEVICE"] = before


def stand_in(tensor: Tensor) -> Tensor:
    """A tensor to be sent to an absent device, in place of one without values.

    It is zeros on the host if it is small: sums and counts then stay what they are on a device that is there. Else it
    is a placeholder.
    """
    from torch_xla.core.xla_builder import create_placeholder_tensor

    if tensor.nbytes <= _SMALL:
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    absent: Tensor = create_placeholder_tensor(tuple(tensor.shape), tensor.dtype)
    return absent
