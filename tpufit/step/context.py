"""`StepContext`: the facts of the step being traced that `train_step`'s helpers need."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..metrics import PassMetrics
from ..optimizers import UpdatePlan
from ..runtime import HOST


@dataclass(frozen=True)
class StepContext:
    """One step while its Python runs. Outside of any step the defaults hold: nothing is summed or checked.

    Attributes:
        metrics: The sums that the step adds to.
        rows: The number of the batch's rows, over all cores.
        labels: The range of the batch's class labels, as `Loss.label_range` finds it.
        update: The part of an update that the step makes with its gradients.
    """

    metrics: PassMetrics = field(default_factory=lambda: PassMetrics([], HOST))
    rows: int = 0
    labels: Any = None
    update: UpdatePlan = field(default_factory=UpdatePlan)
