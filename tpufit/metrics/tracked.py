"""`TrackedMetric`: a torchmetrics object among a model's attributes, which the model's steps update by hand."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any

import torchmetrics
from torch import Tensor

from ..errors import ArgumentError
from ..utils.replaced import replaced
from .metric import DeviceMetric
from .sums import SumTable


def metrics_in(attributes: Mapping[str, Any]) -> dict[str, torchmetrics.Metric]:
    """Find the torchmetrics objects among a model's attributes, by name."""
    return {name: value for name, value in attributes.items() if isinstance(value, torchmetrics.Metric)}


class TrackedMetric:
    """A torchmetrics object that steps update by hand, as part of their graph. Its sums are those of a pass.

    Inside a step the object itself collects nothing: its `compute`, or a call of it, returns the object, which stands
    for its value over the pass in the step's logs.

    Args:
        name: The attribute's name; its log has that too, unless the step returns it under another.
        metric: The object.

    Attributes:
        name: The attribute's name.
        metric: The object.
    """

    def __init__(self, name: str, metric: torchmetrics.Metric) -> None:
        self.name, self.metric = name, metric
        self._device_metric = DeviceMetric(metric.clone(), "")
        self._signature = inspect.signature(metric.update)

    @contextmanager
    def in_step(self, update: Callable[[Sequence[Any]], None]) -> Iterator[None]:
        """A context for a step's Python, in which the object's updates go elsewhere.

        Args:
            update: Takes the arguments of an update.
        """

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
        # A scalar is whole on every core as it is, and can't be gathered.
        whole = [sums.placement.gather(tensor) if tensor.dim() else tensor for tensor in tensors]
        return self._device_metric.update(sums, slot, whole)

    def compute(self, sums: Mapping[str, Tensor], kept: Sequence[Sequence[Tensor]]) -> Any:
        """Compute the metric on the host; see `Metric.compute`."""
        return self._device_metric.compute(sums, kept)

    def state_dict(self) -> dict[str, Any]:
        """The attribute's name."""
        return {"name": self.name}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take nothing: the first step finds the object as it is."""
