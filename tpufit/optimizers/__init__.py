"""Optimizers, learning rates on the device, accumulated gradients and moving averages."""

from .accumulation import Accumulator, GradientConfig, UpdatePlan
from .build import (
    NAMES,
    Counters,
    DeviceRates,
    OptimizerArgument,
    build,
    create_state,
    device_state,
    parameters,
    rates,
    scale_rates,
    set_rate,
)
from .ema import EMA, EMAConfig

__all__ = [
    "EMA",
    "NAMES",
    "Accumulator",
    "Counters",
    "DeviceRates",
    "EMAConfig",
    "GradientConfig",
    "OptimizerArgument",
    "UpdatePlan",
    "build",
    "create_state",
    "device_state",
    "parameters",
    "rates",
    "scale_rates",
    "set_rate",
]
