"""Compiles a training step of a GPT in plain JAX, its weights split over the cores: `jax_fsdp.py NAME FOLDER SLICE`.

The GPT is that of `networks.py`, trained with AdamW in bfloat16. The step follows JAX's guides: weights and optimizer
state have shardings, the batch is split by rows, activations are constrained to this split between blocks, and the
compiler decides what to gather and to sum.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax_mesh import mesh_of
from networks import TRAININGS

from tpufit.preflight.compiling import read_figures
from tpufit.preflight.tpu_slices import Slice, find_slice
from tpufit.step.sharding import choose_dimension

SMALL = 1 << 15  # bytes: smaller weights stay whole, as in tpufit
RATE, DECAY, BETA1, BETA2, EPSILON = 1e-3, 1e-2, 0.9, 0.999, 1e-8


def shapes(name: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the PyTorch network's weights, by name; weights of linear layers are transposed."""
    import torch

    with torch.device("meta"):
        net = TRAININGS[name].make()
    kept = {}
    for key, parameter in net.named_parameters():
        linear = parameter.dim() == 2 and not key.startswith(("words", "positions"))
        kept[key] = tuple(parameter.shape[::-1] if linear else parameter.shape)
    return kept


def norm(x: Any, weights: Any, name: str) -> Any:
    x = x.astype(jnp.float32)
    x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    return x * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def linear(x: Any, weights: Any, name: str) -> Any:
    weight, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
    return x.astype(jnp.bfloat16) @ weight.astype(jnp.bfloat16) + bias.astype(jnp.bfloat16)


def block(x: Any, weights: Any, name: str) -> Any:
    q, k, v = jnp.split(linear(norm(x, weights, f"{name}.norm1"), weights, f"{name}.qkv"), 3, -1)
    q, k, v = (part.reshape(*part.shape[:2], -1, 64) for part in (q, k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) / 8
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    shares = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)).astype(jnp.bfloat16)
    attended = jnp.einsum("bhqk,bkhd->bqhd", shares, v).reshape(x.shape)
    x = x + linear(attended, weights, f"{name}.out")
    y = jax.nn.gelu(linear(norm(x, weights, f"{name}.norm2"), weights, f"{name}.feed_forward.0"), approximate=False)
    return x + linear(y, weights, f"{name}.feed_forward.2")


def lowered(name: str, on: Slice) -> Any:
    """Return the step, lowered for a slice."""
    training, own = TRAININGS[name], shapes(name)
    depth = len({key.split(".")[1] for key in own if key.startswith("blocks.")})
    mesh = mesh_of(on)
    rows = NamedSharding(mesh, PartitionSpec("data"))

    def sharding(shape: tuple[int, ...]) -> NamedSharding:
        axis = choose_dimension(shape, on.devices) if 4 * np.prod(shape) >= SMALL else None
        return NamedSharding(mesh, PartitionSpec(*("data" if i == axis else None for i in range(len(shape)))))

    def loss_of(weights: Any, x: Any, y: Any) -> Any:
        h = weights["words"][x] + weights["positions"][jnp.arange(x.shape[1])]
        for number in range(depth):
            h = jax.lax.with_sharding_constraint(block(h, weights, f"blocks.{number}"), rows)
        h = norm(h, weights, "norm").astype(jnp.bfloat16)
        logits = (h @ weights["words"].astype(jnp.bfloat16).T).astype(jnp.float32)
        right = jnp.take_along_axis(logits, y[..., None], -1)[..., 0]
        hits = (logits.argmax(-1) == y).mean()
        return (jax.nn.logsumexp(logits, -1) - right).mean(), hits

    def step(state: Any, x: Any, y: Any) -> Any:
        weights, first, second, count, sums = state
        (loss, hits), gradients = jax.value_and_grad(loss_of, has_aux=True)(weights, x, y)
        count = count + 1

        def update(weight: Any, gradient: Any, m: Any, v: Any) -> Any:
            m, v = BETA1 * m + (1 - BETA1) * gradient, BETA2 * v + (1 - BETA2) * gradient**2
            change = (m / (1 - BETA1**count)) / (jnp.sqrt(v / (1 - BETA2**count)) + EPSILON)
            return weight * (1 - RATE * DECAY) - RATE * change, m, v

        new = {key: update(weights[key], gradients[key], first[key], second[key]) for key in weights}
        parts = tuple({key: parts[i] for key, parts in new.items()} for i in range(3))
        return (*parts, count, (sums[0] + loss, sums[1] + hits))

    def named(key: str) -> str:
        return key.removesuffix(".weight") if key.startswith(("words", "positions")) else key

    given = {named(key): jax.ShapeDtypeStruct(shape, "float32", sharding=sharding(shape)) for key, shape in own.items()}
    scalar = jax.ShapeDtypeStruct((), "float32", sharding=NamedSharding(mesh, PartitionSpec()))
    x, _ = training.batch(on.devices)
    batch = jax.ShapeDtypeStruct(tuple(x.shape), "int32", sharding=rows)
    state = (given, given, given, scalar, (scalar, scalar))
    kept = jax.tree.map(lambda leaf: leaf.sharding, state)
    return jax.jit(step, donate_argnums=0, out_shardings=kept).lower(state, batch, batch)


if __name__ == "__main__":
    name, folder, on = sys.argv[1], Path(sys.argv[2]), find_slice(sys.argv[3])
    program = lowered(name, on)
    began = time.perf_counter()
    compiled = program.compile()
    found = read_figures(compiled.runtime_executable()) | {"seconds": time.perf_counter() - began}
    (folder / f"jax.{on.name}.txt").write_text(compiled.as_text())
    (folder / f"jax.{on.name}.json").write_text(json.dumps(found))
