"""The engine of a model, for tests of the engine and of code that uses it."""

from __future__ import annotations

import tpufit
from tpufit import runtime
from tpufit.step.engine import Engine


def engine_of(model: tpufit.Model) -> Engine:
    """Return the engine that the last `compile` has created. Tests of `fit` use the model's public methods instead."""
    engine: Engine = model._engine
    return engine


def engine_on(cores: int, model: tpufit.Model) -> Engine:
    """Return the engine of a model after moving it to its cores, as `fit` does."""
    engine = engine_of(model)
    engine.move_to(engine.place_on(runtime.start(cores, "test")))
    return engine
