"""`Recorder`: stands in for a device that isn't there. It keeps the programs that steps would run, and runs nothing.

Large tensors of the absent device are placeholders with a shape and a dtype, but without memory and values. Reading a
placeholder aborts the process, so a recorder is used in a separate process.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..backend import Sharding
from .driver import Trace, driver
from .trace_context import tracing_with


@dataclass(frozen=True)
class Argument:
    """An input of a program."""

    source: str  # its list: "state", "sum", "input", "seed" or "constant"
    index: int  # in that list
    shape: tuple[int, ...]
    dtype: torch.dtype
    donated: bool  # the program may write over it
    axis: int | None  # the dimension along which it is split over the cores; None if whole on every core
    nbytes: int  # over all cores


@dataclass(frozen=True)
class Recorded:
    """A program that a device would run."""

    role: str
    cause: str  # why the program is needed
    hlo: bytes  # XLA's serialized proto
    arguments: list[Argument]  # in its order


@dataclass
class Recorder:
    """Keeps the programs that steps would run, and runs nothing."""

    programs: list[Recorded] = field(default_factory=list)
    outputs: dict[Any, tuple[list[Tensor], list[Sharding]]] = field(default_factory=dict)
    """By the hash of a graph: its outputs, as meta tensors, and how each is split."""
    _axes: dict[Hashable, int | None] = field(default_factory=dict)  # by the identity of a tensor's memory

    def note(self, tensors: Sequence[Tensor], axes: Sequence[int | None]) -> None:
        """Note the dimension along which each of these just sent tensors is split over the cores, or None."""
        self._axes |= zip(driver().handles(list(tensors)), axes, strict=True)

    def keep(self, trace: Trace) -> None:
        """Keep the program of a trace, unless an equal program is kept already."""
        graph = trace.graph
        if graph.hash in self.outputs:
            return
        # Sums, seeds and constants are whole; constants may have reused the memory of a batch.
        axes = [self._axes.get(handle) for handle in driver().handles(trace.values)]
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
        outputs = [torch.empty(root.shape, dtype=root.dtype, device="meta") for root in trace.roots]
        self.outputs[graph.hash] = outputs, [Sharding(axis) for axis in trace.output_axes]
        hlo = driver().serialize(trace)
        self.programs.append(Recorded(trace.role, trace.cause, hlo, arguments))


@contextmanager
def tracing_for(kind: str) -> Iterator[None]:
    """A context in which operations are traced for a kind of TPU, because torch_xla lowers a few differently on a CPU.

    In SPMD mode, which the environment may also set for one core, torch_xla reads the kind of device from the
    environment at each operation. See `CheckTpuDevice` in torch_xla's csrc/device.cpp.
    """
    before = os.environ["PJRT_DEVICE"]
    os.environ["PJRT_DEVICE"] = "TPU"
    try:
        with tracing_with(kind=kind):
            yield
    finally:
        os.environ["PJRT_DEVICE"] = before
