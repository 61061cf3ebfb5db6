"""`find_aliases`: finds tensors that share memory, because of views or `tensor.data = other`.

torch_xla keeps PyTorch's semantics while a step is traced: a change of one tensor shows in all tensors that share its
memory. A graph knows only values. So shared memory is noted here before the values are taken out of the tensors, and
`link` lets tensors share memory again.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from .driver import driver
from .thread_guard import unguarding


@dataclass(frozen=True)
class Alias:
    """A tensor that shares memory with another tensor of a list.

    Attributes:
        index: The index of the tensor in the list.
        owner: The index of a tensor whose memory includes the whole tensor.
        view: The tensor's size, strides and offset in the owner's memory; None if both are the same.
        overlaps: True if neither tensor's memory includes the other's: they share only a part, or differ in dtype.
    """

    index: int
    owner: int
    view: tuple[tuple[int, ...], tuple[int, ...], int] | None = None
    overlaps: bool = False


Aliases = tuple[Alias, ...]


def identify_storage(tensor: Tensor) -> int:
    """Return the identity of a tensor's memory, computed or not; tensors that share memory have the same."""
    return int(tensor.untyped_storage()._cdata)


def is_shared_elsewhere(tensors: Sequence[Tensor]) -> bool:
    """True if a tensor outside of the list shares memory with a tensor of the list.

    Example:
        >>> weight = torch.zeros(2)
        >>> same = weight.detach()
        >>> is_shared_elsewhere([weight]), is_shared_elsewhere([weight, same])
        (True, False)
    """
    known = Counter(map(identify_storage, tensors))
    references = _references_of_one()
    return any(torch._C._storage_Use_Count(storage) >= times + references for storage, times in known.items())


@cache
def _references_of_one() -> int:
    """Count the references to the storage of a single tensor; newer releases of PyTorch include Python's reference."""
    tensor = torch.zeros(1)
    return int(torch._C._storage_Use_Count(identify_storage(tensor)))


def find_aliases(tensors: Sequence[Tensor]) -> Aliases:
    """Find the tensors of a list that share memory with another tensor of the list, usually none.

    Example:
        >>> weight = torch.zeros(2, 3)
        >>> find_aliases([weight, torch.zeros(2), weight.detach()])
        (Alias(index=2, owner=0, view=None, overlaps=False),)
        >>> find_aliases([weight, weight[1]])
        (Alias(index=1, owner=0, view=((3,), (1,), 3), overlaps=False),)
    """
    with unguarding():
        storages = [
            identify_storage(tensor) if tensor.layout is torch.strided else -i for i, tensor in enumerate(tensors, 1)
        ]
    if len(set(storages)) == len(storages):
        return ()
    by_storage: dict[int, list[int]] = {}
    for i, storage in enumerate(storages):
        by_storage.setdefault(storage, []).append(i)
    aliases = (alias for members in by_storage.values() if len(members) > 1 for alias in _find_among(tensors, members))
    return tuple(sorted(aliases, key=lambda alias: alias.index))


def find_shared(aliases: Aliases) -> Iterator[tuple[int, int]]:
    """Yield the indices of tensors that are the same as their owner, each with the owner's index."""
    return ((alias.index, alias.owner) for alias in aliases if alias.view is None and not alias.overlaps)


def link(tensors: Sequence[Tensor], aliases: Aliases) -> list[Tensor]:
    """Let tensors share memory as noted, with the owners' values. Returns the views, which must be computed."""
    views = []
    for alias in aliases:
        if alias.overlaps:
            continue
        tensors[alias.index].data = make_view(tensors[alias.owner], alias)
        if alias.view is not None:
            views.append(tensors[alias.index])
    return views


def make_view(owner: Tensor, alias: Alias) -> Tensor:
    """Return a tensor over an alias's part of its owner's current memory."""
    data = owner.data  # `detach` would make a view
    return data if alias.view is None else data.as_strided(*alias.view)


def _find_among(tensors: Sequence[Tensor], members: list[int]) -> Iterator[Alias]:
    """Find the aliases among tensors of one storage, of which some may not overlap."""
    on_device = torch._is_functional_tensor(tensors[members[0]])
    # The largest tensor comes first, as it may include the others. `sorted` keeps the order of equals.
    remaining = sorted(members, key=lambda i: -tensors[i].numel() * tensors[i].is_contiguous())
    if on_device:  # the tensor with the whole storage comes first
        remaining = sorted(remaining, key=lambda i: not torch._is_functional_tensor_base(tensors[i]))
    while len(remaining) > 1:
        owner, *others = remaining
        base = tensors[owner]
        whole = _geometry(base, base)
        if on_device and whole != _normalize(base.shape, torch.empty(base.shape, device="meta").stride(), 0):
            whole = None
        begin, end = (0, 0) if whole is None else _span(whole)
        remaining = []
        for i in others:
            view = _geometry(tensors[i], base)
            if view is None or whole is None or tensors[i].dtype is not base.dtype:
                yield Alias(i, owner, overlaps=True)
                continue
            first, last = _span(view)
            size, strides, offset = view
            if last <= begin or end <= first:
                remaining.append(i)
            elif view == whole:
                yield Alias(i, owner)
            elif base.is_contiguous() and begin <= first and last <= end:
                yield Alias(i, owner, (size, strides, offset - whole[2]))
            else:
                yield Alias(i, owner, overlaps=True)


_Geometry = tuple[tuple[int, ...], tuple[int, ...], int]


def _geometry(tensor: Tensor, owner: Tensor) -> _Geometry | None:
    """Return the size, strides and offset of a tensor in the storage that it shares with its owner; None if unknown."""
    if not torch._is_functional_tensor(tensor):
        return _normalize(tensor.shape, tensor.stride(), int(tensor.storage_offset()))
    if torch._is_functional_tensor_base(tensor):
        indices = torch.arange(tensor.numel()).view(tensor.shape)
        return _normalize(tensor.shape, indices.stride(), 0)
    # A view of a multi-output operation such as `unbind`: if the owner has fewer outputs, PyTorch aborts the process.
    one_of_several = torch._functionalize_is_multi_output_view(tensor)  # type: ignore[attr-defined]
    if one_of_several and not torch._is_functional_tensor_base(owner):
        return None
    # The tensor reports a copy's strides. Find its place in the storage by applying the view's operations to indices.
    numbers = torch.arange(owner.numel()).view(owner.shape)
    try:
        numbers = driver().apply_view(numbers, tensor)
    except (RuntimeError, IndexError):  # the view has another dtype, or another base
        return None
    if numbers.shape != tensor.shape:  # the view has another base than the owner
        return None
    if not numbers.numel():
        return tuple(tensor.shape), (1,) * tensor.dim(), 0
    first = numbers[(0,) * numbers.dim()]
    steps = (
        numbers.select(i, 1)[(0,) * (numbers.dim() - 1)] - first if n > 1 else 1 for i, n in enumerate(numbers.shape)
    )
    return tuple(numbers.shape), tuple(map(int, steps)), int(first)


def _normalize(size: Sequence[int], strides: Sequence[int], offset: int) -> _Geometry:
    """Return a geometry in which dimensions of size 1, whose strides mean nothing, have stride 1."""
    return tuple(size), tuple(step if n > 1 else 1 for n, step in zip(size, strides, strict=True)), offset


def _span(geometry: _Geometry) -> tuple[int, int]:
    """Return the indices in the storage of a tensor's first element and of the element after its last."""
    size, strides, offset = geometry
    last = sum((n - 1) * stride for n, stride in zip(size, strides, strict=True))
    return offset, offset + (last + 1 if all(size) else 0)
