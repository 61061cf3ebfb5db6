"""What one step of training, testing and predicting does: the public pieces that a subclass of `Model` may override.

Steps are traced, as a `tf.function` is: Python in them runs while the graph is made, not once a batch, and a value on
the device can't be looked at inside.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from . import losses, optimizers, precision
from .data import unpack
from .data.batches import as_tensors, count_rows
from .errors import DataError, NotCompiledError
from .metrics import Metric, Pass
from .runtime import HOST, Layout, Placement, launch, move, run, to_device, to_host, tracing
from .seeds import step_seed


class Steps:
    """The pieces of a step, and where it runs. `Model` adds the loops around them.

    Args:
        module: Any `torch.nn.Module`.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.optimizer: Optimizer | None = None
        self.metrics: list[Metric] = []
        self._loss: losses.Loss | None = None
        self._precision = "fp32"
        self._place = HOST
        self._rates: dict[int, tuple[Optimizer, optimizers.DeviceRates]] = {}
        self._pass = Pass([], HOST)
        self._label_range: tuple[int, int] | None = None
        self._step = 0  # training steps taken since the model was made; the seed of each is a function of it
        self._seed = 0

    def __call__(self, x: Any) -> Any:
        """The module's output for a batch, on the side where the batch is: host in, host out.

        Args:
            x: A tensor or array, a tuple or list of them (passed as positional arguments) or a dict (by keyword).

        Returns:
            What the module returns. For host data after `fit` this waits for the device, and no gradient flows.
        """
        leaves, spec = tree_flatten(as_tensors(x))
        at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        from_host = any(leaves[i].device.type == "cpu" for i in at) and not self._place.on_host
        if from_host:
            for i, tensor in zip(at, to_device([leaves[i] for i in at], self._place, Layout.ROWS), strict=True):
                leaves[i] = tensor
        x = tree_unflatten(leaves, spec)
        with precision.autocast(self._precision, self._place.device):
            if isinstance(x, dict):
                y_pred = self.module(**x)
            elif isinstance(x, (tuple, list)):
                y_pred = self.module(*x)
            else:
                y_pred = self.module(x)
        return fetch(y_pred, "outputs") if from_host and not tracing() else y_pred

    def train_step(self, batch: Any) -> dict[str, Tensor]:
        """One update of the weights. Override it for a training of your own.

        Args:
            batch: `(x,)`, `(x, y)` or `(x, y, sample_weight)`, or whatever your data yield, with its tensors on the
                device.

        Returns:
            Scalars by name, each the mean over the batch. The logs are their running means over the epoch's rows, and
            the metrics.
        """
        x, y, sample_weight = unpack(batch)
        y_pred = self(x)
        loss = self.compute_loss(x, y, y_pred, sample_weight)
        self.apply_gradients(loss)
        self.update_metrics(x, y, y_pred, sample_weight)
        return {"loss": loss}

    def test_step(self, batch: Any) -> dict[str, Tensor]:
        """One step of an evaluation: as `train_step`, but nothing learns. No gradients are kept in it."""
        x, y, sample_weight = unpack(batch)
        y_pred = self(x)
        loss = self.compute_loss(x, y, y_pred, sample_weight)
        self.update_metrics(x, y, y_pred, sample_weight)
        return {"loss": loss}

    def predict_step(self, batch: Any) -> Any:
        """The outputs for a batch: a tensor or a nest of tensors whose first dimension is the batch's rows."""
        x, _, _ = unpack(batch)
        return self(x)

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Tensor | None = None) -> Tensor:
        """The loss of a batch, a scalar in float32.

        Args:
            x: The inputs; a loss of your own may use them.
            y: The targets, e.g. classes of shape `(batch,)`.
            y_pred: What the module returned.
            sample_weight: One weight a row, shape `(batch,)`, or None.

        Raises:
            NotCompiledError: `compile` was given no loss.
            LabelError: A label of this batch is none of the module's classes.
        """
        loss = losses.required(self._loss, "compute_loss")
        if y is None:
            raise DataError(
                "the loss needs targets, but the batches hold only x: yield (x, y) or override compute_loss"
            )
        loss.check_labels(self._label_range, y_pred)
        return loss(y_pred, y, sample_weight)

    def apply_gradients(self, loss: Tensor, optimizer: Optimizer | None = None) -> None:
        """Compute the gradients of the loss and let the optimizer take one step.

        Args:
            loss: A scalar.
            optimizer: The optimizer (default: the one of `compile`); one of your own holds parameters of this module.

        Raises:
            NotCompiledError: There is no optimizer.
        """
        optimizer = optimizer or self.optimizer
        if optimizer is None:
            raise NotCompiledError("apply_gradients needs an optimizer: call model.compile(optimizer='adamw', ...)")
        rates = self._attach(optimizer)
        optimizer.zero_grad()
        loss.backward()
        with rates.in_graph():
            optimizer.step()
        optimizer.zero_grad()  # gradients are not kept: they would be outputs of the graph, as large as the weights
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._place.pin(parameter)
        for tensor in optimizers.device_state(optimizer):
            self._place.pin(tensor)

    def update_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Tensor | None = None) -> None:
        """Add a batch to the metrics of `compile`.

        Args:
            x: The inputs; metrics of your own may use them.
            y: The targets.
            y_pred: What the module returned.
            sample_weight: One weight a row; plain metrics don't weigh, as in Keras.
        """
        self._pass.update_metrics(y_pred, y)

    def _move_to(self, place: Placement) -> None:
        """Move the module, the loss and the optimizer's state, each tensor in place, and compile nothing for it."""
        names: dict[int, str] = {}
        tensors: dict[int, Tensor] = {}
        for module in (self.module, self._loss.module if self._loss else None):
            for name, tensor in [*module.named_parameters(), *module.named_buffers()] if module else []:
                names.setdefault(id(tensor), name)
                tensors.setdefault(id(tensor), tensor)
        # An optimizer of one's own is an attribute of the model, as in the usual GAN.
        own = [value for value in vars(self).values() if isinstance(value, Optimizer)]
        for optimizer in own:
            optimizers.create_state(optimizer)
            tensors |= {id(t): t for t in optimizers.device_state(optimizer)}
        move(tensors.values(), place, names)
        if place != self._place:
            self._rates.clear()
        self._place = place
        launch(place, "init")  # state created when the weights were on the device already, by a second compile

    def _attach(self, optimizer: Optimizer) -> optimizers.DeviceRates:
        """The optimizer's rates on the device; one that is met for the first time gets its state and moves there."""
        known = self._rates.get(id(optimizer))
        if known is None:
            optimizers.create_state(optimizer)
            move(optimizers.device_state(optimizer), self._place)
            known = self._rates[id(optimizer)] = (optimizer, optimizers.DeviceRates(optimizer, self._place))
        return known[1]


class StepRunner:
    """Runs the steps of one pass: moves a batch to the device and starts its graph, never waiting.

    Args:
        model: Whose steps.
        role: `"train"`, `"eval"` or `"predict"`.
    """

    def __init__(self, model: Steps, role: str) -> None:
        self._model, self._role = model, role
        self._steps = 0
        model._pass = Pass(model.metrics if role != "predict" else [], model._place)
        if role == "train" and model.optimizer is not None:
            model._attach(model.optimizer)

    def __call__(self, batch: Any) -> Any:
        """Run one step.

        Args:
            batch: A nest of host tensors, with the rows of all cores.

        Returns:
            The pass's logs so far, lazily; for `"predict"` the outputs, on the device.
        """
        model, rows = self._model, count_rows(batch)
        model._label_range = self._labels(batch)
        leaves, spec = tree_flatten(batch)
        at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        for i, tensor in zip(at, to_device([leaves[i] for i in at], model._place, Layout.ROWS), strict=True):
            leaves[i] = tensor
        for _, rates in model._rates.values():
            rates.refresh()
        # Steps of evaluation count backwards from -1, so that their seeds are none of training's.
        number = model._step if self._role == "train" else -1 - self._steps
        body = {"train": self._train, "eval": self._test, "predict": self._predict}[self._role]
        outputs = run(
            body,
            tree_unflatten(leaves, spec),
            rows,
            placement=model._place,
            role=self._role,
            seed=step_seed(model._seed, number),
        )
        self._steps += 1
        if self._role == "train":
            model._step += 1
        model._pass.count(rows)
        return outputs if self._role == "predict" else model._pass.lazy()

    def results(self) -> dict[str, Any]:
        """The logs of the whole pass, as numbers. This is the pass's one wait for the device."""
        return self._model._pass.results("logs")

    def _train(self, batch: Any, rows: int) -> None:
        self._model._pass.add_means(self._model.train_step(batch), rows)

    def _test(self, batch: Any, rows: int) -> None:
        with torch.no_grad():
            self._model._pass.add_means(self._model.test_step(batch), rows)

    def _predict(self, batch: Any, rows: int) -> Any:
        with torch.no_grad():
            return self._model.predict_step(batch)

    def _labels(self, batch: Any) -> tuple[int, int] | None:
        """The range of the batch's class labels, where it is of the usual form; a step of one's own may take others."""
        usual = type(batch) in (tuple, list) and 2 <= len(batch) <= 3
        return self._model._loss.label_range(batch[1]) if self._model._loss and usual else None


def fetch(nest: Any, reason: str) -> Any:
    """A nest of tensors on the host; this waits for the device, once for all of them."""
    tensors = [leaf for leaf in tree_leaves(nest) if isinstance(leaf, Tensor)]
    host = iter(to_host(tensors, reason))
    return tree_map(lambda leaf: next(host) if isinstance(leaf, Tensor) else leaf, nest)
