"""Checks for torchmetrics' classes without importing torchmetrics, which takes longer than importing tpufit."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeGuard, Union

if TYPE_CHECKING:
    import torchmetrics

MetricArgument = Union[str, "torchmetrics.Metric", Callable[[Any, Any], Any]]


def is_metric(value: Any) -> TypeGuard[torchmetrics.Metric]:
    """True for an object of torchmetrics; none exists before torchmetrics is imported."""
    return isinstance(value, getattr(sys.modules.get("torchmetrics"), "Metric", ()))


def is_collection(value: Any) -> TypeGuard[torchmetrics.MetricCollection]:
    """True for a collection of torchmetrics' objects."""
    return isinstance(value, getattr(sys.modules.get("torchmetrics"), "MetricCollection", ()))


def to_snake_case(name: str) -> str:
    """Return the name of a class's log.

    Example:
        >>> to_snake_case("MulticlassAUROC")
        'multiclass_auroc'
    """
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
