"""`Placement`: where steps run, and `Sharding`: how a tensor is laid out over the cores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .in_flight import InFlight


@dataclass(frozen=True)
class Sharding:
    """The layout of a tensor over the cores.

    Attributes:
        axis: The dimension that is split over the cores; None (default): the tensor is whole on every core.
        ROWS: The sharding of a batch, split by its first dimension.
        WHOLE: The sharding of everything else.

    Example:
        >>> Sharding.ROWS
        Sharding(axis=0)
    """

    axis: int | None = None
    ROWS: ClassVar[Sharding]
    WHOLE: ClassVar[Sharding]

    def axes(self, ndim: int) -> tuple[str | None, ...]:
        """The axis of the mesh for each of `ndim` dimensions. A tensor without dimensions is always whole."""
        return tuple("data" if i == self.axis else None for i in range(ndim))


Sharding.ROWS = Sharding(0)
Sharding.WHOLE = Sharding()


def sharding_of_each(sharding: Sharding | Sequence[Sharding], count: int) -> Sequence[Sharding]:
    """Return the sharding of each of `count` tensors. A single sharding is for all tensors.

    Example:
        >>> sharding_of_each(Sharding.ROWS, 2)
        [Sharding(axis=0), Sharding(axis=0)]
    """
    return [sharding] * count if isinstance(sharding, Sharding) else sharding


def block_of_rows(core: int, cores: int, rows: int) -> range:
    """Return the rows of one of several cores. Each has an equal block of consecutive rows.

    The last blocks may have fewer rows, or none.

    Example:
        >>> [block_of_rows(core, 4, 7) for core in range(4)]
        [range(0, 2), range(2, 4), range(4, 6), range(6, 7)]
    """
    block = -(-rows // cores)
    return range(min(core * block, rows), min((core + 1) * block, rows))


Shardings = Mapping[int, Sharding]
"""The shardings of tensors, by `id`. A tensor without an entry is whole on every core."""

Names = Mapping[int, str]
"""The names of tensors, by `id`."""


class Placement(ABC):
    """Where steps run: on the host, on one core, or on all cores together, with a batch's rows split among them.

    Two placements are equal if tensors at one can be used at the other. The defaults are for one core.
    """

    @property
    def on_host(self) -> bool:
        """True for plain PyTorch in the host's memory."""
        return False

    @property
    def eager(self) -> bool:
        """True for plain PyTorch: the Python of a step runs each time, and nothing is traced."""
        return False

    @property
    def has_mesh(self) -> bool:
        """True if one program runs on several cores."""
        return False

    @property
    def count(self) -> int:
        """The number of cores that share a batch, at least 1."""
        return 1

    @property
    def hosts(self) -> int:
        """The number of hosts that have these cores, at least 1."""
        return 1

    @property
    def shares_only_steps(self) -> bool:
        """True if several cores share only the work of steps, and one core computes everything outside of steps."""
        return False

    @property
    def peak(self) -> float | None:
        """The peak of all cores together, in operations per second; None if unknown."""
        return None

    @property
    def local_shards(self) -> tuple[int, ...] | None:
        """The positions of this process's cores along the mesh: the parts of a batch that this process sends.

        None without a mesh; all positions with one process. On a pod a host's cores need not be neighbors.
        """
        return None

    @property
    def memory_used(self) -> int | None:
        """The bytes of a core's memory that are in use (on a GPU, the peak so far); None if unknown."""
        return None

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device of all tensors at this placement. Several cores are one device."""

    @property
    @abstractmethod
    def max_in_flight(self) -> int:
        """The number of steps of one role that may be pending; all roles and models together may have three times as
        many."""

    @abstractmethod
    def send(self, tensors: Sequence[Tensor], sharding: Sharding | Sequence[Sharding] = Sharding.WHOLE) -> list[Tensor]:
        """Copy host tensors to this placement, without waiting.

        Args:
            tensors: Host tensors; tensors that are already at this placement are returned unchanged.
            sharding: A sharding for all tensors, or one for each (default: whole on every core). A tensor without
                dimensions is always whole.

        Returns:
            The tensors at this placement, in the same order.
        """

    @abstractmethod
    def launch(self, role: str, cause: str = "", tensors: Sequence[Tensor] | None = None) -> None:
        """Start all pending work at this placement, without waiting for it.

        Args:
            role: The role for which a graph is counted, if this compiles one.
            cause: The reason for that graph.
            tensors: All tensors that may be pending and that Python refers to (default: found by a search among all
                objects, which takes a tenth of a second or more if any tensor is pending).
        """

    @abstractmethod
    def pin(self, tensor: Tensor, sharding: Sharding = Sharding.WHOLE) -> Tensor:
        """Fix the sharding of a result of the currently traced step, and return it; else the device may choose it.

        Args:
            tensor: A result that is kept for the next step, such as a parameter or a sum.
            sharding: Its sharding (default: whole on every core).
        """

    @abstractmethod
    def lay_out(self, tensor: Tensor, sharding: Sharding) -> Tensor:
        """Return the same values with this sharding, inside a traced step; the sharding of `tensor` doesn't change."""

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the same values whole on every core, inside a traced step."""
        return self.lay_out(tensor, Sharding.WHOLE)

    @abstractmethod
    def in_flight(self) -> InFlight:
        """Return the limiter of the pending steps of one pass."""
