"""Metrics by name, torchmetrics objects, and their sums over a pass."""

from .metric import NAMES, LazyLogs, Metric, MetricsArgument, PassMetrics, build, first_bad

__all__ = ["NAMES", "LazyLogs", "Metric", "MetricsArgument", "PassMetrics", "build", "first_bad"]
