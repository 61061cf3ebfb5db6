"""Traces or compiles a training step of Keras on JAX: `tpu_keras.py NAME FOLDER SLICE [compile]`.

The step is the one of Keras's guide to training loops in JAX, and its state is donated as in Keras's `fit`. Each core
has its rows of the batch, and all of the weights.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np
from jax._src.interpreters import pxla
from jax.sharding import NamedSharding, PartitionSpec
from jax_mesh import mesh_of
from keras_networks import NETWORKS
from networks import TRAININGS, Training

from tpufit.preflight.compiling import read_figures
from tpufit.preflight.preflight_plan import TRACED
from tpufit.preflight.tpu_slices import Slice, find_slice

State = tuple[Any, Any, Any, Any, Any]


def lowered(training: Training, on: Slice) -> Any:
    """Return the step, lowered for a slice."""
    keras.config.set_dtype_policy({"bf16": "mixed_bfloat16", "fp32": "float32"}[training.precision])
    x, y = (tensor.numpy() for tensor in training.batch(on.devices))
    x = np.moveaxis(x, 1, -1) if x.ndim == 4 else x  # channels last
    model = NETWORKS[training.peer](len(x))
    optimizer = keras.optimizers.AdamW(weight_decay=0.01)
    optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    mean, accuracy = keras.metrics.Mean(), keras.metrics.SparseCategoricalAccuracy()

    def forward(trainable: Any, others: Any, x: Any, y: Any) -> Any:
        predicted, others = model.stateless_call(trainable, others, x, training=True)
        return loss_of(y, predicted), (predicted, others)

    def step(state: State, x: Any, y: Any) -> State:
        trainable, others, optimizing, losses, hits = state
        (loss, (predicted, others)), gradients = jax.value_and_grad(forward, has_aux=True)(trainable, others, x, y)
        trainable, optimizing = optimizer.stateless_apply(optimizing, gradients, trainable)
        losses = mean.stateless_update_state(losses, loss, sample_weight=len(x))
        hits = accuracy.stateless_update_state(hits, y, predicted)
        return trainable, others, optimizing, losses, hits

    mesh = mesh_of(on)
    whole, divided = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("data",)))
    variables = (
        model.trainable_variables, model.non_trainable_variables, optimizer.variables, mean.variables,
        accuracy.variables,
    )  # fmt: skip
    given = [[jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=whole) for v in part] for part in variables]
    # 32 bits, JAX's default.
    batch = [
        jax.ShapeDtypeStruct(a.shape, "float32" if a.dtype == "float32" else "int32", sharding=divided) for a in (x, y)
    ]
    return jax.jit(step, donate_argnums=0, out_shardings=whole).lower(tuple(given), *batch)


def main(name: str, folder: Path, on: Slice, compiles: bool) -> None:
    training = TRAININGS[name]
    program = lowered(training, on)
    if not compiles:
        (folder / "0.hlo").write_bytes(program.compiler_ir("hlo").as_serialized_hlo_module_proto())
        facts = {"role": "train", "cause": "", "rows": training.rows * on.devices, "steps": 1, "arguments": []}
        facts |= {"lines": [], "precision": training.precision, "remat": False}
        (folder / TRACED).write_text(json.dumps({"0": facts}))
        return
    # With JAX 0.7.2 it ends the process without a TPU; it matters only when the program is called.
    pxla.is_default_layout = lambda *_: True
    began = time.perf_counter()
    compiled = program.compile()
    found = read_figures(compiled.runtime_executable()) | {"seconds": time.perf_counter() - began}
    (folder / f"0.{on.name}.txt").write_text(compiled.as_text())
    (folder / f"0.{on.name}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), find_slice(sys.argv[3]), sys.argv[4:] == ["compile"])
