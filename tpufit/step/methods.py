"""`StepMethods`: the pieces of a step that a subclass of `Model` may override or call.

Steps are traced, like a `tf.function`: their Python runs while a graph is captured, and can't read a value from the
device. For later batches the graph is replayed, without the Python.
"""

import inspect
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten

from .. import losses
from ..backend import Sharding, turns
from ..data import unpack
from ..data.batches import as_tensors
from ..errors import ArgumentError, BatchError, DataError, NotCompiledError
from ..optimizers import drop_gradients, parameters
from ..runtime import fetch, recomputing, to_device, tracing
from ..utils.users_code import warn
from . import precision
from .arguments import call
from .engine import Engine
from .kept_modules import Holder


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


class CompileOption:
    """An argument of `compile` that can be read, and set for the passes that follow."""

    def __set_name__(self, kind: type, name: str) -> None:
        self._name = name

    def __get__(self, model: Any, kind: type | None = None) -> Any:
        return self if model is None else getattr(model._engine.config, self._name)

    def __set__(self, model: Any, value: object) -> None:
        model._engine.config = model._engine.config.with_option(self._name, value)


class StepMethods(Holder):
    """The pieces of a step. `Model` adds the loops around them."""

    optimizer: Optimizer | None
    _engine = EngineSlot()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "_engine" in vars(cls):
            raise ArgumentError(
                f"{cls.__name__} defines _engine, the one private name that tpufit.Model keeps for itself: choose "
                "another name"
            )

    def __call__(self, x: Any, training: bool | None = None) -> Any:
        """Call the module on a batch. A batch on the host gives outputs on the host.

        Args:
            x: A tensor or array, a tuple or list of them (passed as positional arguments) or a dict: by keyword,
                without what `forward` doesn't name, or whole if it names none of the keys and takes one argument.
            training: True or False computes as in training or not, e.g. with or without dropout (default: as the
                module's layers are set, which a step does).

        Returns:
            The module's output. For host data after `fit` this waits for the device, and no gradient flows.

        Raises:
            BatchError: The module takes other arguments, or one of its layers fails, e.g. on rows of the wrong shape.
        """
        engine = self._engine
        placement = engine.state.placement
        name = engine.config.precision
        if torch.is_inference_mode_enabled() and not placement.on_host:  # there torch_xla can't make a tensor
            with torch.inference_mode(False), torch.no_grad():
                return self(x, training)
        with turns.taken("model(x)"):
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
            modes = nullcontext() if training is None else engine.calling(training)
            once = nullcontext() if placement.on_host or tracing() else recomputing({}, None)
            with modes, once, precision.autocast(name, placement.device):
                y_pred = call(self.module, x)
            return fetch(y_pred, "outputs") if from_host and not tracing() else y_pred

    def train_step(self, batch: Any) -> dict[str, Any]:
        """Update the weights once. Override this for a custom training step.

        Args:
            batch: `(x,)`, `(x, y)` or `(x, y, sample_weight)`, or whatever your data yield, with tensors on the
                device.

        Returns:
            Scalars by name, each the mean over the batch: tensors, or numbers that stay the same. The logs are their
            running means over the epoch, plus the metrics; a batch counts by what its loss is the mean over, see
            `average`. torchmetrics objects among the model's attributes,
            which a step of your own updates, are logged too: under the attribute's name, or under the one that
            `{"name": self.metric.compute()}` gives. Those of a `MetricCollection` have the names that it gives them.
        """
        x, y, sample_weight = unpack(batch)
        y_pred = self(x)
        loss = _loss(self, x, y, y_pred, sample_weight, training=True)
        self.apply_gradients(loss)
        return {"loss": loss, **self.compute_metrics(x, y, y_pred, sample_weight)}

    def test_step(self, batch: Any) -> dict[str, Any]:
        """Evaluate one batch: as `train_step`, but without gradients and without an update."""
        x, y, sample_weight = unpack(batch)
        y_pred = self(x)
        loss = _loss(self, x, y, y_pred, sample_weight, training=False)
        return {"loss": loss, **self.compute_metrics(x, y, y_pred, sample_weight)}

    def predict_step(self, batch: Any) -> Any:
        """Compute the outputs for a batch: a tensor or a nest of tensors, with the batch's rows as first dimension.

        What a Hugging Face model returns is reduced to its logits, if it has some.
        """
        x, _, _ = unpack(batch)
        y_pred = losses.logits_of(self(x))
        # A vector alone may be a batch of numbers, but then each of them has an output.
        if isinstance(x, Tensor) and isinstance(y_pred, Tensor) and x.dim() == 1 and y_pred.shape[:1] != x.shape:
            raise BatchError(
                f"x gives single rows, not batches: of x of shape {tuple(x.shape)} the module makes an output of shape "
                f"{tuple(y_pred.shape)}. Pass one array with all rows, a Dataset, or batches of shape (rows, ...)"
            )
        return y_pred

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Tensor:
        """Compute the loss of a batch, a scalar in float32. Several losses are summed by weight, and each is logged.

        Args:
            x: The inputs, for a loss of your own.
            y: The targets, e.g. classes of shape `(batch,)`; None if they are the `"labels"` in a dict `x`.
            y_pred: The module's output.
            sample_weight: One weight a row, shape `(batch,)`, or one for each element of a sequence, shape
                `(batch, time)`; for several outputs one tensor for all, or one for each; or None.
            training: False in an evaluation (default True), for a loss of your own. An override may leave it out.

        Raises:
            NotCompiledError: `compile` was given no loss.
            ArgumentError, DataError: The losses are for other outputs than those of the module or of the targets.
            LabelError: A label of this batch is outside the module's classes.
        """
        engine = self._engine
        loss = losses.required(engine.config.loss, "compute_loss")
        if isinstance(loss, losses.ModuleLoss):
            return loss(y_pred, y, sample_weight)  # what it is the mean over, the module's own losses have noted
        y_pred, y = _compared(x, y, y_pred)
        if y is None:
            raise DataError(
                "the loss needs targets, but the batches hold only x: yield (x, y) or override compute_loss"
            )
        loss.check_labels(engine.context.labels, y_pred)
        if isinstance(loss, losses.SharedLoss):
            loss = loss.of(y)
        if isinstance(loss, losses.Loss):
            return _noted(engine, loss.measure(y_pred, y, sample_weight))
        means = loss.measure(y_pred, y, sample_weight)
        parts = {key: _noted(engine, mean) for key, mean in means.items()}
        total = loss.total(parts)
        if engine.context.rows:
            averages = engine.context.averages
            weights = {key: averages.of(part)[0].weight for key, part in parts.items()}
            for key, part in parts.items():
                averages.note(part, [losses.Mean(part, weights[key])])
            averages.note(total, [losses.Mean(part, weights[key]) for key, part in loss.weighed(parts).items()])
            engine.context.metrics.note(loss.logs(parts))
        return total

    def average(self, values: Tensor, weights: Any = None) -> Tensor:
        """Average the losses of a batch, and let the batch count by their weights.

        Epoch logs, evaluations and `accumulate_steps` put batches together. A loss that tpufit or PyTorch computes
        counts there by what it is the mean over. Your own counts by the rows of the targets, unless it is made here.

        Args:
            values: The losses of rows or elements, shape `(batch, ...)`; or one number, which is their mean already.
            weights: One for each row or element, such as a mask; for one number the sum of all weights (default: 1 for
                each element).

        Returns:
            The mean, a scalar: the sum of `values * weights`, divided by the sum of `weights`.

        Raises:
            ArgumentError: The weights are of another shape.

        Example:
            >>> import torch, tpufit
            >>> class Masked(tpufit.Model):
            ...     def compute_loss(self, x, y, y_pred, sample_weight=None):
            ...         return self.average((y_pred - y).abs(), y != 0)
            >>> model = Masked(torch.nn.Identity())
            >>> model.compile(None)
            >>> model.evaluate(torch.ones(4, 1), torch.tensor([[3.0], [0.0], [0.0], [0.0]]), batch_size=2, verbose=0)
            2.0
        """
        return _noted(self._engine, losses.mean_of(values, weights))

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
        engine.context.stepped = True
        if not any(parameter.requires_grad for parameter in parameters(optimizer)):
            warn("the optimizer has nothing to train: the module has no parameters, or none that requires a gradient")
            return
        own = engine.state.attach(optimizer)
        optimizer.zero_grad()
        own.backward(loss, engine.context.averages)
        own.step(engine.context)
        engine.state.note_unused_gradients()
        if not engine.state.placement.on_host:
            drop_gradients(optimizer)  # kept ones would be outputs of the graph, as large as the weights
            engine.state.drop_unused_gradients()
        engine.state.pin(own)

    def update_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Add a batch to the metrics of `compile`.

        Args:
            x: The inputs, for metrics of your own.
            y: The targets.
            y_pred: The module's output.
            sample_weight: As in `compute_loss`. Only metrics in `weighted_metrics` weigh, as in Keras.
        """
        self._engine.context.metrics.update_metrics(*_compared(x, y, y_pred), sample_weight)

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> dict[str, Any]:
        """Add a batch to the metrics, and give what else to log of it. Override this for logs of your own.

        Args:
            x: The inputs, for metrics of your own.
            y: The targets.
            y_pred: The module's output.
            sample_weight: As in `update_metrics`.

        Returns:
            Scalars by name, as `train_step` returns them (default: none). The metrics themselves are not among them:
            their values are known only once the steps have run, see `get_metrics_result`.

        Source: `keras.Model.compute_metrics`.
        """
        self.update_metrics(x, y, y_pred, sample_weight)
        return {}

    def get_metrics_result(self) -> dict[str, Any]:
        """Compute the logs of the pass run last. Override this for logs made of others: it is called after each pass.

        **This waits** for the device. Inside a step, where no value is known yet, there are none.

        Returns:
            The loss and the metrics, as floats by name; empty before the first step.

        Example:
            >>> import torch, tpufit
            >>> class Own(tpufit.Model):
            ...     def get_metrics_result(self):
            ...         logs = super().get_metrics_result()
            ...         return {**logs, "rmse": logs["loss"] ** 0.5}
            >>> model = Own(torch.nn.Linear(1, 1))
            >>> model.compile("sgd", "mse")
            >>> logs = model.evaluate(torch.ones(4, 1), torch.ones(4, 1), verbose=0, return_dict=True)
            >>> logs["rmse"] == logs["loss"] ** 0.5
            True

        Source: `keras.Model.get_metrics_result`.
        """
        engine = self._engine
        return {} if engine.latest is None or engine.context.rows else engine.latest.computed()


def is_usual(model: Any, *methods: str) -> bool:
    """True if a model has these methods as they are here."""
    return all(getattr(getattr(model, name), "__func__", None) is getattr(StepMethods, name) for name in methods)


def _loss(model: StepMethods, *batch: Any, training: bool) -> Tensor:
    """Compute the loss of `(x, y, y_pred, sample_weight)`. An override need not take `training`, as in Keras."""
    takes = is_usual(model, "compute_loss") or "training" in inspect.signature(model.compute_loss).parameters
    return model.compute_loss(*batch, **({"training": training} if takes else {}))


def _noted(engine: Engine, mean: losses.Mean) -> Tensor:
    """Note what a loss of the running step is the mean over, and return the loss."""
    if engine.context.rows and mean.weight is not None:
        engine.context.averages.note(mean.value, [mean])
    loss: Tensor = mean.value
    return loss


def _compared(x: Any, y: Any, y_pred: Any) -> tuple[Any, Any]:
    """The output and the targets of a batch, as losses and metrics compare them."""
    y = losses.targets_of(x, y)
    return losses.logits_of(y_pred) if isinstance(y, Tensor) else y_pred, y
