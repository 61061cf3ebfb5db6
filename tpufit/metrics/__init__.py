"""Metrics by name, torchmetrics objects, and their sums over a pass.

`build` reads the arguments of `compile`; `named` has a table of the metrics by name. A `Metric` takes the batches of
its output, a `TrackedMetric` the batches that the user's step passes, and a `DatasetMetric` all rows together.
`PassMetrics` sums over a pass, inside the steps' graphs, and `LazyLogs` reads the sums.
"""

from .build import MetricsArgument, build
from .dataset_metric import DatasetMetric
from .lazy_logs import LazyLogs
from .pass_metrics import PassMetrics, find_first_bad
from .torchmetrics_classes import is_collection, is_metric
from .tracked_metric import TrackedMetric, find_metrics
