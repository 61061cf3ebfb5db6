"""The engine of a model, for tests of the engine and of what it is given to."""

from __future__ import annotations

import tpufit
from tpufit import runtime
from tpufit.step.engine import Engine


def engine_of(model: tpufit.Model) -> Engine:
    """The engine that `compile` has made last. A test of what `fit` does asks the model instead."""
    engine: Engine = model._engine
    return engine


def engine_on(cores: int, model: tpufit.Model) -> Engine:
    """The engine of a model, which is moved to its cores as `fit` does."""
    engine = engine_of(model)
    engine.move_to(engine.place_on(runtime.start(cores, "test")))
    return engine
