"""`Packing`: the weights of convolutions are kept with their outputs last on a TPU, as JAX keeps them.

A TPU keeps arrays in tiles of two dimensions. Those of a weight of shape (out, in, height, width) run along its inputs
where torch_xla keeps it, and along its outputs where a convolution uses it. So each step would copy it, and each state
of its optimizer, to another layout and back: a sixth of the cycles of a ResNet-50.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .placement import CorePlacement


@dataclass(frozen=True)
class Packing:
    """The order in which a placement keeps the dimensions of tensors; without one they stay as they are."""

    placement: CorePlacement | None = None

    def packs(self, tensors: Sequence[Tensor]) -> list[int]:
        """The indices of the tensors that are kept in another order: weights of convolutions, and what is like them.

        One of few inputs, as a first layer's or one of each channel alone, is kept as it is used.
        """
        if self.placement is None or not self.placement.packs:
            return []
        return [i for i, t in enumerate(tensors) if t.dim() > 2 and min(t.shape[:2]) > max(t.shape[2:])]

    def packed(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copy tensors to the order in which they are kept. **This waits**, see `CorePlacement.compute`."""
        return self._computed([kept(tensor) for tensor in tensors])

    def unpacked(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copy kept tensors to the order in which the user sees them. **This waits**, see `CorePlacement.compute`."""
        return self._computed([shown(tensor) for tensor in tensors])

    def pinned(self, tensor: Tensor) -> Tensor:
        """A kept tensor of the trace under way, whole on every core as a value of the state."""
        return tensor if self.placement is None else self.placement.pin(tensor)

    def _computed(self, copies: list[Tensor]) -> list[Tensor]:
        return [] if self.placement is None or not copies else self.placement.compute(copies)


@torch.no_grad()
def kept(tensor: Tensor) -> Tensor:
    """A tensor in the order in which it is kept, pending: (out, in, height, width) as (height, width, in, out).

    Example:
        >>> kept(torch.zeros(5, 4, 3, 2)).shape, shown(kept(torch.zeros(5, 4, 3, 2))).shape
        (torch.Size([3, 2, 4, 5]), torch.Size([5, 4, 3, 2]))
    """
    # A clone, as a view goes on following the changes of its base.
    return tensor.detach().permute(*range(2, tensor.dim()), 1, 0).clone(memory_format=torch.contiguous_format)


@torch.no_grad()
def shown(tensor: Tensor) -> Tensor:
    """A kept tensor in the order in which the user sees it, pending."""
    last = tensor.dim() - 1
    return tensor.detach().permute(last, last - 1, *range(last - 1)).clone(memory_format=torch.contiguous_format)
