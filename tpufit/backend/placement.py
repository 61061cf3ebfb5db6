"""`Placement`: where steps run, and `Sharding`: how a tensor lies over its cores."""

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
    """Return the sharding of each of `count` tensors, where one may be given for all.

    Example:
        >>> sharding_of_each(Sharding.ROWS, 2)
        [Sharding(axis=0), Sharding(axis=0)]
    """
    return [sharding] * count if isinstance(sharding, Sharding) else sharding


Shardings = Mapping[int, Sharding]
"""The shardings of tensors, by their `id`. One that is missing is whole on every core."""

Names = Mapping[int, str]
"""The names of tensors, by their `id`."""


class Placement(ABC):
    """A place to run steps at: the host, one core, or all cores as one, over which a batch is split by its rows.

    Two placements are equal if tensors of one can be used at the other. The defaults are those of one core.
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
        """The number of hosts that the cores belong to, at least 1."""
        return 1

    @property
    def shares_only_steps(self) -> bool:
        """True if several cores compute only steps together, and what runs outside of a step is computed by one."""
        return False

    @property
    def peak(self) -> float | None:
        """The operations a second that all cores together can compute at most; None if nobody knows."""
        return None

    @property
    def local_shards(self) -> tuple[int, ...] | None:
        """The positions of this process's cores along the mesh: the parts of a batch that it has to send.

        None without a mesh; with one process all of them. On a pod a host's cores need not be neighbours.
        """
        return None

    @property
    def memory_used(self) -> int | None:
        """The bytes of a core's memory that are in use; on a GPU the peak so far. None if unknown."""
        return None

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device of every tensor here. Several cores are one device."""

    @property
    @abstractmethod
    def most_in_flight(self) -> int:
        """The number of steps of one role that may be under way; of all together three times as many may."""

    @abstractmethod
    def send(self, tensors: Sequence[Tensor], sharding: Sharding | Sequence[Sharding] = Sharding.WHOLE) -> list[Tensor]:
        """Copy host tensors here, without waiting.

        Args:
            tensors: Host tensors; one that is here already is passed through.
            sharding: How they lie over the cores, all of them or one by one (default: whole on every core). A tensor
                without dimensions is always whole.

        Returns:
            The tensors here, in the same order.
        """

    @abstractmethod
    def launch(self, role: str, cause: str = "", tensors: Sequence[Tensor] | None = None) -> None:
        """Start everything that is pending here, without waiting for it.

        Args:
            role: The role that a graph is counted under, if one must be compiled.
            cause: The reason for that graph.
            tensors: All tensors that may be pending and that Python refers to (default: a search among all objects,
                which takes a tenth of a second or more if any tensor is pending).
        """

    @abstractmethod
    def pin(self, tensor: Tensor, sharding: Sharding = Sharding.WHOLE) -> Tensor:
        """Fix how a result of the step being traced lies over the cores, and return it; else the device may choose.

        Args:
            tensor: A result that is kept for the next step: a parameter, a sum.
            sharding: How it lies (default: whole on every core).
        """

    @abstractmethod
    def lay_out(self, tensor: Tensor, sharding: Sharding) -> Tensor:
        """The same values with a sharding of their own, in the step being traced; `tensor` keeps its own."""

    def gather(self, tensor: Tensor) -> Tensor:
        """The same values, whole on every core, in the step being traced."""
        return self.lay_out(tensor, Sharding.WHOLE)

    @abstractmethod
    def in_flight(self) -> InFlight:
        """Return the back-pressure of the steps of one pass."""
