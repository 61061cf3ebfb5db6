"""Sends and reads the parts of a tensor on this host's cores."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...backend import Sharding
from ...errors import PlacementError
from .cpp_bindings import xla
from .placement import XlaCores


def send_parts(parts: Sequence[Tensor], axis: int, block: int, rows: int, placement: XlaCores) -> Tensor:
    """Send this host's parts of a batch of `rows` rows along `axis`, one of at most `block` rows for each core."""
    layout = placement.layout(Sharding(axis), parts[0].dim())
    shards = [_pad(part, axis, block) for part in parts]
    shape = list(parts[0].shape)
    shape[axis] = rows
    sent: Tensor = xla()._global_tensor_from_cpu_shards(shards, layout, shape)
    return sent


def fetch_parts(tensor: Tensor) -> Tensor:
    """Read the rows of a computed tensor on this host's cores."""
    shards = xla()._get_local_shards([tensor])[0]
    places = [index for _, index in xla()._get_local_shard_replica_and_indices([tensor])[0]]
    if any(index[1:] != places[0][1:] for index in places):
        raise PlacementError("predict(local=True) needs outputs whose first dimension is the rows")
    # The rest of a shard is padding.
    return torch.cat(
        [shard[: index[0].stop - index[0].start] for (shard, _), index in zip(shards, places, strict=True)]
    )


def _pad(part: Tensor, axis: int, rows: int) -> Tensor:
    """Pad with zero rows, because all shards of a tensor have the same size. The device ignores the padding."""
    if part.shape[axis] == rows:
        return part.contiguous()
    shape = list(part.shape)
    shape[axis] = rows
    whole = torch.zeros(shape, dtype=part.dtype)
    whole.narrow(axis, 0, part.shape[axis]).copy_(part)
    return whole
