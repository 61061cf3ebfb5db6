"""Attention as products that keep their dimensions, with scores and their softmax in float32."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from string import ascii_lowercase
from typing import Any

import torch
from torch import Tensor

from ..kinds import keeps_bfloat16, kind_of
from .dropout import draw, held, scaled
from .flash import flash
from .forms import cores, flash_form
from .products import product
from .residuals import residual
from .views import direct

_FAST_MEMORY = 128 << 20  # bytes, of a core of a v5e or v6e


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

    The weights of keys are kept for the backward pass, whose sum over them is taken from the result instead (equation 4
    of "FlashAttention", https://arxiv.org/abs/2205.14135, appendix B). Queries that share a head of keys and values get
    a dimension of their own, so that no key or value is repeated.
    """
    kind = query.device.type
    # Of no list of autocast: natively its products are cast.
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
    query, key, value = (x.to(dtype) if x.is_floating_point() else x for x in direct(query, key, value))
    if not _fit(query, key, value, enable_gqa) or (is_causal and attn_mask is not None) or not 0 <= dropout_p < 1:
        return None
    if attn_mask is not None and not _broadcasts(attn_mask, (*query.shape[:-1], key.shape[-2])):
        return None
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    plain = partial(_plain, dropout_p=dropout_p, is_causal=is_causal, scale=scale)
    taken = flash_form(query, key, attn_mask, is_causal, dropout_p)
    if taken is None:
        return plain(query, key, value, attn_mask)
    placement, pattern = taken
    y = flash(query, key, value, pattern, attn_mask, scale, placement, plain)
    if pattern.tells_blind:
        blind = None if pattern.blind is None else pattern.blind[:, None, :, None]
    else:
        blind = _blind(attn_mask)
    return y if blind is None else y.masked_fill(blind, 0)


def _plain(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float
) -> Tensor:
    shared = query.shape[:-2] != key.shape[:-2]
    if shared:
        query = query.unflatten(-3, (key.shape[-3], -1))
        if attn_mask is not None and attn_mask.dim() > 2:
            attn_mask = attn_mask.unflatten(-3, (1, 1) if attn_mask.shape[-3] == 1 else query.shape[-4:-2])
    attend = _attend if _region is None else _region(_attend)
    y = attend(query, key, value, attn_mask, dropout_p, is_causal, scale)
    return y.flatten(-4, -3) if shared else y


Attend = Callable[..., Tensor]
_region: Callable[[Attend], Attend] | None = None


@contextmanager
def attending_in(region: Callable[[Attend], Attend]) -> Iterator[None]:
    """A context in which each attention is a region of its own; `region` makes regions of a function's calls."""
    global _region
    before = _region
    _region = region
    try:
        yield
    finally:
        _region = before


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, is_causal: bool, scale: float
) -> Tensor:
    left = draw((*query.shape[:-1], key.shape[-2]), dropout, query.device) if dropout else None
    form = _Narrow if _gains_by_bfloat16(query, key) else _Attention
    y: Tensor = form.apply(query, key, value, mask, left, dropout, is_causal, scale)  # type: ignore[no-untyped-call]
    return y


class _Attention(torch.autograd.Function):
    """Attention; of queries with one more dimension than the keys, which those share that differ in it alone."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        left: Tensor | None,
        dropout: float,
        is_causal: bool,
        scale: float,
    ) -> Tensor:
        left = left if left is None else held(left)
        shares = _shares(query, key, mask, is_causal, scale)
        blind = _blind(mask)
        (y,), _ = residual(lambda: [_mean(_scaled(shares, left, dropout), value, blind)])
        ctx.save_for_backward(query, key, value, mask, left, blind, shares, y)
        ctx.dropout = dropout
        ctx.is_causal = is_causal
        ctx.scale = scale
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        query, key, value, mask, left, blind, shares, y = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative goes through the shares too
            shares = _shares(query, key, mask, ctx.is_causal, ctx.scale)
            y = _mean(_scaled(shares, left, ctx.dropout), value, blind)
        q, k = _indices(query, key)
        gradient = gradient if blind is None else gradient.masked_fill(blind, 0)
        # The derivative of a softmax is p * (dp - sum(dp * p)), and that sum is the one of dy * y, which is smaller.
        of_shares = product(f"{q}xz,{k}yz->{q}xy", gradient, value).to(shares.dtype)
        mean = (gradient.to(shares.dtype) * y.to(shares.dtype)).sum(-1, keepdim=True)
        of_scores = shares * (_scaled(of_shares, left, ctx.dropout) - mean)
        of_products = (of_scores * ctx.scale).to(query.dtype)
        weights = _scaled(shares, left, ctx.dropout)
        of_mask = None
        if mask is not None and ctx.needs_input_grad[3]:
            of_mask = of_scores.sum_to_size(mask.shape).to(mask.dtype)
        return (
            product(f"{q}xy,{k}yz->{q}xz", of_products, key),
            product(f"{q}xy,{q}xz->{k}yz", of_products, query),
            product(f"{q}xy,{q}xz->{k}yz", weights.to(value.dtype), gradient),
            *(of_mask, None, None, None, None),
        )


class _Narrow(torch.autograd.Function):
    """As `_Attention`, with less to keep: the weights of keys before they are divided by their sum, in bfloat16.

    Those that dropout drops are kept with a minus, so that their sign tells which, and no mask is kept beside them. A
    weight of zero has none, and needs none: it adds nothing to the result, and its score gets no gradient. What is left
    isn't scaled: the divisor of the result is.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        left: Tensor | None,
        dropout: float,
        is_causal: bool,
        scale: float,
    ) -> Tensor:
        weights = _weights(query, key, mask, is_causal, scale)
        blind = _blind(mask)
        if left is None:
            divisor = weights.sum(-1, keepdim=True)
        else:
            # The sum is of what is kept, or the compiler would write the weights in float32 too, to sum them up.
            weights = torch.where(left, weights, -weights)
            divisor = weights.abs().sum(-1, keepdim=True) * (1 - dropout)
        # Or the compiler would take the rounding back, and keep the weights in float32.
        weights = held(weights.to(value.dtype))
        (y,), _ = residual(lambda: [_quotient(_kept(weights, dropout), divisor, value, blind)])
        ctx.save_for_backward(query, key, value, mask, blind, weights, divisor, y)
        ctx.dropout = dropout
        ctx.is_causal = is_causal
        ctx.scale = scale
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        query, key, value, mask, blind, weights, divisor, y = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative goes through the weights too
            anew = _weights(query, key, mask, ctx.is_causal, ctx.scale)
            divisor = anew.sum(-1, keepdim=True) * (1 - ctx.dropout)
            weights = anew * weights.sign()
            y = _quotient(_kept(weights, ctx.dropout), divisor, value, blind)
        q, k = _indices(query, key)
        # As in `_Attention`, but the weights aren't divided by their sum, so that the gradient is.
        gradient = (gradient.to(divisor.dtype) / divisor).to(value.dtype)
        gradient = gradient if blind is None else gradient.masked_fill(blind, 0)
        # Made wider, which changes no number and no product, so that the compiler keeps the gradient of the scores in
        # float32.
        wide = gradient.to(divisor.dtype)
        of_weights = product(f"{q}xz,{k}yz->{q}xy", wide, value.to(divisor.dtype))
        mean = (wide * y.to(divisor.dtype)).sum(-1, keepdim=True)
        kept = _kept(weights, ctx.dropout).to(value.dtype)
        if ctx.dropout:
            mean = mean * (1 - ctx.dropout)  # the divisor is that of what is left, and this sum is over all weights
            of_weights = of_weights.masked_fill(weights <= 0, 0)
            weights = weights.abs()
        of_scores = weights.to(divisor.dtype) * (of_weights - mean)
        of_products = (of_scores * ctx.scale).to(query.dtype)
        if of_scores.nbytes > cores() * _FAST_MEMORY:
            # Rounded where it is made, so that half as much is written and read.
            of_key = product(f"{q}xy,{q}xz->{k}yz", held(of_products), query)
        else:
            # Rounded by the products that read it from fast memory: to round it where it is made would take three
            # times as long. Each of the two rounds another number, or the compiler would do it there at once.
            of_key = product(f"{q}xy,{q}xz->{k}yz", of_scores.to(query.dtype), query) * ctx.scale
        of_mask = None
        if mask is not None and ctx.needs_input_grad[3]:
            of_mask = of_scores.sum_to_size(mask.shape).to(mask.dtype)
        return (
            product(f"{q}xy,{k}yz->{q}xz", of_products, key),
            of_key,
            product(f"{q}xy,{q}xz->{k}yz", kept, gradient),
            *(of_mask, None, None, None, None),
        )


def _shares(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    """How much each query takes of each key, in float32 at least; of a query that may look at nothing, anything."""
    return torch.softmax(_scores(query, key, mask, is_causal, scale), -1)


def _weights(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    """The weights of keys for each query, from 0 to 1; a share is a weight over their sum."""
    scores = _scores(query, key, mask, is_causal, scale)
    return torch.exp(scores - scores.detach().amax(-1, keepdim=True))


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    q, k = _indices(query, key)
    scores = product(f"{q}xz,{k}yz->{q}xy", query, key)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale
    # Not infinite, as softmax of nothing else is NaN. Python's number would be in 64 bits, which a TPU emulates.
    number = torch.finfo(scores.dtype).min
    least = scores.new_full((), number)
    if is_causal:
        queries, keys = (torch.arange(x.shape[-2], dtype=torch.int32, device=x.device) for x in (query, key))
        scores = scores.masked_fill(queries[:, None] < keys, least)
    if mask is not None:
        of_bool = mask.dtype is torch.bool
        scores = scores.masked_fill(~mask, least) if of_bool else (scores + mask).clamp(min=number)
    return scores


def _blind(mask: Tensor | None) -> Tensor | None:
    """True for a query that may look at nothing: told by the mask, which heads and blocks share."""
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        return ~mask.any(-1, keepdim=True)
    return (mask == mask.new_full((), -math.inf)).all(-1, keepdim=True)


def _scaled(weights: Tensor, left: Tensor | None, dropout: float) -> Tensor:
    return weights if left is None else scaled(weights, left, dropout)


def _kept(weights: Tensor, dropout: float) -> Tensor:
    """The weights that dropout has left, from those whose sign tells which."""
    return weights.clamp(min=0) if dropout else weights


def _mean(weights: Tensor, value: Tensor, blind: Tensor | None) -> Tensor:
    q, k = _indices(weights, value)
    y = product(f"{q}xy,{k}yz->{q}xz", weights.to(value.dtype), value)
    return y if blind is None else y.masked_fill(blind, 0)


def _quotient(weights: Tensor, divisor: Tensor, value: Tensor, blind: Tensor | None) -> Tensor:
    """The mean, divided after the product, which is smaller than the weights."""
    q, k = _indices(weights, value)
    y = (product(f"{q}xy,{k}yz->{q}xz", weights.to(value.dtype), value).to(divisor.dtype) / divisor).to(value.dtype)
    return y if blind is None else y.masked_fill(blind, 0)


def _indices(query: Tensor, key: Tensor) -> tuple[str, str]:
    """Of all dimensions but the last two, for an equation of products."""
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
        and _shareable(query.shape[-3], key.shape[-3], enable_gqa)
    )


def _gains_by_bfloat16(query: Tensor, key: Tensor) -> bool:
    """True if the weights had better be kept in bfloat16: of few words, or of parts of tiles, they are larger so."""
    long = all(x.shape[-2] >= 256 and x.shape[-2] % 128 == 0 for x in (query, key))
    return long and query.dtype is torch.bfloat16 and keeps_bfloat16(kind_of(query.device))


def _shareable(queries: int, keys: int, enable_gqa: bool) -> bool:
    """True if so many heads of queries go with so many of keys."""
    return queries == keys or keys == 1 or (enable_gqa and queries % keys == 0)


def _broadcasts(mask: Tensor, shape: tuple[int, ...]) -> bool:
    padded = (1,) * (len(shape) - mask.dim()) + tuple(mask.shape)
    known = mask.dtype is torch.bool or mask.is_floating_point()
    return known and len(padded) == len(shape) and all(a in (1, b) for a, b in zip(padded, shape, strict=True))
