"""Reductions for which torch_xla's results differ from PyTorch's: counts, norms and pairwise distances."""

from collections.abc import Sequence

import torch
from torch import Tensor


def count_nonzero(input: Tensor, dim: int | list[int] | None = None) -> Tensor:
    """`torch.count_nonzero`, as int64. torch_xla returns the dtype of the input, so that three `True` count as `True`.

    Example:
        >>> count_nonzero(torch.tensor([[0.0, 2.0], [3.0, 4.0]]), 1)
        tensor([1, 2])
    """
    counted = input != 0
    return counted.sum() if dim is None else counted.sum(dim)


def norm(
    input: Tensor,
    p: float | None = 2,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`torch.norm` of vectors, as on other devices. torch_xla treats an infinite order as 0.

    Example:
        >>> norm(torch.tensor([3.0, -4.0]), float("inf"))
        tensor(4.)
    """
    if not input.is_floating_point() and not input.is_complex() and dtype is None:
        raise RuntimeError(f"norm takes floating-point or complex tensors, got {input.dtype}; call .float() first")
    over = None if dim is None or not len(dim) else list(dim)
    result: Tensor = torch.linalg.vector_norm(input, 2 if p is None else p, over, keepdim, dtype=dtype)
    return result


def pdist(input: Tensor, p: float = 2) -> Tensor | None:
    """`torch.pdist`; None for arguments that PyTorch refuses.

    torch_xla computes its gradient on the host, and its results for the orders 0 and infinity are wrong.

    Example:
        >>> pdist(torch.tensor([[0.0, 0.0], [3.0, 4.0], [3.0, 0.0]]), float("inf"))
        tensor([4., 3., 4.])
    """
    if input.dim() != 2 or not p >= 0:
        return None
    each = torch.linalg.vector_norm(input[:, None] - input, p, -1)
    return torch.cat([input.new_zeros(0), *(row[i + 1 :] for i, row in enumerate(each))])
