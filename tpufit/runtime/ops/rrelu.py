"""`rrelu`: `nn.RReLU` on the device. torch_xla computes it on the host, and TorchTPU refuses its gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def rrelu(input: Tensor, *options: Any, **named: Any) -> Tensor | None:
    """`torch.rrelu`."""
    slopes = _draw_slopes(input, *options, **named)
    return None if slopes is None else input * slopes


def rrelu_in_place(input: Tensor, *options: Any, **named: Any) -> Tensor | None:
    """`torch.rrelu_`."""
    slopes = _draw_slopes(input, *options, **named)
    return None if slopes is None else input.mul_(slopes)


def _draw_slopes(
    input: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor | None:
    """Return the slope at each element; None for a generator of the user's, or arguments that PyTorch refuses."""
    if not input.is_floating_point() or not lower <= upper or generator is not None:
        return None
    with torch.no_grad():
        dtype = torch.promote_types(input.dtype, torch.float32)
        slopes = torch.full(input.shape, (lower + upper) / 2, dtype=dtype, device=input.device)
        if training:
            slopes.uniform_(lower, upper)
        return torch.where(input <= 0, slopes, 1).to(input.dtype)
