"""Views of a tensor, found out: the same elements straight from the tensor that they are of.

XLA computes each view as it comes. One that merges the rows with another dimension, or moves a whole stack of
projections about, costs copies on each core, where its parts, taken from the tensor itself, cost nothing.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .products import divided


def unflattened(x: Tensor) -> Tensor:
    """Take back the flattening of a tensor's leading dimensions, as of a batch's logits `(batch * time, classes)`.

    Returns:
        The tensor that it is a view of, if that has the same elements in the same order and the same last dimension;
        else `x`.

    Example:
        >>> unflattened(torch.zeros(2, 3, 5).flatten(0, 1)).shape
        torch.Size([2, 3, 5])
    """
    found = _layout(x)
    if found is None:
        return x
    base, start, strides = found
    same = base.dim() > 1 and base.numel() == x.numel() and base.shape[-1] == x.shape[-1]
    return base if same and (start, strides) == (0, _contiguous(x.shape)) else x


def direct(*tensors: Tensor) -> list[Tensor]:
    """Take parts of a tensor's last dimension straight from it.

    Where they are all that a linear layer has computed, each becomes a product of its own. Else the gradients of parts
    of the same tensor are joined to its own one: those of PyTorch's views would each be filled up with zeros and added,
    by masks on torch_xla.

    Args:
        tensors: Tensors, such as queries, keys and values `(batch, heads, time, size)`, of a projection
            `(batch, time, 3 * width)` that was split, permuted and unbound.

    Returns:
        The same elements, as slices of the projection, then reshaped and transposed; the tensors themselves where that
        can't be done.

    Example:
        >>> q, k, v = torch.arange(48.0).view(2, 4, 6).unflatten(2, (3, 1, 2)).permute(2, 0, 3, 1, 4)
        >>> torch.equal(direct(q, k, v)[1], k)
        True
    """
    places = [_place(x) for x in tensors]
    bases = {id(place.base): place.base for place in places if place}
    parts: dict[tuple[int, int, int], Tensor] = {}
    taken: tuple[Tensor, ...] | None
    for name, base in bases.items():
        ranges = sorted({(place.start, place.size) for place in places if place and place.base is base})
        disjoint = all(a + size <= b for (a, size), (b, _) in itertools.pairwise(ranges))
        sizes = [size for _, size in ranges]
        for together in [ranges] if disjoint else [[one] for one in ranges]:
            taken = divided(base, sizes) if disjoint and sum(sizes) == base.shape[-1] else None
            taken = taken or _Parts.apply(base, together)  # type: ignore[no-untyped-call]
            parts |= {(name, *one): part for one, part in zip(together, taken, strict=True)}
    return [
        parts[id(place.base), place.start, place.size].unflatten(-1, place.sizes).permute(place.order) if place else x
        for x, place in zip(tensors, places, strict=True)
    ]


@dataclass(frozen=True)
class _Place:
    """Where a tensor's elements are: in which range of another one's last dimension, in which sizes and order."""

    base: Tensor
    start: int
    sizes: list[int]
    order: list[int]

    @property
    def size(self) -> int:
        return math.prod(self.sizes)


def _place(x: Tensor) -> _Place | None:
    found = _layout(x)
    if found is None:
        return None
    base, start, strides = found
    # A dimension with a stride of the base's leading ones goes over its rows, any other over a range in a row. Only if
    # the former go over all rows, in order, and the latter over one range, is the view a slice that was reshaped.
    outer = {stride: i for i, stride in enumerate(_contiguous(base.shape)[:-1])}
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
        or tuple(strides[i] for i in inner) != _contiguous(sizes)
        or start + size > base.shape[-1]
    ):
        return None
    return _Place(base, start, sizes, sorted(range(x.dim()), key=[*rows, *inner].__getitem__))


class _Parts(torch.autograd.Function):
    """Ranges of a tensor's last dimension, which don't overlap, in order."""

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
    """`torch.unsafe_chunk`, of the gates of a recurrent cell. torch_xla picks them by indices, one by one."""
    if x.dim() == 0 or chunks < 1 or not -x.dim() <= dim < x.dim() or not x.shape[dim]:
        return None
    # Copies, as their owner may write into them.
    parts: list[Tensor] = torch.ops.aten.split_copy.Tensor(x, -(-x.shape[dim] // chunks), dim)
    return parts


def _layout(x: Tensor) -> tuple[Tensor, int, tuple[int, ...]] | None:
    """Where a view's elements lie: in which tensor, from which element on, and how far apart along each dimension.

    None for what is no view, and where a gradient or a hook of the view itself must be kept.
    """
    base = x._base
    if base is None or base.numel() == 0 or x.dtype is not base.dtype or x.dim() == 0:
        return None
    if x.requires_grad is not base.requires_grad or x._backward_hooks or x.retains_grad or not _only_views(x, base):
        return None
    try:
        # The views are computed once more, of a tensor without memory: a device's own tensors don't tell their strides.
        view: Tensor = x._view_func_unsafe(torch.empty(base.shape, dtype=base.dtype, device="meta"))
    except RuntimeError:  # memory has no strides for it; XLA has views that copy
        return None
    return base, int(view.storage_offset()), view.stride()


def _only_views(x: Tensor, base: Tensor) -> bool:
    """True if the gradient of a view goes to its base by way of views alone.

    An `autograd.Function` may return a view too: that of a module's backward hook does.
    """
    node: Any = x.grad_fn
    while node is not None and node is not base.grad_fn and node.next_functions:
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return False
        node = node.next_functions[0][0]
    return True


def _contiguous(shape: torch.Size | list[int]) -> tuple[int, ...]:
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
