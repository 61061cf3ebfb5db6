"""PyTorch's optimizers, by name or as objects, and what lets them run inside a graph without a wait."""

from .accumulation import Accumulator, UpdatePlan, plan_updates
from .build import (
    NAMES,
    OptimizerArgument,
    build,
    clear_state,
    create_state,
    drop_gradients,
    list_device_state,
    list_parameters,
    share_counters,
    step_counts,
)
from .device_rates import DeviceRates
from .ema import EMA, EMAConfig
from .gradients import GradientConfig
from .group_numbers import Attached, GroupNumbers
from .group_options import has_inputs, let_momentum_vary, list_constants, list_numbers, set_momentum
from .host_counters import HostCounters
from .inner_optimizers import find_optimizers, find_rated, find_rated_groups
from .learning_rates import (
    begin_from_peak,
    group_rates,
    list_rates,
    note_scheduled,
    read_scaled_rates,
    require_optimizer,
    require_rates,
    scale_rates,
    set_rate,
)
from .parameter_groups import ExcludeArgument, GroupConfig
from .shared_counters import SharedStepCounters
