"""Metrics by name, torchmetrics objects, and their sums over a pass.

`build` reads the arguments of `compile`; `named` holds the metrics by name, a row each. A `Metric` takes the batches of
its output, a `TrackedMetric` those that the model's own step gives it; `PassMetrics` sums a pass over the data, inside
the steps' graphs, and `LazyLogs` reads the sums.
"""

from .build import MetricsArgument, build
from .lazy_logs import LazyLogs
from .library import is_collection, is_metric
from .pass_metrics import PassMetrics, first_bad
from .tracked import TrackedMetric, metrics_in
