"""Lazy tensors: torch_xla's tensors that may still wait to be computed, and the memory that they have on the device."""

import gc
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from . import counters
from .bindings import xla
from .placement import Placement
from .transfer import swap_value


def launch(placement: Placement, role: str, cause: str = "") -> None:
    """Start everything that is pending on the device, without waiting for it.

    Args:
        placement: The cores on which it is pending; on the host nothing ever is.
        role: The role that a graph is counted under, if one must be compiled.
        cause: The reason for that graph.
    """
    if placement.on_host:
        return
    with counters.role(role, cause):
        xla()._xla_step_marker(placement.device_name, [], wait=False)


def wait(reason: str) -> None:
    """Wait until the device has done all that was started."""
    with counters.waiting(reason):
        xla()._xla_wait_device_ops([])


def pending(tensors: Sequence[Tensor]) -> list[int]:
    """The indices of the tensors that have no value yet. All must be on the device."""
    if not tensors:  # which torch_xla refuses
        return []
    return [i for i, waits in enumerate(xla()._check_tensor_need_materialization(tensors)) if waits]


def graph_hash(tensor: Tensor) -> object:
    """The identity of the work that a pending tensor waits for."""
    return xla()._get_graph_hash([tensor])


def handles(tensors: Sequence[Tensor]) -> list[int]:
    """The identity of each tensor's memory on the device; it must have been computed."""
    return list(xla()._get_tensors_handle(tensors)) if tensors else []


def by_memory(lists: Mapping[str, Sequence[Tensor]]) -> dict[int, tuple[str, int]]:
    """The list and the index of each tensor, by the identity of its memory."""
    return {handle: (name, i) for name, tensors in lists.items() for i, handle in enumerate(handles(tensors))}


def same_memory(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Other tensors over the memory that these have now, on the device."""
    if not tensors:
        return []
    _, values = xla()._get_tensors_xla_device_data_node(tensors)
    found = dict(zip(handles(values), values, strict=True))
    return [found[handle] for handle in handles(tensors)]


def behind_barrier(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return tensors of the same values, which the compiler takes for others, and which exist once all of them do."""
    apart = [tensor.detach().clone() for tensor in tensors]
    xla()._xla_optimization_barrier_(apart)
    return apart


def pending_elsewhere(known: Iterable[Tensor]) -> list[Tensor]:
    """The pending tensors that only user code knows: in an attribute, a list, a closure. They come in order of birth.

    Args:
        known: Tensors to leave out.
    """
    own, kinds = {id(tensor) for tensor in known}, _subclasses(Tensor)
    # By membership: there are half a million objects, and `issubclass` takes twice as long for each.
    objects = [o for o in gc.get_objects() if type(o) in kinds and id(o) not in own]
    tensors = [t for t in objects if t.is_xla]  # unlike `device`, it is also there for a tensor without a device
    found = [tensors[i] for i in pending(tensors)]
    return sorted(found, key=xla()._xla_get_tensor_id)


def _subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_subclasses, kind.__subclasses__()))


def drop(tensors: Iterable[Tensor]) -> None:
    """Take their values out of tensors, and the pending work with them, whoever else holds the tensors."""
    for tensor in tensors:
        # A tensor that only another's history kept may have ended with it, and then has no device.
        if tensor.is_xla:  # type: ignore[attr-defined]
            swap_value(tensor, torch.empty_like(tensor, device="meta"), requires_grad=False)
