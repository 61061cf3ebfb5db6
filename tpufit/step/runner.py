"""What one step of training, testing and predicting does: the public pieces that a subclass of `Model` may override.

Steps are traced, as a `tf.function` is: Python in them runs while the graph is made, not once a batch, and a value on
the device can't be looked at inside.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, partial
from itertools import chain
from traceback import walk_tb
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from .. import losses, optimizers
from ..data import unpack
from ..data.batches import as_tensors, count_rows, fields, is_plain, listed
from ..diagnostics.summary import noting_outputs
from ..errors import ArgumentError, BatchError, DataError, NotCompiledError, StateLostError, StrictError, few
from ..losses import ClassWeight
from ..metrics import LazyLogs, Metric, PassMetrics, first_bad
from ..optimizers import EMA, Accumulator, EMAConfig, GradientConfig, UpdatePlan
from ..runtime import (
    HOST,
    DeviceState,
    InFlight,
    Layout,
    Load,
    Placement,
    Program,
    copy_into,
    launch,
    move,
    python_state,
    sharded_norms,
    swap_value,
    to_device,
    to_host,
    tracing,
    translate,
)
from ..utils.random import step_seed
from . import precision
from .graph_key import Guard, Guards, options
from .recompiles import ShapeWatch


class Steps:
    """The pieces of a step, and where it runs. `Model` adds the loops around them.

    Args:
        module: Any `torch.nn.Module`.

    Attributes:
        rows_seen: How many rows it has been given since it was made, in steps of any kind.
        first_bad_step: The first step since `fit` began, counted from 1 over all training of the model, that returned
            a loss or another scalar which is not finite; None if none is known. It is found out where something waits
            for the device anyway: at most 64 graphs later, and at the end of each epoch.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.optimizer: Optimizer | None = None
        self.metrics: list[Metric] = []
        self._loss: losses.Loss | losses.LossByOutput | None = None
        self._class_weight: ClassWeight | None = None  # that of the current or last fit
        self._precision = "fp32"
        self._formats: precision.Formats | None = None  # seen in the first step of training
        self._loss_format: torch.dtype | None = None
        self._layer_outputs: dict[str, str] = {}  # shapes by name, seen in the first step of any kind
        self._place = HOST
        self._jit_compile: str | bool = "auto"
        self._steps_per_execution: int | str = 1
        self._chosen_steps: dict[str, int] = {}  # for "auto", by role
        self._rates: dict[int, tuple[Optimizer, optimizers.DeviceRates]] = {}
        self._counters = optimizers.Counters()
        self._gradients = GradientConfig()
        self._accumulators: dict[int, Accumulator] = {}  # by the optimizer's `id`, as the averages
        self._ema: EMAConfig | None = None
        self._averages: dict[int, EMA] = {}
        self._update = UpdatePlan()  # what the step being traced does with its gradients,
        self._rows = 0  # and of how many rows these are
        self._batches_waiting = self._updates = 0  # batches since the last update, and updates
        self._state = DeviceState([])
        self._programs: dict[str, tuple[Program, PassMetrics]] = {}  # by role
        self._running = PassMetrics([], HOST)
        self._runners: dict[str, StepRunner] = {}  # the last one of each role
        self._signatures: list[Any] = []  # the structures of batches met so far; a batch's number is its place here
        self._guards = Guards()
        self._transforms: list[Any] = []  # and the transforms of data sets; some can't be hashed
        self._shapes: dict[str, ShapeWatch] = {}
        self._label_range: Any = None
        self._step = 0  # training steps taken since the model was made; the seed of each is a function of it
        self._seed = 0
        self.rows_seen = 0
        self.first_bad_step: int | None = None
        self._last_saved: str | None = None
        self._recipe: dict[str, Any] | None = None  # the arguments of `compile`, as far as a checkpoint can hold them
        self._wanted_saves: list[Any] = []  # what callbacks want written, and where, once the step is over
        self._strict_at = ""  # the line that called fit(strict=True), while it runs
        self._own = {*vars(self), "_own"}

    def __call__(self, x: Any) -> Any:
        """The module's output for a batch, on the side where the batch is: host in, host out.

        Args:
            x: A tensor or array, a tuple or list of them (passed as positional arguments) or a dict (by keyword).

        Returns:
            What the module returns. For host data after `fit` this waits for the device, and no gradient flows.

        Raises:
            BatchError: The module takes other arguments, or a layer of it fails, as it does for rows of another shape
                than it was made for.
        """
        if not tracing():
            self.write_back()
        leaves, spec = tree_flatten(as_tensors(x))
        at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        from_host = any(leaves[i].device.type == "cpu" for i in at) and not self._place.on_host
        if from_host:
            for i, tensor in zip(at, to_device([leaves[i] for i in at], self._place, Layout.ROWS), strict=True):
                leaves[i] = tensor
        x = tree_unflatten(leaves, spec)
        x = precision.inputs(self._precision, x)
        args: Sequence[Any] = (x,)
        named: Mapping[str, Any] = {}
        if isinstance(x, dict):
            args, named = (), x
        elif isinstance(x, (tuple, list)):
            args = x
        try:
            with precision.autocast(self._precision, self._place.device):
                y_pred = self.module(*args, **named)
        except TypeError as error:
            misfit = _misfit(self.module, args, named)
            if not misfit:
                raise
            raise BatchError(misfit) from error
        except RuntimeError as error:
            if type(error) is not RuntimeError:  # what has a class of its own is no matter of shapes
                raise
            raise BatchError(_failure(self.module, x, error)) from error
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

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Tensor:
        """The loss of a batch, a scalar in float32. Of several losses it is the weighted sum; the logs tell each.

        Args:
            x: The inputs; a loss of your own may use them.
            y: The targets, e.g. classes of shape `(batch,)`.
            y_pred: What the module returned.
            sample_weight: One weight a row, shape `(batch,)`, or one for each element of a sequence, shape
                `(batch, time)`; for several outputs one tensor for all, or one for each; or None.

        Raises:
            NotCompiledError: `compile` was given no loss.
            ArgumentError, DataError: There are losses for other outputs than the module returns, or the data target.
            LabelError: A label of this batch is none of the module's classes.
        """
        loss = losses.required(self._loss, "compute_loss")
        if y is None:
            raise DataError(
                "the loss needs targets, but the batches hold only x: yield (x, y) or override compute_loss"
            )
        loss.check_labels(self._label_range, y_pred)
        if isinstance(loss, losses.Loss):
            return loss(y_pred, y, sample_weight)
        parts = loss.parts(y_pred, y, sample_weight)
        self._running.note(loss.logs(parts))
        return loss.total(parts)

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
        parameters = optimizers.parameters(optimizer)
        optimizer.zero_grad()
        loss.backward()
        stepping = nullcontext() if self._place.on_host else self._attach(optimizer).stepping()
        accumulator, averages = self._accumulators.get(id(optimizer)), self._averages.get(id(optimizer))
        if accumulator is not None:
            accumulator.add(self._rows)
            if self._update.takes_step:
                accumulator.release()
        if self._update.takes_step:
            self._gradients.clip(parameters)
            with stepping:
                optimizer.step()
            if averages is not None and self._ema is not None:
                averages.update(self._ema.momentum, self._update.overwrites)
        if not self._place.on_host:
            optimizer.zero_grad()  # gradients are not kept: they would be outputs of the graph, as large as the weights
        kept = [part.tensors for part in (accumulator, averages) if part is not None]
        for tensor in chain(parameters, optimizers.device_state(optimizer), *kept):
            self._place.pin(tensor)

    def update_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Add a batch to the metrics of `compile`.

        Args:
            x: The inputs; metrics of your own may use them.
            y: The targets.
            y_pred: What the module returned.
            sample_weight: As in `compute_loss`. Only those in `weighted_metrics` weigh, as in Keras.
        """
        self._running.update_metrics(y_pred, y, sample_weight)

    def write_back(self) -> None:
        """Put the current weights into the module. While steps are replayed they are kept elsewhere, for speed.

        `fit` does it before it calls user code, so it is needed only to look at the weights at another moment.

        Raises:
            StateLostError: A step failed on the device, and the weights are lost with it.
        """
        self._state.write_back()
        self._counters.catch_up()

    def _expose(self) -> None:
        """Let user code see the weights; after a fault of the device there are none to be seen."""
        if not self._state.lost:
            self.write_back()

    @contextmanager
    def _noticing_loss(self) -> Iterator[None]:
        """A context in which an error of the device that has cost the weights becomes a `StateLostError`.

        Most errors of a step come out later than it: where something waits for the device.
        """
        try:
            yield
        except StateLostError:
            raise
        except Exception as error:
            if not self._state.lost and _may_be_of_device(error):
                self._state.examine()
            fault = translate(error, self._load()) if isinstance(error, RuntimeError) else None
            if self._state.lost:
                raise StateLostError(self._lost(fault or error)) from error
            if fault is not None:
                raise fault from error
            raise

    def _load(self) -> Load:
        """What the step under way has on each core of the device."""
        cores = self._place.count
        runner = next((runner for runner in self._runners.values() if runner._running is self._running), None)
        group = () if runner is None else runner._group
        module = [*self.module.parameters(), *self.module.buffers()]
        weights = sum(tensor.nbytes for tensor in module)
        return Load(
            role="train" if runner is None else runner._role,
            rows=max((fed.rows for fed in group), default=0),
            cores=cores,
            weights=weights,
            learns=sum(tensor.nbytes for tensor in module if tensor.requires_grad),
            optimizer=sum(tensor.nbytes for tensor in self._state.tensors) - weights,
            batch=sum(fed.nbytes for fed in group) // cores,
            precision=self._precision,
        )

    def _lost(self, error: Exception) -> str:
        saved = f"the last ones saved are in {self._last_saved}" if self._last_saved else "none have been saved"
        return (
            f"step {self._step} failed on the device, or one shortly before it, and the weights are lost with it; "
            f"{saved}. Load them with load_weights, upon which the optimizer begins anew, and try a smaller batch. The "
            f"device says: {error}"
        )

    def begin_anew(self, weights: Mapping[int, Tensor]) -> None:
        """After a step that has cost the weights: be on the host as before the first step, with these weights.

        The module and the loss keep their tensors, with new values in place; the optimizers lose their state, the
        gradients and averages that were kept are gone. The next `fit` makes these, and moves all to the device.

        Args:
            weights: Host tensors by the `id` of the module's or the loss's tensor that they are for, of its shape and
                dtype. Tensors that aren't lost may be left out, and then keep their values.

        Raises:
            StateLostError: One that is lost was left out. Nothing has changed.
        """
        owned = {id(t): (name, t) for module in self._modules() for name, t in _tensors(module)}
        lost = {id(self._state.tensors[place]) for place in self._state.lost}
        missing = [name for key, (name, _) in owned.items() if key in lost - weights.keys()]
        if missing:
            raise StateLostError(
                f"{few(missing)} can't be brought back: lost with a step that "
                "failed on the device, and not among the weights given. Begin with a new module"
            )
        self._state.revive()
        kept = [tensor for key, (_, tensor) in owned.items() if key not in weights]
        values = dict(zip(map(id, kept), fetch(kept, "state"), strict=True)) | dict(weights)
        for key, (_, tensor) in owned.items():
            tensor.grad = None
            swap_value(tensor, values[key].detach().clone())
        for optimizer in self._optimizers():
            optimizer.state.clear()
        self._accumulators.clear()
        self._averages.clear()
        self._rates.clear()
        self._programs.clear()
        self._counters, self._batches_waiting = optimizers.Counters(), 0
        self._place, self._state = HOST, DeviceState([])

    def swap_ema_weights(self, to: bool | None = None) -> None:
        """Let the weights and their moving averages (`compile(use_ema=True)`) change places. Nothing is copied.

        Args:
            to: Whether the module shall have the averages afterwards (default: what it hasn't now).

        Raises:
            ArgumentError: No averages are kept.
        """
        if self._ema is None and to is not False:
            raise ArgumentError("there are no moving averages of the weights: model.compile(..., use_ema=True)")
        for averages in self._averages.values():
            if averages.swapped != to:
                self.write_back()
                averages.swap()

    def finish_averages(self) -> None:
        """Make the moving averages the weights, as `fit` does at its end, if there are any."""
        if self._averages:
            self.write_back()
            for averages in self._averages.values():
                averages.overwrite()
            launch(self._place, "ema")

    @property
    def steps_taken(self) -> int:
        """How many steps of training it has taken since it was made."""
        return self._step

    def _move_to(self, place: Placement) -> None:
        """Move the module, the loss and the optimizers' state, each tensor in place, and compile nothing for it."""
        self.write_back()
        for optimizer in self._optimizers():
            self._create_state(optimizer)
        tensors, names = self._state_tensors()
        move(tensors.values(), place, names)
        launch(place, "init")  # state created when the weights were on the device already, by a second compile
        if place != self._place:
            self._rates.clear()
        if place != self._place or [id(t) for t in self._state.tensors] != list(tensors):
            self._place, self._state = place, DeviceState(tensors.values())
            self._programs.clear()

    def _state_tensors(self) -> tuple[dict[int, Tensor], dict[int, str]]:
        """What training changes, and what it is called, both by `id`."""
        names: dict[int, str] = {}
        tensors: dict[int, Tensor] = {}
        for module in self._modules():
            for name, tensor in _tensors(module):
                names.setdefault(id(tensor), name)
                tensors.setdefault(id(tensor), tensor)
        for optimizer in self._optimizers():
            tensors |= {id(t): t for t in optimizers.device_state(optimizer)}
        tensors |= {id(t): t for part in (*self._accumulators.values(), *self._averages.values()) for t in part.tensors}
        return tensors, names

    def _modules(self) -> list[nn.Module]:
        """The module, and those of the loss."""
        return [self.module, *(self._loss.modules if self._loss else ())]

    def _note_formats(self, products: set[torch.dtype]) -> None:
        """Note in which formats the first step has computed, and warn if they aren't those that were asked for."""
        weights = {parameter.dtype for parameter in self.module.parameters() if parameter.is_floating_point()}
        self._formats = precision.Formats(frozenset(products), frozenset(weights), self._loss_format)
        fault = self._formats.fault(self._precision)
        if fault:
            warnings.warn(fault, stacklevel=2)

    def _take_in_new_state(self) -> None:
        """After a step that was traced: let the state hold what the step has made, as some optimizers' first step does.

        Graphs that were captured before know nothing of it, and are made anew.
        """
        tensors, _ = self._state_tensors()
        if len(tensors) != len(self._state.tensors):
            self.write_back()
            self._state.replace(tensors.values())
            for program, _ in self._programs.values():
                program.forget()

    def _optimizers(self) -> list[Optimizer]:
        """The optimizer of `compile`, and those of one's own: attributes of the model, as in the usual GAN."""
        return [value for value in vars(self).values() if isinstance(value, Optimizer)]

    def _attach(self, optimizer: Optimizer) -> optimizers.DeviceRates:
        """The optimizer's rates on the device; one that is met for the first time gets its state and moves there."""
        known = self._rates.get(id(optimizer))
        if known is None:
            self._create_state(optimizer)
            move(optimizers.device_state(optimizer), self._place)
            known = self._rates[id(optimizer)] = (optimizer, optimizers.DeviceRates(optimizer, self._place))
        return known[1]

    def _create_state(self, optimizer: Optimizer) -> None:
        """Make what training changes beside the weights, so that the first step has it."""
        optimizers.create_state(optimizer)
        if self._gradients.accumulate_steps > 1 and id(optimizer) not in self._accumulators:
            self._accumulators[id(optimizer)] = Accumulator(optimizer)
        if self._ema is not None and id(optimizer) not in self._averages:
            self._averages[id(optimizer)] = EMA(optimizer)

    def _next_updates(self, steps: int, last: bool) -> list[UpdatePlan]:
        """What the next steps do with their gradients; empty where all do the same.

        Args:
            steps: How many they are.
            last: Whether the last of them is the last of its epoch, after which no gradient is left over.
        """
        every, overwrite = self._gradients.accumulate_steps, self._ema.overwrite_frequency if self._ema else None
        if every == 1 and overwrite is None:
            return []
        updates = []
        for i in range(steps):
            self._batches_waiting += 1
            takes_step = self._batches_waiting == every or (last and i == steps - 1)
            if takes_step:
                self._batches_waiting = 0
                self._updates += 1
            overwrites = takes_step and overwrite is not None and self._updates % overwrite == 0
            updates.append(UpdatePlan(takes_step, overwrites))
        return updates

    def _drop_gradients(self) -> None:
        """Forget gradients that an epoch which was broken off has left over."""
        if self._batches_waiting:
            self._batches_waiting = 0
            self.write_back()
            for accumulator in self._accumulators.values():
                tensors = accumulator.tensors
                copy_into(tensors, [torch.zeros(t.shape, dtype=t.dtype) for t in tensors], self._place)

    def _transform_number(self, transform: Any) -> int:
        """A number for a data set's transform, which goes into its graphs. It is kept, so that no other has its id."""
        for number, known in enumerate(self._transforms):
            if known is transform:
                return number
        self._transforms.append(transform)
        return len(self._transforms) - 1

    def _python_state(self, transform: Any) -> dict[str, Any]:
        """What the user's Python keeps, by name: a step must leave it as it is, or it can't be replayed."""
        kind = type(self)
        own = {f"{kind.__name__}.{name}": value for name, value in vars(self).items() if name not in self._own}
        loss = self._loss and self._loss.users
        users = {kind.__name__: kind, type(self.module).__name__: self.module, "loss": loss, "transform": transform}
        return python_state.facts(users | own)


class DeviceBatch(NamedTuple):
    """A batch on the device, with what the host knows of it.

    Attributes:
        tensors: Its tensors.
        leaves: All its leaves, with a mark for each tensor.
        spec: How the leaves make the batch.
        rows: How many rows it has.
        nbytes: How much memory it takes.
        labels: The smallest and largest class label, where there are classes; by output if there are several.
        signature: A number for its structure, shapes and dtypes.
    """

    tensors: list[Tensor]
    leaves: list[Any]
    spec: TreeSpec
    rows: int
    nbytes: int
    labels: Any
    signature: int

    def batch(self, tensors: Iterator[Tensor]) -> Any:
        """The batch, with these tensors for its own."""
        return tree_unflatten([next(tensors) if leaf is _TENSOR else leaf for leaf in self.leaves], self.spec)


_TENSOR = object()

# For steps_per_execution="auto": to start a graph costs the host about 0.4 ms, which is little beside this. A graph of
# more steps takes longer to compile.
_WORTH_STARTING = 0.005
_MOST_JOINED = 16


def _flatten(batch: Any) -> tuple[list[Any], TreeSpec]:
    """A batch's leaves, and how they make it."""
    return (list(batch), _plain_spec(type(batch) is list, len(batch))) if is_plain(batch) else tree_flatten(batch)


@cache
def _plain_spec(as_list: bool, length: int) -> TreeSpec:
    """How so many tensors make a tuple or list; always the same object, which compares faster."""
    return tree_flatten([0] * length if as_list else (0,) * length)[1]


class StepRunner:
    """Runs the steps of one pass: sends batches to the device and starts their graphs, never waiting for them.

    Args:
        model: Whose steps.
        role: `"train"`, `"eval"` or `"predict"`.
        transform: What to do to each batch on the device, before the step.

    Attributes:
        steps: How many steps have been run,
        rows: and how many rows they have had.
        batches: How many batches of the pass have been run on, with those before a resumption.
        inside: Whether a step has begun and not been started: after an error its work may be half done.
        before_step: Called before each step of training, and may set rates.
        warm: Whether the data have been passed over before, so that none of its steps should need a graph.
    """

    def __init__(self, model: Steps, role: str, transform: Callable[[Any], Any] | None = None) -> None:
        self._model, self._role, self._transform = model, role, transform
        self.steps = self.rows = self.batches = 0
        self.inside = False
        self.before_step: Callable[[], None] | None = None
        self.warm = False
        self._transform_number = model._transform_number(transform)
        self._class_weight = model._class_weight if role == "train" else None
        self._shapes = model._shapes.setdefault(role, ShapeWatch(role))
        self._signatures = model._signatures
        self._in_flight = InFlight()
        if role == "train":
            model._drop_gradients()
            for optimizer in model._optimizers() if not model._place.on_host else ():
                model._attach(optimizer)
        if role not in model._programs:
            model._programs[role] = self._build()
        self._program, self._running = model._programs[role]
        self._program.body, self._program.python_state = self._body, self._python_state
        self._program.strict = bool(model._strict_at) and role != "predict"
        if self._program.strict:
            self._program.retry()
        self._running.reset()
        self._running.on_finite = partial(self._note_finite, model._step)
        self._group: Sequence[DeviceBatch] = ()
        self._updates: list[UpdatePlan] = []
        self._guard: Guard | None = None
        self._guard_number = 0
        self._hooked = False
        model._runners[role] = self

    @property
    def is_current(self) -> bool:
        """Whether no other pass of its role has begun since: they share their sums."""
        return self._model._runners.get(self._role) is self

    def prepare(self, batch: Any) -> DeviceBatch:
        """Send a batch to the device. Called ahead of its step, in the feed's thread.

        Args:
            batch: A nest of host tensors, with the rows of all cores.

        Raises:
            BatchError: It has no rows.
        """
        leaves, spec = _flatten(batch)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        structure = (spec, [(t.shape, t.dtype) for t in tensors])
        try:
            signature = self._signatures.index(structure)
        except ValueError:
            signature = len(self._signatures)
            self._signatures.append(structure)
        self._shapes.note(signature, batch, self._model._strict_at if self.warm else "")
        rows = count_rows(tensors)
        if not rows:
            raise BatchError(
                f"a batch must have rows, but the data gave {listed(fields(batch))}: the mean over it is no number. "
                "Leave empty batches out"
            )
        return DeviceBatch(
            to_device(tensors, self._model._place, Layout.ROWS),
            [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves],
            spec,
            rows,
            sum(t.nbytes for t in tensors),
            self._labels(batch),
            signature,
        )

    def __call__(
        self,
        group: Sequence[DeviceBatch],
        pause: Callable[[], AbstractContextManager[object]] = nullcontext,
        last: bool = False,
    ) -> Any:
        """Run a step for each batch of the group, as one graph.

        Args:
            group: Prepared batches; several must be of one structure.
            pause: A context in which nothing else is sent to the device.
            last: Whether no batch of the pass comes after these.

        Returns:
            For `"predict"` the outputs of each batch, on the device; else None.

        Raises:
            LabelError: A label of a batch is none of the module's classes.
        """
        model = self._model
        inputs: list[Tensor] = []
        vectors = self._send_rates(len(group))
        for i, fed in enumerate(group):
            if fed.labels is not None and model._loss is not None:
                model._loss.check_labels(fed.labels)
            inputs += fed.tensors
            inputs += [vector[i] for vector in vectors]
        # Steps of evaluation count backwards from -1, so that their seeds are none of training's.
        first, direction = (model._step, 1) if self._role == "train" else (-1 - self.steps, -1)
        seeds = [step_seed(model._seed, first + direction * i) for i in range(len(group))]
        if not self._program.traced_because and not model._place.on_host:
            self._check_guard()
        self.inside = True
        self._group = group
        self._updates = model._next_updates(len(group), last) if self._role == "train" else []
        model._running = self._running
        key = (self._guard_number, self._transform_number, *(fed.signature for fed in group), *self._updates)
        if self._program.knows(key):
            outputs = self._program(key, inputs, seeds, pause)
            if self._program.replays(key):
                model._counters.replayed((self._role, key))
        else:
            self._program.cause = self._cause(key, len(group))
            with model._counters.traced((self._role, key), model._optimizers()):
                outputs = self._program(key, inputs, seeds, pause)
            model._take_in_new_state()
        if self._role == "train" and model._formats is None:
            model._note_formats(self._program.products)
        self.inside = False
        rows = sum(fed.rows for fed in group)
        self.steps += len(group)
        self.batches += len(group)
        self.rows += rows
        model.rows_seen += rows
        if self._role == "train":
            model._step += len(group)
        if self._role == "predict":
            return outputs
        self._running.count(rows, outputs)
        finite = self._running.finite
        if self._running.tensors and not model._place.on_host:
            small = self._running.tensors[0] if finite is None else finite
            reached = self._in_flight.add(small, sum(fed.nbytes for fed in group))
            finite = None if finite is None else reached
        if finite is not None:
            self._running.on_finite(finite)
        return None

    def look(self) -> int | None:
        """The model's `first_bad_step`, up to the last step. **This waits** for it."""
        finite = self._running.finite
        if finite is not None:
            self._running.on_finite(to_host([finite], "finite")[0])
        return self._model.first_bad_step

    def _note_finite(self, before: int, finite: Tensor) -> None:
        """Note what is known of the steps of this pass.

        Args:
            before: How many steps there were before it.
            finite: See `PassMetrics.finite`; on the host.
        """
        bad = first_bad(finite)
        if bad is not None and self._model.first_bad_step is None:
            self._model.first_bad_step = before + bad

    @property
    def group_size(self) -> int:
        """How many steps the next group should have: those of `compile`, or for `"auto"` what pays at the pace so far.

        It is chosen once, because each size needs a graph of its own.
        """
        model = self._model
        if model._place.on_host:
            return 1
        if isinstance(model._steps_per_execution, int):
            return model._steps_per_execution
        if self._in_flight.pace is not None and not self._program.traced_because:
            model._chosen_steps.setdefault(self._role, steps_worth_joining(self._in_flight.pace))
        return model._chosen_steps.get(self._role, 1)

    def _send_rates(self, steps: int) -> list[list[Tensor]]:
        """The rates of the next steps on the device, for each optimizer."""
        ours = list(self._model._rates.values())
        if self.before_step is None:
            return [sent.send([optimizers.rates(optimizer)] * steps) for optimizer, sent in ours]
        rates: list[list[list[float]]] = [[] for _ in ours]
        for _ in range(steps):
            self.before_step()
            for row, (optimizer, _) in zip(rates, ours, strict=True):
                row.append(optimizers.rates(optimizer))
        self._hooked = True
        return [sent.send(row) for row, (_, sent) in zip(rates, ours, strict=True)]

    def hooked(self) -> None:
        """Note that callbacks have run, which may have changed the optimizer's options."""
        self._hooked = True

    def logs(self) -> LazyLogs:
        """The logs of the pass so far; they wait for the device only if one is read."""
        return self._running.lazy()

    def results(self) -> dict[str, Any]:
        """The logs of the whole pass, as numbers. This is the pass's one wait for the device."""
        return self._running.results("logs")

    def sums(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The sums of the pass so far, for a checkpoint: numbers, and tensors by name."""
        return self._running.state_dict()

    def load_sums(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor], batches: int) -> None:
        """Go on with the sums of a checkpoint, before the first step.

        Args:
            state: What `sums` gave,
            tensors: and its tensors, on the host.
            batches: How many steps they are of.
        """
        self._running.load_state_dict(state, tensors)
        self._running.on_finite = partial(self._note_finite, self._model._step - batches)

    def take_sums(self) -> tuple[dict[str, Tensor], int]:
        """The sums of what the steps returned since the last call, on the device, and of how many rows they are."""
        return self._running.take()

    def _check_guard(self) -> None:
        """Take a new snapshot of what graphs depend on wherever user code may have changed it since the last.

        Callbacks that look at weights have them put back, so that the state isn't held; the others have no business
        with the module, but may change the optimizer.
        """
        model = self._model
        used = [optimizer for optimizer, _ in model._rates.values()]
        hooked, self._hooked = self._hooked, False
        if self._guard is not None and model._state.held and (not hooked or self._guard.options == options(used)):
            return
        self._guard = Guard.of(model.module, used, self._python_state())
        self._guard_number = model._guards.number(self._role, self._guard, model.module)
        if self.warm and self._program.strict and self._guard_number not in {key[0] for key in self._program.met}:
            raise StrictError(
                f"strict=True, in the fit {model._strict_at}: after its first pass over the data the {self._role} step "
                f"needs another graph, because {model._guards.causes.get(self._guard_number, 'its options changed')}. "
                "Only the learning rate is an input of a graph: change the rest before fit, or leave strict away"
            )

    def _cause(self, key: Any, steps: int) -> str:
        """Why a call needs a graph of its own, for the report."""
        model, met = self._model, self._program.met
        if not met:
            return "it is the first step"
        if key in met:
            return "the step before it made new state"
        guard, transform, signature = key[:3]
        if guard not in {other[0] for other in met}:
            return model._guards.causes.get(guard, "its options changed")
        if transform not in {other[1] for other in met}:
            return "the data have another device_transform"
        if signature not in {other[2] for other in met}:
            return self._shapes.changes[signature]
        if len(key) not in {len(other) for other in met}:
            return f"{steps} step{'s run' if steps > 1 else ' runs'} as one graph"
        return "it does something else with its gradients"

    def _build(self) -> tuple[Program, PassMetrics]:
        model = self._model
        learns = self._role == "train"
        running = PassMetrics(model.metrics if learns or self._role == "eval" else [], model._place, learns)
        program = Program(
            self._body,
            placement=model._place,
            role=self._role,
            state=model._state,
            sums=running,
            jit_compile=model._jit_compile,
            donate=self._role == "train",
            inside=sharded_norms,  # on one core too: there native batch norm in eval mode has no backward pass
        )
        return program, running

    def _body(self, key: Any, inputs: list[Tensor], seed: Callable[[int], None]) -> Any:
        """The Python of the group's steps, to be traced."""
        model, tensors = self._model, iter(inputs)
        outputs = []
        with ExitStack() as stack:
            if not model._layer_outputs:
                stack.enter_context(noting_outputs(model.module, model._layer_outputs))
            every = [rates for _, rates in model._rates.values()]
            for rates in every:
                stack.enter_context(rates.in_step())
            for i, fed in enumerate(self._group):
                seed(i)
                batch = fed.batch(tensors)
                if self._transform is not None:
                    batch = self._transform(batch)
                if self._class_weight is not None:
                    batch = self._class_weight.weigh(batch, model._place)
                for rates in every:
                    rates.use(next(tensors))
                model._label_range, model._rows = fed.labels, fed.rows
                model._update = self._updates[i] if self._updates else UpdatePlan()
                if self._role == "train":
                    logs = model.train_step(batch)
                    model._loss_format = getattr(logs.get("loss"), "dtype", None)
                    self._running.add_means(logs, fed.rows)
                    continue
                with torch.no_grad():
                    if self._role == "eval":
                        self._running.add_means(model.test_step(batch), fed.rows)
                    else:
                        outputs.append(model.predict_step(batch))
        return outputs if self._role == "predict" else self._running.kept

    def _python_state(self) -> dict[str, Any]:
        weights = {"class_weight": self._class_weight.summary} if self._class_weight else {}
        return self._model._python_state(self._transform) | weights

    def _labels(self, batch: Any) -> Any:
        """The range of the batch's class labels, where it is of the usual form; a step of one's own may take others."""
        usual = type(batch) in (tuple, list) and 2 <= len(batch) <= 3 and self._role != "predict"
        return self._model._loss.label_range(batch[1]) if self._model._loss and usual else None


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The parameters and buffers of a module, with their names."""
    return [*module.named_parameters(), *module.named_buffers()]


def _may_be_of_device(error: BaseException | None) -> bool:
    """Whether an error, or one that led to it, may be the device's; torch_xla has no class of its own for these."""
    while error is not None and type(error) is not RuntimeError:
        error = error.__cause__ or error.__context__
    return error is not None


def _misfit(module: nn.Module, args: Sequence[Any], named: Mapping[str, Any]) -> str:
    """What is wrong if the module's forward pass takes other arguments than a batch gives; empty if it doesn't."""
    signature = inspect.signature(module.forward)
    try:
        signature.bind(*args, **named)
    except TypeError:
        kind = type(module).__name__
        given = ", ".join(["..."] * len(args) + [f"{name}=..." for name in named])
        form = "a dict" if named else f"a tuple of {len(args)}" if len(args) != 1 else "one tensor"
        return (
            f"x is {form}, so that the module is called as {kind}({given}), but its forward takes {signature}. "
            "A dict's entries are given by name, a tuple's one after the other, and a tensor alone"
        )
    return ""


def _failure(module: nn.Module, x: Any, error: RuntimeError) -> str:
    """Which layer has failed: the innermost one on the way to the error."""
    names = {id(layer): name for name, layer in module.named_modules()}
    running = [frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__)]
    layer = next((layer for layer in reversed(running) if id(layer) in names), module)
    kind = type(layer).__name__ if any(layer.children()) else repr(layer)
    which = f"the module's layer {names[id(layer)]!r}, {kind}," if layer is not module else f"the module, {kind},"
    return (
        f"{which} fails on a batch of {listed({'x': x})}. Compare the shapes of the rows with those that it was made "
        f"for. PyTorch says: {error}"
    )


def steps_worth_joining(seconds: float) -> int:
    """How many steps should run as one graph.

    Args:
        seconds: How long one takes alone.

    Example:
        >>> [steps_worth_joining(seconds) for seconds in (0.0001, 0.0005, 0.002, 0.01)]
        [16, 10, 2, 1]
    """
    return max(1, min(_MOST_JOINED, round(_WORTH_STARTING / seconds)))


def fetch(nest: Any, reason: str) -> Any:
    """A nest of tensors on the host; this waits for the device, once for all of them."""
    tensors = [leaf for leaf in tree_leaves(nest) if isinstance(leaf, Tensor)]
    host = iter(to_host(tensors, reason))
    return tree_map(lambda leaf: next(host) if isinstance(leaf, Tensor) else leaf, nest)


def copies(tensors: Sequence[Tensor], reason: str) -> list[Tensor]:
    """Host tensors of their own with these values; this waits for the device, once for all of them."""
    # A tensor of the host is fetched as it is: the very memory that training goes on to change.
    return [
        value.clone() if tensor.device.type == "cpu" else value
        for tensor, value in zip(tensors, to_host(tensors, reason), strict=True)
    ]
