"""Gathers, scatters and repetitions that torch_xla refuses or computes wrongly.

The functions in `KERNELS` take an operation's arguments; the others first take the native kernel and the dispatcher's
keys.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...runtime.ops.native import Native, operation


def _chunk_cat(tensors: list[Tensor], dim: int, num_chunks: int) -> Tensor:
    from torch._decomp import decomposition_table  # takes long, and is rarely used

    result: Tensor = decomposition_table[operation("_chunk_cat")](tensors, dim, num_chunks)
    return result


KERNELS: dict[str, Callable[..., Tensor]] = {"_chunk_cat": _chunk_cat}


def gather(native: Native, keys: Any, tensor: Tensor, dim: int, index: Tensor, **kwargs: Any) -> Tensor:
    """`gather`, also with an empty index, of any number of dimensions, and of a tensor without dimensions."""
    result: Tensor
    if not index.numel():
        result = tensor.reshape(-1)[:0].reshape(index.shape)
    elif tensor.dim() and index.dim():
        result = native(keys, tensor, dim, index, **kwargs)
    else:
        result = native(keys, tensor.reshape(-1), dim, index.reshape(-1), **kwargs).reshape(index.shape)
    return result


def scatter_add(native: Native, keys: Any, tensor: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """`scatter_add`, also with an empty index, as in the gradient of `gather`, and to a tensor without dimensions."""
    result: Tensor
    if not index.numel():
        result = tensor.clone()
    elif tensor.dim():
        result = native(keys, tensor, dim, index, source)
    else:
        result = native(keys, tensor[None], dim, index.reshape(-1), source.reshape(-1)).reshape(())
    return result


def fill(native: Native, keys: Any, tensor: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:
    """`index_fill`, also of a tensor without dimensions."""
    result: Tensor
    if tensor.dim():
        result = native(keys, tensor, dim, index, value)
    else:
        result = tensor.masked_fill(torch.full((), index.numel() > 0, device=tensor.device), value)
    return result


def repeat(native: Native, keys: Any, tensor: Tensor, times: Sequence[int]) -> Tensor:
    """`repeat`, also with an empty result, and with no repeat counts."""
    if not times:
        return tensor.clone()
    sizes = [1] * (len(times) - tensor.dim()) + list(tensor.shape)
    if 0 in (*times, *sizes):
        return tensor.new_empty([size * number for size, number in zip(sizes, times, strict=True)])
    result: Tensor = native(keys, tensor, times)
    return result


def as_strided_scatter(
    native: Native,
    keys: Any,
    tensor: Tensor,
    source: Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> Tensor:
    """`as_strided_scatter`. torch_xla's is wrong for a view that skips elements, or has an element more than once."""
    places = torch.full((), storage_offset or 0, device=tensor.device)
    for length, step in zip(size, stride, strict=True):
        places = torch.unsqueeze_copy(places, -1) + torch.arange(length, device=tensor.device) * step
    flat = tensor.reshape(-1).index_put([places.reshape(-1)], source.reshape(-1))
    return flat.reshape(tensor.shape)


def replicate(native: Native, keys: Any, tensor: Tensor, padding: Sequence[int]) -> Tensor:
    """`replication_pad1d` to `3d`, also by negative numbers, which cut off edges."""
    if min(padding) >= 0:
        return native(keys, tensor, padding)  # type: ignore[no-any-return]
    F.pad(torch.empty_like(tensor, device="meta"), list(padding), mode="replicate")  # raises PyTorch's errors
    for dim, (before, after) in enumerate(zip(padding[::2], padding[1::2], strict=True), start=1):
        size = tensor.shape[-dim]
        places = torch.arange(-before, size + after, device=tensor.device).clamp(0, size - 1)
        tensor = tensor.index_select(-dim, places)
    return tensor
