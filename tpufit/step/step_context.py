"""`StepContext`: what the methods that `train_step` calls need to know about the running step."""

from dataclasses import dataclass, field
from typing import Any

from ..backend import HOST
from ..losses import Averages
from ..metrics import PassMetrics
from ..optimizers import UpdatePlan


@dataclass
class StepContext:
    """The step whose Python is running. Outside any step the defaults apply: nothing is summed or checked."""

    metrics: PassMetrics = field(default_factory=lambda: PassMetrics([], HOST))  # the sums that the step adds to
    rows: int = 0  # in the batch, over all cores
    averages: Averages = field(default_factory=lambda: Averages(1))  # of the losses of the step
    labels: Any = None  # the range of its classes, see `Loss.label_range`
    update: UpdatePlan = field(default_factory=UpdatePlan)
    compiles: bool = False  # whether the step calls `Engine.compiled_module`
    stepped: bool = False  # whether its Python has called apply_gradients or an optimizer's step
