"""`aliases_of`: the tensors that share memory, as PyTorch's views and `tensor.data = other` make them.

torch_xla keeps PyTorch's semantics while a step is traced: a change of one tensor shows in all that share its memory. A
graph knows values only. So what shares memory is noted here before the values are taken out of the tensors, and
`link` lets tensors share it again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from weakref import ref

import torch
from torch import Tensor

from .release import viewed


@dataclass(frozen=True)
class Alias:
    """One of several tensors over the same memory.

    Attributes:
        index: Its index in the list of tensors.
        owner: The index of a tensor whose memory holds all of it.
        view: Its size, strides and offset in the owner's memory; None if it shows all of it as the owner does.
        apart: True if there is no such owner: the two share only a part, or have other dtypes.
    """

    index: int
    owner: int
    view: tuple[tuple[int, ...], tuple[int, ...], int] | None = None
    apart: bool = False


Aliases = tuple[Alias, ...]


@dataclass(frozen=True)
class Follower:
    """A tensor outside of a list that shares memory with one of its tensors."""

    tensor: ref[Tensor]
    alias: Alias

    def link(self, tensors: Sequence[Tensor]) -> None:
        """Let it share the memory that its owner has now, if it is alive."""
        tensor = self.tensor()
        if tensor is not None:
            tensor.data = _shown(tensors[self.alias.owner], self.alias)


def storage_of(tensor: Tensor) -> int:
    """The identity of a tensor's memory, computed or not. Tensors that share it have the same."""
    return int(tensor.untyped_storage()._cdata)


def aliases_of(tensors: Sequence[Tensor]) -> Aliases:
    """Find the tensors that share memory with another one of the list. Usually there are none.

    Example:
        >>> weight = torch.zeros(2, 3)
        >>> aliases_of([weight, torch.zeros(2), weight.detach(), weight[1]])
        (Alias(index=2, owner=0, view=None, apart=False), Alias(index=3, owner=0, view=((3,), (1,), 3), apart=False))
    """
    storages = [storage_of(tensor) if tensor.layout is torch.strided else -i for i, tensor in enumerate(tensors, 1)]
    if len(set(storages)) == len(storages):
        return ()
    together: dict[int, list[int]] = {}
    for i, storage in enumerate(storages):
        together.setdefault(storage, []).append(i)
    found = (alias for members in together.values() if len(members) > 1 for alias in _among(tensors, members))
    return tuple(sorted(found, key=lambda alias: alias.index))


def shared(aliases: Aliases) -> Iterator[tuple[int, int]]:
    """The indices of tensors that show all the memory of their owner, and of these."""
    return ((alias.index, alias.owner) for alias in aliases if alias.view is None and not alias.apart)


def link(tensors: Sequence[Tensor], aliases: Aliases) -> list[Tensor]:
    """Let tensors share memory as noted, with the owners' values. Returns the views, which are to be computed."""
    views = []
    for alias in aliases:
        if alias.apart:
            continue
        tensors[alias.index].data = _shown(tensors[alias.owner], alias)
        if alias.view is not None:
            views.append(tensors[alias.index])
    return views


def followers_of(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> list[Follower]:
    """Find those of some other tensors that share all their memory with one of the list."""
    first = len(tensors)
    return [
        Follower(ref(others[alias.index - first]), alias)
        for alias in aliases_of([*tensors, *others])
        if alias.index >= first > alias.owner and not alias.apart
    ]


def _shown(owner: Tensor, alias: Alias) -> Tensor:
    shown = owner.data  # `detach` would make a view of it
    return shown if alias.view is None else shown.as_strided(*alias.view)


def _among(tensors: Sequence[Tensor], members: list[int]) -> Iterator[Alias]:
    """Find the aliases among tensors of the same storage, of which some may lie apart."""
    on_device = torch._is_functional_tensor(tensors[members[0]])
    # The largest first: it may hold the others. `sorted` keeps the order of equals.
    waiting = sorted(members, key=lambda i: -tensors[i].numel() * tensors[i].is_contiguous())
    if on_device:  # first the one that has the whole storage
        waiting = sorted(waiting, key=lambda i: not torch._is_functional_tensor_base(tensors[i]))
    while len(waiting) > 1:
        owner, *others = waiting
        own = tensors[owner]
        whole = _geometry(own, own)
        if on_device and whole != (tuple(own.shape), torch.empty(own.shape, device="meta").stride(), 0):
            whole = None
        begin, end = (0, 0) if whole is None else _span(whole)
        waiting = []
        for i in others:
            view = _geometry(tensors[i], own)
            if view is None or whole is None or tensors[i].dtype is not own.dtype:
                yield Alias(i, owner, apart=True)
                continue
            first, last = _span(view)
            size, strides, offset = view
            if last <= begin or end <= first:
                waiting.append(i)
            elif view == whole:
                yield Alias(i, owner)
            elif own.is_contiguous() and begin <= first and last <= end:
                yield Alias(i, owner, (size, strides, offset - whole[2]))
            else:
                yield Alias(i, owner, apart=True)


_Geometry = tuple[tuple[int, ...], tuple[int, ...], int]


def _geometry(tensor: Tensor, owner: Tensor) -> _Geometry | None:
    """The size, strides and offset of a tensor in the storage that it shares with its owner; None if nobody knows."""
    if not torch._is_functional_tensor(tensor):
        return tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())
    if torch._is_functional_tensor_base(tensor):
        indices = torch.arange(tensor.numel()).view(tensor.shape)
        return tuple(tensor.shape), indices.stride(), 0
    # One of several outputs, as of `unbind`: another tensor may have fewer, and PyTorch would end the process.
    one_of_several = torch._functionalize_is_multi_output_view(tensor)  # type: ignore[attr-defined]
    if one_of_several and not torch._is_functional_tensor_base(owner):
        return None
    # Its strides are those of a copy: only the operations that made the view know where it lies.
    numbers = torch.arange(owner.numel()).view(owner.shape)
    try:
        numbers = viewed(numbers, tensor)
    except (RuntimeError, IndexError):  # a view as another dtype, or of another tensor
        return None
    if numbers.shape != tensor.shape:  # it was made of another tensor than the owner
        return None
    if not numbers.numel():
        return tuple(tensor.shape), (1,) * tensor.dim(), 0
    first = numbers[(0,) * numbers.dim()]
    steps = (
        numbers.select(i, 1)[(0,) * (numbers.dim() - 1)] - first if n > 1 else 1 for i, n in enumerate(numbers.shape)
    )
    return tuple(numbers.shape), tuple(map(int, steps)), int(first)


def _span(geometry: _Geometry) -> tuple[int, int]:
    """The first element of a tensor in its storage, and the one after its last."""
    size, strides, offset = geometry
    last = sum((n - 1) * stride for n, stride in zip(size, strides, strict=True))
    return offset, offset + (last + 1 if all(size) else 0)
