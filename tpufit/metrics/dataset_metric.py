"""`DatasetMetric`: a metric over all rows of an evaluation at once, computed on the host."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ..errors import ArgumentError, DataError
from ..losses import Output, describe_nest, output_name, pick
from .sum_table import SumTable
from .torchmetrics_classes import is_metric, to_snake_case


class DatasetMetric:
    """A metric that needs all predictions and targets at once, such as a rank correlation, mAP or BLEU.

    `evaluate` and the validations of `fit` compute it on the host after the last row; training epochs and batch logs
    don't have it. Each row counts once, on any number of cores and hosts. Rows are copied to the host while later steps
    run. Until the evaluation ends, each host keeps all rows in memory, and two copies while the metric is computed:
    10,000 rows of 1,000 outputs in float32 take 40 MB.

    Its log has the function's name, or its key in a dict of metrics.

    Args:
        function: A function of (predictions, targets) that returns a number, an array, or a dict of these, each a log
            by name. Both arguments are tensors on the host with all rows in order, or nests of tensors if the module
            returns a nest; bfloat16 becomes float32. Or a torchmetrics object, which takes the same arguments.
        higher_is_better: True or False if the metric gets better as it rises or falls, for callbacks with
            `mode="auto"` (default None: as a torchmetrics object says, else unknown).

    Raises:
        ArgumentError: The argument is neither a function of two arguments nor a torchmetrics object.

    Example:
        >>> import torch, tpufit
        >>> def median_error(predictions, targets):
        ...     return (predictions - targets).abs().median()
        >>> model = tpufit.Model(torch.nn.Identity())
        >>> model.compile(None, "mse", metrics=[tpufit.DatasetMetric(median_error)])
        >>> x = torch.tensor([[1.0], [2.0], [9.0]])
        >>> model.evaluate(x, torch.zeros(3, 1), batch_size=2, verbose=0, return_dict=True)["median_error"]
        2.0
    """

    user_code = None  # it has no part in a step's Python
    leaves_out = False  # its function gets every row, even with the label that the loss ignores

    def __init__(self, function: Callable[[Any, Any], Any], higher_is_better: bool | None = None) -> None:
        self.higher_is_better = higher_is_better
        if is_metric(function):
            metric = function.clone()
            self.name = to_snake_case(type(function).__name__)
            self.higher_is_better = function.higher_is_better if higher_is_better is None else higher_is_better

            def value(predictions: Any, targets: Any) -> Any:
                metric.reset()
                metric.update(predictions, targets)
                return metric.compute()

            self._function: Callable[[Any, Any], Any] = value
        else:
            _require_function(function)
            self.name = getattr(function, "__name__", type(function).__name__).strip("<>")
            self._function = function
        self._output: Output | None = None
        self._prefix = ""
        self._spec: TreeSpec | None = None  # the form of a batch's predictions and targets

    def bind(self, name: str | None, output: Output | None) -> None:
        """Set the name of the log and the module's output, in the copy that a compiled model keeps."""
        self._output = output
        self._prefix = "" if output is None else f"{output_name(output)}_"
        self.name = f"{self._prefix}{name or self.name}"

    def update(self, sums: SumTable, slot: int, y_pred: Any, y: Any, sample_weight: Any) -> Sequence[Tensor]:
        """Return the tensors to keep of a batch, inside a step; see `Metric.update`."""
        pair = [nest if self._output is None else pick(nest, self._output) for nest in (y_pred, y)]
        leaves, spec = tree_flatten(pair)
        if not all(isinstance(leaf, Tensor) and leaf.dim() for leaf in leaves):
            raise ArgumentError(
                f"{self.name!r}, a DatasetMetric, takes predictions and targets of tensors that have rows, but the "
                f"module returns {describe_nest(pair[0])} and the targets are {describe_nest(pair[1])}. Pass text as "
                "numbers, and decode it in the metric's function"
            )
        if self._spec is not None and spec != self._spec:
            raise DataError(
                f"{self.name!r} joins the predictions and targets of all batches, which must have the same structure, "
                f"but {describe_nest(pair[0])} and {describe_nest(pair[1])} came after batches of another structure"
            )
        self._spec = spec
        return [leaf.detach() for leaf in leaves]

    def compute(self, sums: Mapping[str, Tensor], kept: Sequence[Sequence[Tensor]]) -> Any:
        """Compute the metric on the host from the batches that `update` returned: a number, an array or a dict."""
        if not kept or self._spec is None:
            return float("nan")
        predictions, targets = tree_unflatten([self._join(parts) for parts in zip(*kept, strict=True)], self._spec)
        value = self._function(predictions, targets)
        if isinstance(value, Mapping) and value and all(isinstance(name, str) for name in value):
            return {f"{self._prefix}{name}": self._to_log(item) for name, item in value.items()}
        return self._to_log(value)

    def state_dict(self) -> dict[str, Any]:
        """Return the name of the log."""
        return {"name": self.name}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing: an evaluation is never resumed in the middle."""

    def _join(self, parts: Sequence[Tensor]) -> Tensor:
        shapes = {tuple(part.shape[1:]) for part in parts}
        if len(shapes) > 1:
            raise DataError(
                f"{self.name!r} joins the rows of all batches, but some have shape {min(shapes)} and others "
                f"{max(shapes)}: pad them to one shape"
            )
        rows = torch.cat(list(parts))
        return rows.float() if rows.dtype is torch.bfloat16 else rows

    def _to_log(self, value: Any) -> Any:
        """Return a value as a log: a float, or an array for several numbers."""
        if isinstance(value, Real):
            return float(value)
        if isinstance(value, (Tensor, np.ndarray)):
            array = value.detach().cpu().numpy() if isinstance(value, Tensor) else value
            if array.dtype.kind in "biuf":
                return float(array.reshape(())) if array.size == 1 else array
        raise ArgumentError(
            f"{self.name!r}, the function of a DatasetMetric, must return a number, an array of numbers or a dict of "
            f"these, got {value!r:.100}"
        )


def _require_function(function: object) -> None:
    """Raise an `ArgumentError` unless an object can be called with predictions and targets."""
    wanted = "DatasetMetric takes a function of (predictions, targets) or a torchmetrics object"
    if not callable(function) or isinstance(function, type):
        raise ArgumentError(f"{wanted}, got {function!r:.100}")
    try:
        signature = inspect.signature(function)
    except ValueError:  # some builtins have no signature
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise ArgumentError(f"{wanted}, got {function!r:.100} with the arguments {signature}: {error}") from error
