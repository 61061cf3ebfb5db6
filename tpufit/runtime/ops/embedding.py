"""`replace_embedding`: embeddings use 32-bit indices, forward and backward, because a TPU emulates 64-bit integers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...errors import ArgumentError
from ...utils.replacing_attributes import replacing_attributes
from ..driver import on_device
from .native import transforming


@contextmanager
def replace_embedding() -> Iterator[None]:
    """A context in which `torch.nn.functional.embedding` uses 32-bit indices, and sparse gradients are refused."""
    native = F.embedding

    def embedding(
        input: Tensor,
        weight: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Tensor:
        if sparse and on_device(weight):
            raise _sparse_error("embedding")
        rare = max_norm is not None or scale_grad_by_freq or sparse or transforming()
        if rare or input.dtype not in (torch.int64, torch.int32) or weight.dim() != 2 or not 0 < len(weight) < 2**31:
            return native(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
        if padding_idx is not None and not -len(weight) <= padding_idx < len(weight):
            return native(input, weight, padding_idx)
        y: Tensor = _Embedding.apply(input.int(), weight, padding_idx)  # type: ignore[no-untyped-call]
        return y

    native_bag = F.embedding_bag

    def embedding_bag(input: Tensor, weight: Tensor, *others: Any, **named: Any) -> Tensor:
        if (named.get("sparse") or any(others[5:6])) and on_device(weight):
            raise _sparse_error("embedding_bag")
        return native_bag(input, weight, *others, **named)

    with replacing_attributes(F, embedding=embedding, embedding_bag=embedding_bag):
        yield


def _sparse_error(name: str) -> ArgumentError:
    return ArgumentError(
        f"{name}(sparse=True) has sparse gradients, which XLA can't compute: build the layer with sparse=False, whose "
        "gradients are the same"
    )


class _Embedding(torch.autograd.Function):
    """Selects rows of a table, and adds their gradients. Without torch_xla's extra pass for negative indices."""

    @staticmethod
    def forward(ctx: Any, words: Tensor, weight: Tensor, padding: int | None) -> Tensor:
        ctx.save_for_backward(words)
        ctx.rows = len(weight)
        ctx.padding = padding
        return torch.embedding(weight, words)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (words,) = ctx.saved_tensors
        if ctx.padding is not None:
            filling = words == words.new_full((), ctx.padding % ctx.rows)
            gradient = gradient.masked_fill(filling.unsqueeze(-1), 0)
        width = gradient.shape[-1]
        table = gradient.new_zeros(ctx.rows, width)
        return None, table.index_add(0, words.flatten(), gradient.reshape(-1, width)), None
