"""Keras 3 on JAX, on the MLP."""

from __future__ import annotations

import os
from typing import Any

from measure import BATCH, CLASSES, LAYERS, MOMENTUM, RATE, WIDTH, Clock

os.environ["KERAS_BACKEND"] = "jax"
os.environ["JAX_PLATFORMS"] = "cpu"

import keras
import numpy as np


class Timer(keras.callbacks.Callback):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._clock.begin_epoch()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._clock.end_epoch(float(logs["loss"]))


def keras_jax(clock: Clock, spec: dict[str, Any]) -> dict[str, Any]:
    generator = np.random.default_rng(0)
    rows = BATCH * spec["steps"]
    x = generator.standard_normal((rows, WIDTH), dtype="float32")
    y = generator.integers(0, CLASSES, rows)
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Dense(WIDTH, activation="relu") for _ in range(LAYERS)])
    model.add(keras.layers.Dense(CLASSES))
    model.compile(
        optimizer=keras.optimizers.SGD(RATE, momentum=MOMENTUM),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        **spec.get("compile", {}),
    )
    data = {"x": x, "y": y, "batch_size": BATCH, "shuffle": False, "verbose": 0, **spec.get("fit", {})}
    if not spec.get("fits"):
        model.fit(**data, epochs=spec["epochs"], callbacks=[Timer(clock)])
        return {}
    for _ in range(spec["epochs"]):
        clock.begin_epoch()
        clock.end_epoch(float(model.fit(**data).history["loss"][0]))
    return {}
