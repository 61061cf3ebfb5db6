"""Copies tensors from the device to the host. A tensor is whole on each core, or is joined from the cores' shards."""

import math
import re
from collections.abc import Sequence

import torch
from torch import Tensor

from ...errors import PlacementError
from ...hosts import all_reduce_max
from .cpp_bindings import xla


def read(tensors: Sequence[Tensor], collective: bool) -> list[Tensor]:
    """Copy device tensors to the host. **This waits**. If `collective`, all hosts read the same tensors."""
    wide = [i for i, tensor in enumerate(tensors) if tensor.dtype is torch.complex128]
    values = list(tensors)
    for i in wide:  # torch_xla would drop the imaginary parts
        values[i] = torch.view_as_real_copy(values[i])
    xla()._xla_sync_multi(values, devices=[], wait=True, sync_xla_data=False)
    specs = [xla()._get_xla_sharding_spec(tensor) for tensor in values]
    _check_computed([tensor for tensor, spec in zip(values, specs, strict=True) if spec])
    # A split tensor is joined from its shards, because torch_xla would compile a gather for it at every call.
    split = {i for i, spec in enumerate(specs) if _is_split(spec)}
    whole = [i for i in range(len(values)) if i not in split]
    for i, value in zip(whole, xla()._xla_get_cpu_tensors([values[i] for i in whole]), strict=True):
        values[i] = value
    for i in sorted(split):
        values[i] = _gather(values[i]) if collective and not _is_local(values[i]) else _join_shards(values[i])
    for i in wide:
        values[i] = torch.view_as_complex(values[i])
    return values


def wait_for(tensor: Tensor) -> None:
    """Wait until the device has computed a tensor; other hosts may own some of its rows."""
    xla()._xla_sync_multi([tensor], devices=[], wait=True, sync_xla_data=False)
    spec = xla()._get_xla_sharding_spec(tensor)
    _check_computed([tensor] if spec else [])
    xla()._get_local_shards([tensor]) if _is_split(spec) else xla()._xla_get_cpu_tensors([tensor])


def split_axis(tensor: Tensor) -> int | None:
    """Return the dimension along which a tensor on the device is split; None if it is whole."""
    tiles = re.search(r"devices=\[([\d,]+)\]", xla()._get_xla_sharding_spec(tensor) or "")
    counts = [int(count) for count in tiles[1].split(",")] if tiles else []
    return next((i for i, count in enumerate(counts[: tensor.dim()]) if count > 1), None)


def _is_split(spec: str) -> bool:
    """True if torch_xla's description of a sharding splits a tensor."""
    return bool(spec) and "devices=" in spec


def _check_computed(sharded: Sequence[Tensor]) -> None:
    """Raise an error if the program of a value on several cores has failed.

    The wait for a program reports its failure only once, and torch_xla crashes when such a value is read.
    """
    if sharded and not all(xla()._get_local_shard_replica_and_indices(sharded)):
        raise RuntimeError("a value can't be read, because the program that should have computed it has failed")


def _is_local(tensor: Tensor) -> bool:
    """True if this host's cores have all shards of a split tensor."""
    places = xla()._get_local_shard_replica_and_indices([tensor])[0]
    local: int = sum(math.prod(i.stop - i.start for i in index) for _, index in places)
    return local >= tensor.numel()


def _gather(tensor: Tensor) -> Tensor:
    """Join a tensor that is split over several hosts, on each host. All tensors of a shape use the same program."""
    from torch_xla.distributed.spmd import ShardingType

    all_reduce_max([])  # wait for all hosts
    whole = tensor.clone()
    replicated = xla().OpSharding([], [], [], int(ShardingType.REPLICATED))
    xla()._xla_annotate_custom_sharding(whole, replicated)
    xla()._xla_sync_multi([whole], devices=[], wait=True, sync_xla_data=False)
    value: Tensor = xla()._xla_get_cpu_tensors([whole])[0]
    return value


def _join_shards(tensor: Tensor) -> Tensor:
    if not _is_local(tensor):
        raise PlacementError(
            f"a tensor of shape {tuple(tensor.shape)} is split over the cores of several hosts, and one host can't "
            "read it alone. Return means from steps, or call predict, which gathers rows"
        )
    shards = xla()._get_local_shards([tensor])[0]
    places = xla()._get_local_shard_replica_and_indices([tensor])[0]
    whole = torch.empty(tensor.shape, dtype=tensor.dtype)
    for (shard, _), (_, index) in zip(shards, places, strict=True):
        whole[tuple(index)] = shard[tuple(slice(0, i.stop - i.start) for i in index)]  # the rest of a shard is padding
    return whole
