"""Attention as products that keep their dimensions, with scores and their softmax in float32."""

import math
from functools import partial
from string import ascii_lowercase
from typing import Any

import torch
from torch import Tensor

from ..core_kind import find_kind, keeps_bfloat16
from ..trace_context import assuming_finite, trace_context
from .attention_choice import choose_flash, count_cores
from .dropout import compute_once, draw_keep_mask, scale_kept
from .flash import flash
from .products import product
from .residuals import compute_residual
from .views import slice_base

_FAST_MEMORY = 128 << 20  # bytes, on a core of a v5e or v6e


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """`torch.nn.functional.scaled_dot_product_attention`.

    The attention weights are kept for the backward pass, which computes the sum over them from the result instead
    (equation 4 of "FlashAttention", https://arxiv.org/abs/2205.14135, appendix B). Query heads that share a key-value
    head get an extra dimension, so that no key or value is repeated.

    Returns:
        The attention; None if the arguments don't fit, so that PyTorch's own kernel runs or raises its error.
    """
    kind = query.device.type
    # Attention isn't on autocast's lists: PyTorch's kernel casts its products.
    query, key, value = slice_base(query, key, value)
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = (x.to(dtype) if x.is_floating_point() else x for x in (query, key, value))
    if not _fit(query, key, value, enable_gqa) or (is_causal and attn_mask is not None) or not 0 <= dropout_p < 1:
        return None
    if attn_mask is not None and not _broadcasts(attn_mask, (*query.shape[:-1], key.shape[-2])):
        return None
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    plain = partial(_plain, dropout_p=dropout_p, is_causal=is_causal, scale=scale)
    choice = choose_flash(query, key, attn_mask, is_causal, dropout_p)
    if choice is None:
        return plain(query, key, value, attn_mask)
    placement, pattern = choice
    y = flash(query, key, value, pattern, attn_mask, scale, placement, plain)
    if pattern.knows_blind:
        blind = None if pattern.blind is None else pattern.blind[:, None, :, None]
    else:
        blind = _blind(attn_mask)
    return y if blind is None else y.masked_fill(blind, 0)


def _plain(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float
) -> Tensor:
    grouped = query.shape[:-2] != key.shape[:-2]
    if grouped:
        query = query.unflatten(-3, (key.shape[-3], -1))
        if attn_mask is not None and attn_mask.dim() > 2:
            attn_mask = attn_mask.unflatten(-3, (1, 1) if attn_mask.shape[-3] == 1 else query.shape[-4:-2])
    region = trace_context().attention_region
    attend = _attend if region is None else region(_attend)
    y = attend(query, key, value, attn_mask, dropout_p, is_causal, scale)
    return y.flatten(-4, -3) if grouped else y


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, is_causal: bool, scale: float
) -> Tensor:
    keep = draw_keep_mask((*query.shape[:-1], key.shape[-2]), dropout, query.device) if dropout else None
    form = _Narrow if _gains_by_bfloat16(query, key) else _Attention
    y: Tensor = form.apply(query, key, value, mask, keep, dropout, is_causal, scale)  # type: ignore[no-untyped-call]
    return y


class _Attention(torch.autograd.Function):
    """Attention. An extra dimension of the queries holds query heads that share a key head."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        keep: Tensor | None,
        dropout: float,
        is_causal: bool,
        scale: float,
    ) -> Tensor:
        keep = keep if keep is None else compute_once(keep)
        normalized = _normalized_weights(query, key, mask, is_causal, scale)
        blind = _blind(mask)
        (y,), _ = compute_residual(lambda: [_mean(_scale(normalized, keep, dropout), value, blind)])
        ctx.save_for_backward(query, key, value, mask, keep, blind, normalized, y)
        ctx.dropout = dropout
        ctx.is_causal = is_causal
        ctx.scale = scale
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        query, key, value, mask, keep, blind, normalized, y = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative goes through the weights too
            normalized = _normalized_weights(query, key, mask, ctx.is_causal, ctx.scale)
            y = _mean(_scale(normalized, keep, ctx.dropout), value, blind)
        q, k = _indices(query, key)
        gradient = gradient if blind is None else gradient.masked_fill(blind, 0)
        # The derivative of a softmax is p * (dp - sum(dp * p)). The sum equals sum(dy * y), over fewer numbers.
        weight_gradient = _multiply_wide(f"{q}xz,{k}yz->{q}xy", gradient, value)
        mean = (gradient.to(normalized.dtype) * y.to(normalized.dtype)).sum(-1, keepdim=True)
        score_gradient = normalized * (_scale(weight_gradient, keep, ctx.dropout) - mean)
        product_gradient = (score_gradient * ctx.scale).to(query.dtype)
        weights = _scale(normalized, keep, ctx.dropout)
        mask_gradient = None
        if mask is not None and ctx.needs_input_grad[3]:
            mask_gradient = score_gradient.sum_to_size(mask.shape).to(mask.dtype)
        return (
            product(f"{q}xy,{k}yz->{q}xz", product_gradient, key),
            product(f"{q}xy,{q}xz->{k}yz", product_gradient, query),
            product(f"{q}xy,{q}xz->{k}yz", weights.to(value.dtype), gradient),
            *(mask_gradient, None, None, None, None),
        )


class _Narrow(torch.autograd.Function):
    """Like `_Attention`, but keeps less for the backward pass: the weights before normalization, in bfloat16.

    Weights that dropout drops are stored as negative numbers, so that no separate mask is kept. A weight of zero has no
    sign and needs none: it adds nothing to the result, and its score gets no gradient. The remaining weights aren't
    scaled by `1 / (1 - p)`: the divisor of the result is scaled instead.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        keep: Tensor | None,
        dropout: float,
        is_causal: bool,
        scale: float,
    ) -> Tensor:
        weights = _unnormalized_weights(query, key, mask, is_causal, scale)
        blind = _blind(mask)
        if keep is None:
            divisor = weights.sum(-1, keepdim=True)
        else:
            # Sum the stored weights; otherwise the compiler would also write them in float32 for the sum.
            weights = torch.where(keep, weights, -weights)
            divisor = weights.abs().sum(-1, keepdim=True) * (1 - dropout)
        # Without this barrier the compiler would undo the rounding and keep the weights in float32.
        weights = compute_once(weights.to(value.dtype))
        (y,), _ = compute_residual(lambda: [_quotient(_zero_dropped(weights, dropout), divisor, value, blind)])
        ctx.save_for_backward(query, key, value, mask, blind, weights, divisor, y)
        ctx.dropout = dropout
        ctx.is_causal = is_causal
        ctx.scale = scale
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        query, key, value, mask, blind, weights, divisor, y = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative goes through the weights too
            recomputed = _unnormalized_weights(query, key, mask, ctx.is_causal, ctx.scale)
            divisor = recomputed.sum(-1, keepdim=True) * (1 - ctx.dropout)
            weights = recomputed * weights.sign()
            y = _quotient(_zero_dropped(weights, ctx.dropout), divisor, value, blind)
        q, k = _indices(query, key)
        # As in `_Attention`, but the gradient is divided by the sum of the weights, because the weights aren't.
        gradient = (gradient.to(divisor.dtype) / divisor).to(value.dtype)
        gradient = gradient if blind is None else gradient.masked_fill(blind, 0)
        weight_gradient = _multiply_wide(f"{q}xz,{k}yz->{q}xy", gradient, value)
        mean = (gradient.to(divisor.dtype) * y.to(divisor.dtype)).sum(-1, keepdim=True)
        kept = _zero_dropped(weights, ctx.dropout).to(value.dtype)
        if ctx.dropout:
            mean = mean * (1 - ctx.dropout)  # the divisor includes the factor of dropout; this sum is over all weights
            weight_gradient = weight_gradient.masked_fill(weights <= 0, 0)
            weights = weights.abs()
        score_gradient = weights.to(divisor.dtype) * (weight_gradient - mean)
        product_gradient = (score_gradient * ctx.scale).to(query.dtype)
        if score_gradient.nbytes > count_cores() * _FAST_MEMORY:
            # Rounded where it is computed, so that half as many bytes are written and read.
            key_gradient = product(f"{q}xy,{q}xz->{k}yz", compute_once(product_gradient), query)
        else:
            # Rounded by the two products that read it from fast memory: rounding where it is computed would take three
            # times as long. Each product rounds a different number; otherwise the compiler would round at the source.
            key_gradient = product(f"{q}xy,{q}xz->{k}yz", score_gradient.to(query.dtype), query) * ctx.scale
        mask_gradient = None
        if mask is not None and ctx.needs_input_grad[3]:
            mask_gradient = score_gradient.sum_to_size(mask.shape).to(mask.dtype)
        return (
            product(f"{q}xy,{k}yz->{q}xz", product_gradient, key),
            key_gradient,
            product(f"{q}xy,{q}xz->{k}yz", kept, gradient),
            *(mask_gradient, None, None, None, None),
        )


def _normalized_weights(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    """Return the normalized weights of keys for each query, at least in float32; arbitrary if all keys are masked."""
    return torch.softmax(_scores(query, key, mask, is_causal, scale), -1)


def _unnormalized_weights(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    """Return the weights of keys for each query before normalization, from 0 to 1."""
    scores = _scores(query, key, mask, is_causal, scale)
    with assuming_finite():
        most = scores.detach().amax(-1, keepdim=True)
    return torch.exp(scores - most)


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    q, k = _indices(query, key)
    scores = _multiply_wide(f"{q}xz,{k}yz->{q}xy", query, key) * scale
    # Finite, because softmax of only -inf is NaN. A tensor, because a Python float has 64 bits, which a TPU emulates.
    number = torch.finfo(scores.dtype).min
    least = scores.new_full((), number)
    if is_causal:
        queries, keys = (torch.arange(x.shape[-2], dtype=torch.int32, device=x.device) for x in (query, key))
        scores = scores.masked_fill(queries[:, None] < keys, least)
    if mask is not None:
        is_boolean = mask.dtype is torch.bool
        scores = scores.masked_fill(~mask, least) if is_boolean else (scores + mask).clamp(min=number)
    return scores


def _multiply_wide(equation: str, a: Tensor, b: Tensor) -> Tensor:
    """Return a product that isn't rounded to bfloat16: a weight is the exponential of its score, whose rounding error
    it multiplies. A TPU multiplies the widened numbers as fast as the narrow ones.
    """
    dtype = torch.promote_types(a.dtype, torch.float32)
    with torch.autocast(a.device.type, enabled=False):  # it would narrow them again
        return product(equation, a.to(dtype), b.to(dtype))


def _blind(mask: Tensor | None) -> Tensor | None:
    """Return True for each query whose keys are all masked, in the shape of the mask; None without a mask."""
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        return ~mask.any(-1, keepdim=True)
    return (mask == mask.new_full((), -math.inf)).all(-1, keepdim=True)


def _scale(weights: Tensor, keep: Tensor | None, dropout: float) -> Tensor:
    return weights if keep is None else scale_kept(weights, keep, dropout)


def _zero_dropped(weights: Tensor, dropout: float) -> Tensor:
    """Return signed weights with the dropped ones, which are negative, as zeros."""
    return weights.clamp(min=0) if dropout else weights


def _mean(weights: Tensor, value: Tensor, blind: Tensor | None) -> Tensor:
    q, k = _indices(weights, value)
    y = product(f"{q}xy,{k}yz->{q}xz", weights.to(value.dtype), value)
    return y if blind is None else y.masked_fill(blind, 0)


def _quotient(weights: Tensor, divisor: Tensor, value: Tensor, blind: Tensor | None) -> Tensor:
    """Return the weighted mean. Divide the product instead of the weights, because it is smaller."""
    q, k = _indices(weights, value)
    y = (product(f"{q}xy,{k}yz->{q}xz", weights.to(value.dtype), value).to(divisor.dtype) / divisor).to(value.dtype)
    return y if blind is None else y.masked_fill(blind, 0)


def _indices(query: Tensor, key: Tensor) -> tuple[str, str]:
    """Return letters for all dimensions except the last two, for `torch.einsum`."""
    return ascii_lowercase[: query.dim() - 2], ascii_lowercase[: key.dim() - 2]


def _fit(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> bool:
    return (
        2 < query.dim() == key.dim() == value.dim()
        and key.shape[:-2] == value.shape[:-2]
        and query.shape[:-3] == key.shape[:-3]
        and query.shape[-1] == key.shape[-1]
        and key.shape[-2] == value.shape[-2]
        and query.is_floating_point()
        and query.dtype is key.dtype is value.dtype
        and all(x.numel() for x in (query, key, value))
        and _can_share(query.shape[-3], key.shape[-3], enable_gqa)
    )


def _gains_by_bfloat16(query: Tensor, key: Tensor) -> bool:
    """True if bfloat16 weights save memory. With short sequences or partial tiles they take more."""
    long = all(x.shape[-2] >= 256 and x.shape[-2] % 128 == 0 for x in (query, key))
    return long and query.dtype is torch.bfloat16 and keeps_bfloat16(find_kind(query.device))


def _can_share(queries: int, keys: int, enable_gqa: bool) -> bool:
    """True if this number of query heads can share this number of key heads."""
    return queries == keys or keys == 1 or (enable_gqa and queries % keys == 0)


def _broadcasts(mask: Tensor, shape: tuple[int, ...]) -> bool:
    padded = (1,) * (len(shape) - mask.dim()) + tuple(mask.shape)
    known = mask.dtype is torch.bool or mask.is_floating_point()
    return known and len(padded) == len(shape) and all(a in (1, b) for a, b in zip(padded, shape, strict=True))
