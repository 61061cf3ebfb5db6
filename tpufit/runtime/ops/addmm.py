"""`replace_addmm`: flattened rows get their dimensions back, and a product with factors stays on the device.

transformers' `Conv1D` flattens rows. `torch.optim.Muon` passes `alpha` and `beta`, for which torch_xla computes on the
host.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...utils.replacing_attributes import replacing_attributes
from ..driver import on_device
from .views import restore_rows


@contextmanager
def replace_addmm() -> Iterator[None]:
    """A context in which `torch.addmm` is a linear layer of the original rows, and takes factors on the device."""
    native = torch.addmm

    def addmm(*args: Any, **kwargs: Any) -> Tensor:
        result = _add_scaled(*args, **kwargs) if kwargs else _multiply_rows(*args)
        return native(*args, **kwargs) if result is None else result

    with replacing_attributes(torch, addmm=addmm):
        yield


def _multiply_rows(*args: Any) -> Tensor | None:
    if len(args) != 3 or not all(isinstance(x, Tensor) for x in args):
        return None
    bias, flat, weight = args
    if (bias.dim(), flat.dim(), weight.dim()) != (1, 2, 2) or bias.shape != weight.shape[1:]:
        return None
    rows = restore_rows(flat)
    if rows is flat or rows.dim() < 3 or rows.shape[-1] != weight.shape[0]:
        return None
    return F.linear(rows, weight.t(), bias).flatten(0, -2)


def _add_scaled(*args: Any, beta: float = 1, alpha: float = 1, **others: Any) -> Tensor | None:
    if others or len(args) != 3 or not all(isinstance(x, Tensor) and on_device(x) for x in args):
        return None
    added, first, second = args
    # The sum is rounded once, as in PyTorch.
    wide = torch.promote_types(added.dtype, torch.float32)
    total: Tensor = added.to(wide) * beta + torch.mm(first, second).to(wide) * alpha
    return total.to(added.dtype)
