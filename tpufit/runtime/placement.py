"""`CorePlacement`: one core or a mesh, as the engine sees it.

Over a mesh a batch is split by rows, and everything else is whole on every core.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from ..backend import Cores, InFlight, Placement
from ..utils import hardware
from .devices import memory_used, platform
from .driver import Trace, driver
from .in_flight import RunsAhead

PACKED_ON = {"TPU"}  # the kinds of cores that keep weights in another order, see `weight_packing`


@dataclass(frozen=True)
class CorePlacement(Placement):
    """One core, or all cores of the process as one. The defaults are for cores that exist."""

    cores: Cores

    @property
    def has_mesh(self) -> bool:
        return self.cores.spmd

    @property
    def max_in_flight(self) -> int:
        # XLA's CPU client runs up to 32 programs at a time. It starts the parts of a further program core by core, on
        # threads that the parts of the first program need, so that with several virtual cores they deadlock.
        return 8 if self.cores.spmd and self.cores.platform == "CPU" else 256

    @property
    def count(self) -> int:
        return self.cores.count

    @property
    def hosts(self) -> int:
        return self.cores.hosts

    @cached_property
    def peak(self) -> float | None:
        chips = hardware.find_chips() if platform() == "TPU" else []
        return None if not chips or chips[0].peak is None else chips[0].peak * self.count

    @property
    def memory_used(self) -> int | None:
        return memory_used()

    def in_flight(self) -> InFlight:
        return RunsAhead(max_pending=self.max_in_flight)

    # For programs

    @property
    def runs(self) -> bool:
        """True if graphs run, and their results can be waited for."""
        return True

    @property
    def donates_from(self) -> float:
        """The bytes of a state from which a step writes the new state over the old."""
        return driver().donates_from if platform() == "CPU" else 0

    @property
    def packs(self) -> bool:
        """True if weights are kept in another order of dimensions, see `weight_packing`."""
        return platform() in PACKED_ON

    def compile(self, trace: Trace) -> None:
        """Compile the graph of a trace."""
        driver().compile(trace)

    @abstractmethod
    def prepare_start(self, name: Any, inputs: list[Tensor]) -> Iterator[list[Tensor]]:
        """Prepare the start of a graph, by its hash, with inputs.

        Returns:
            An iterator with one item, the graph's outputs. Asking for the item starts the graph in C, which no signal
            interrupts.
        """

    def note_start(self, name: Any, outputs: Sequence[list[Tensor]]) -> None:
        """Note the outputs of a started graph; empty if the start failed."""

    @abstractmethod
    def compute_and_wait(self, copies: list[Tensor]) -> list[Tensor]:
        """Compute pending copies. **This waits**, because only computed tensors have memory to identify."""

    @abstractmethod
    def to_core(self, tensor: Tensor) -> Tensor:
        """Return a core's rows of a tensor, for a program of each core.

        If the rows don't divide evenly, some cores have rows with arbitrary values.
        """

    @abstractmethod
    def from_core(self, tensor: Tensor, rows: int) -> Tensor:
        """Return the tensor of `rows` rows of which a program of each core has computed a part."""
