"""`TrackedMetric`: a torchmetrics object among a model's attributes, which the model's steps update by hand."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..errors import ArgumentError
from ..utils.replaced import replaced
from .library import is_collection, is_metric
from .sums import SumTable

if TYPE_CHECKING:
    import torchmetrics


def metrics_in(attributes: Mapping[str, Any]) -> dict[str, torchmetrics.Metric]:
    """Find the torchmetrics objects among a model's attributes and in its collections, by the names of their logs.

    A collection names its own metrics; where such a name is taken, the collection's own and `_` come before it.

    Example:
        >>> import torchmetrics
        >>> rows = torchmetrics.SumMetric()
        >>> scores = torchmetrics.MetricCollection([torchmetrics.MeanSquaredError()], prefix="own_")
        >>> list(metrics_in({"rows": rows, "scores": scores, "others": scores.clone(), "net": None}))
        ['rows', 'own_MeanSquaredError', 'others_own_MeanSquaredError']
    """
    found = {name: value for name, value in attributes.items() if is_metric(value)}
    for name, collection in _collections_in(attributes).items():
        for own, metric in collection.items(copy_state=False):
            found[f"{name}_{own}" if own in found else own] = metric
    return found


@contextmanager
def one_by_one(attributes: Mapping[str, Any]) -> Iterator[None]:
    """A context in which the collections among a model's attributes update every metric of theirs.

    Otherwise a collection updates one metric for all whose sums were equal after its first update (`compute_groups`).
    Inside a step it would take too many for equal, as the metrics themselves collect nothing there.
    """

    def call(collection: torchmetrics.MetricCollection, *args: Any, **kwargs: Any) -> None:
        collection(*args, **kwargs)  # this knows no groups

    with ExitStack() as stack:
        for collection in _collections_in(attributes).values():
            stack.enter_context(replaced(collection, update=partial(call, collection)))
        yield


def _collections_in(attributes: Mapping[str, Any]) -> dict[str, torchmetrics.MetricCollection]:
    return {name: value for name, value in attributes.items() if is_collection(value)}


class TrackedMetric:
    """A torchmetrics object that steps update by hand, as part of their graph. Its sums are those of a pass.

    Inside a step the object itself collects nothing: its `compute`, or a call of it, returns the object, which stands
    for its value over the pass in the step's logs. Its log has the name of the attribute, or the one that its
    collection gives it, unless the step returns it under another.
    """

    def __init__(self, name: str, metric: torchmetrics.Metric) -> None:
        from .metric import DeviceMetric  # with torchmetrics

        self.name = name
        self.metric = metric
        self._device_metric = DeviceMetric(metric.clone(), "")
        self._signature = inspect.signature(metric.update)

    @contextmanager
    def in_step(self, update: Callable[[Sequence[Any]], None]) -> Iterator[None]:
        """A context for a step's Python, in which `update` takes the arguments of the object's updates."""

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

        with replaced(self.metric, update=collect, forward=call, compute=lambda: self.metric):
            yield

    def update(self, sums: SumTable, slot: int, arguments: Sequence[Any]) -> Sequence[Tensor] | None:
        """Add a batch, inside a step; see `Metric.update`."""
        tensors = [sums.placed(argument) for argument in arguments]
        if len(tensors) > 1:
            self._device_metric.check(self.name, sums, tensors)
        # A scalar is whole on every core as it is, and can't be gathered.
        whole = [sums.placement.gather(tensor) if tensor.dim() else tensor for tensor in tensors]
        return self._device_metric.update(sums, slot, whole)

    def compute(self, sums: Mapping[str, Tensor], kept: Sequence[Sequence[Tensor]]) -> Any:
        """Compute the metric on the host; see `Metric.compute`."""
        return self._device_metric.compute(sums, kept)

    def state_dict(self) -> dict[str, Any]:
        """The name of its log."""
        return {"name": self.name}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take nothing: the first step finds the object as it is."""
