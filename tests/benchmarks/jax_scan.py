"""What looping over equal blocks costs on a TPU at best: a GPT in plain JAX, its blocks unrolled, or in `lax.scan`.

    python tests/benchmarks/jax_scan.py unrolled|scan [DEPTH] [WIDTH]

With `scan` the blocks' weights, and their optimizer's state, are kept stacked: nothing is copied together for the loop.
The compiler counts the cycles of a loop's body once, so they are multiplied by its turns here. One core of a v5e.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from tpufit.preflight.compiling import NO_HOST, compile_for, figures
from tpufit.preflight.hlo import operations
from tpufit.preflight.loops import Loops

os.environ |= NO_HOST
import jax
import jax.numpy as jnp
from jax.experimental import topologies

WORDS, TOKENS, ROWS = 8192, 512, 2
RATE, DECAY, BETA1, BETA2, EPSILON = 1e-3, 1e-2, 0.9, 0.999, 1e-8


def norm(x: Any, weights: Any, name: str) -> Any:
    x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    return (x * weights[f"{name} weight"] + weights[f"{name} bias"]).astype(jnp.bfloat16)


def linear(x: Any, weights: Any, name: str) -> Any:
    return x @ weights[f"{name} weight"].astype(jnp.bfloat16) + weights[f"{name} bias"].astype(jnp.bfloat16)


def block(x: Any, weights: Any) -> Any:
    projected = linear(norm(x, weights, "norm1"), weights, "qkv").reshape(*x.shape[:2], 3, -1, 64)
    q, k, v = projected.transpose(2, 0, 3, 1, 4)
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k).astype(jnp.float32) / 8
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    shares = jax.nn.softmax(jnp.where(seen, scores, -1e30)).astype(jnp.bfloat16)
    attended = jnp.einsum("bhqk,bhkd->bhqd", shares, v).transpose(0, 2, 1, 3).reshape(x.shape)
    x = x + linear(attended, weights, "out")
    return x + linear(jax.nn.gelu(linear(norm(x, weights, "norm2"), weights, "up")), weights, "down")


def shapes(depth: int, width: int, stacked: bool) -> dict[str, Any]:
    sizes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    own = {f"{name} weight": size for name, size in sizes.items()} | {f"{n} bias": s[1:] for n, s in sizes.items()}
    own |= {f"{name} {part}": (width,) for name in ("norm1", "norm2") for part in ("weight", "bias")}
    blocks: Any = [own] * depth
    if stacked:
        blocks = {name: (depth, *size) for name, size in own.items()}
    every = {"words": (WORDS, width), "head": (width, WORDS), "blocks": blocks}
    return jax.tree.map(
        lambda size: jax.ShapeDtypeStruct(size, jnp.float32), every, is_leaf=lambda size: isinstance(size, tuple)
    )


def loss_of(weights: Any, x: Any, y: Any) -> Any:
    h = weights["words"][x]
    if isinstance(weights["blocks"], dict):
        h, _ = jax.lax.scan(lambda h, own: (block(h, own), None), h, weights["blocks"])
    else:
        for own in weights["blocks"]:
            h = block(h, own)
    logits = (h.astype(jnp.bfloat16) @ weights["head"].astype(jnp.bfloat16)).astype(jnp.float32)
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[..., None], -1).mean()


def step(weights: Any, means: Any, squares: Any, x: Any, y: Any) -> Any:
    loss, gradients = jax.value_and_grad(loss_of)(weights, x, y)
    means = jax.tree.map(lambda m, g: BETA1 * m + (1 - BETA1) * g, means, gradients)
    squares = jax.tree.map(lambda s, g: BETA2 * s + (1 - BETA2) * g * g, squares, gradients)
    weights = jax.tree.map(
        lambda w, m, s: w * (1 - RATE * DECAY) - RATE * m / (jnp.sqrt(s) + EPSILON), weights, means, squares
    )
    return weights, means, squares, loss


def cycles(program: str) -> int:
    """The estimated cycles of a program, those of a loop's body as often as it turns."""
    turns = Loops(program).turns
    return sum(one.cycles * turns.get(one.computation, 1) for one, _ in operations(program))


def main(kind: str, depth: int = 12, width: int = 512) -> None:
    from jax._src.interpreters import mlir

    state, tokens = shapes(depth, width, kind == "scan"), jax.ShapeDtypeStruct((ROWS, TOKENS), jnp.int32)
    began = time.perf_counter()
    jitted = jax.jit(step, donate_argnums=(0, 1, 2))
    module = jitted.trace(state, state, state, tokens, tokens).lower(lowering_platforms=("tpu",)).compiler_ir()
    with module.context:
        code = mlir.module_to_bytecode(module)
    traced = time.perf_counter()
    chips = topologies.get_topology_desc(
        platform="tpu", topology_name="v5e:2x4", chips_per_host_bounds=(2, 4, 1), chip_config_name="default"
    )
    compiled = compile_for(chips.devices[:1], code)
    seconds = time.perf_counter() - traced
    memory = figures(compiled)["memory"]
    estimated = cycles(compiled.hlo_modules()[0].to_string())
    print(
        f"{kind} {depth} x {width}: {estimated / 1e6:.2f} million cycles, {memory['temp'] / 2**20:.0f} MiB of "
        f"temporaries, {memory['generated_code'] / 2**20:.1f} MiB of code; traced in {traced - began:.1f} s, compiled "
        f"in {seconds:.1f} s"
    )


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
