"""`own_addmm`: products of rows that were flattened for them keep their dimensions, as in transformers' `Conv1D`."""

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
    """A context in which `torch.addmm` of a bias and of flattened rows is a linear layer of the rows as they were."""
    native = torch.addmm

    def addmm(*args: Any, **kwargs: Any) -> Tensor:
        found = None if kwargs else _of_rows(*args)
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
