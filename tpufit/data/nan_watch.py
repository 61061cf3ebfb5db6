"""`NaNWatch`: warns once about NaN in the data, which the host finds before the device computes with it."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..utils.user_code import warn
from .batches import collect_tensors, is_flat, name_parts
from .per_host import LocalBatch

_NUMPY_DTYPES = (torch.float32, torch.float64, torch.float16)


class NaNWatch:
    """Looks for NaN in the host's data: in whole arrays at once, in other data batch by batch in the first epoch.

    Attributes:
        finished: True after a warning, or after an epoch.
    """

    def __init__(self, name: str) -> None:
        self.finished = False
        self._name = name

    def check_arrays(self, arrays: Any) -> None:
        """Check all rows at once."""
        self.finished = True
        self._check(arrays, "")

    def check_batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of an epoch, after checking each."""
        for number, batch in enumerate(batches, 1):
            if not self.finished:
                self._check(batch.batch if isinstance(batch, LocalBatch) else batch, f" of batch {number}")
            yield batch
        self.finished = True

    def _check(self, batch: Any, where: str) -> None:
        leaves = batch if is_flat(batch) else tree_leaves(batch)
        if not any(_has_nan(leaf) for leaf in leaves):
            return
        self.finished = True
        path, tensor = next((path, leaf) for path, leaf in collect_tensors(name_parts(batch)).items() if _has_nan(leaf))
        row = int(tensor.isnan().nonzero()[0, 0]) if tensor.dim() else 0
        if path.startswith("x"):
            path = self._name + path[1:]
        elif self._name != "x":
            path = f"{path} of {self._name}"
        warn(
            f"{path} has NaN, first in row {row}{where}: all results computed from it are NaN, and after such a step "
            "the weights, too. Replace the NaN or drop the row, in the data or in your own step or loss"
        )


def _has_nan(leaf: Any) -> bool:
    """True for a host tensor that contains NaN."""
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or not leaf.is_cpu or not leaf.numel():
        return False
    if leaf.dtype not in _NUMPY_DTYPES or leaf.layout is not torch.strided or leaf.requires_grad:
        return bool(leaf.isnan().any()) if leaf.layout is torch.strided else False
    # NumPy computes in this thread, see `select_rows`. The minimum of NaN and a number is NaN.
    with np.errstate(invalid="ignore"):
        return bool(np.isnan(np.minimum.reduce(leaf.numpy(), axis=None)))
