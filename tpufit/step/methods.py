"""`StepMethods`: the pieces of a step that a subclass of `Model` may override or call.

Steps are traced, like a `tf.function`: their Python runs while a graph is captured, and can't read a value from the
device. For later batches the graph is replayed, without the Python.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten

from .. import losses
from ..data import unpack
from ..data.batches import as_tensors
from ..errors import ArgumentError, BatchError, DataError, NotCompiledError
from ..runtime import Sharding, fetch, to_device, tracing
from . import precision
from .engine import Engine
from .failures import layer_failure, misfit


class EngineSlot:
    """The one private attribute of a model. All other private names belong to the user's subclass."""

    def __get__(self, model: Any, kind: type | None = None) -> Engine:
        if model is None:
            raise AttributeError("_engine")
        try:
            engine: Engine = vars(model)["_engine"]
        except KeyError:
            raise ArgumentError(
                f"{type(model).__name__}.__init__ must call super().__init__(module) before anything else is done with "
                "the model"
            ) from None
        return engine

    def __set__(self, model: Any, value: object) -> None:
        if not isinstance(value, Engine):
            raise ArgumentError(
                f"{type(model).__name__} sets self._engine, the one private name that tpufit.Model keeps for itself: "
                "choose another name"
            )
        vars(model)["_engine"] = value


class StepMethods:
    """The pieces of a step. `Model` adds the loops around them."""

    module: nn.Module
    optimizer: Optimizer | None
    _engine = EngineSlot()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "_engine" in vars(cls):
            raise ArgumentError(
                f"{cls.__name__} defines _engine, the one private name that tpufit.Model keeps for itself: choose "
                "another name"
            )

    def __call__(self, x: Any) -> Any:
        """Call the module on a batch. A batch on the host gives outputs on the host.

        Args:
            x: A tensor or array, a tuple or list of them (passed as positional arguments) or a dict (by keyword).

        Returns:
            The module's output. For host data after `fit` this waits for the device, and no gradient flows.

        Raises:
            BatchError: The module takes other arguments, or one of its layers fails, e.g. on rows of the wrong shape.
        """
        engine = self._engine
        placement, name = engine.state.placement, engine.config.precision
        # Between replays the module's tensors are empty; a trace has put its own values there.
        if not tracing():
            engine.state.write_back()
        leaves, spec = tree_flatten(as_tensors(x))
        at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        from_host = any(leaves[i].device.type == "cpu" for i in at) and not placement.on_host
        if from_host:
            for i, tensor in zip(at, to_device([leaves[i] for i in at], placement, Sharding.ROWS), strict=True):
                leaves[i] = tensor
        x = precision.inputs(name, tree_unflatten(leaves, spec))
        args: Sequence[Any] = (x,)
        named: Mapping[str, Any] = {}
        if isinstance(x, dict):
            args, named = (), x
        elif isinstance(x, (tuple, list)):
            args = x
        try:
            with precision.autocast(name, placement.device):
                y_pred = self.module(*args, **named)
        except TypeError as error:
            reason = misfit(self.module, args, named)
            if not reason:
                raise
            raise BatchError(reason) from error
        except RuntimeError as error:
            if type(error) is not RuntimeError:  # wrong shapes give a plain RuntimeError
                raise
            raise BatchError(layer_failure(self.module, x, error)) from error
        return fetch(y_pred, "outputs") if from_host and not tracing() else y_pred

    def train_step(self, batch: Any) -> dict[str, Tensor]:
        """Update the weights once. Override this for a custom training step.

        Args:
            batch: `(x,)`, `(x, y)` or `(x, y, sample_weight)`, or whatever your data yield, with tensors on the
                device.

        Returns:
            Scalars by name, each the mean over the batch. The logs are their running means over the epoch's rows, plus
            the metrics.
        """
        x, y, sample_weight = unpack(batch)
        y_pred = self(x)
        loss = self.compute_loss(x, y, y_pred, sample_weight)
        self.apply_gradients(loss)
        self.update_metrics(x, y, y_pred, sample_weight)
        return {"loss": loss}

    def test_step(self, batch: Any) -> dict[str, Tensor]:
        """Evaluate one batch: as `train_step`, but without gradients and without an update."""
        x, y, sample_weight = unpack(batch)
        y_pred = self(x)
        loss = self.compute_loss(x, y, y_pred, sample_weight)
        self.update_metrics(x, y, y_pred, sample_weight)
        return {"loss": loss}

    def predict_step(self, batch: Any) -> Any:
        """Compute the outputs for a batch: a tensor or a nest of tensors, with the batch's rows as first dimension."""
        x, _, _ = unpack(batch)
        return self(x)

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Tensor:
        """Compute the loss of a batch, a scalar in float32. Several losses are summed by weight, and each is logged.

        Args:
            x: The inputs, for a loss of your own.
            y: The targets, e.g. classes of shape `(batch,)`.
            y_pred: The module's output.
            sample_weight: One weight a row, shape `(batch,)`, or one for each element of a sequence, shape
                `(batch, time)`; for several outputs one tensor for all, or one for each; or None.

        Raises:
            NotCompiledError: `compile` was given no loss.
            ArgumentError, DataError: The losses are for other outputs than those of the module or of the targets.
            LabelError: A label of this batch is outside the module's classes.
        """
        engine = self._engine
        loss = losses.required(engine.config.loss, "compute_loss")
        if y is None:
            raise DataError(
                "the loss needs targets, but the batches hold only x: yield (x, y) or override compute_loss"
            )
        loss.check_labels(engine.context.labels, y_pred)
        if isinstance(loss, losses.Loss):
            return loss(y_pred, y, sample_weight)
        parts = loss.parts(y_pred, y, sample_weight)
        engine.context.metrics.note(loss.logs(parts))
        return loss.total(parts)

    def apply_gradients(self, loss: Tensor, optimizer: Optimizer | None = None) -> None:
        """Compute the gradients of the loss and let the optimizer take one step.

        Args:
            loss: A scalar.
            optimizer: The optimizer, over parameters of this module (default: the one of `compile`).

        Raises:
            NotCompiledError: There is no optimizer.
        """
        optimizer = optimizer or self.optimizer
        if optimizer is None:
            raise NotCompiledError("apply_gradients needs an optimizer: call model.compile(optimizer='adamw', ...)")
        engine = self._engine
        own = engine.state.attach(optimizer)
        optimizer.zero_grad()
        loss.backward()
        own.step(engine.context)
        if not engine.state.placement.on_host:
            optimizer.zero_grad()  # kept gradients would be outputs of the graph, as large as the weights
        # Pinned last, as results: else the partitioner may split the next step's inputs.
        for tensor in own.tensors:
            engine.state.placement.pin(tensor)

    def update_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Add a batch to the metrics of `compile`.

        Args:
            x: The inputs, for metrics of your own.
            y: The targets.
            y_pred: The module's output.
            sample_weight: As in `compute_loss`. Only metrics in `weighted_metrics` weigh, as in Keras.
        """
        self._engine.context.metrics.update_metrics(y_pred, y, sample_weight)
