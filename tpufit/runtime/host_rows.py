"""Sending a host's rows of a batch to its cores, and reading them, on a pod of several hosts."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ..backend import Placement, block_of_rows
from ..errors import BatchError
from ..utils.counters import waiting
from . import device_counters
from .driver import driver, on_device
from .pending_tensors import find_pending
from .placement import CorePlacement
from .transfer import to_device, to_host


def send_rows(tensors: Sequence[Tensor], rows: int, placement: Placement, axis: int = 0) -> list[Tensor]:
    """Send this host's rows of a global batch, without waiting; all other hosts send their rows at the same time.

    The rows are along the dimension `axis`, core by core; a tensor without this dimension is whole, and equal on all
    hosts. The placement has the cores of all hosts, and `rows` is the number of rows of the global batch.

    Raises:
        BatchError: A tensor has a different number of rows.
    """
    assert isinstance(placement, CorePlacement)  # the host has no parts
    block = len(block_of_rows(0, placement.count, rows))
    sizes = [len(block_of_rows(i, placement.count, rows)) for i in placement.local_shards or ()]
    sent = []
    for tensor in tensors:
        if tensor.dim() <= axis:
            sent += to_device([tensor], placement)
            continue
        if tensor.shape[axis] != sum(sizes):
            raise BatchError(
                f"each tensor of a batch must have one row for each of this host's {sum(sizes)} samples, got shape "
                f"{tuple(tensor.shape)}. Build other tensors in the module"
            )
        sent.append(driver().send_parts(tensor.detach().split(sizes, axis), axis, block, rows, placement))
    return sent


def gather_rows(nest: Any, placement: Placement) -> Any:
    """Return the same values whole on every core, so that each host can read them; with one host, unchanged.

    All hosts call this at the same time. It doesn't wait.
    """
    if placement.hosts == 1:
        return nest
    gathered = tree_map(lambda leaf: placement.gather(leaf) if isinstance(leaf, Tensor) else leaf, nest)
    tensors = [leaf for leaf in tree_leaves(gathered) if isinstance(leaf, Tensor)]
    with device_counters.role("transfer"):
        driver().compute(tensors)
    return gathered


def read_value(tensor: Tensor, placement: Placement) -> Tensor | None:
    """Return the value of a computed tensor on the host; None for a pending tensor, as in a step's trace.

    Nothing is compiled or run for it. **This waits**. On a pod and for absent cores the result is None.
    """
    if tensor.device.type == "cpu":
        return tensor.detach()
    if not isinstance(placement, CorePlacement) or not placement.runs or placement.hosts > 1:
        return None
    try:
        if find_pending([tensor]):
            return None
    except RuntimeError:  # the tensor has neither a value nor pending work
        return None
    return to_host([tensor], "capture")[0]


def fetch_rows(nest: Any, mine: Sequence[int], reason: str) -> Any:
    """Copy this host's rows (the numbers `mine`) of a step's outputs to the host. **This waits** for the device."""
    tensors = [leaf for leaf in tree_leaves(nest) if isinstance(leaf, Tensor) and on_device(leaf)]
    with waiting(reason), device_counters.role("transfer"):
        driver().compute(tensors, wait=True)
        return tree_map(lambda leaf: _read_local(leaf, mine, reason) if isinstance(leaf, Tensor) else leaf, nest)


def _read_local(tensor: Tensor, mine: Sequence[int], reason: str) -> Tensor:
    if not tensor.dim() or not on_device(tensor) or driver().split_axis(tensor) is None:
        (whole,) = to_host([tensor], reason)
        return whole[mine] if whole.dim() else whole
    return driver().fetch_parts(tensor)
