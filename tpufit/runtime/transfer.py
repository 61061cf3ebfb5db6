"""Host to device and back. Values reach the host only by `to_host`, which waits, and counts the wait by its reason.

Everything is moved by the driver's transfer calls and never by `Tensor.to`: a 0-d host tensor moved by `.to` is traced
as a constant with its first value, but a transferred tensor is an input of the graph.
"""

import copyreg
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ..backend import Placement, Sharding, Shardings
from ..backend.placement import Names
from ..errors import PlacementError
from ..utils.counters import waiting
from . import device_counters
from .aliases import find_aliases, link
from .driver import driver, on_device
from .thread_guard import unguarding

# The bytes of a large state that are copied at once, to the host or on the device. Single tensors aren't divided.
AT_ONCE = 1 << 28

_ALL_WHOLE: Shardings = {}
_NAMELESS: Names = {}


def to_device(
    tensors: Sequence[Tensor], placement: Placement, sharding: Sharding | Sequence[Sharding] = Sharding.WHOLE
) -> list[Tensor]:
    """Copy host tensors to the device, in the same order, without waiting; device tensors are returned unchanged.

    A placement on the host returns the same tensors. Absent cores take meta tensors too. A single sharding is for all
    tensors; a scalar is always whole.
    """
    return placement.send(tensors, sharding)


def to_host(tensors: Sequence[Tensor], reason: str, collective: bool = False) -> list[Tensor]:
    """Copy tensors to the host, in the same order. **This waits** until the device has computed them.

    Args:
        tensors: Device tensors; the copies share no memory with them. Host tensors are returned unchanged, without a
            wait if all are host tensors.
        reason: The reason for which the wait is counted, e.g. `"logs"`.
        collective: True if all hosts of a pod call this for the same tensors, because parts of split tensors may be on
            other hosts (default False).
    """
    here = [t.detach() for t in tensors]
    remote = [i for i, t in enumerate(here) if on_device(t)]
    if not remote:
        with waiting(reason) if any(t.is_cuda for t in here) else nullcontext():
            return [t.cpu() if t.is_cuda else t for t in here]
    with waiting(reason), device_counters.role("transfer"):
        values = driver().read([here[i] for i in remote], collective)
    for i, value in zip(remote, values, strict=True):
        here[i] = value
    return here


def fetch_each(tensors: Iterable[Tensor], reason: str) -> Iterator[Tensor]:
    """Copy tensors to the host one after the other. **This waits** for the device.

    At most `AT_ONCE` bytes, or one tensor, are on the host at once, if the caller doesn't keep them. On a pod all hosts
    iterate over all tensors, at the same time.
    """
    tensors = list(tensors)
    for group in group_by_bytes(tensors):
        values = to_host([tensors[i] for i in group], reason, collective=True)[::-1]
        while values:
            yield values.pop()


def group_by_bytes(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yield the indices of tensors in groups of at most `AT_ONCE` bytes, or of one tensor."""
    group: list[int] = []
    nbytes = 0
    for i, tensor in enumerate(tensors):
        if group and nbytes + tensor.nbytes > AT_ONCE:
            yield group
            group = []
            nbytes = 0
        group.append(i)
        nbytes += tensor.nbytes
    if group:
        yield group


def wait_for(tensor: Tensor, reason: str) -> None:
    """Wait until the device has computed a tensor, which may have rows on other hosts."""
    with waiting(reason), device_counters.role("transfer"):
        driver().wait_for(tensor)


def fetch(nest: Any, reason: str) -> Any:
    """Copy the tensors of a nest to the host. **This waits** for the device, once for all tensors."""
    tensors = [leaf for leaf in tree_leaves(nest) if isinstance(leaf, Tensor)]
    host = iter(to_host(tensors, reason))
    return tree_map(lambda leaf: next(host) if isinstance(leaf, Tensor) else leaf, nest)


def copy_to_host(tensors: Sequence[Tensor], reason: str) -> list[Tensor]:
    """Copy tensors to separate host memory. **This waits** for the device, once for all tensors.

    On a pod all hosts call this for the same tensors, if a tensor is split.
    """
    # `to_host` returns host tensors unchanged, whose memory training would change later.
    return [
        value.clone() if tensor.device.type == "cpu" else value
        for tensor, value in zip(tensors, to_host(tensors, reason, collective=True), strict=True)
    ]


def _reduce_from_host(tensor: Tensor) -> Any:
    if on_device(tensor):
        tensor = to_host([tensor], "pickle")[0].requires_grad_(tensor.requires_grad)
    return tensor.__reduce_ex__(2)


# `torch.save` writes device tensors, e.g. of a trained module's state_dict, as host tensors. By default PyTorch would
# write tensors that only a process with the same device can load.
copyreg.pickle(Tensor, _reduce_from_host)


def move(
    tensors: Iterable[Tensor], placement: Placement, names: Names = _NAMELESS, shardings: Shardings = _ALL_WHOLE
) -> None:
    """Move tensors to a placement in place: each stays the same Python object, so ties and references stay valid.

    A large state is moved in parts, and moved tensors free their old memory. Tensors that are already at the placement
    stay. A move to the host waits, once for each part. Errors name tensors by `names`, which has names by `id`.

    Raises:
        PlacementError: A tensor can't be exchanged, because its memory is referenced elsewhere; or two parameters share
            memory without being one tensor, and would be separate on the device.
    """
    moving = [t for t in tensors if _is_elsewhere(t.device, placement.device)]
    if not moving:
        return
    _refuse_shared_memory(moving, names)
    aliases = find_aliases(moving)
    for group in group_by_bytes(moving):
        _move([moving[i] for i in group], placement, names, shardings)
    link(moving, aliases)


def _is_elsewhere(device: torch.device, there: torch.device) -> bool:
    """True unless tensors of `device` can be used on `there`. Devices of one type are interchangeable, except GPUs."""
    return device.type != there.type or (device.type == "cuda" and device.index != there.index)


def _move(tensors: Sequence[Tensor], placement: Placement, names: Names, shardings: Shardings) -> None:
    host = to_host(tensors, "state", collective=True)
    values = placement.send(host, [shardings.get(id(t), Sharding.WHOLE) for t in tensors])
    for tensor, value in zip(tensors, values, strict=True):
        tensor.grad = None  # it is on the other device, and a step computes a new gradient
        try:
            swap_value(tensor, value)
        except RuntimeError as error:
            name = names.get(id(tensor), "a tensor")
            cure = "Delete whatever else refers to its memory, such as views, or build the module again"
            raise PlacementError(
                f"{name} can't be moved to {placement.device}. {cure}. PyTorch says: {error}"
            ) from error


def reshard(tensors: Iterable[Tensor], placement: Placement, shardings: Shardings) -> None:
    """Change the shardings of tensors. **This waits** for each tensor whose sharding differs."""
    if not placement.has_mesh:
        return
    for tensor in tensors:
        if on_device(tensor) and driver().split_axis(tensor) != shardings.get(id(tensor), Sharding.WHOLE).axis:
            copy_into([tensor], to_host([tensor], "state", collective=True), placement, shardings)


def swap_value(tensor: Tensor, value: Tensor, requires_grad: bool | None = None) -> Tensor:
    """Give a tensor object a new value of the same shape, on any device, and return a tensor with the old value.

    All references to the object see the new value; its class, attributes and gradient hooks stay. The tensor `value`
    must not be used afterwards.
    """
    with unguarding():
        learns = tensor.requires_grad if requires_grad is None else requires_grad
        other = torch.Tensor._make_subclass(type(tensor), value, learns)
        # torch.utils.swap_tensors would refuse a tensor that an output still refers to, as every cell's result does in
        # a notebook. Here the old autograd graph keeps the old value.
        torch._C._swap_tensor_impl(tensor, other)
        for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            if getattr(tensor, hooks) is not None:
                setattr(tensor, hooks, getattr(tensor, hooks))  # setting installs them on the new value
    return other


def copy_into(
    targets: Sequence[Tensor], values: Sequence[Tensor], placement: Placement, shardings: Shardings = _ALL_WHOLE
) -> None:
    """Copy values of the same shapes and dtypes into tensors, in place and without waiting.

    The targets are at `placement`, or on the host like some optimizers' counters.
    """
    pairs = list(zip(targets, values, strict=True))
    aliases = find_aliases(targets)
    with torch.no_grad():
        for target, value in pairs:
            if target.device.type == "cpu":
                target.copy_(value)
    remote = [pair for pair in pairs if pair[0].device.type != "cpu"]
    for group in group_by_bytes([target for target, _ in remote]):
        there = [remote[i][0] for i in group]
        host = [remote[i][1] for i in group]
        sent = to_device(host, placement, [shardings.get(id(target), Sharding.WHOLE) for target in there])
        for target, value in zip(there, sent, strict=True):
            if target.is_meta:  # lost with a step that failed
                swap_value(target, value)
            else:
                target.data = value
    link(targets, aliases)


def _refuse_shared_memory(tensors: Sequence[Tensor], names: Names) -> None:
    """Refuse parameters on the host that have an element in common; other views of one tensor can be separated."""
    by_memory: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        if isinstance(tensor, torch.nn.Parameter) and tensor.device.type == "cpu" and tensor.numel():
            by_memory.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    for group in by_memory.values():
        if len(group) == 1:
            continue
        # For each byte of the memory, the number of the parameter that it belongs to.
        owners = torch.full((max(tensor.untyped_storage().nbytes() for tensor in group),), -1, dtype=torch.int32)
        for number, tensor in enumerate(group):
            part = _select_bytes(owners, tensor)
            owner = int(part.max())
            if owner >= 0:
                first, second = (names.get(id(t), "a parameter") for t in (group[owner], tensor))
                why = "two parameters over the same memory; on the device they would be two tensors, no longer tied"
                cure = "Assign one Parameter to both places: module.b.weight = module.a.weight"
                raise PlacementError(f"{first} and {second} are {why}. {cure}")
            part.fill_(number)


def _select_bytes(memory: Tensor, tensor: Tensor) -> Tensor:
    """Return a view of `memory`, which has an element per byte of a storage, at a tensor's bytes."""
    size = tensor.itemsize
    strides = [stride * size for stride in tensor.stride()]
    return memory.as_strided((*tensor.shape, size), (*strides, 1), int(tensor.storage_offset()) * size)
