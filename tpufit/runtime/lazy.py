"""Lazy tensors: torch_xla's tensors that may still wait to be computed, and the memory that they have on the device."""

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ..utils.counters import waiting
from . import counters
from .bindings import xla
from .transfer import swap_value


def compute(tensors: Sequence[Tensor], cause: str = "tensors share memory") -> None:
    """Start the work of some tensors alone, without waiting; none of the memory that it reads is written over."""
    if tensors:
        with counters.role("transfer", cause):
            xla()._xla_sync_multi(list(tensors), [], False, True)


def wait(reason: str) -> None:
    """Wait until the device has done all that was started."""
    with waiting(reason):
        xla()._xla_wait_device_ops([])


def pending(tensors: Sequence[Tensor]) -> list[int]:
    """The indices of the tensors that have no value yet. All must be on the device."""
    if not tensors:  # which torch_xla refuses
        return []
    return [i for i, waits in enumerate(xla()._check_tensor_need_materialization(tensors)) if waits]


def graph_hash(tensor: Tensor) -> object:
    """The identity of the work that a pending tensor waits for."""
    return xla()._get_graph_hash([tensor])


def identity(tensor: Tensor) -> int:
    """The number of a tensor on the device. A tensor that was detached from it, and shares its value, has the same."""
    return int(xla()._xla_get_tensor_id(tensor))


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


def pending_elsewhere(known: Iterable[Tensor], among: Sequence[Tensor] | None = None) -> list[Tensor]:
    """The pending tensors that only user code knows: in an attribute, a list, a closure. They come in order of birth.

    Known ones are left out. To look among all that there are takes a tenth of a second and more.
    """
    own = {id(tensor) for tensor in known}
    tensors = [tensor for tensor in (_tensors() if among is None else among) if id(tensor) not in own]
    try:
        found = [tensors[i] for i in pending(tensors)]
    except RuntimeError:  # one has no value and waits for none, as while another thread reads it
        found = [tensor for tensor in tensors if _waits(tensor) is True]
    return sorted(found, key=identity)


@contextmanager
def noting_new() -> Iterator[list[Tensor]]:
    """A context that, at its end, lists the tensors on the device that were made inside and are alive.

    They are among the collector's youngest objects, few enough to look at, as long as it doesn't run.
    """
    runs = gc.isenabled()
    new = list[Tensor]()
    gc.disable()
    try:
        yield new
    finally:
        new += young()
        if runs:
            gc.enable()


def young() -> list[Tensor]:
    """The tensors on the device among the collector's youngest objects."""
    return _tensors(generation=0)


def _tensors(generation: int | None = None) -> list[Tensor]:
    """The tensors on the device, of all generations of the garbage collector or of one."""
    kinds = _subclasses(Tensor)
    # By membership: there are half a million objects, and `issubclass` takes twice as long for each.
    objects = [o for o in gc.get_objects(generation) if type(o) in kinds]
    found = [t for t in objects if t.is_xla]  # unlike `device`, it is also there for a tensor without a device
    for tensor in found:  # one that only autograd's graph kept would end with it, with a warning, while we hold it
        tensor._fix_weakref()
    return found


def has_value(tensor: Tensor) -> bool:
    """True if a tensor is there and has been computed."""
    return _waits(tensor) is False


def _waits(tensor: Tensor) -> bool | None:
    try:
        return bool(pending([tensor])) if tensor.is_xla else None  # type: ignore[attr-defined]
    except RuntimeError:
        return None


def _subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_subclasses, kind.__subclasses__()))


def drop(tensors: Iterable[Tensor]) -> None:
    """Take their values out of tensors, and the pending work with them, whoever else holds the tensors."""
    for tensor in tensors:
        # A tensor that only another's history kept may have ended with it, and then has no device.
        if tensor.is_xla:  # type: ignore[attr-defined]
            swap_value(tensor, torch.empty_like(tensor, device="meta"), requires_grad=False)
