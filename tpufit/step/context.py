"""`StepContext`: the facts about the running step that `train_step`'s helpers need."""

from dataclasses import dataclass, field
from typing import Any

from ..backend import HOST
from ..metrics import PassMetrics
from ..optimizers import UpdatePlan


@dataclass(frozen=True)
class StepContext:
    """The step whose Python is running. Outside any step the defaults apply: nothing is summed or checked.

    Attributes:
        metrics: The sums that the step adds to.
        rows: The number of rows in the batch, over all cores; 0 outside any step.
        labels: The range of the batch's class labels, see `Loss.label_range`.
        update: The plan for the step's gradients: accumulate or take an optimizer step.
    """

    metrics: PassMetrics = field(default_factory=lambda: PassMetrics([], HOST))
    rows: int = 0
    labels: Any = None
    update: UpdatePlan = field(default_factory=UpdatePlan)
