"""`TrackedMetric`: a torchmetrics object among a model's attributes, which the user's steps update."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..errors import ArgumentError
from ..utils.replacing_attributes import replacing_attributes
from .sum_table import SumTable
from .torchmetrics_classes import is_collection, is_metric

if TYPE_CHECKING:
    import torchmetrics


def find_metrics(attributes: Mapping[str, Any]) -> dict[str, torchmetrics.Metric]:
    """Find the torchmetrics objects among a model's attributes and in its collections, by the names of their logs.

    A collection names its metrics; if a name is taken, the collection's name and `_` are put before it.

    Example:
        >>> import torchmetrics
        >>> rows = torchmetrics.SumMetric()
        >>> scores = torchmetrics.MetricCollection([torchmetrics.MeanSquaredError()], prefix="own_")
        >>> list(find_metrics({"rows": rows, "scores": scores, "others": scores.clone(), "net": None}))
        ['rows', 'own_MeanSquaredError', 'others_own_MeanSquaredError']
    """
    metrics = {name: value for name, value in attributes.items() if is_metric(value)}
    for name, collection in _collections_in(attributes).items():
        for key, metric in collection.items(copy_state=False):
            metrics[f"{name}_{key}" if key in metrics else key] = metric
    return metrics


@contextmanager
def update_separately(attributes: Mapping[str, Any]) -> Iterator[None]:
    """A context in which the collections among a model's attributes update each of their metrics.

    Otherwise a collection updates only one of the metrics whose sums were equal after the first update
    (`compute_groups`). Inside a step all sums would seem equal, because the metrics themselves collect nothing there.
    """

    def call(collection: torchmetrics.MetricCollection, *args: Any, **kwargs: Any) -> None:
        collection(*args, **kwargs)  # calls each metric, without groups

    with ExitStack() as stack:
        for collection in _collections_in(attributes).values():
            stack.enter_context(replacing_attributes(collection, update=partial(call, collection)))
        yield


def _collections_in(attributes: Mapping[str, Any]) -> dict[str, torchmetrics.MetricCollection]:
    return {name: value for name, value in attributes.items() if is_collection(value)}


class TrackedMetric:
    """A torchmetrics object that the user's steps update, as a part of their graph; summed over a pass.

    Inside a step the object itself collects nothing. A call of it, or its `compute`, returns the object, which in the
    step's logs stands for the value over the pass. Its log has the attribute's name, or the name in its collection,
    unless the step returns the object under another name.
    """

    def __init__(self, name: str, metric: torchmetrics.Metric) -> None:
        from .metric import DeviceMetric  # imports torchmetrics

        self.name = name
        self.metric = metric
        self._device_metric = DeviceMetric(metric.clone(), "")
        self._signature = inspect.signature(metric.update)

    @contextmanager
    def in_step(self, update: Callable[[Sequence[Any]], None]) -> Iterator[None]:
        """A context for a step's Python in which `update` gets the arguments of the object's updates."""

        def collect(*args: Any, **kwargs: Any) -> None:
            bound = self._signature.bind(*args, **kwargs)
            wrong = [a for a in bound.args if not isinstance(a, (Tensor, Real))] + list(bound.kwargs)
            if wrong:
                raise ArgumentError(
                    f"inside a step {self.name}.update takes tensors and numbers, got {wrong[0]!r}: update such a "
                    "metric in a callback"
                )
            update(bound.args)

        def call(*args: Any, **kwargs: Any) -> torchmetrics.Metric:
            collect(*args, **kwargs)
            return self.metric

        with replacing_attributes(self.metric, update=collect, forward=call, compute=lambda: self.metric):
            yield

    def update(self, sums: SumTable, slot: int, arguments: Sequence[Any]) -> Sequence[Tensor] | None:
        """Add a batch, inside a step; see `Metric.update`."""
        tensors = [sums.place(argument) for argument in arguments]
        if len(tensors) > 1:
            self._device_metric.check(self.name, sums, tensors)
        # A scalar is whole on every core, and can't be gathered.
        whole = [sums.placement.gather(tensor) if tensor.dim() else tensor for tensor in tensors]
        return self._device_metric.update(sums, slot, whole)

    def compute(self, sums: Mapping[str, Tensor], kept: Sequence[Sequence[Tensor]]) -> Any:
        """Compute the metric on the host; see `Metric.compute`."""
        return self._device_metric.compute(sums, kept)

    def state_dict(self) -> dict[str, Any]:
        """Return the name of the log."""
        return {"name": self.name}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing: the sums are in `PassMetrics`."""
