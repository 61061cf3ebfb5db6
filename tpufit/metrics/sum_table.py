"""`SumTable`: the sums that the steps of a pass add to, on the device."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..backend import Placement
from ..runtime import read_value, to_device

# The owner of a sum (the name of a mean, or the slot of a metric), and the sum's name.
Key = tuple[str | int | None, str]


class SumTable:
    """Sums on the device: a flat list of tensors that a step's graph takes and replaces, with a key for each.

    The first trace determines which sums exist.
    """

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.tensors: list[Tensor] = []  # the current sums
        # The sums before the step being traced, including new sums of this step.
        self.before: list[Tensor] = []
        # For tensors of the traced step's batch that are parts of stacked tensors: the whole, and the part's number.
        self.parts: Any = WeakIdKeyDictionary()
        self._index: dict[Key, int] = {}  # the place of each sum in the lists
        self._defaults: list[Tensor] = []

    def begin(self) -> None:
        """Begin the trace of a step."""
        self.before = self.tensors
        self.tensors = list(self.tensors)  # a copy, because a batch's logs may hold the list

    def roll_back(self) -> None:
        """Restore the sums from before the trace of a step."""
        self.tensors = self.before

    def get(self, key: Key, default: Tensor) -> Tensor:
        """Read a sum, inside a step; a new sum begins with its default."""
        if key not in self._index:
            self._index[key] = len(self._defaults)
            self._defaults.append(default.detach().clone())
            (tensor,) = to_device([default.clone()], self.placement)
            self.tensors.append(tensor)
            self.before = [*self.before, tensor]
        return self.tensors[self._index[key]]

    def set(self, key: Key, value: Tensor) -> None:
        """Replace a sum, inside a step."""
        self.tensors[self._index[key]] = self.placement.pin(value)

    def place(self, value: Any) -> Tensor:
        """Return a value of the step's Python as a tensor on the device; a number or a host tensor is sent there."""
        tensor = torch.as_tensor(value, dtype=torch.float32 if isinstance(value, float) else None).detach()
        if tensor.dtype in (torch.bfloat16, torch.float64):
            tensor = tensor.float()
        return to_device([tensor], self.placement)[0] if tensor.device.type == "cpu" else tensor

    def find_host_value(self, tensor: Tensor) -> Tensor | None:
        """Return the value of a tensor of the batch on the host; None for a tensor that the step computes."""
        whole, part = self.parts.get(tensor, (tensor, None))
        value = read_value(whole, self.placement)
        return value if value is None or part is None else value[part]

    def reset(self) -> None:
        """Reset every sum to its default."""
        self.tensors = to_device([default.clone() for default in self._defaults], self.placement)
