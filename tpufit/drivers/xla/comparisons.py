"""Comparisons of a tensor with a Python number, which torch_xla computes in float64, and of complex numbers.

Each function takes the native kernel and the dispatcher's keys, then the operation's arguments.
"""

from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from ...runtime.ops.native import Native

_ORDERS = ("ge", "gt", "le", "lt")

# A Python number as a tensor, before it takes the dtype of the comparison.
_WIDEST = {bool: torch.bool, int: torch.int64, float: torch.float64}


def _compare(name: str, native: Native, keys: Any, tensor: Tensor, number: Any) -> Tensor:
    """Compare in the common dtype of the tensor and the number, as PyTorch does: 0.9 equals its nearest float32."""
    dtype = torch.result_type(tensor, number)
    if dtype.is_complex and name in _ORDERS:
        raise NotImplementedError("complex numbers have no order: compare their real parts or their absolute values")
    result: Tensor
    if isinstance(number, float):  # torch_xla makes it a float64, and then the tensor too
        rounded = torch.full((), _round(number, dtype), dtype=dtype, device=tensor.device)
        result = getattr(torch, name)(tensor.to(dtype), rounded)
    elif isinstance(number, complex) or dtype.is_floating_point:
        result = native(keys, tensor, number)
    else:
        result = native(keys, tensor, _round(number, dtype))
    return result


@lru_cache(maxsize=1024, typed=True)
def _round(number: Any, dtype: torch.dtype) -> Any:
    return torch.tensor(number, dtype=_WIDEST[type(number)], device="cpu").to(dtype).item()


# By the operation.
KERNELS = {f"{name}.Scalar": partial(_compare, name) for name in ("eq", "ne", *_ORDERS)}
