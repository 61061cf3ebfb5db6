"""torchmetrics' own classes, without its import: that takes longer than tpufit's, and is left to who uses a metric."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeGuard, Union

if TYPE_CHECKING:
    import torchmetrics

MetricArgument = Union[str, "torchmetrics.Metric", Callable[[Any, Any], Any]]


def is_metric(value: Any) -> TypeGuard[torchmetrics.Metric]:
    """True for an object of torchmetrics, which only who has imported it can have."""
    return isinstance(value, getattr(sys.modules.get("torchmetrics"), "Metric", ()))


def is_collection(value: Any) -> TypeGuard[torchmetrics.MetricCollection]:
    """True for a collection of torchmetrics' objects."""
    return isinstance(value, getattr(sys.modules.get("torchmetrics"), "MetricCollection", ()))
