"""The lowest cost of loops on a TPU: nets in plain JAX, unrolled, or with `lax.scan`.

    python tests/benchmarks/jax_scan.py gpt unrolled|scan [DEPTH] [WIDTH]
    python tests/benchmarks/jax_scan.py lstm|gru|rnn unrolled|scan [TIME_STEPS] [WIDTH]

A GPT loops over its equal blocks: with `scan` the blocks' weights and optimizer state stay stacked, so that the loop
copies nothing. Two recurrent layers loop over time steps. The compiler counts the cycles of a loop's body once, so this
script multiplies them by the number of iterations. Compiles for one core of a v5e; adds to `results/jax_scan.json`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from engine import HERE, machine

from tpufit.preflight.compiling import NO_HOST, compile_for, read_figures
from tpufit.preflight.hlo import parse_operations
from tpufit.preflight.loop_counts import Loops
from tpufit.utils import releases

os.environ |= NO_HOST
import jax
import jax.numpy as jnp
from jax.experimental import topologies

WORDS, TOKENS, ROWS = 8192, 512, 2
NUMBERS, SERIES, CLASSES = 128, 64, 10  # in a time step; rows, and classes of recurrent nets
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


def gpt_shapes(depth: int, width: int, stacked: bool) -> Any:
    sizes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    own = {f"{name} weight": size for name, size in sizes.items()} | {f"{n} bias": s[1:] for n, s in sizes.items()}
    own |= {f"{name} {part}": (width,) for name in ("norm1", "norm2") for part in ("weight", "bias")}
    blocks: Any = [own] * depth
    if stacked:
        blocks = {name: (depth, *size) for name, size in own.items()}
    return {"words": (WORDS, width), "head": (width, WORDS), "blocks": blocks}


def gpt_loss(weights: Any, x: Any, y: Any, loops: bool) -> Any:
    h = weights["words"][x]
    if loops:
        h, _ = jax.lax.scan(lambda h, own: (block(h, own), None), h, weights["blocks"])
    else:
        for own in weights["blocks"]:
            h = block(h, own)
    logits = (h.astype(jnp.bfloat16) @ weights["head"].astype(jnp.bfloat16)).astype(jnp.float32)
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[..., None], -1).mean()


def lstm(state: Any, x: Any, h_gates: Any) -> Any:
    """Compute PyTorch's cell from the products of the input and of the hidden state."""
    i, f, g, o = jnp.split(x + h_gates, 4, -1)
    c = jax.nn.sigmoid(f) * state[1] + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def gru(state: Any, x: Any, h_gates: Any) -> Any:
    (xr, xz, xn), (hr, hz, hn) = (jnp.split(one, 3, -1) for one in (x, h_gates))
    r, z = jax.nn.sigmoid(xr + hr), jax.nn.sigmoid(xz + hz)
    h = (1 - z) * jnp.tanh(xn + r * hn) + z * state[0]
    return h, h


def rnn(state: Any, x: Any, h_gates: Any) -> Any:
    h = jnp.tanh(x + h_gates)
    return h, h


CELLS: dict[str, tuple[Callable[..., Any], int]] = {"lstm": (lstm, 4), "gru": (gru, 3), "rnn": (rnn, 1)}  # and gates


def recurrent_shapes(gates: int, width: int) -> Any:
    layer = {"input": (width, gates * width), "hidden": (width, gates * width)}
    layer |= {"input bias": (gates * width,), "hidden bias": (gates * width,)}
    return {"layers": [{**layer, "input": (NUMBERS, gates * width)}, layer], "head": (width, CLASSES)}


def recurrent_loss(weights: Any, x: Any, y: Any, loops: bool, cell: Callable[..., Any]) -> Any:
    for own in weights["layers"]:
        x = (x @ own["input"] + own["input bias"]).swapaxes(0, 1)  # of all time steps at once
        zeros = jnp.zeros((x.shape[1], own["hidden"].shape[0]))

        def turn(state: Any, x: Any, own: Any = own) -> Any:
            state = cell(state, x, state[0] @ own["hidden"] + own["hidden bias"])
            return state, state[0]

        state = zeros, zeros
        if loops:
            _, outputs = jax.lax.scan(turn, state, x)
        else:
            every = []
            for moment in x:
                state, output = turn(state, moment)
                every.append(output)
            outputs = jnp.stack(every)
        x = outputs.swapaxes(0, 1)
    logits = x[:, -1] @ weights["head"]
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], -1).mean()


@dataclass(frozen=True)
class Net:
    """A net to compile: the shapes of weights and of a batch, and the loss."""

    weights: Any
    x: Any
    y: Any
    loss: Callable[..., Any]


def net_of(name: str, loops: bool, length: int, width: int) -> Net:
    if name == "gpt":
        tokens = jax.ShapeDtypeStruct((ROWS, TOKENS), jnp.int32)
        return Net(gpt_shapes(length, width, loops), tokens, tokens, lambda *given: gpt_loss(*given, loops))
    cell, gates = CELLS[name]
    x = jax.ShapeDtypeStruct((SERIES, length, NUMBERS), jnp.float32)
    y = jax.ShapeDtypeStruct((SERIES,), jnp.int32)
    return Net(recurrent_shapes(gates, width), x, y, lambda *given: recurrent_loss(*given, loops, cell))


def step(loss_of: Callable[..., Any], weights: Any, means: Any, squares: Any, x: Any, y: Any) -> Any:
    """Take a step of AdamW."""
    loss, gradients = jax.value_and_grad(loss_of)(weights, x, y)
    means = jax.tree.map(lambda m, g: BETA1 * m + (1 - BETA1) * g, means, gradients)
    squares = jax.tree.map(lambda s, g: BETA2 * s + (1 - BETA2) * g * g, squares, gradients)
    weights = jax.tree.map(
        lambda w, m, s: w * (1 - RATE * DECAY) - RATE * m / (jnp.sqrt(s) + EPSILON), weights, means, squares
    )
    return weights, means, squares, loss


def cycles(program: str) -> int:
    """Estimate the cycles of a program; those of a loop's body count once for each iteration."""
    run_counts = Loops(program).run_counts
    return sum(one.cycles * run_counts.get(one.computation, 1) for one, _ in parse_operations(program))


def compiled(net: Net) -> dict[str, float]:
    """Return the figures of a net's step on one core of a v5e."""
    is_size = lambda size: isinstance(size, tuple)  # noqa: E731
    state = jax.tree.map(lambda size: jax.ShapeDtypeStruct(size, jnp.float32), net.weights, is_leaf=is_size)
    began = time.perf_counter()
    jitted = jax.jit(partial(step, net.loss), donate_argnums=(0, 1, 2))
    module = jitted.trace(state, state, state, net.x, net.y).lower(lowering_platforms=("tpu",)).compiler_ir()
    traced, processors = time.perf_counter(), time.process_time()
    chips = topologies.get_topology_desc(
        platform="tpu", topology_name="v5e:2x4", chips_per_host_bounds=(2, 4, 1), chip_config_name="default"
    )
    program = compile_for(chips.devices[:1], module)
    seconds = time.perf_counter() - traced
    memory = read_figures(program)["memory"]
    return {
        "cycles": cycles(program.hlo_modules()[0].to_string()),
        "temporaries": memory["temp"],
        "code": memory["generated_code"],
        "traced_s": round(traced - began, 1),
        "compiled_s": round(seconds, 1),
        "compiled_processor_s": round(time.process_time() - processors, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("net", choices=("gpt", *CELLS))
    parser.add_argument("form", choices=("unrolled", "scan"))
    parser.add_argument("length", nargs="?", type=int, help="blocks (default 12) or time steps (default 64)")
    parser.add_argument("width", nargs="?", type=int, help="default 512 or 256")
    args = parser.parse_args()
    default = (12, 512) if args.net == "gpt" else (64, 256)
    length, width = args.length or default[0], args.width or default[1]
    found = compiled(net_of(args.net, args.form == "scan", length, width))
    name = f"{args.net} {length} x {width}, {args.form}"
    print(name, found)
    path = HERE / "results" / "jax_scan.json"
    kept = json.loads(path.read_text())["nets"] if path.exists() else {}
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    kept[name] = {"date": today, "load": round(os.getloadavg()[0], 1), **found}
    report = {"machine": machine(), "compiler": releases.find_compiler_versions(), "core": "v5e", "nets": kept}
    path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
