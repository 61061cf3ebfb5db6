"""Resizes images by a factor. torch_xla uses the ratio of sizes, which differs if the exact size isn't whole."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def nearest(input: Tensor, output_size: Sequence[int] | None, scale_factors: Sequence[float] | None) -> Tensor | None:
    """`upsample_nearest2d` by factors. None without factors, and where the ratio of the sizes equals the factor."""
    if not _needs_factors(input, output_size, scale_factors):
        return None
    result = input
    for dim, factor in zip((-2, -1), scale_factors or (), strict=True):
        size = input.shape[dim]
        positions = torch.arange(int(size * factor), dtype=torch.float32, device=input.device) * (1 / factor)
        result = result.index_select(dim, positions.floor().clamp(max=size - 1).long())
    return result


def bilinear(
    input: Tensor, output_size: Sequence[int] | None, align_corners: bool, scale_factors: Sequence[float] | None
) -> Tensor | None:
    """`upsample_bilinear2d` by factors. None where `nearest` returns None, and with aligned corners."""
    if align_corners or not _needs_factors(input, output_size, scale_factors):
        return None
    result = input
    for dim, factor in zip((-2, -1), scale_factors or (), strict=True):
        size = input.shape[dim]
        positions = torch.arange(int(size * factor), dtype=torch.float32, device=input.device)
        positions = ((positions + 0.5) * (1 / factor) - 0.5).clamp(min=0)
        below = positions.floor().clamp(max=size - 1)
        fraction = (positions - below).view([-1] + [1] * (-1 - dim))
        first, second = (result.index_select(dim, i.long()) for i in (below, (below + 1).clamp(max=size - 1)))
        result = first * (1 - fraction) + second * fraction
    return result.to(input.dtype)


def _needs_factors(input: Tensor, output_size: Any, factors: Sequence[float] | None) -> bool:
    if output_size is not None or not factors or input.dim() != 4 or not input.numel():
        return False
    sizes = [(size, int(size * factor), factor) for size, factor in zip(input.shape[2:], factors, strict=True)]
    return all(size for _, size, _ in sizes) and any(before / after != 1 / factor for before, after, factor in sizes)
