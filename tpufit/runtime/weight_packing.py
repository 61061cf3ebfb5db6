"""`Packing`: on a TPU the weights of convolutions are kept with their output channels last, as in JAX.

A TPU keeps arrays in tiles of two dimensions. For a weight of shape (out, in, height, width) torch_xla's tiles run
along the input channels, but convolutions need tiles along the output channels. So each step would convert the layout
of each weight and its optimizer state and back, which takes a sixth of the cycles of a ResNet-50.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .placement import CorePlacement


@dataclass(frozen=True)
class Packing:
    """The order in which a placement keeps the dimensions of tensors; without a placement the order doesn't change."""

    placement: CorePlacement | None = None

    def find_packable(self, tensors: Sequence[Tensor]) -> list[int]:
        """Return the indices of tensors that are kept in another order: weights of convolutions and similar tensors.

        Weights with few input channels (first layers, depthwise convolutions) keep PyTorch's order, which suits them.
        """
        if self.placement is None or not self.placement.packs:
            return []
        return [i for i, t in enumerate(tensors) if t.dim() > 2 and min(t.shape[:2]) > max(t.shape[2:])]

    def pack(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copy tensors to the device's order. **This waits**, see `CorePlacement.compute_and_wait`."""
        return self._compute([reorder_for_device(tensor) for tensor in tensors])

    def unpack(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copy packed tensors to the user's order. **This waits**, see `CorePlacement.compute_and_wait`."""
        return self._compute([reorder_for_user(tensor) for tensor in tensors])

    def pin(self, tensor: Tensor) -> Tensor:
        """Pin a packed tensor of the current trace to be whole on every core."""
        return tensor if self.placement is None else self.placement.pin(tensor)

    def _compute(self, copies: list[Tensor]) -> list[Tensor]:
        return [] if self.placement is None or not copies else self.placement.compute_and_wait(copies)


@torch.no_grad()
def reorder_for_device(tensor: Tensor) -> Tensor:
    """Return a pending copy in the device's order: (out, in, height, width) becomes (height, width, in, out).

    Example:
        >>> packed = reorder_for_device(torch.zeros(5, 4, 3, 2))
        >>> packed.shape, reorder_for_user(packed).shape
        (torch.Size([3, 2, 4, 5]), torch.Size([5, 4, 3, 2]))
    """
    # A clone, because a view would follow later changes of its base.
    return tensor.detach().permute(*range(2, tensor.dim()), 1, 0).clone(memory_format=torch.contiguous_format)


@torch.no_grad()
def reorder_for_user(tensor: Tensor) -> Tensor:
    """Return a pending copy of a packed tensor in the user's order."""
    last = tensor.dim() - 1
    return tensor.detach().permute(last, last - 1, *range(last - 1)).clone(memory_format=torch.contiguous_format)
