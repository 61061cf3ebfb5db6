"""`Packing`: the weights of 1x1 convolutions are kept as matrices on a TPU.

A TPU keeps arrays in tiles of two dimensions. For a weight of shape (out, in, 1, 1) it takes others where the weight is
kept than where it is used, so each step would copy it, and each state of its optimizer, to another layout and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import counters
from .bindings import xla
from .devices import platform
from .placement import HOST, Placement
from .transfer import to_device

PLATFORMS = {"TPU"}


@dataclass(frozen=True)
class Packing:
    """The shapes in which a placement keeps tensors.

    Args:
        placement: The cores.

    Attributes:
        placement: The cores.
        active: True if they keep any tensor in another shape.
    """

    placement: Placement = HOST

    @property
    def active(self) -> bool:
        placement = self.placement
        return not placement.on_host and (placement.recorder is not None or platform() in PLATFORMS)

    def packs(self, tensors: Sequence[Tensor]) -> dict[int, torch.Size]:
        """The shapes of those tensors, by their indices, that are kept in another one than their own."""
        if not self.active:
            return {}
        return {i: t.shape[:2] for i, t in enumerate(tensors) if t.dim() > 2 and t.shape[2:].numel() == 1}

    def reshaped(self, tensors: Sequence[Tensor], shapes: Sequence[torch.Size]) -> list[Tensor]:
        """Copy tensors to other shapes. **This waits**: only what is computed has memory that can be told apart.

        Args:
            tensors: Tensors on the device.
            shapes: The shapes.
        """
        if not tensors:
            return []
        if self.placement.recorder is not None:
            empty = [torch.empty(s, dtype=t.dtype, device="meta") for t, s in zip(tensors, shapes, strict=True)]
            return to_device(empty, self.placement)
        with torch.no_grad():
            # Clones, as a view goes on following the changes of its base.
            copies = [t.detach().view(s).clone() for t, s in zip(tensors, shapes, strict=True)]
        with counters.waiting("packing"), counters.role("transfer"):
            xla()._xla_sync_multi(copies, devices=[], wait=True)
        return copies
