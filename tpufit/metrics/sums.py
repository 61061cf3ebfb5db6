"""`SumTable`: the sums that the steps of a pass add to, on the device."""

from typing import Any

import torch
from torch import Tensor

from ..backend import Placement
from ..runtime import to_device, value_of

# The owner of a sum, a mean's name or a metric's slot, and the sum's name.
Key = tuple[str | int | None, str]


class SumTable:
    """Sums on the device: a flat list of tensors, which the graph of a step takes in and replaces, found by key.

    The first trace shows which sums there are.
    """

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.tensors: list[Tensor] = []  # as they stand
        # With these the step being traced began; those that it made itself are among them.
        self.begun: list[Tensor] = []
        # Of the step being traced, the tensors of its batch that are parts of larger ones: these and the part's number.
        self.parts: dict[int, tuple[Tensor, int]] = {}
        self._index: dict[Key, int] = {}  # the place of each sum in the lists
        self._defaults: list[Tensor] = []

    def begin(self) -> None:
        """Begin the trace of a step."""
        self.begun = self.tensors
        self.tensors = list(self.tensors)  # a batch's logs may hold the list, and keep their values

    def roll_back(self) -> None:
        """Return to the sums that the trace of a step began with."""
        self.tensors = self.begun

    def get(self, key: Key, default: Tensor) -> Tensor:
        """Read a sum, inside a step; a new one begins with its default."""
        if key not in self._index:
            self._index[key] = len(self._defaults)
            self._defaults.append(default.detach().clone())
            (tensor,) = to_device([default.clone()], self.placement)
            self.tensors.append(tensor)
            self.begun = [*self.begun, tensor]
        return self.tensors[self._index[key]]

    def set(self, key: Key, value: Tensor) -> None:
        """Replace a sum, inside a step."""
        self.tensors[self._index[key]] = self.placement.pin(value)

    def placed(self, value: Any) -> Tensor:
        """A value of the step's Python as a tensor where the steps run: a number or a host tensor is sent there."""
        tensor = torch.as_tensor(value).detach()
        if tensor.dtype in (torch.bfloat16, torch.float64):
            tensor = tensor.float()
        return to_device([tensor], self.placement)[0] if tensor.device.type == "cpu" else tensor

    def known(self, tensor: Tensor) -> Tensor | None:
        """The value of a tensor on the host, if it came with the batch; None if the step has to compute it."""
        whole, part = self.parts.get(id(tensor), (tensor, None))
        value = value_of(whole, self.placement)
        return value if value is None or part is None else value[part]

    def reset(self) -> None:
        """Return every sum to its default."""
        self.tensors = to_device([default.clone() for default in self._defaults], self.placement)
