"""`DeviceState`: the tensors that steps change, and their values while steps run."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import NamedTuple

from torch import Tensor

from .placement import Placement, Sharding


class Slot(NamedTuple):
    """A place in the user's objects that holds a tensor of the state, such as a module's buffer."""

    name: Hashable
    tensor: Tensor  # the tensor that is there now
    put: Callable[[Tensor | None], None]  # puts another tensor there, or removes it


def no_slots() -> list[Slot]:
    """Return no slots, for tensors that no step replaces."""
    return []


class DeviceState(ABC):
    """The tensors that training changes: weights, buffers, and the optimizers' state.

    A program may hold the values apart while it runs steps; the user's tensors are then empty until `write_back`.

    Args:
        tensors: The user's own tensor objects.
        shardings: The shardings of split tensors, by `id` (default: each tensor is whole on every core).

    Attributes:
        tensors: The user's own tensor objects.
        shardings: The shardings of split tensors, by `id`; a tensor without an entry is whole on every core.
        held: True while the values are held apart.
    """

    def __init__(self, tensors: Iterable[Tensor], shardings: Mapping[int, Sharding] | None = None) -> None:
        self.tensors = list(tensors)
        self.shardings = dict(shardings or {})
        self.held = False

    @property
    @abstractmethod
    def lost(self) -> list[int]:
        """The indices of the values that were lost with a step that failed on the device; usually none."""

    @abstractmethod
    def pin(self, tensors: Iterable[Tensor], placement: Placement) -> None:
        """Keep the sharding of tensors that the currently traced step has changed, see `Placement.pin`."""

    @abstractmethod
    def replace(self, tensors: Iterable[Tensor], shardings: Mapping[int, Sharding]) -> None:
        """Replace the tensors by others. No values may be held."""

    @abstractmethod
    def write_back(self) -> None:
        """Put the values back into the user's tensors. After an interrupt in this method it may be called again.

        Raises:
            StateLostError: A step failed on the device after it had consumed the values.
        """

    @abstractmethod
    def find_lost(self) -> None:
        """Find the values that an error has lost: the results of a failed step can't be read. **This waits**."""

    @abstractmethod
    def clear_lost(self) -> None:
        """Forget which values are lost, because all of them are about to be replaced. Until then, don't read any."""
