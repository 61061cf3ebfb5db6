"""Lazy tensors: tensors that may be pending, and their memory on the device."""

import gc
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, compress, tee
from operator import attrgetter

import torch
from torch import Tensor

from ..utils.counters import waiting
from ..utils.garbage_collector import collector
from . import device_counters
from .aliases import Aliases, link
from .driver import driver
from .thread_guard import unguarding
from .transfer import swap_value

_use_count = Tensor._use_count  # type: ignore[attr-defined]  # missing in PyTorch's stubs
_let_python_own = Tensor._fix_weakref  # type: ignore[attr-defined]  # missing in PyTorch's stubs


def compute(tensors: Sequence[Tensor], cause: str = "tensors share memory") -> None:
    """Start the work of only these tensors, without waiting, and without writing over any memory that it reads."""
    if tensors:
        with device_counters.role("transfer", cause):
            driver().compute(tensors)


def wait(reason: str) -> None:
    """Wait until the device has done all started work."""
    with waiting(reason):
        driver().wait()


def link_now(tensors: Sequence[Tensor], aliases: Aliases, reason: str) -> list[Tensor]:
    """Let tensors share memory as noted, and return the views. **This waits** for the views.

    A trace reads the identity of their memory, and on several cores reading it too early aborts the process.
    """
    views = link(tensors, aliases)
    if views:
        compute(views)
        wait(reason)
    return views


def find_pending(tensors: Sequence[Tensor]) -> list[int]:
    """Return the indices of the tensors that have no value yet. All must be on the device."""
    return driver().find_pending(tensors) if tensors else []


def graph_hash(tensor: Tensor) -> object:
    """Return the identity of the work that computes a pending tensor."""
    return driver().work_of(tensor)


def identity(tensor: Tensor) -> int:
    """Return the number of a tensor's value on the device; its detached tensors share the value and the number."""
    return driver().identity(tensor)


def handles(tensors: Sequence[Tensor]) -> list[Hashable]:
    """Return the identity of each tensor's memory on the device. All tensors must have been computed."""
    return driver().handles(tensors) if tensors else []


def index_by_memory(lists: Mapping[str, Sequence[Tensor]]) -> dict[Hashable, tuple[str, int]]:
    """Return the list and the index of each tensor by the identity of its memory."""
    return {handle: (name, i) for name, tensors in lists.items() for i, handle in enumerate(handles(tensors))}


def alias_memory(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return new tensors over the current memory of these tensors on the device."""
    return driver().alias_memory(tensors) if tensors else []


def put_behind_barrier(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return tensors of equal values behind an optimization barrier, which are computed together."""
    return driver().put_behind_barrier(list(tensors))


def find_pending_elsewhere(known: Iterable[Tensor], among: Sequence[Tensor] | None = None) -> list[Tensor]:
    """Return the pending tensors that aren't `known`, but in the user's attributes, lists or closures, oldest first.

    A search among all tensors (without `among`) takes a tenth of a second or more.
    """
    known = list(known)
    known_ids = {id(tensor) for tensor in known}
    tensors = [tensor for tensor in (find_alive() if among is None else among) if id(tensor) not in known_ids]
    try:
        pending = [tensors[i] for i in find_pending(tensors)]
    except RuntimeError:  # a tensor has neither a value nor pending work, e.g. while another thread reads it
        pending = [tensor for tensor in tensors if _is_pending(tensor) is True]
    # The collector doesn't list the objects that `gc.freeze` has frozen.
    if among is None and gc.get_freeze_count() and others_are_pending([*filter(_has_device, known), *pending]):
        gc.unfreeze()
        return find_pending_elsewhere(known)
    return sorted(pending, key=identity) if driver().is_lazy else pending  # the collector lists the oldest first


def others_are_pending(tensors: Sequence[Tensor]) -> bool:
    """True if other tensors than these are pending on the device. The given tensors must be on the device."""
    return driver().count_pending() > len({identity(tensors[i]) for i in find_pending(tensors)})


@contextmanager
def noting_new(new: list[Tensor]) -> Iterator[None]:
    """A context that at its end adds to a list the living tensors on the device that were made inside.

    The garbage collector is paused, so that they are among its youngest objects, which are few enough to search.
    """
    with collector.pausing():
        try:
            yield
        finally:
            new += find_young()


def find_young() -> list[Tensor]:
    """Return the tensors on the device among the garbage collector's youngest objects."""
    return find_alive(generation=0)


def find_alive(generation: int | None = None) -> list[Tensor]:
    """Return the tensors on the device in one generation of the garbage collector (default: in all)."""
    kinds = _subclasses(Tensor)
    objects = list[object]()
    # `in` takes half the time of `issubclass` for each of half a million objects.
    tensors = compress(objects, map(kinds.__contains__, map(type, objects)))
    on_device = attrgetter(f"is_{driver().device_type}")  # unlike `device`, tensors without a device have it too
    found, same = tee(filter(_use_count, filter(on_device, tensors)))  # a tensor that is being freed has no users
    owned = compress(found, zip(map(_let_python_own, same), strict=True))
    # The collector also lists tensors that only C++ keeps, e.g. autograd's graph. Between two instructions of Python
    # another thread may free such a tensor: PyTorch warns, and using it may overwrite memory. So one instruction fills
    # the list, searches it, and clears it; the iterators are C, where Python doesn't switch threads.
    with collector.pausing(), unguarding():
        _, *result, _ = chain(
            map(objects.extend, map(gc.get_objects, (generation,))), owned, map(list.clear, (objects,))
        )
    return result


def has_value(tensor: Tensor) -> bool:
    """True if a tensor is on the device and has been computed."""
    return _is_pending(tensor) is False


def _is_pending(tensor: Tensor) -> bool | None:
    """Return whether a tensor is pending; None if it has neither a value nor pending work."""
    try:
        return bool(find_pending([tensor])) if _has_device(tensor) else None
    except RuntimeError:
        return None


def _has_device(tensor: Tensor) -> bool:
    """True for a tensor on the device; a tensor that only autograd's graph has kept may have lost its device."""
    return bool(getattr(tensor, f"is_{driver().device_type}"))


def _subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_subclasses, kind.__subclasses__()))


def drop(tensors: Iterable[Tensor]) -> None:
    """Take the values and the pending work out of tensors, even if they are referenced elsewhere."""
    for tensor in tensors:
        # A tensor kept alive only by another tensor's autograd history may have been freed with it. Then it has no
        # device.
        if _has_device(tensor):
            swap_value(tensor, torch.empty_like(tensor, device="meta"), requires_grad=False)
