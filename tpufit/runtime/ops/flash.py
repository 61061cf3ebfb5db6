"""`flash`: attention by JAX's splash kernel for TPUs, in whose memory the scores never lie.

The kernel takes a block of queries and one of keys at a time, skips the blocks that a causal mask leaves out, and
shares heads of keys and values among those of queries. What it masks beside that are segments: a query looks at the
keys of its own segment. Each core runs it on its own rows.

Source: jax/experimental/pallas/ops/tpu/splash_attention; "FlashAttention-2", https://arxiv.org/abs/2307.08691.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..jax_calls import Computation, lower
from ..kernel_work import KernelWork, mark
from ..placement import CorePlacement
from .masks import BLIND, FILLING, Pattern
from .residuals import keeps, residual

_LANES = 128
# Those of a block, as far as they go: larger ones read keys and values less often.
_BLOCKS = (512, 384, 256, 128)

_interpreted = False


@contextmanager
def interpreted() -> Iterator[None]:
    """A context in which steps on a CPU take the kernel too: Pallas' interpreter runs it, exactly and slowly."""
    global _interpreted
    before = _interpreted
    _interpreted = True
    try:
        yield
    finally:
        _interpreted = before


def is_interpreted() -> bool:
    """True inside of `interpreted`."""
    return _interpreted


@dataclass(frozen=True)
class _Shape:
    """What a kernel is made for, on one core.

    Attributes:
        rows: The rows of the core.
        heads: The heads of queries.
        shared: The heads of keys and values.
        queries: Their number, of whole blocks.
        keys: Their number, of whole blocks.
        width: The width of a head of queries and keys.
        of_value: The width of a head of values.
        dtype: The format, e.g. `"bfloat16"`.
        left: The number of places before its own that a query looks at; None: all.
        right: The number of places after it; None: all.
        segmented: True if it takes segments.
        learns: True if there will be a backward pass.
        interpreted: True for Pallas' interpreter on a CPU.
    """

    rows: int
    heads: int
    shared: int
    queries: int
    keys: int
    width: int
    of_value: int
    dtype: str
    left: int | None
    right: int | None
    segmented: bool
    learns: bool
    interpreted: bool


@dataclass(frozen=True)
class _Kernel:
    """The kernels of a shape: forward, whose results are the attention and what is kept, and backward."""

    forward: Computation
    backward: Computation | None = None


@lru_cache(maxsize=256)
def _kernel(shape: _Shape) -> _Kernel:
    jax = import_module("jax")
    folder = "jax.experimental.pallas.ops.tpu.splash_attention.splash_attention"
    splash = import_module(f"{folder}_kernel")
    masks = import_module(f"{folder}_mask")

    lengths = shape.queries, shape.keys
    limits = shape.left, shape.right
    if limits == (None, None):
        mask = masks.FullMask(lengths)
    else:
        mask = masks.CausalMask(lengths) if limits == (None, 0) else masks.LocalMask(lengths, limits, offset=0)
    block_q, block_kv = (_block(length) for length in lengths)
    sizes = splash.BlockSizes(
        block_q=block_q, block_kv=block_kv, block_kv_compute=block_kv,
        block_q_dkv=block_q, block_kv_dkv=block_kv, block_kv_dkv_compute=block_kv,
        block_q_dq=block_q, block_kv_dq=block_kv,
    )  # fmt: skip

    def attend(query: Any, key: Any, value: Any, *ids: Any) -> Any:
        kernel = splash.make_splash_mha(
            masks.MultiHeadMask([mask] * shape.heads),
            block_sizes=sizes,
            head_shards=1,
            q_seq_shards=1,
            interpret=shape.interpreted,
        )
        segments = splash.SegmentIds(*ids) if ids else None
        with jax.named_scope(mark(_work(shape))):
            return jax.vmap(kernel)(query, key, value, segments)

    # Of what the backward pass takes: which of the arguments and the result it is, or None.
    known: list[int | None] = []
    trees: list[Any] = []

    def forward(*given: Any) -> Any:
        if not shape.learns:
            return attend(*given)
        result, backwards = jax.vjp(lambda *tensors: attend(*tensors, *given[3:]), *given[:3])
        leaves, tree = jax.tree.flatten(backwards)
        those = *given, result
        known[:] = [next((i for i, one in enumerate(those) if one is leaf), None) for leaf in leaves]
        trees[:] = [tree]
        return (result, *(leaf for leaf, at in zip(leaves, known, strict=True) if at is None))

    def backward(gradient: Any, *tensors: Any) -> Any:
        kept = iter(tensors[len(arguments) + 1 :])
        leaves = [next(kept) if at is None else tensors[at] for at in known]
        return jax.tree.unflatten(trees[0], leaves)(gradient)

    rows = shape.rows
    dtype = jax.numpy.dtype(shape.dtype)
    of = jax.ShapeDtypeStruct
    arguments = [
        of((rows, shape.heads, shape.queries, shape.width), dtype),
        of((rows, shape.shared, shape.keys, shape.width), dtype),
        of((rows, shape.shared, shape.keys, shape.of_value), dtype),
    ]
    if shape.segmented:
        arguments += [of((rows, length), jax.numpy.dtype("int32")) for length in lengths]
    platform = "cpu" if shape.interpreted else "tpu"
    there, results = lower(forward, arguments, platform, "flash_attention")
    if not shape.learns:
        return _Kernel(there)
    back, _ = lower(backward, [results[0], *arguments, *results], platform, "flash_attention_backward")
    return _Kernel(there, back)


def _work(shape: _Shape) -> list[KernelWork]:
    """What the kernels compute and move: forward, and backward for queries, and for keys and values."""
    block_q = _block(shape.queries)
    block_kv = _block(shape.keys)
    blocks = 0
    for begin in range(0, shape.queries, block_q):
        first = 0 if shape.left is None else max(0, begin - shape.left) // block_kv
        end = shape.keys if shape.right is None else min(begin + block_q + shape.right, shape.keys)
        blocks += max(0, -(-end // block_kv) - first)
    heads = shape.rows * shape.heads
    scores = heads * block_q * block_kv * blocks
    width = shape.width
    of_value = shape.of_value
    # In memory a row is of whole lanes.
    row = (_lanes(width) + _lanes(of_value)) * (2 if shape.dtype == "bfloat16" else 4)
    queries = heads * shape.queries
    keys = shape.rows * shape.shared * shape.keys
    whole = 4 * _LANES * queries  # a number in 32 bits for each query, which takes all lanes of a row
    limited = (shape.left, shape.right) != (None, None)
    beside = whole * (limited + shape.segmented)  # the places and segments of queries
    again = scores // block_q * row  # keys and values, for each block of queries
    return [
        KernelWork(
            "splash_mha_fwd", 2 * scores * (width + of_value), width, queries * row + again + whole + beside, True
        ),
        KernelWork("splash_mha_dq", 2 * scores * (2 * width + of_value), width, 2 * queries * row + again + beside),
        KernelWork(
            "splash_mha_dkv",
            4 * scores * (width + of_value),
            width,
            # Queries and gradients for each block of keys, which every head of queries reads.
            scores // block_kv * (row + 2 * 8 * 4) + heads * shape.keys * row + 2 * keys * row,
        ),
    ]


@cache
def _takes_whole_lanes() -> bool:
    """True if JAX's kernel takes whole lanes only, as before 0.7.1."""
    version: tuple[int, ...] = import_module("jax").__version_info__
    return version < (0, 7, 1)


def _lanes(width: int) -> int:
    return -(-width // _LANES) * _LANES


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    mask: Tensor | None,
    scale: float,
    placement: CorePlacement,
    plain: Callable[..., Tensor],
) -> Tensor:
    """Attention by the kernel. A query that looks at nothing gets anything.

    Args:
        query: Shape (rows, heads, queries, width).
        key: Shape (rows, heads or fewer, keys, width).
        value: Shape (rows, heads of `key`, keys, any width).
        mask: The mask that the pattern stands for.
        scale: What scores are multiplied by.
        plain: The same attention in PyTorch, of query, key, value and mask, for second derivatives.
    """
    result: Tensor = _Flash.apply(  # type: ignore[no-untyped-call]
        query,
        key,
        value,
        mask,
        pattern.of_queries,
        pattern.of_keys,
        (pattern.left, pattern.right, scale, placement, plain),
    )
    return result


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        of_queries: Tensor | None,
        of_keys: Tensor | None,
        how: tuple[int | None, int | None, float, CorePlacement, Callable[..., Tensor]],
    ) -> Tensor:
        left, right, scale, placement, plain = how
        queries = query.shape[-2]
        keys = key.shape[-2]
        filled = (_whole(queries), _whole(keys))
        lanes = _takes_whole_lanes()
        if of_queries is None and keys < filled[1] and not (right == 0 and queries <= keys):
            # Else queries would look at keys that only fill up a block.
            of_queries, of_keys = (
                torch.zeros(x.shape[0], x.shape[-2], dtype=torch.int32, device=x.device) for x in (query, key)
            )
        lengths = filled[0], filled[1], filled[1]
        given = [
            F.pad(x, (0, _lanes(x.shape[-1]) - x.shape[-1] if lanes else 0, 0, length - x.shape[-2]))
            for x, length in zip((query * scale, key, value), lengths, strict=True)
        ]
        if of_queries is not None and of_keys is not None:
            given.append(F.pad(of_queries, (0, filled[0] - queries), value=BLIND))
            given.append(F.pad(of_keys, (0, filled[1] - keys), value=FILLING))
        own = [placement.to_core(x) for x in given]
        kernel = _kernel(
            _Shape(
                rows=own[0].shape[0],
                heads=query.shape[1],
                shared=key.shape[1],
                queries=filled[0],
                keys=filled[1],
                width=own[0].shape[-1],
                of_value=own[2].shape[-1],
                dtype=str(query.dtype).removeprefix("torch."),
                left=left,
                right=right,
                segmented=len(own) > 3,
                learns=any(ctx.needs_input_grad[:3]),
                interpreted=_interpreted,
            )
        )
        result, *kept = _kept(kernel.forward(*own), len(query), placement)
        ctx.save_for_backward(query, key, value, mask, *own, result, *kept)
        ctx.kernel = kernel
        ctx.scale = scale
        ctx.placement = placement
        ctx.plain = plain
        return placement.from_core(result, len(query))[:, :, :queries, : value.shape[-1]]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        query, key, value, mask, *kept = ctx.saved_tensors
        rest = (None,) * 4
        if torch.is_grad_enabled():  # of a second derivative
            learns = ctx.needs_input_grad[:3]
            wanted = [x for x, needed in zip((query, key, value), learns, strict=True) if needed]
            again = torch.autograd.grad(ctx.plain(query, key, value, mask), wanted, gradient, create_graph=True)
            found = iter(again)
            return *(next(found) if needed else None for needed in learns), *rest
        lanes, places = (kept[i].shape[at] - gradient.shape[at] for i, at in ((2, -1), (0, -2)))
        filled = F.pad(gradient, (0, lanes, 0, places))
        parts = ctx.kernel.backward(ctx.placement.to_core(filled), *kept)
        whole = [ctx.placement.from_core(x, len(query)) for x in parts]
        of_query, of_key, of_value = (
            x[:, :, : like.shape[-2], : like.shape[-1]] for x, like in zip(whole, (query, key, value), strict=True)
        )
        return of_query * ctx.scale, of_key, of_value, *rest


def _kept(results: list[Tensor], rows: int, placement: CorePlacement) -> list[Tensor]:
    """What a kernel has come to; where a region keeps products, it is kept too, and no kernel runs again."""
    if not keeps():
        return results
    # The others are of the mask, and don't depend on the rows.
    of_rows, _ = residual(lambda: [placement.from_core(x, rows) for x in results if x.is_floating_point()])
    own = map(placement.to_core, of_rows)
    return [next(own) if x.is_floating_point() else x for x in results]


def _block(length: int) -> int:
    """The size of a block, for whole ones."""
    return next(size for size in _BLOCKS if length % size == 0)


def _whole(length: int) -> int:
    """A length filled up to whole blocks: of a size that fills up little, and isn't small."""
    filled = {size: -(-length // size) * size for size in _BLOCKS}
    return min(filled.items(), key=lambda pair: pair[1] * (pair[0] + 64) / pair[0])[1]
