"""Resolves views: reads their elements directly from the base tensor.

XLA computes each view literally. A view that merges rows with another dimension, or transposes a whole stack of
projections, costs copies on each core; the same elements, sliced from the base tensor, cost nothing.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .products import split_linear


def restore_rows(x: Tensor) -> Tensor:
    """Undo the flattening of a tensor's leading dimensions, e.g. of logits `(batch * time, classes)`.

    Returns:
        The base of the view, if it has the same elements in the same order and the same last dimension; else `x`.

    Example:
        >>> restore_rows(torch.zeros(2, 3, 5).flatten(0, 1)).shape
        torch.Size([2, 3, 5])
    """
    layout = _find_layout(x)
    if layout is None:
        return x
    base, start, strides = layout
    same = base.dim() > 1 and base.numel() == x.numel() and base.shape[-1] == x.shape[-1]
    return base if same and (start, strides) == (0, _compute_strides(x.shape)) else x


def slice_base(*tensors: Tensor) -> list[Tensor]:
    """Slice parts of a tensor's last dimension directly from the tensor.

    If the parts cover the whole output of a linear layer, each part becomes a separate product. Otherwise the gradients
    of parts of the same tensor are concatenated. PyTorch's views would pad each gradient with zeros and add them, which
    torch_xla does with masks.

    Args:
        tensors: Tensors, such as queries, keys and values `(batch, heads, time, size)`, of a projection
            `(batch, time, 3 * width)` that was split, permuted and unbound.

    Returns:
        The same elements, sliced from the projection, then reshaped and transposed; a tensor for which this isn't
        possible is returned unchanged.

    Example:
        >>> q, k, v = torch.arange(48.0).view(2, 4, 6).unflatten(2, (3, 1, 2)).permute(2, 0, 3, 1, 4)
        >>> torch.equal(slice_base(q, k, v)[1], k)
        True
    """
    places = [_find_place(x) for x in tensors]
    bases = {id(place.base): place.base for place in places if place}
    parts: dict[tuple[int, int, int], Tensor] = {}
    slices: tuple[Tensor, ...] | None
    for name, base in bases.items():
        ranges = sorted({(place.start, place.size) for place in places if place and place.base is base})
        disjoint = all(a + size <= b for (a, size), (b, _) in itertools.pairwise(ranges))
        sizes = [size for _, size in ranges]
        for group in [ranges] if disjoint else [[one] for one in ranges]:
            slices = split_linear(base, sizes) if disjoint and sum(sizes) == base.shape[-1] else None
            slices = slices or _Parts.apply(base, group)  # type: ignore[no-untyped-call]
            parts |= {(name, *start_and_size): part for start_and_size, part in zip(group, slices, strict=True)}
    return [
        parts[id(place.base), place.start, place.size].unflatten(-1, place.sizes).permute(place.order) if place else x
        for x, place in zip(tensors, places, strict=True)
    ]


@dataclass(frozen=True)
class _Place:
    """The location of a tensor's elements: a range of the base's last dimension, its shape, and the permutation."""

    base: Tensor
    start: int
    sizes: list[int]
    order: list[int]

    @property
    def size(self) -> int:
        return math.prod(self.sizes)


def _find_place(x: Tensor) -> _Place | None:
    layout = _find_layout(x)
    if layout is None:
        return None
    base, start, strides = layout
    # A dimension whose stride is one of the base's leading strides runs over rows; any other runs within a row. The
    # view is a reshaped slice only if the former dimensions cover all rows in order, and the others one range of each.
    outer = {stride: i for i, stride in enumerate(_compute_strides(base.shape)[:-1])}
    inner = [i for i, stride in enumerate(strides) if stride not in outer]
    inner.sort(key=lambda i: -strides[i])
    sizes = [x.shape[i] for i in inner]
    size = math.prod(sizes)
    rows = [i for i, stride in enumerate(strides) if stride in outer]
    rows.sort(key=lambda i: -strides[i])
    if (
        not inner
        or x.numel() != base.shape[:-1].numel() * size
        or [x.shape[i] for i in rows] != list(base.shape[:-1])
        or tuple(strides[i] for i in inner) != _compute_strides(sizes)
        or start + size > base.shape[-1]
    ):
        return None
    return _Place(base, start, sizes, sorted(range(x.dim()), key=[*rows, *inner].__getitem__))


class _Parts(torch.autograd.Function):
    """Slices a tensor's last dimension into ordered, disjoint ranges."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranges: list[tuple[int, int]]) -> tuple[Tensor, ...]:
        ctx.ranges = ranges
        ctx.width = x.shape[-1]
        return tuple(x.narrow(-1, start, size) for start, size in ranges)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        joined = []
        end = 0
        for (start, size), gradient in zip(ctx.ranges, gradients, strict=True):
            joined += [gradient.new_zeros((*gradient.shape[:-1], start - end)), gradient]
            end = start + size
        joined.append(gradients[0].new_zeros((*gradients[0].shape[:-1], ctx.width - end)))
        return torch.cat([part for part in joined if part.shape[-1]], -1), None


def chunks(x: Tensor, chunks: int, dim: int = 0) -> list[Tensor] | None:
    """`torch.unsafe_chunk`, as for the gates of a recurrent cell. torch_xla gathers the chunks by indices."""
    if x.dim() == 0 or chunks < 1 or not -x.dim() <= dim < x.dim() or not x.shape[dim]:
        return None
    # Copies, because the caller may write into them.
    parts: list[Tensor] = torch.ops.aten.split_copy.Tensor(x, -(-x.shape[dim] // chunks), dim)
    return parts


def _find_layout(x: Tensor) -> tuple[Tensor, int, tuple[int, ...]] | None:
    """Return a view's base, the offset of its first element, and its strides.

    None if it isn't a view that strides describe, or if autograd must keep the view itself, e.g. for a hook.
    """
    base = x._base
    if base is None or base.numel() == 0 or x.dtype is not base.dtype or x.dim() == 0:
        return None
    if (
        x.requires_grad is not base.requires_grad
        or x._backward_hooks
        or x.retains_grad
        or not _passes_only_views(x, base)
    ):
        return None
    try:
        # The views are recomputed on a meta tensor, because the device's tensors don't report their strides.
        view: Tensor = x._view_func_unsafe(torch.empty(base.shape, dtype=base.dtype, device="meta"))
    except RuntimeError:  # no strides describe it: some of XLA's views are copies
        return None
    return base, int(view.storage_offset()), view.stride()


def _passes_only_views(x: Tensor, base: Tensor) -> bool:
    """True if the gradient of a view reaches its base only through views.

    An `autograd.Function` may return a view too, e.g. the function of a module's backward hook.
    """
    node: Any = x.grad_fn
    while node is not None and node is not base.grad_fn and node.next_functions:
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return False
        node = node.next_functions[0][0]
    return True


def _compute_strides(shape: torch.Size | list[int]) -> tuple[int, ...]:
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
