"""Optimizers: PyTorch's, by name or as objects, and the parts that let them run inside a graph without a wait."""

from .accumulation import Accumulator, GradientConfig, UpdatePlan
from .build import (
    NAMES,
    OptimizerArgument,
    build,
    clear_state,
    create_state,
    device_state,
    drop_gradients,
    parameters,
    share_counters,
)
from .device_rates import DeviceRates
from .ema import EMA, EMAConfig
from .group_numbers import GroupNumbers
from .groups import ExcludeArgument, GroupConfig
from .host_counters import HostCounters
from .rates import (
    RATE_KEYS,
    RUNNING,
    begin_from_peak,
    note_scheduled,
    rates,
    require_rates,
    required,
    runs_numbers,
    scale_rates,
    scaled_rates,
    set_rate,
)
from .shared_counters import SharedStepCounters
