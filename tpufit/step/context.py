"""`StepContext`: the facts about the running step that `train_step`'s helpers need."""

from dataclasses import dataclass, field
from typing import Any

from ..backend import HOST
from ..losses import Averages
from ..metrics import PassMetrics
from ..optimizers import UpdatePlan


@dataclass
class StepContext:
    """The step whose Python is running. Outside any step the defaults apply: nothing is summed or checked."""

    metrics: PassMetrics = field(default_factory=lambda: PassMetrics([], HOST))  # whose sums the step adds to
    rows: int = 0  # in the batch, over all cores
    averages: Averages = field(default_factory=lambda: Averages(1))  # of the losses of the step
    labels: Any = None  # the range of its classes, see `Loss.label_range`
    update: UpdatePlan = field(default_factory=UpdatePlan)
    stepped: bool = False  # its Python has called apply_gradients or an optimizer's step
