"""`NaNWatch`: says once that data hold NaN, which the host can see before the device computes with it."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..utils.users_code import warn
from .batches import fields, is_flat, tensors_of
from .per_host import LocalBatch

_OF_NUMPY = (torch.float32, torch.float64, torch.float16)


class NaNWatch:
    """Looks for NaN in the host's data: in arrays as a whole, in other data batch by batch through the first epoch.

    Attributes:
        over: True once it has warned, or an epoch has passed.
    """

    def __init__(self, name: str) -> None:
        self.over = False
        self._name = name

    def look_at(self, arrays: Any) -> None:
        """Look through all rows, once and for all."""
        self.over = True
        self._look(arrays, "")

    def through(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Give the batches of an epoch, and look at each before."""
        for number, batch in enumerate(batches, 1):
            if not self.over:
                self._look(batch.batch if isinstance(batch, LocalBatch) else batch, f" of batch {number}")
            yield batch
        self.over = True

    def _look(self, batch: Any, where: str) -> None:
        leaves = batch if is_flat(batch) else tree_leaves(batch)
        if not any(_has_nan(leaf) for leaf in leaves):
            return
        self.over = True
        path, tensor = next((path, leaf) for path, leaf in tensors_of(fields(batch)).items() if _has_nan(leaf))
        row = int(tensor.isnan().nonzero()[0, 0]) if tensor.dim() else 0
        if path.startswith("x"):
            path = self._name + path[1:]
        elif self._name != "x":
            path = f"{path} of {self._name}"
        warn(
            f"{path} has NaN, first in row {row}{where}: what is computed from it is NaN, as the weights are after "
            "such a step. Replace it or leave the row out; a step or loss of your own may do so too"
        )


def _has_nan(leaf: Any) -> bool:
    """True for a host tensor with NaN in it."""
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or not leaf.is_cpu or not leaf.numel():
        return False
    if leaf.dtype not in _OF_NUMPY or leaf.layout is not torch.strided or leaf.requires_grad:
        return bool(leaf.isnan().any()) if leaf.layout is torch.strided else False
    # NumPy computes in this very thread, see `rows_in`. The minimum of NaN and a number is NaN.
    with np.errstate(invalid="ignore"):
        return bool(np.isnan(np.minimum.reduce(leaf.numpy(), axis=None)))
