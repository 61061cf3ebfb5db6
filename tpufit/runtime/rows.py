"""A host's own rows of a batch: sent to its own cores, and read from them. With one host nobody needs this.

A batch is split into equal blocks of consecutive rows, one a core; the last blocks may be shorter, or empty.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ..backend import Placement, Sharding
from ..errors import BatchError, PlacementError
from ..utils.counters import waiting
from . import counters
from .bindings import xla
from .lazy import pending
from .placement import CorePlacement
from .transfer import to_device, to_host


def send_rows(tensors: Sequence[Tensor], rows: int, placement: Placement) -> list[Tensor]:
    """Send this host's rows of a global batch, without waiting; all other hosts send theirs at the same time.

    The rows come core by core; a tensor without dimensions is whole, and equal on all hosts. The placement is the cores
    of all hosts, and `rows` the number of rows of the global batch.

    Raises:
        BatchError: A tensor has another number of rows.
    """
    block = -(-rows // placement.count)
    sizes = [min(max(rows - i * block, 0), block) for i in placement.local_shards or ()]
    sent = []
    for tensor in tensors:
        if not tensor.dim():
            sent += to_device([tensor], placement)
            continue
        if len(tensor) != sum(sizes):
            raise BatchError(
                f"each tensor of a batch must have one row for each of this host's {sum(sizes)} samples, got shape "
                f"{tuple(tensor.shape)}. Make other tensors in the module"
            )
        assert isinstance(placement, CorePlacement)  # the host has no parts
        layout = placement.layout(Sharding.ROWS, tensor.dim())
        shards = [_filled_up(part, block) for part in tensor.detach().split(sizes)]
        sent.append(xla()._global_tensor_from_cpu_shards(shards, layout, [rows, *tensor.shape[1:]]))
    return sent


def _filled_up(part: Tensor, rows: int) -> Tensor:
    """Add rows of zeros, which the device leaves out: the shards of a tensor are all of one size."""
    if len(part) == rows:
        return part.contiguous()
    whole = torch.zeros((rows, *part.shape[1:]), dtype=part.dtype)
    whole[: len(part)] = part
    return whole


def gather_rows(nest: Any, placement: Placement) -> Any:
    """The same values, whole on every core, so that each host can read them; nothing to do with one host.

    All hosts call this at the same moment. It doesn't wait.
    """
    if placement.hosts == 1:
        return nest
    gathered = tree_map(lambda leaf: placement.gather(leaf) if isinstance(leaf, Tensor) else leaf, nest)
    tensors = [leaf for leaf in tree_leaves(gathered) if isinstance(leaf, Tensor)]
    with counters.role("transfer"):
        xla()._xla_sync_multi(tensors, devices=[], wait=False, sync_xla_data=False)
    return gathered


def value_of(tensor: Tensor, placement: Placement) -> Tensor | None:
    """The value of a tensor on the host, if it is computed; None for one that waits, as what a step's trace makes.

    Nothing is compiled or run for it. **This waits**. On a pod, and for cores that aren't there, it is None.
    """
    if tensor.device.type == "cpu":
        return tensor.detach()
    if not isinstance(placement, CorePlacement) or not placement.runs or placement.hosts > 1:
        return None
    try:
        if pending([tensor]):
            return None
    except RuntimeError:  # it has no value and waits for none
        return None
    return to_host([tensor], "capture")[0]


def fetch_rows(nest: Any, mine: Sequence[int], reason: str) -> Any:
    """Copy the rows of these numbers, this host's, of a step's outputs to the host. **This waits** for the device."""
    tensors = [leaf for leaf in tree_leaves(nest) if isinstance(leaf, Tensor) and leaf.device.type == "xla"]
    with waiting(reason), counters.role("transfer"):
        xla()._xla_sync_multi(tensors, devices=[], wait=True, sync_xla_data=False)
        return tree_map(lambda leaf: _own(leaf, mine, reason) if isinstance(leaf, Tensor) else leaf, nest)


def _own(tensor: Tensor, mine: Sequence[int], reason: str) -> Tensor:
    if not tensor.dim() or tensor.device.type != "xla" or "devices=" not in xla()._get_xla_sharding_spec(tensor):
        (whole,) = to_host([tensor], reason)
        return whole[mine] if whole.dim() else whole
    shards = xla()._get_local_shards([tensor])[0]
    places = [index for _, index in xla()._get_local_shard_replica_and_indices([tensor])[0]]
    if any(index[1:] != places[0][1:] for index in places):
        raise PlacementError("predict(local=True) needs outputs whose first dimension is that of the rows")
    # The rest of a shard is padding.
    return torch.cat(
        [shard[: index[0].stop - index[0].start] for (shard, _), index in zip(shards, places, strict=True)]
    )
