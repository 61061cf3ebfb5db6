"""`Engine`: a compiled model's programs and state. `Model.compile` makes a new one, so nothing in it can be stale.

A program captures a step (traces and compiles it), then replays its graph without the step's Python.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from .. import optimizers
from ..backend import HOST, AttentionForms, Cores, Load, Placement, Program, turns
from ..diagnostics.report import Pass, Report
from ..errors import ArgumentError, BusyError, StateLostError
from ..losses import ClassWeight
from ..runtime import (
    Recorder,
    available,
    counts,
    metrics_report,
    placement_on,
    set_matmul_precision,
    translate,
)
from ..utils.counters import Counts
from ..utils.python_state import facts
from ..utils.random import draw_seed, step_seed
from ..utils.strict import LENIENT, Strict
from ..utils.users_code import warn
from .blocks import blocks
from .config import UNCOMPILED, CompileConfig
from .context import StepContext
from .failures import may_be_of_device, weights_lost
from .kept_modules import Holder, kept
from .modules import Modes, modes_kept, refuse_host_inputs, train
from .precision import Formats
from .role import ROLES, Role
from .state import SavedState, TrainState
from .tally import Tally

# The number of passes kept for reports.
_PASSES_TOLD = 1000


class UserModel(Protocol):
    """The part of the user's model that the engine and the loops use; `Model` documents the attributes."""

    module: nn.Module
    optimizer: Optimizer | None
    history: Any
    input_bound: float | None
    out_of_time: bool
    stop_training: bool
    stop_evaluating: bool
    stop_predicting: bool

    def train_step(self, batch: Any) -> dict[str, Tensor]:
        """Update the weights once."""

    def test_step(self, batch: Any) -> dict[str, Tensor]:
        """Evaluate one batch."""

    def predict_step(self, batch: Any) -> Any:
        """Compute the outputs for a batch."""

    def get_metrics_result(self) -> dict[str, Any]:
        """Compute the logs of the pass that was run last."""


# The attributes of `Model` itself. No step depends on them, and `fit` changes some: as state of the user's Python they
# would only force new graphs.
_OURS = {*UserModel.__annotations__, "_engine"}


@dataclass
class FitOptions:
    """The options of the current `fit` that its steps need; outside `fit` the defaults apply."""

    strict: Strict = LENIENT
    class_weight: ClassWeight | None = None
    fitting: bool = False  # True inside `fit`


@dataclass
class RunLog:
    """The record of the steps that have run, for reports."""

    passes: deque[Pass] = field(default_factory=lambda: deque(maxlen=_PASSES_TOLD))
    since: Counts = field(default_factory=counts)  # at the start of the last `fit`
    first_bad_step: int | None = None  # of the last `fit`, whose logs were not finite
    training: Tally | None = None  # of the last pass of training
    predicted: float | None = None  # seconds of a training step, by the last preflight
    data: Mapping[str, str] = field(default_factory=dict)  # what the data of the last `fit` say of themselves
    last_saved: str | None = None  # path of weights or a checkpoint
    wanted_saves: list[Any] = field(default_factory=list)  # requested by callbacks: pairs of a writer and a score

    def begin_fit(self) -> None:
        """Start the record of a new `fit`."""
        self.passes.clear()
        self.since = counts()
        self.first_bad_step = None


@dataclass
class Observed:
    """The facts about the module that its first step reveals."""

    shapes: dict[str, str] = field(default_factory=dict)  # of the layers' outputs, by the layer's name
    loss: torch.dtype | None = None  # its dtype
    formats: Formats | None = None
    learns: bool = False  # a training step has taken a step of an optimizer, or has changed a weight itself


class Engine:
    """A compiled model's programs and state.

    Args:
        model: The user's model, whose `train_step`, `test_step` and `predict_step` are traced.
        config: The arguments of `compile` (default: those of a model that is not compiled).
        before: The engine before this `compile`; its weights stay in place, its count of steps goes on (default: none).

    Attributes:
        model: The user's model.
        config: The arguments of `compile`.
        state: All that training changes.
        context: The step whose Python is running.
        options: The options of the `fit` under way.
        attention: How attention is to be computed, and how each layer's is.
        roles: The roles by name, each with its program.
        hook: The module's hook `refuse_host_inputs`, while it is on the device.
        latest: The role that started the last step, or whose logs were read last; None before the first.
        log: The record of the steps that have run.
        observed: The facts about the module that its first step reveals.
        modes: The modes of the module's parts, as the user has set them.
    """

    def __init__(self, model: UserModel, config: CompileConfig = UNCOMPILED, before: Engine | None = None) -> None:
        self.model = model
        self.config = config
        self.state: TrainState = TrainState(model, config, None if before is None else before.state)
        self.context = StepContext()
        self.options = FitOptions()
        self.attention = AttentionForms(config.attention)
        self.roles = {name: Role(name, self._python_state, self.attention) for name in ROLES}
        self.latest: Role | None = None
        self.hook: RemovableHandle | None = None if before is None else before.hook
        self.log: RunLog = RunLog() if before is None else before.log
        self.observed: Observed = Observed() if before is None else Observed(before.observed.shapes)
        self.modes: Modes = Modes() if before is None else before.modes

    @property
    def compiled(self) -> bool:
        """True after `compile`."""
        return self.config.arguments is not None

    @property
    def programs(self) -> list[Program]:
        """The programs that there are."""
        return [role.program for role in self.roles.values() if role.program is not None]

    def drop_programs(self) -> None:
        """Drop what was captured: the module's tensors, or their place, are others."""
        if self.config.loss is not None:
            self.config.loss.forget_classes()  # the module may have got another last layer
        for role in self.roles.values():
            role.program = None

    @property
    def blocks(self) -> dict[nn.Module, str]:
        """The modules that compute activations again in the backward pass, each with the policy on what it keeps."""
        module = self.model.module
        return {module.get_submodule(name): policy for name, policy in blocks(self.config.remat, module).items()}

    @property
    def keeps_inputs_alone(self) -> bool:
        """True if blocks compute all their activations again."""
        return set(self.blocks.values()) == {"nothing"}

    def place_on(self, cores: Cores, recorder: Recorder | None = None) -> Placement:
        """Return the placement of steps on these cores, or a recorder in their place; with `run_eagerly`, the host."""
        if self.config.run_eagerly:
            if cores.hosts > 1:
                raise ArgumentError("run_eagerly=True runs on one host's processor, and this is one of several hosts")
            return HOST
        set_matmul_precision(self.config.matmul_precision)
        return placement_on(cores, recorder)

    def move_to(self, placement: Placement) -> None:
        """Move the module, the loss, what the model keeps and the optimizers' state, each tensor in place."""
        # First the models that this one keeps: they may hold the values of their modules.
        for engine in reversed(self._engines()):
            engine.move_alone(placement)

    def move_alone(self, placement: Placement) -> None:
        """Do as `move_to`, but leave the engines of models that the model keeps as they are."""
        # Captured graphs take the old tensors, in their old place.
        if self.state.move_to(placement):
            self.drop_programs()
        if placement.on_host and self.hook is not None:
            self.hook.remove()
            self.hook = None
        elif not placement.on_host and self.hook is None:
            self.hook = self.model.module.register_forward_pre_hook(refuse_host_inputs, with_kwargs=True)

    def _engines(self) -> list[Engine]:
        """This engine, and those of models that the model keeps."""
        found = [self]
        for engine in found:  # which grows meanwhile
            inner = [vars(value).get("_engine") for _, value in kept(engine.model) if isinstance(value, Holder)]
            found += [one for one in dict.fromkeys(inner) if isinstance(one, Engine) and one not in found]
        return found

    # Modes

    def _learns(self) -> set[int]:
        """Return the `id` of each parameter that learns: an optimizer has it, and it requires a gradient."""
        each = self.state.named_optimizers().values()
        return {id(p) for optimizer in each for p in optimizers.parameters(optimizer) if p.requires_grad}

    def note_modes(self) -> None:
        """Note the modes of the module's parts as the user has set them, before training."""
        self.modes.note(self.model.module, self._learns())

    def train_mode(self) -> None:
        """Put the module into training mode, but for frozen parts in eval mode, see `modules.train`.

        What the model keeps beside it stays in the modes that the user has set.
        """
        self.modes.train(self.model.module, self._learns())

    def leave_mode(self) -> None:
        """Put the module into the mode that `fit` leaves it in, ready for use."""
        self.modes.leave(self.model.module, self._learns())

    def eval_mode(self) -> None:
        """Put the module and what the model keeps beside it into eval mode."""
        for module in self.state.modules:
            module.eval()

    @contextmanager
    def calling(self, training: bool) -> Iterator[None]:
        """A context in which the module computes as in training or not, with frozen parts as they are."""
        module = self.model.module
        with modes_kept(module):
            if training:
                train(module, self._learns())
            else:
                module.eval()
            yield

    def begin_fit(self, history: Any, options: FitOptions, seed: int) -> None:
        """Set the history, the options and the seed of a new `fit`."""
        self.model.history = history
        self.options = options
        self.state.numbers.seed = seed
        self.log.begin_fit()
        for program in self.programs:
            program.try_again()

    def scale_rates(self, cores: int) -> list[float]:
        """Multiply the learning rates by the factor of a number of cores, once, and return the rates from before."""
        optimizer = optimizers.required(self.model.optimizer)
        before = optimizers.rates(optimizer)
        optimizers.scale_rates(optimizer, self.config.rate_factor(cores))
        return before

    def seed_of_pass(self) -> int:
        """Return the seed of a new evaluation or prediction.

        Outside `fit` it is drawn from PyTorch's generator. Inside the data may draw from that at the same time, in
        their thread; there it is a function of the run, which a resumed one repeats.
        """
        numbers = self.state.numbers
        if not self.options.fitting:
            return draw_seed()
        numbers.passes += 1
        return step_seed(numbers.seed, -numbers.passes)  # counted down, because steps count up

    def reset(self, weights: Mapping[int, Tensor]) -> None:
        """Return to the host with other weights, after a failed step lost the old ones; see `TrainState.reset`."""
        self.state.reset(weights)
        self.drop_programs()

    def reset_to(self, saved: SavedState) -> None:
        """Return to the host with the weights of a checkpoint; see `TrainState.reset_to`."""
        self.state.reset_to(saved)
        self.drop_programs()

    @contextmanager
    def trial(self) -> Iterator[None]:
        """A context of training steps that are undone in the end; see `TrainState.put_back`."""
        before = self.state.snapshot()
        bad = self.log.first_bad_step
        try:
            yield
        finally:
            self.state.put_back(before)
            # The trial's graphs may take state that its first step created and that is gone now. XLA keeps them
            # compiled. The shapes of its batches are none that training goes through either.
            self.roles["train"] = Role("train", self._python_state, self.attention)
            self.log.first_bad_step = bad

    def register_new_state(self) -> None:
        """Adopt the state that a traced step has created; graphs without it are forgotten, and captured again."""
        if self.state.register_new():
            for program in self.programs:
                program.forget()

    def note_users_code(self, seldom: bool) -> None:
        """Note that the user's code has run, which may have changed something that the Python of steps reads.

        It does so at each batch, or `seldom`.
        """
        for program in self.programs:
            program.note_users_code(seldom)

    def require_weights(self, method: str) -> None:
        """Check that the module keeps its weights when a method, which the error names, returns.

        Raises:
            BusyError: Another thread is running steps, which take them out.
        """
        busy = turns.elsewhere() if self.options.fitting or self.state.device.held else ""
        if busy:
            raise BusyError(
                f"{method} gives the module's own tensors, out of which {busy} takes the values: use state_dict() or "
                "get_weights(), which wait for a place between two steps and copy them"
            )

    def expose(self) -> None:
        """Write the weights back before user code reads them; after a device fault there are none."""
        if not self.state.device.lost:
            self.state.write_back()

    @contextmanager
    def tracing(self, context: StepContext) -> Iterator[None]:
        """Make a step the current one while its Python runs."""
        before = self.context
        self.context = context
        try:
            yield
        finally:
            self.context = before

    @contextmanager
    def noticing_loss(self) -> Iterator[None]:
        """Turn a device error that lost the weights into a `StateLostError`.

        Most errors of a step surface later, where the host next waits for the device.
        """
        try:
            yield
        except StateLostError:
            raise
        except Exception as error:
            device = self.state.device
            # Only a read shows which values are lost. It waits, so errors that can't be the device's skip it.
            if not device.lost and may_be_of_device(error):
                device.find_lost()
            fault = translate(error, self._load()) if isinstance(error, RuntimeError) else None
            if device.lost:
                lost = weights_lost(self.state.numbers.step, self.log.last_saved, fault or error)
                raise StateLostError(lost) from error
            if fault is not None:
                raise fault from error
            raise

    def _load(self) -> Load:
        """Return the sizes of the current step, or of the last one, in bytes per core."""
        cores = self.state.placement.count
        role = self.latest
        group = None if role is None else role.group
        module = [*self.model.module.parameters(), *self.model.module.buffers()]
        of_a_core = self.state.of_a_core
        weights = of_a_core(module)
        return Load(
            role="train" if role is None else role.name,
            rows=0 if group is None else group.forms[0].rows,
            cores=cores,
            weights=weights,
            learns=of_a_core(tensor for tensor in module if tensor.requires_grad),
            optimizer=of_a_core(self.state.device.tensors) - weights,
            batch=0 if group is None else group.nbytes // cores,
            precision=self.config.precision,
            split=bool(self.state.device.shardings),
            remat=self.keeps_inputs_alone,
        )

    def _python_state(self, role: Role, deep: bool) -> dict[str, Any]:
        """Return the numbers, strings and flags in the user's Python, by name: a replayed step doesn't read them."""
        model = self.model
        kind = type(model)
        own = {
            f"{kind.__name__}.{name}": value
            for name, value in vars(model).items()
            if name not in _OURS and not isinstance(value, Optimizer)
        }
        users = self.config.loss and self.config.loss.users
        parts = {kind.__name__: kind, type(model.module).__name__: model.module, "loss": users}
        parts["transform"] = role.transform
        parts |= {metric.name: metric.users for metric in self.config.metrics if metric.users is not None}
        if role.learns:
            # The numbers of schedule-free optimizers are inputs of a graph.
            stepped = self.state.named_optimizers().items()
            parts |= {f"{kind.__name__}.{name}": one for name, one in stepped if not optimizers.runs_numbers(one)}
        weights = self.options.class_weight if role.learns else None
        return facts(parts | own, deep) | ({} if weights is None else {"class_weight": weights.summary})

    def note_formats(self, products: set[torch.dtype]) -> None:
        """Note the formats that the first training step computed in, and warn if they contradict `precision`."""
        weights = {p.dtype for p in self.model.module.parameters() if p.is_floating_point()}
        formats = Formats(frozenset(products), frozenset(weights), self.observed.loss)
        self.observed.formats = formats
        fault = formats.fault(self.config.precision)
        if fault:
            warn(fault)

    @property
    def memory_used(self) -> int | None:
        """The bytes of a core's memory that are in use; None where nobody tells."""
        return self.state.placement.memory_used

    def speed(self, steps_per_second: float) -> dict[str, float]:
        """What training steps at this pace come to; see `Model.speed`."""
        training = self.log.training
        return {} if training is None else training.speed(steps_per_second, self.state.placement.peak)

    def report(self, verbose: bool) -> Report:
        """Report on the steps since the last `fit` began; see `Model.report`."""
        train = self.roles["train"].program
        cores = self.state.placement.count
        return Report(
            passes=tuple(self.log.passes),
            counts=counts() - self.log.since,
            traced={
                role.name: own.traced_because
                for role in self.roles.values()
                if (own := role.program) and own.traced_keys
            },
            donated=train.donated if train else 0,
            cores=cores,
            available=available(cores),
            joined=self.config.steps_per_execution != 1,
            metrics_report=metrics_report() if verbose else "",
            peak=self.state.placement.peak,
            predicted=self.log.predicted,
            attention=self.attention.named(self.model.module),
            data=self.log.data,
        )
