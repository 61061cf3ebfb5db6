"""`build`: builds the metrics of a model from the arguments of `compile`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError
from ..losses import Output, check_form, output_name, pick, to_path
from .dataset_metric import DatasetMetric
from .torchmetrics_classes import MetricArgument, is_collection

if TYPE_CHECKING:
    from .metric import Metric

OneMetric = MetricArgument | DatasetMetric
OneOutputs = Sequence[OneMetric] | Mapping[str, OneMetric] | OneMetric | None
MetricsArgument = OneOutputs | Mapping[str, OneOutputs] | Sequence[OneOutputs]


def build(
    metrics: MetricsArgument,
    weighted: MetricsArgument = None,
    outputs: Sequence[Output] | None = None,
    ignored: Mapping[Any, int] | None = None,
) -> list[Metric | DatasetMetric]:
    """Build the metrics of a model, weighted metrics last; as in Keras, metrics of named outputs are sorted by name.

    Args:
        metrics: Names, torchmetrics objects and functions, in a list or in a dict with the names of their logs; or a
            single one. For several outputs, a dict or list of such metrics for each output, of which at least one
            value is a list or dict. A single `DatasetMetric`, or a list of them if outputs have names, gets all
            outputs.
        weighted: Metrics with sample weights, in the same forms.
        outputs: The outputs of the loss, if there are several; then metrics are always by output.
        ignored: The label that an output's loss ignores, by output: `LossByOutput.ignored`.

    Raises:
        UnknownNameError, ArgumentError: See `Metric`; or two metrics have one name, or their form isn't the loss's.

    Example:
        >>> import torchmetrics
        >>> [m.name for m in build(["accuracy", torchmetrics.MeanSquaredError()], ["accuracy"])]
        ['accuracy', 'mean_squared_error', 'weighted_accuracy']
        >>> [m.name for m in build({"a": ["accuracy"], "b": "mae"})], [m.name for m in build({"top": "accuracy"})]
        (['a_accuracy', 'b_mae'], ['top'])
    """
    built: list[Metric | DatasetMetric] = []
    by_name = False
    for argument, given in (("metrics", metrics), ("weighted_metrics", weighted)):
        taken = {metric.name for metric in built}
        for output, name, metric in _walk_metrics(given, outputs, argument):
            by_name |= isinstance(output, str)
            if isinstance(metric, DatasetMetric):
                if argument == "weighted_metrics":
                    raise ArgumentError("weighted_metrics can't have a DatasetMetric, which takes no weights")
                bound = copy(metric)
                bound.bind(name, output)
                built.append(bound)
                continue
            from .metric import Metric  # imports torchmetrics, which takes long

            new = Metric(metric, name, output, argument == "weighted_metrics", (ignored or {}).get(output))
            if new.name in taken:
                new.mark_weighted()
            built.append(new)
    if by_name:
        built.sort(key=lambda metric: metric.name)
    names = ["loss", *(f"{output_name(output)}_loss" for output in outputs or ()), *(metric.name for metric in built)]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise ArgumentError(
            f"each metric needs a different name, but {doubled} is used twice or more. Pass a dict: "
            "metrics={'top1': ..., 'top5': ...}"
        )
    return built


def _walk_metrics(
    metrics: Any, outputs: Sequence[Output] | None, argument: str
) -> Iterator[tuple[Any, str | None, Any]]:
    """Yield each metric of an argument of `compile`, with its output and its name in a dict."""
    for output, of_output in _group_by_output(metrics, outputs, argument):
        named = isinstance(of_output, Mapping) or is_collection(of_output)
        several = of_output if isinstance(of_output, (list, tuple)) else [of_output]
        for name, metric in of_output.items() if named else ((None, each) for each in several if each is not None):
            if is_collection(metric):
                prefix = "" if name is None else f"{name}_"
                yield from ((output, f"{prefix}{key}", part) for key, part in metric.items())
            else:
                yield output, name, metric


def _group_by_output(metrics: Any, outputs: Sequence[Output] | None, argument: str) -> list[tuple[Any, Any]]:
    """Return pairs of an output and its metrics; the output is None if there is only one."""
    if metrics is None:
        return []
    if outputs and _is_of_all_outputs(metrics, outputs):
        return [(None, metrics)]
    if outputs:
        check_form(metrics, outputs, argument, ())
        if any(isinstance(output, tuple) for output in outputs):
            return [(output, pick(metrics, output)) for output in outputs]
    if not isinstance(metrics, (Mapping, list, tuple)):
        return [(None, metrics)]
    pairs = list(metrics.items() if isinstance(metrics, Mapping) else enumerate(metrics))
    by_output = outputs or any(isinstance(value, (Mapping, list, tuple)) for _, value in pairs)
    return pairs if by_output else [(None, metrics)]


def _is_of_all_outputs(metrics: Any, outputs: Sequence[Output]) -> bool:
    """True for a `DatasetMetric`, or a list of them if outputs have names: these get all outputs at once."""
    by_name = any(isinstance(to_path(output)[0], str) for output in outputs)
    several = metrics if isinstance(metrics, (list, tuple)) and metrics and by_name else [metrics]
    return all(isinstance(metric, DatasetMetric) for metric in several)
