"""`DeviceState`: the tensors that steps change, and their values meanwhile."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import NamedTuple

from torch import Tensor

from .placement import Placement, Sharding


class Slot(NamedTuple):
    """A place of the user's that has one of the state's tensors: a module's buffer, a part of an optimizer's state."""

    name: Hashable
    tensor: Tensor  # that is there now
    put: Callable[[Tensor | None], None]  # puts another one there, or takes it out


def no_slots() -> list[Slot]:
    """List no slots, as of tensors that no step replaces."""
    return []


class DeviceState(ABC):
    """The tensors that training changes: weights, buffers, and the optimizers' state.

    A program may hold their values apart while it runs steps; the user's tensors are empty then, until `write_back`.

    Args:
        tensors: The user's own tensor objects.
        shardings: How they lie over the cores, by their `id` (default: each is whole on every core).

    Attributes:
        tensors: The user's own tensor objects.
        shardings: How they lie over the cores, by their `id`; one that is missing is whole on every core.
        held: True while their values are held apart.
    """

    def __init__(self, tensors: Iterable[Tensor], shardings: Mapping[int, Sharding] | None = None) -> None:
        self.tensors = list(tensors)
        self.shardings = dict(shardings or {})
        self.held = False

    @property
    @abstractmethod
    def lost(self) -> list[int]:
        """The indices of values that a step took with it when it failed on the device; usually none."""

    @abstractmethod
    def pin(self, tensors: Iterable[Tensor], placement: Placement) -> None:
        """Keep the sharding of tensors that the step being traced has changed, see `Placement.pin`."""

    @abstractmethod
    def replace(self, tensors: Iterable[Tensor], shardings: Mapping[int, Sharding]) -> None:
        """Go on with other tensors, while nothing is held."""

    @abstractmethod
    def write_back(self) -> None:
        """Put the values back into the user's tensors. After an interrupt in here it may be called again.

        Raises:
            StateLostError: A step failed on the device after it had consumed them.
        """

    @abstractmethod
    def find_lost(self) -> None:
        """Find out which values are lost after an error: no result of a failed step can be read. **This waits**."""

    @abstractmethod
    def clear_lost(self) -> None:
        """Let lost values count as there, because all of them are about to be replaced. Until then none may be read."""
