"""`own_addmm`: rows that were flattened for a product keep their dimensions, and factors stay on the device.

transformers' `Conv1D` flattens rows; `torch.optim.Muon` gives factors, with which torch_xla computes on the host.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...utils.replaced import replaced
from .views import unflattened


@contextmanager
def own_addmm() -> Iterator[None]:
    """A context in which `torch.addmm` is a linear layer of rows as they were, and on the device a sum of products."""
    native = torch.addmm

    def addmm(*args: Any, **kwargs: Any) -> Tensor:
        found = _with_factors(*args, **kwargs) if kwargs else _of_rows(*args)
        return native(*args, **kwargs) if found is None else found

    with replaced(torch, addmm=addmm):
        yield


def _of_rows(*args: Any) -> Tensor | None:
    if len(args) != 3 or not all(isinstance(x, Tensor) for x in args):
        return None
    bias, flat, weight = args
    if (bias.dim(), flat.dim(), weight.dim()) != (1, 2, 2) or bias.shape != weight.shape[1:]:
        return None
    rows = unflattened(flat)
    if rows is flat or rows.dim() < 3 or rows.shape[-1] != weight.shape[0]:
        return None
    return F.linear(rows, weight.t(), bias).flatten(0, -2)


def _with_factors(*args: Any, beta: float = 1, alpha: float = 1, **others: Any) -> Tensor | None:
    if others or len(args) != 3 or not all(isinstance(x, Tensor) and x.device.type == "xla" for x in args):
        return None
    added, first, second = args
    # The sum is rounded once, as PyTorch's.
    total: Tensor = added.float() * beta + torch.mm(first, second).float() * alpha
    return total.to(added.dtype)
