"""`StepMethods`: the pieces of a step that a subclass of `Model` may override or call.

Steps are traced, like a `tf.function`: their Python runs while a graph is captured, and can't read values from the
device. Later batches replay the graph, without the Python.
"""

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from .. import losses
from ..backend import Sharding, turns
from ..data import unpack
from ..data.to_tensors import as_tensors
from ..errors import ArgumentError, BatchError, DataError, NotCompiledError
from ..optimizers import drop_gradients, list_parameters
from ..runtime import fetch, recomputing, replace_encoder, to_device, tracing
from ..utils.user_code import warn
from . import precision
from .attribute_modules import Holder
from .engine import Engine
from .module_call import call


class EngineSlot:
    """The one private attribute of a model. All other private names belong to the user's subclass."""

    def __get__(self, model: Any, kind: type | None = None) -> Engine:
        if model is None:
            raise AttributeError("_engine")
        try:
            engine: Engine = vars(model)["_engine"]
        except KeyError:
            raise ArgumentError(
                f"{type(model).__name__}.__init__ must call super().__init__(module) before it uses the model"
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
    """An argument of `compile` that can be read, and set for the next passes."""

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

    def __call__(self, x: Any = None, *args: Any, training: bool | None = None, **kwargs: Any) -> Any:
        """Call the module on a batch. A batch on the host gives outputs on the host.

        Args:
            x: A tensor or array; a tuple or list of them, passed by position; or a dict, passed by keyword without the
                keys that `forward` doesn't name. If `forward` names none of the keys and takes one argument, it gets
                the whole dict. Without x, the keywords are passed like a dict: `model(**batch)`.
            *args: Further positional arguments of `forward`, after x. Numbers, flags and lists stay as they are.
            training: True computes as in training, e.g. with dropout, False as in an evaluation (default: in the
                modes of the module's layers, which a step sets). It is passed on if `forward` has a `training`.
            **kwargs: Further keyword arguments of `forward`. They replace a dict's entries of the same name.

        Returns:
            The module's output. For host data after `fit` this waits for the device, and no gradient flows.

        Raises:
            ArgumentError: x is passed by keyword, and there are further positional arguments.
            BatchError: The module takes other arguments, or one of its layers fails, e.g. on rows of the wrong shape.

        Example:
            >>> import tpufit
            >>> tpufit.Model(torch.nn.Flatten())(torch.zeros(4, 2, 3)).shape
            torch.Size([4, 6])
            >>> class Scaled(torch.nn.Module):
            ...     def forward(self, x, scale=1.0):
            ...         return x * scale
            >>> model = tpufit.Model(Scaled())
            >>> model(torch.ones(2), 0.5), model(torch.ones(2), scale=3.0, training=False)
            (tensor([0.5000, 0.5000]), tensor([3., 3.]))

        Source: `keras.Model.__call__`.
        """
        if x is None and kwargs and not args:
            x, kwargs = kwargs, {}
        engine = self._engine
        placement = engine.state.placement
        name = engine.config.precision
        if torch.is_inference_mode_enabled() and not placement.eager:  # torch_xla can't make tensors in inference mode
            with torch.inference_mode(False), torch.no_grad():
                return StepMethods.__call__(self, x, *args, training=training, **kwargs)
        with turns.taking_turn("model(x)"):
            # Between replays the module's tensors are empty; in a trace they have the trace's values.
            if not tracing():
                engine.state.write_back()
            leaves, spec = tree_flatten((as_tensors(x), *tree_map(_array_to_tensor, (args, kwargs))))
            at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
            from_host = any(leaves[i].device.type == "cpu" for i in at) and placement.device.type != "cpu"
            if from_host:
                for i, tensor in zip(at, to_device([leaves[i] for i in at], placement, Sharding.ROWS), strict=True):
                    leaves[i] = tensor

            def compute(tensors: list[Tensor], seed: Callable[[int], None] | None = None) -> Any:
                if seed is not None:
                    seed(0)
                given = dict(zip(at, tensors, strict=True))
                parts = [given.get(i, leaf) for i, leaf in enumerate(leaves)]
                x, further, keywords = precision.cast_inputs(name, tree_unflatten(parts, spec))
                if training is not None and "training" in inspect.signature(self.module.forward).parameters:
                    keywords["training"] = training
                modes = nullcontext() if training is None else engine.calling(training)
                alone = not placement.eager and not tracing()
                once = recomputing({}, None) if alone else nullcontext()
                encoder = replace_encoder() if alone else nullcontext()
                with modes, once, encoder, precision.autocast(name, placement.device):
                    return call(self.module, x, engine.compiled_module, further, keywords)

            tensors = [leaves[i] for i in at]
            if not from_host or tracing():
                return compute(tensors)
            y_pred = engine.run_once(tensors, compute) if placement.shares_only_steps else compute(tensors)
            return fetch(y_pred, "outputs")

    def train_step(self, batch: Any) -> dict[str, Any]:
        """Update the weights once. Override this for a custom training step.

        Args:
            batch: `(x,)`, `(x, y)` or `(x, y, sample_weight)`, or whatever your data yield, with tensors on the
                device.

        Returns:
            Scalars by name, each the mean over the batch: tensors, or constant numbers. The logs are their running
            means over the epoch, plus the metrics; a batch's weight is the denominator of its loss, see `average`.
            torchmetrics objects among the model's attributes, which your own step updates, are logged too: under
            the attribute's name, or under `"name"` if the step returns `{"name": self.metric.compute()}`. The metrics
            of a `MetricCollection` keep the names that the collection gives them.

        Example: a step that adds noise to the inputs.
            >>> import tpufit
            >>> class Noisy(tpufit.Model):
            ...     def train_step(self, batch):
            ...         x, y = batch
            ...         loss = self.compute_loss(x, y, self(x + 0.1 * torch.randn_like(x)))
            ...         self.apply_gradients(loss)
            ...         return {"loss": loss, "noise": 0.1}
            >>> model = Noisy(torch.nn.Linear(1, 1))
            >>> model.compile("sgd", "mse")
            >>> history = model.fit(torch.ones(4, 1), torch.ones(4, 1), verbose=0)
            >>> sorted(history.history)
            ['loss', 'noise']

        Source: `keras.Model.train_step`.
        """
        x, y, sample_weight = unpack(batch)
        y_pred = self(x)
        loss = _loss(self, x, y, y_pred, sample_weight, training=True)
        self.apply_gradients(loss)
        return {"loss": loss, **self.compute_metrics(x, y, y_pred, sample_weight)}

    def test_step(self, batch: Any) -> dict[str, Any]:
        """Evaluate one batch, like `train_step` without gradients and without an update.

        Args:
            batch: As in `train_step`.

        Returns:
            Scalars by name, as in `train_step`.

        Source: `keras.Model.test_step`.
        """
        x, y, sample_weight = unpack(batch)
        y_pred = self(x)
        loss = _loss(self, x, y, y_pred, sample_weight, training=False)
        return {"loss": loss, **self.compute_metrics(x, y, y_pred, sample_weight)}

    def predict_step(self, batch: Any) -> Any:
        """Compute the outputs for a batch: a tensor or a nest of tensors, with the batch's rows as first dimension.

        Args:
            batch: As in `train_step`; targets are ignored.

        Returns:
            The module's output. Of the output of a Hugging Face model only the logits, if it has any.

        Raises:
            BatchError: x has single rows.

        Source: `keras.Model.predict_step`.
        """
        x, _, _ = unpack(batch)
        y_pred = losses.extract_logits(self(x))
        # A vector x may be a batch of single numbers, but then the output has a row for each number.
        if isinstance(x, Tensor) and isinstance(y_pred, Tensor) and x.dim() == 1 and y_pred.shape[:1] != x.shape:
            raise BatchError(
                f"x has single rows, not batches: from x of shape {tuple(x.shape)} the module makes an output of "
                f"shape {tuple(y_pred.shape)}. Pass one array with all rows, a Dataset, or batches of shape (rows, ...)"
            )
        return y_pred

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Tensor:
        """Compute the loss of a batch, a scalar in float32. Several losses are summed by weight and logged separately.

        Args:
            x: The inputs, for a loss of your own.
            y: The targets, e.g. classes of shape `(batch,)`; None if they are the `"labels"` in a dict `x`.
            y_pred: The module's output.
            sample_weight: One weight per row, shape `(batch,)`, or one for each element of a sequence, shape
                `(batch, time)`; for several outputs one tensor for all, or one for each; or None.
            training: False in an evaluation (default True), for a loss of your own. An override may leave it out.

        Returns:
            The loss, a scalar.

        Raises:
            NotCompiledError: `compile` was given no loss.
            ArgumentError, DataError: The losses don't fit the outputs of the module or the targets.
            LabelError: A label of this batch is outside the module's classes.

        Example:
            >>> import tpufit
            >>> model = tpufit.Model(torch.nn.Identity())
            >>> model.compile(None, "mse")
            >>> model.compute_loss(y=torch.zeros(2), y_pred=torch.tensor([1.0, 3.0]))
            tensor(5.)

        Source: `keras.Model.compute_loss`.
        """
        engine = self._engine
        loss = losses.require_loss(engine.config.loss, "compute_loss")
        if isinstance(loss, losses.ModuleLoss):
            return loss(y_pred, y, sample_weight)  # `LossWatch` notes the denominators of the losses inside
        y_pred, y = _prepare_comparison(x, y, y_pred)
        if y is None:
            raise DataError(
                "the loss needs targets, but the batches have only x: yield (x, y) or override compute_loss"
            )
        loss.check_labels(engine.context.labels, y_pred)
        if isinstance(loss, losses.SharedLoss):
            loss = loss.of(y)
        if isinstance(loss, losses.Loss):
            return _note_weight(engine, loss.measure(y_pred, y, sample_weight))
        means = loss.measure(y_pred, y, sample_weight)
        parts = {key: _note_weight(engine, mean) for key, mean in means.items()}
        total = loss.total(parts)
        if engine.context.rows:
            averages = engine.context.averages
            weights = {key: averages.of(part)[0].weight for key, part in parts.items()}
            for key, part in parts.items():
                averages.note(part, [losses.Mean(part, weights[key])])
            averages.note(total, [losses.Mean(part, weights[key]) for key, part in loss.weight_parts(parts).items()])
            engine.context.metrics.note(loss.logs(parts))
        return total

    def average(self, values: Tensor, weights: Any = None) -> Tensor:
        """Average the losses of a batch, and weight the batch by the sum of their weights.

        Epoch logs, evaluations and `accumulate_steps` average over batches. A batch's weight is the denominator of its
        mean loss, if tpufit or PyTorch computes the loss, e.g. the number of tokens. For your own loss it is the number
        of rows of the targets, unless `average` computes the loss.

        Args:
            values: The losses of rows or elements, shape `(batch, ...)`; or their mean, a scalar.
            weights: A weight for each row or element, such as a mask; with a scalar, the sum of all weights (default:
                1 for each element).

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
        return _note_weight(self._engine, losses.weighted_mean(values, weights))

    def apply_gradients(self, loss: Tensor, optimizer: Optimizer | None = None) -> None:
        """Compute the gradients of the loss and let the optimizer take one step.

        Args:
            loss: A scalar.
            optimizer: The optimizer, over parameters of this module (default: the optimizer of `compile`).

        Raises:
            NotCompiledError: There is no optimizer.

        Example: see `train_step`.
        """
        optimizer = optimizer or self.optimizer
        if optimizer is None:
            raise NotCompiledError("apply_gradients needs an optimizer: call model.compile(optimizer='adamw', ...)")
        engine = self._engine
        engine.context.stepped = True
        if not any(parameter.requires_grad for parameter in list_parameters(optimizer)):
            warn("the optimizer has nothing to train: the module has no parameters, or none that requires a gradient")
            return
        state = engine.state.attach(optimizer)
        gradients = engine.state.gradient_step(state, engine.context)
        optimizer.zero_grad()
        gradients.backward(loss)
        gradients.step()
        tensors, optimizers = engine.state.list_every_tensor(), engine.state.list_every_optimizer()
        engine.state.untrained.warn_of_gradients(tensors, optimizers)
        if not engine.state.placement.eager:
            drop_gradients(optimizer)  # else they would be outputs of the graph, as large as the weights
            engine.state.untrained.drop_gradients(tensors, optimizers)
        engine.state.pin(state)

    def update_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Add a batch to the metrics of `compile`.

        Args:
            x: The inputs, for metrics of your own.
            y: The targets.
            y_pred: The module's output.
            sample_weight: As in `compute_loss`. Only metrics in `weighted_metrics` use it, as in Keras.
        """
        self._engine.context.metrics.update_metrics(*_prepare_comparison(x, y, y_pred), sample_weight)

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> dict[str, Any]:
        """Add a batch to the metrics, and return further logs of the batch. Override this for logs of your own.

        Args:
            x: The inputs, for metrics of your own.
            y: The targets.
            y_pred: The module's output.
            sample_weight: As in `update_metrics`.

        Returns:
            Scalars by name, as `train_step` returns them (default: none). The metrics themselves are not included,
            because their values are known only after the steps have run, see `get_metrics_result`.

        Source: `keras.Model.compute_metrics`.
        """
        self.update_metrics(x, y, y_pred, sample_weight)
        return {}

    def get_metrics_result(self) -> dict[str, Any]:
        """Compute the logs of the last pass. Override this to derive logs from others; it is called after each pass.

        **This waits** for the device. Inside a step, where no value is known yet, it returns an empty dict.

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
        return {} if engine.latest is None or engine.context.rows else engine.latest.compute_logs()


def uses_default(model: Any, *methods: str) -> bool:
    """True if a model doesn't override these methods."""
    return all(getattr(getattr(model, name), "__func__", None) is getattr(StepMethods, name) for name in methods)


def _loss(model: StepMethods, *batch: Any, training: bool) -> Tensor:
    """Compute the loss of `(x, y, y_pred, sample_weight)`. As in Keras, an override may leave out `training`."""
    takes = uses_default(model, "compute_loss") or "training" in inspect.signature(model.compute_loss).parameters
    return model.compute_loss(*batch, **({"training": training} if takes else {}))


def _array_to_tensor(leaf: Any) -> Any:
    """Convert an array or a tensor like one in a batch; leave a number, which Python may read, unchanged."""
    return as_tensors(leaf) if isinstance(leaf, (np.ndarray, Tensor)) else leaf


def _note_weight(engine: Engine, mean: losses.Mean) -> Tensor:
    """Note the weight of a loss of the running step, and return the loss."""
    if engine.context.rows and mean.weight is not None:
        engine.context.averages.note(mean.value, [mean])
    loss: Tensor = mean.value
    return loss


def _prepare_comparison(x: Any, y: Any, y_pred: Any) -> tuple[Any, Any]:
    """Return the targets and the output of a batch in the form in which losses and metrics compare them."""
    y = losses.find_targets(x, y)
    return losses.extract_logits(y_pred) if isinstance(y, Tensor) else y_pred, y
