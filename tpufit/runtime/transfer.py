"""Host to device and back. Values reach the host by `to_host` only, which waits, and counts the wait under its reason.

Everything is moved by torch_xla's transfer calls and never by `Tensor.to`: a 0-d host tensor moved by `.to` is traced
as a constant, frozen at its first value, where a transferred one is an input of the graph.
"""

import copyreg
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ..backend import Placement, Sharding, Shardings
from ..backend.placement import Names
from ..errors import PlacementError
from ..hosts import all_reduce_max
from ..utils.counters import waiting
from . import counters
from .aliases import aliases_of, link
from .bindings import xla

# The bytes of a large state that are on the host at once, on their way from the device or to it. No tensor is parted.
AT_ONCE = 1 << 28

_ALL_WHOLE: Shardings = {}
_NAMELESS: Names = {}


def to_device(
    tensors: Sequence[Tensor], placement: Placement, sharding: Sharding | Sequence[Sharding] = Sharding.WHOLE
) -> list[Tensor]:
    """Copy host tensors to the device, in the same order, without waiting; one that is there already is passed through.

    The host itself returns the tensors as they are. Absent cores take meta tensors too. One sharding is for all of
    them; a tensor without dimensions is always whole.
    """
    return placement.send(tensors, sharding)


def to_host(tensors: Sequence[Tensor], reason: str, collective: bool = False) -> list[Tensor]:
    """Copy tensors to the host, in the same order. **This waits** until the device has computed them.

    Args:
        tensors: Device tensors, with which the copies share no memory. A host tensor is returned as it is, and if all
            are, nothing is waited for.
        reason: The reason that the wait is counted under, e.g. `"logs"`.
        collective: True if all hosts of a pod call this for the same tensors, as parts of a split one may be on others
            (default False).
    """
    here = [t.detach() for t in tensors]
    remote = [i for i, t in enumerate(here) if t.device.type == "xla"]
    if not remote:
        return here
    with waiting(reason), counters.role("transfer"):
        xla()._xla_sync_multi([here[i] for i in remote], devices=[], wait=True, sync_xla_data=False)
        specs = {i: xla()._get_xla_sharding_spec(here[i]) for i in remote}
        _check_computed([here[i] for i in remote if specs[i]])
        # A tensor split over the cores is put together from its shards: torch_xla's own way would compile a gather
        # for it, and again at every call.
        split = {i for i in remote if _names_a_split(specs[i])}
        whole = [i for i in remote if i not in split]
        for i, value in zip(whole, xla()._xla_get_cpu_tensors([here[i] for i in whole]), strict=True):
            here[i] = value
        for i in sorted(split):
            here[i] = _gathered(here[i]) if collective and not _is_here(here[i]) else _join_shards(here[i])
    return here


def fetch_each(tensors: Iterable[Tensor], reason: str) -> Iterator[Tensor]:
    """Copy tensors to the host one after the other. **This waits** for the device.

    At most `AT_ONCE` bytes, or one tensor, are on the host at once, if nobody keeps them. On a pod all hosts go through
    all of them, at the same time.
    """
    for group in _in_groups(tensors):
        values = to_host(group, reason, collective=True)[::-1]
        while values:
            yield values.pop()


def _in_groups(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Take tensors together up to `AT_ONCE` bytes."""
    group: list[Tensor] = []
    nbytes = 0
    for tensor in tensors:
        if group and nbytes + tensor.nbytes > AT_ONCE:
            yield group
            group = []
            nbytes = 0
        group.append(tensor)
        nbytes += tensor.nbytes
    if group:
        yield group


def reach(tensor: Tensor, reason: str) -> None:
    """Wait until the device has computed a tensor, of whose rows another host may have some."""
    with waiting(reason), counters.role("transfer"):
        xla()._xla_sync_multi([tensor], devices=[], wait=True, sync_xla_data=False)
        spec = xla()._get_xla_sharding_spec(tensor)
        _check_computed([tensor] if spec else [])
        xla()._get_local_shards([tensor]) if _names_a_split(spec) else xla()._xla_get_cpu_tensors([tensor])


def fetch(nest: Any, reason: str) -> Any:
    """Copy the tensors of a nest to the host. **This waits** for the device, once for all of them."""
    tensors = [leaf for leaf in tree_leaves(nest) if isinstance(leaf, Tensor)]
    host = iter(to_host(tensors, reason))
    return tree_map(lambda leaf: next(host) if isinstance(leaf, Tensor) else leaf, nest)


def copies(tensors: Sequence[Tensor], reason: str) -> list[Tensor]:
    """Copy tensors to host memory of their own. **This waits** for the device, once for all of them.

    On a pod all hosts call this for the same tensors, if any is split.
    """
    # `to_host` returns a host tensor as it is: the very memory that training goes on to change.
    return [
        value.clone() if tensor.device.type == "cpu" else value
        for tensor, value in zip(tensors, to_host(tensors, reason, collective=True), strict=True)
    ]


def _reduced(tensor: Tensor) -> Any:
    if tensor.device.type == "xla":
        tensor = to_host([tensor], "pickle")[0].requires_grad_(tensor.requires_grad)
    return tensor.__reduce_ex__(2)


# What `torch.save` writes of a tensor on the device, such as those of a trained module's state_dict, is one of the
# host. PyTorch's own way writes one that only a process with this very device can load.
copyreg.pickle(Tensor, _reduced)


def move(
    tensors: Iterable[Tensor], placement: Placement, names: Names = _NAMELESS, shardings: Shardings = _ALL_WHOLE
) -> None:
    """Move tensors to a placement in place: each stays the same Python object, so ties and references hold.

    A large state goes in parts, and what has gone takes no memory any more where it was. Tensors already there stay. To
    move to the host waits, once for each part. Errors tell the tensors' names, by their `id`.

    Raises:
        PlacementError: A tensor can't be exchanged, because something else holds on to its memory; or two parameters
            share memory without being one tensor, which would part ways on the device.
    """
    here = placement.device.type
    moving = [t for t in tensors if t.device.type != here]
    if not moving:
        return
    _refuse_shared_memory(moving, names)
    aliases = aliases_of(moving)
    for group in _in_groups(moving):
        _move(group, placement, names, shardings)
    link(moving, aliases)


def _move(tensors: Sequence[Tensor], placement: Placement, names: Names, shardings: Shardings) -> None:
    host = to_host(tensors, "state", collective=True)
    values = placement.send(host, [shardings.get(id(t), Sharding.WHOLE) for t in tensors])
    for tensor, value in zip(tensors, values, strict=True):
        tensor.grad = None  # of the other device; a step computes its own
        try:
            swap_value(tensor, value)
        except RuntimeError as error:
            name = names.get(id(tensor), "a tensor")
            raise PlacementError(f"{name} can't be moved to {placement.device}. PyTorch says: {error}") from error


def reshard(tensors: Iterable[Tensor], placement: Placement, shardings: Shardings) -> None:
    """Let tensors lie over the cores as they should from now on. **This waits** for each that lies otherwise."""
    if not placement.has_mesh:
        return
    for tensor in tensors:
        if tensor.device.type == "xla" and _axis_of(tensor) != shardings.get(id(tensor), Sharding.WHOLE).axis:
            copy_into([tensor], to_host([tensor], "state", collective=True), placement, shardings)


def swap_value(tensor: Tensor, value: Tensor, requires_grad: bool | None = None) -> Tensor:
    """Give a tensor object another value, on any device, and return a tensor with the old one.

    Whoever refers to the object sees the new value, of the same shape; its class, attributes and gradient hooks stay.
    The value must not be used afterwards.
    """
    learns = tensor.requires_grad if requires_grad is None else requires_grad
    other = torch.Tensor._make_subclass(type(tensor), value, learns)
    # torch.utils.swap_tensors would refuse a tensor that an output still refers to, and in a notebook every cell's
    # result does. That old graph simply keeps the old value.
    torch._C._swap_tensor_impl(tensor, other)
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(tensor, hooks) is not None:
            setattr(tensor, hooks, getattr(tensor, hooks))  # setting installs them on the new value
    return other


def copy_into(
    targets: Sequence[Tensor], values: Sequence[Tensor], placement: Placement, shardings: Shardings = _ALL_WHOLE
) -> None:
    """Give tensors new values of the same shape and dtype, one for each, in place and without waiting.

    The targets live at `placement`, or on the host, where some optimizers count.
    """
    pairs = list(zip(targets, values, strict=True))
    aliases = aliases_of(targets)
    with torch.no_grad():
        for target, value in pairs:
            if target.device.type == "cpu":
                target.copy_(value)
    remote = iter([pair for pair in pairs if pair[0].device.type != "cpu"])
    for group in _in_groups(target for target, _ in pairs if target.device.type != "cpu"):
        own = [next(remote)[1] for _ in group]
        sent = to_device(own, placement, [shardings.get(id(target), Sharding.WHOLE) for target in group])
        for target, value in zip(group, sent, strict=True):
            if target.is_meta:  # a step that failed has left nothing of it
                swap_value(target, value)
            else:
                target.data = value
    link(targets, aliases)


def _refuse_shared_memory(tensors: Sequence[Tensor], names: Names) -> None:
    owners: dict[int, Tensor] = {}
    for tensor in tensors:
        if isinstance(tensor, torch.nn.Parameter) and tensor.device.type == "cpu" and tensor.numel():
            owner = owners.setdefault(tensor.untyped_storage().data_ptr(), tensor)
            if owner is not tensor:
                first, second = (names.get(id(t), "a parameter") for t in (owner, tensor))
                why = "two parameters over the same memory; on the device they would be two tensors, no longer tied"
                cure = "Assign one Parameter to both places: module.b.weight = module.a.weight"
                raise PlacementError(f"{first} and {second} are {why}. {cure}")


def _axis_of(tensor: Tensor) -> int | None:
    """The dimension along which a tensor on the device is split; None if it is whole."""
    tiles = re.search(r"devices=\[([\d,]+)\]", xla()._get_xla_sharding_spec(tensor) or "")
    counts = [int(count) for count in tiles[1].split(",")] if tiles else []
    return next((i for i, count in enumerate(counts[: tensor.dim()]) if count > 1), None)


def _names_a_split(spec: str) -> bool:
    """True if a sharding, in torch_xla's words, splits a tensor."""
    return bool(spec) and "devices=" in spec


def _check_computed(spread: Sequence[Tensor]) -> None:
    """Raise an error for a value on several cores that its program, having failed, never gave.

    The wait for a program tells of its failure once only, and torch_xla ends the process when such a value is read.
    """
    if spread and not all(xla()._get_local_shard_replica_and_indices(spread)):
        raise RuntimeError("a value can't be read, because the program that was to compute it has failed")


def _is_here(tensor: Tensor) -> bool:
    """True if this host's cores have all of a tensor that is split."""
    places = xla()._get_local_shard_replica_and_indices([tensor])[0]
    here: int = sum(math.prod(i.stop - i.start for i in index) for _, index in places)
    return here >= tensor.numel()


def _gathered(tensor: Tensor) -> Tensor:
    """A tensor that lies on the cores of several hosts, put together on each: the same program for each of a shape."""
    from torch_xla.distributed.spmd import ShardingType

    all_reduce_max([])  # that all hosts are here
    whole = tensor.clone()
    everywhere = xla().OpSharding([], [], [], int(ShardingType.REPLICATED))
    xla()._xla_annotate_custom_sharding(whole, everywhere)
    xla()._xla_sync_multi([whole], devices=[], wait=True, sync_xla_data=False)
    value: Tensor = xla()._xla_get_cpu_tensors([whole])[0]
    return value


def _join_shards(tensor: Tensor) -> Tensor:
    if not _is_here(tensor):
        raise PlacementError(
            f"rows of shape {tuple(tensor.shape)} lie on the cores of several hosts, and can't be read by one of them "
            "alone. Return means from steps, or use predict, which gathers them"
        )
    shards = xla()._get_local_shards([tensor])[0]
    places = xla()._get_local_shard_replica_and_indices([tensor])[0]
    whole = torch.empty(tensor.shape, dtype=tensor.dtype)
    for (shard, _), (_, index) in zip(shards, places, strict=True):
        whole[tuple(index)] = shard[tuple(slice(0, i.stop - i.start) for i in index)]  # the rest of a shard is padding
    return whole
