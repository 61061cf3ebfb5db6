"""`flash`: attention by JAX's splash kernel for TPUs, which never stores the scores in main memory.

The kernel processes a block of queries and a block of keys at a time, skips the blocks that a causal mask excludes, and
shares key-value heads among query heads. It also masks by segments: a query attends to the keys of its segment. Each
core runs it on its own rows.

Source: jax/experimental/pallas/ops/tpu/splash_attention; "FlashAttention-2", https://arxiv.org/abs/2307.08691.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..driver import driver
from ..kernel_work import KernelWork, mark
from ..placement import CorePlacement
from ..trace_context import trace_context
from .masks import BLIND_QUERY, MASKED_KEY, Pattern
from .residuals import compute_residual, keeps_residuals

Computation = Callable[..., list[Tensor]]

_LANES = 128
# Possible sizes of blocks. With larger blocks, keys and values are read less often.
_BLOCKS = (512, 384, 256, 128)


@dataclass(frozen=True)
class _Shape:
    """The shape for which a kernel is built, on one core.

    Attributes:
        rows: The number of rows on the core.
        heads: The number of query heads.
        key_heads: The number of key-value heads.
        queries: The number of queries, a multiple of the block size.
        keys: The number of keys, a multiple of the block size.
        width: The width of a query or key head.
        value_width: The width of a value head.
        dtype: The dtype, e.g. `"bfloat16"`.
        left: How many positions before its own a query attends to; None: all.
        right: How many positions after its own a query attends to; None: all.
        segmented: True if the kernel takes segments.
        learns: True if a backward pass follows.
        interpreted: True for Pallas' interpreter on a CPU.
    """

    rows: int
    heads: int
    key_heads: int
    queries: int
    keys: int
    width: int
    value_width: int
    dtype: str
    left: int | None
    right: int | None
    segmented: bool
    learns: bool
    interpreted: bool


@dataclass(frozen=True)
class _Kernel:
    """The kernels of a shape: forward, which returns the attention and its residuals, and backward."""

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

    # For each input of the backward pass: its index among the arguments and the result, or None for a residual.
    indices: list[int | None] = []
    trees: list[Any] = []

    def forward(*args: Any) -> Any:
        if not shape.learns:
            return attend(*args)
        result, backwards = jax.vjp(lambda *tensors: attend(*tensors, *args[3:]), *args[:3])
        leaves, tree = jax.tree.flatten(backwards)
        tensors = *args, result
        indices[:] = [next((i for i, tensor in enumerate(tensors) if tensor is leaf), None) for leaf in leaves]
        trees[:] = [tree]
        return (result, *(leaf for leaf, index in zip(leaves, indices, strict=True) if index is None))

    def backward(gradient: Any, *tensors: Any) -> Any:
        residuals = iter(tensors[len(arguments) + 1 :])
        leaves = [next(residuals) if index is None else tensors[index] for index in indices]
        return jax.tree.unflatten(trees[0], leaves)(gradient)

    rows = shape.rows
    dtype = jax.numpy.dtype(shape.dtype)
    array = jax.ShapeDtypeStruct
    arguments = [
        array((rows, shape.heads, shape.queries, shape.width), dtype),
        array((rows, shape.key_heads, shape.keys, shape.width), dtype),
        array((rows, shape.key_heads, shape.keys, shape.value_width), dtype),
    ]
    if shape.segmented:
        arguments += [array((rows, length), jax.numpy.dtype("int32")) for length in lengths]
    platform = "cpu" if shape.interpreted else "tpu"
    forward_call, results = driver().jax_call(forward, arguments, platform, "flash_attention")
    if not shape.learns:
        return _Kernel(forward_call)
    inputs = [results[0], *arguments, *results]
    backward_call, _ = driver().jax_call(backward, inputs, platform, "flash_attention_backward")
    return _Kernel(forward_call, backward_call)


def _work(shape: _Shape) -> list[KernelWork]:
    """Return the operations and bytes of the kernels: forward, backward for queries, backward for keys and values."""
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
    value_width = shape.value_width
    # In memory a row is padded to whole lanes.
    row = (_lanes(width) + _lanes(value_width)) * (2 if shape.dtype == "bfloat16" else 4)
    queries = heads * shape.queries
    keys = shape.rows * shape.key_heads * shape.keys
    per_query = 4 * _LANES * queries  # one 32-bit number for each query, padded to all lanes of a row
    limited = (shape.left, shape.right) != (None, None)
    masks = per_query * (limited + shape.segmented)  # the positions and segments of queries
    reread = scores // block_q * row  # keys and values, for each block of queries
    return [
        KernelWork(
            "splash_mha_fwd",
            2 * scores * (width + value_width),
            width,
            queries * row + reread + per_query + masks,
            True,
        ),
        KernelWork("splash_mha_dq", 2 * scores * (2 * width + value_width), width, 2 * queries * row + reread + masks),
        KernelWork(
            "splash_mha_dkv",
            4 * scores * (width + value_width),
            width,
            # Queries and gradients for each block of keys, which every query head reads.
            scores // block_kv * (row + 2 * 8 * 4) + heads * shape.keys * row + 2 * keys * row,
        ),
    ]


@cache
def _takes_whole_lanes() -> bool:
    """True if JAX's kernel takes only whole lanes, as before JAX 0.7.1."""
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
    """Attention by the kernel. The result is arbitrary for a query whose keys are all masked.

    Args:
        query: Shape (rows, heads, queries, width).
        key: Shape (rows, heads or fewer, keys, width).
        value: Shape (rows, heads of `key`, keys, any width).
        pattern: The pattern of the mask.
        mask: The mask itself, for `plain`.
        scale: The factor of the scores.
        placement: The cores that share the rows.
        plain: The same attention in PyTorch, of query, key, value and mask, for second derivatives.
    """
    result: Tensor = _Flash.apply(  # type: ignore[no-untyped-call]
        query,
        key,
        value,
        mask,
        pattern.query_segments,
        pattern.key_segments,
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
        query_segments: Tensor | None,
        key_segments: Tensor | None,
        how: tuple[int | None, int | None, float, CorePlacement, Callable[..., Tensor]],
    ) -> Tensor:
        left, right, scale, placement, plain = how
        queries = query.shape[-2]
        keys = key.shape[-2]
        filled = (_pad_to_blocks(queries), _pad_to_blocks(keys))
        lanes = _takes_whole_lanes()
        if query_segments is None and keys < filled[1] and not (right == 0 and queries <= keys):
            # Otherwise queries would attend to keys that are only padding of a block.
            query_segments, key_segments = (
                torch.zeros(x.shape[0], x.shape[-2], dtype=torch.int32, device=x.device) for x in (query, key)
            )
        lengths = filled[0], filled[1], filled[1]
        padded = [
            F.pad(x, (0, _lanes(x.shape[-1]) - x.shape[-1] if lanes else 0, 0, length - x.shape[-2]))
            for x, length in zip((query * scale, key, value), lengths, strict=True)
        ]
        if query_segments is not None and key_segments is not None:
            padded.append(F.pad(query_segments, (0, filled[0] - queries), value=BLIND_QUERY))
            padded.append(F.pad(key_segments, (0, filled[1] - keys), value=MASKED_KEY))
        local = [placement.to_core(x) for x in padded]
        kernel = _kernel(
            _Shape(
                rows=local[0].shape[0],
                heads=query.shape[1],
                key_heads=key.shape[1],
                queries=filled[0],
                keys=filled[1],
                width=local[0].shape[-1],
                value_width=local[2].shape[-1],
                dtype=str(query.dtype).removeprefix("torch."),
                left=left,
                right=right,
                segmented=len(local) > 3,
                learns=any(ctx.needs_input_grad[:3]),
                interpreted=trace_context().interprets_flash,
            )
        )
        result, *residuals = _keep(kernel.forward(*local), len(query), placement)
        ctx.save_for_backward(query, key, value, mask, *local, result, *residuals)
        ctx.kernel = kernel
        ctx.scale = scale
        ctx.placement = placement
        ctx.plain = plain
        return placement.from_core(result, len(query))[:, :, :queries, : value.shape[-1]]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        query, key, value, mask, *kept = ctx.saved_tensors
        without_gradient = (None,) * 4
        if torch.is_grad_enabled():  # for a second derivative
            learns = ctx.needs_input_grad[:3]
            inputs = [x for x, needed in zip((query, key, value), learns, strict=True) if needed]
            gradients = torch.autograd.grad(ctx.plain(query, key, value, mask), inputs, gradient, create_graph=True)
            remaining = iter(gradients)
            return *(next(remaining) if needed else None for needed in learns), *without_gradient
        lanes, positions = (kept[i].shape[dim] - gradient.shape[dim] for i, dim in ((2, -1), (0, -2)))
        padded = F.pad(gradient, (0, lanes, 0, positions))
        parts = ctx.kernel.backward(ctx.placement.to_core(padded), *kept)
        padded_gradients = [ctx.placement.from_core(x, len(query)) for x in parts]
        query_gradient, key_gradient, value_gradient = (
            x[:, :, : like.shape[-2], : like.shape[-1]]
            for x, like in zip(padded_gradients, (query, key, value), strict=True)
        )
        return query_gradient * ctx.scale, key_gradient, value_gradient, *without_gradient


def _keep(results: list[Tensor], rows: int, placement: CorePlacement) -> list[Tensor]:
    """Return a kernel's results. A region that keeps products keeps them too, so that the kernel runs once."""
    if not keeps_residuals():
        return results
    # The other results belong to the mask, and don't depend on the rows.
    per_row, _ = compute_residual(lambda: [placement.from_core(x, rows) for x in results if x.is_floating_point()])
    local = map(placement.to_core, per_row)
    return [next(local) if x.is_floating_point() else x for x in results]


def _block(length: int) -> int:
    """Return the largest block size that divides a length."""
    return next(size for size in _BLOCKS if length % size == 0)


def _pad_to_blocks(length: int) -> int:
    """Return a length padded to whole blocks, of a block size that balances little padding with large blocks."""
    padded = {size: -(-length // size) * size for size in _BLOCKS}
    return min(padded.items(), key=lambda pair: pair[1] * (pair[0] + 64) / pair[0])[1]
