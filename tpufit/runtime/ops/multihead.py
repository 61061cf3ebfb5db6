"""`nn.MultiheadAttention` without merging rows with other dimensions.

PyTorch's version merges time and rows into one dimension, and rows and heads into another. Rows that are split over the
cores can't stay split in a merged dimension, so every core would gather all rows first.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


@contextmanager
def replace_multihead() -> Iterator[None]:
    """A context in which `torch.nn.functional.multi_head_attention_forward` keeps its dimensions."""
    native = F.multi_head_attention_forward

    def forward(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        result = _forward(*args, **kwargs)
        return native(*args, **kwargs) if result is None else result

    F.multi_head_attention_forward = forward
    try:
        yield
    finally:
        F.multi_head_attention_forward = native


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None] | None:
    """Compute PyTorch's function; None for rare arguments, and for arguments that PyTorch refuses."""
    dropout = dropout_p if training else 0.0
    rare = (bias_k, bias_v, static_k, static_v, q_proj_weight, k_proj_weight, v_proj_weight)
    if any(x is not None for x in rare) or in_proj_weight is None or add_zero_attn or (need_weights and dropout):
        return None
    width = embed_dim_to_check
    time, rows = query.shape[:2]
    fits = all(x.dim() == 3 and x.shape[1:] == (rows, width) for x in (query, key, value)) and len(key) == len(value)
    if not fits or width % num_heads or (is_causal and attn_mask is None):
        return None
    shapes = {(time, len(key)): (1, 1), (rows * num_heads, time, len(key)): (rows, num_heads)}
    if attn_mask is not None and tuple(attn_mask.shape) not in shapes:
        return None
    if key_padding_mask is not None and tuple(key_padding_mask.shape) != (rows, len(key)):
        return None
    if query is key is value:
        projected = F.linear(query, in_proj_weight, in_proj_bias).chunk(3, -1)
    else:
        biases = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
        parts = zip((query, key, value), in_proj_weight.chunk(3), biases, strict=True)
        projected = tuple(F.linear(*part) for part in parts)
    q, k, v = (x.unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3) for x in projected)
    masks = []
    if attn_mask is not None and not (is_causal and key_padding_mask is None and not need_weights):
        masks.append(_to_additive_mask(attn_mask, q.dtype).view(*shapes[tuple(attn_mask.shape)], time, len(key)))
    if key_padding_mask is not None:
        masks.append(_to_additive_mask(key_padding_mask, q.dtype)[:, None, None])
    mask = reduce(torch.add, masks) if masks else None
    y = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal and mask is None)
    output = F.linear(y.permute(2, 0, 1, 3).flatten(2), out_proj_weight, out_proj_bias)
    if not need_weights:
        return output, None
    # The weights are computed a second time; XLA removes this computation if the weights aren't used.
    scores = q @ k.mT * (width // num_heads) ** -0.5
    weights = torch.softmax(scores if mask is None else scores + mask, -1)
    return output, weights.mean(1) if average_attn_weights else weights


def _to_additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a mask to a tensor that is added to the scores."""
    if mask.dtype is not torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, float("-inf"))
