"""`build`: the metrics of a model, from the arguments of `compile`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError
from ..losses import Output, check_form, output_name, pick
from .library import MetricArgument, is_collection

if TYPE_CHECKING:
    from .metric import Metric

OneOutputs = Sequence[MetricArgument] | Mapping[str, MetricArgument] | MetricArgument | None
MetricsArgument = OneOutputs | Mapping[str, OneOutputs] | Sequence[OneOutputs]


def build(
    metrics: MetricsArgument,
    weighted: MetricsArgument = None,
    outputs: Sequence[Output] | None = None,
    ignored: Mapping[Any, int] | None = None,
) -> list[Metric]:
    """Build the metrics of a model, weighted ones last; as in Keras those of outputs by name are sorted by their own.

    Args:
        metrics: Names, torchmetrics objects and functions in a list, or by the name they shall have in a dict; or just
            one. For several outputs, such metrics for each in a dict or list, one of whose values at least is a list or
            dict.
        weighted: Metrics that take weights, in the same forms.
        outputs: The outputs of the loss, if it has several: then metrics are by output in any case.
        ignored: The label that an output's loss leaves out, by output: `LossByOutput.ignored`.

    Raises:
        UnknownNameError, ArgumentError: See `Metric`; or two metrics have one name, or they are not of the loss's form.

    Example:
        >>> import torchmetrics
        >>> [m.name for m in build(["accuracy", torchmetrics.MeanSquaredError()], ["accuracy"])]
        ['accuracy', 'mean_squared_error', 'weighted_accuracy']
        >>> [m.name for m in build({"a": ["accuracy"], "b": "mae"})], [m.name for m in build({"top": "accuracy"})]
        (['a_accuracy', 'b_mae'], ['top'])
    """
    built: list[Metric] = []
    by_name = False
    for argument, given in (("metrics", metrics), ("weighted_metrics", weighted)):
        taken = {metric.name for metric in built}
        for output, name, metric in _each(given, outputs, argument):
            from .metric import Metric  # with torchmetrics

            one = Metric(metric, name, output, argument == "weighted_metrics", (ignored or {}).get(output))
            if one.name in taken:
                one.mark_weighted()
            built.append(one)
            by_name |= isinstance(output, str)
    if by_name:
        built.sort(key=lambda metric: metric.name)
    names = ["loss", *(f"{output_name(output)}_loss" for output in outputs or ()), *(metric.name for metric in built)]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise ArgumentError(
            f"each metric needs a name of its own, but {doubled} is taken more than once. Pass a dict: "
            "metrics={'top1': ..., 'top5': ...}"
        )
    return built


def _each(metrics: Any, outputs: Sequence[Output] | None, argument: str) -> Iterator[tuple[Any, str | None, Any]]:
    """Each metric of an argument of `compile`, with its output and the name that a dict gives it."""
    for output, own in _by_output(metrics, outputs, argument):
        named = isinstance(own, Mapping) or is_collection(own)
        several = own if isinstance(own, (list, tuple)) else [own]
        for name, metric in own.items() if named else ((None, one) for one in several if one is not None):
            if is_collection(metric):
                prefix = "" if name is None else f"{name}_"
                yield from ((output, f"{prefix}{key}", part) for key, part in metric.items())
            else:
                yield output, name, metric


def _by_output(metrics: Any, outputs: Sequence[Output] | None, argument: str) -> list[tuple[Any, Any]]:
    """The metrics of each output; the output is None if there is only one."""
    if metrics is None:
        return []
    if outputs:
        check_form(metrics, outputs, argument, ())
        if any(isinstance(output, tuple) for output in outputs):
            return [(output, pick(metrics, output)) for output in outputs]
    if not isinstance(metrics, (Mapping, list, tuple)):
        return [(None, metrics)]
    pairs = list(metrics.items() if isinstance(metrics, Mapping) else enumerate(metrics))
    by_output = outputs or any(isinstance(own, (Mapping, list, tuple)) for _, own in pairs)
    return pairs if by_output else [(None, metrics)]
