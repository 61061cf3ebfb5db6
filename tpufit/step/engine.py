"""`Engine`: a compiled model's programs and state. `Model.compile` makes a new one, so nothing in it can be stale.

A program captures a step (traces and compiles it), then replays its graph without the step's Python.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from .. import optimizers
from ..backend import HOST, AttentionForms, Body, Cores, CoresArgument, Placement, Program, StepMemory, turns
from ..diagnostics.report import Pass, Report
from ..errors import ArgumentError, BusyError, StateLostError
from ..losses import ClassWeight
from ..metrics import PassMetrics
from ..runtime import (
    Recorder,
    count_available_cores,
    counts,
    make_placement,
    make_program,
    metrics_report,
    set_matmul_precision,
    start,
    translate,
)
from ..utils.counters import Counts
from ..utils.python_state import list_device_tensors, list_values
from ..utils.random import draw_seed, step_seed
from ..utils.strict import LENIENT, Strict
from ..utils.user_code import warn
from .attribute_modules import Holder, walk_kept
from .batch_errors import describe_lost_weights, may_come_from_device
from .compile_config import UNCOMPILED, CompileConfig
from .modules import Modes, keeping_modes, refuse_host_inputs, train
from .precision import Formats, warn_of_emulation
from .remat import find_blocks
from .role import ROLES, Role
from .saved_state import SavedState, reset_to
from .snapshot import put_back, take_snapshot
from .state import TrainState
from .step_context import StepContext
from .tally import Tally

# The largest number of passes kept for reports.
_PASSES_KEPT = 1000


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
        """Compute the logs of the last pass."""


# The attributes of `Model` itself. No step depends on them, and `fit` changes some of them: if they counted as state of
# the user's Python, they would only force new graphs. In checkpoints they aren't attributes of the user's either.
MODEL_ATTRIBUTES = {*UserModel.__annotations__, "_engine"}


@dataclass
class FitOptions:
    """The options of the current `fit` that its steps need; outside `fit` the defaults apply."""

    strict: Strict = LENIENT
    class_weight: ClassWeight | None = None
    fitting: bool = False  # True inside `fit`


@dataclass
class RunLog:
    """The record of the steps that have run, for reports."""

    passes: deque[Pass] = field(default_factory=lambda: deque(maxlen=_PASSES_KEPT))
    since: Counts = field(default_factory=counts)  # at the start of the last `fit`
    first_bad_step: int | None = None  # the first step of the last `fit` whose logs were not finite
    training: Tally | None = None  # of the last training pass
    predicted: float | None = None  # seconds per training step, according to the last preflight
    data: Mapping[str, str] = field(default_factory=dict)  # facts about the data of the last `fit`, for the report
    last_saved: str | None = None  # path of weights or a checkpoint
    wanted_saves: list[Any] = field(default_factory=list)  # requested by callbacks, as pairs of a writer and a score

    def begin_fit(self) -> None:
        """Start the record of a new `fit`."""
        self.passes.clear()
        self.since = counts()
        self.first_bad_step = None


@dataclass
class Observed:
    """Facts about the module that its first step reveals."""

    shapes: dict[str, str] = field(default_factory=dict)  # of the layers' outputs, by the layer's name
    loss: torch.dtype | None = None  # its dtype
    formats: Formats | None = None
    learns: bool = False  # a training step has called an optimizer's step, or has changed a weight itself


class Engine:
    """A compiled model's programs and state.

    Args:
        model: The user's model, whose `train_step`, `test_step` and `predict_step` are traced.
        config: The arguments of `compile` (default: the model isn't compiled).
        before: The engine before this `compile`; its weights stay in place, its step count continues (default: none).

    Attributes:
        model: The user's model.
        config: The arguments of `compile`.
        state: All that training changes.
        context: The step whose Python is running.
        options: The options of the current `fit`.
        attention: The requested form of attention, and each layer's actual form.
        roles: The roles by name, each with its program.
        hook: The handle of the module's hook `refuse_host_inputs`, while the module is on the device.
        latest: The role that started the last step, or whose logs were read last; None before the first step.
        log: The record of the steps that have run.
        observed: Facts about the module that its first step reveals.
        modes: The modes of the module's parts, as the user has set them.
    """

    def __init__(self, model: UserModel, config: CompileConfig = UNCOMPILED, before: Engine | None = None) -> None:
        self.model = model
        self.config = config
        self.state: TrainState = TrainState(model, config, None if before is None else before.state)
        self.context = StepContext()
        self.options = FitOptions()
        self.attention = AttentionForms(config.attention)
        self.roles = {name: Role(name, self._python_state, self._find_kept_tensors, self.attention) for name in ROLES}
        self.latest: Role | None = None
        self._compiled: tuple[nn.Module, nn.Module] | None = None  # the module, and its compiled form
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
        """The programs of all roles that have one."""
        return [role.program for role in self.roles.values() if role.program is not None]

    def drop_programs(self) -> None:
        """Drop the captured graphs, because the module's tensors or their placement changed."""
        if self.config.loss is not None:
            self.config.loss.forget_classes()  # the module may have a new last layer
        for role in self.roles.values():
            role.program = None

    @property
    def blocks(self) -> dict[nn.Module, str]:
        """The modules whose activations are rematerialized in the backward pass, each with its policy."""
        module = self.model.module
        return {module.get_submodule(name): policy for name, policy in find_blocks(self.config.remat, module).items()}

    @property
    def keeps_only_inputs(self) -> bool:
        """True if there are rematerialized blocks, and they keep only their inputs."""
        return set(self.blocks.values()) == {"nothing"}

    def start(self, cores: CoresArgument, asked_by: str) -> Cores:
        """Start the runtime on these cores, see `runtime.start`; `run_eagerly` needs no runtime."""
        return start(cores, asked_by, eager=self.config.run_eagerly)

    def place_on(self, cores: Cores, recorder: Recorder | None = None) -> Placement:
        """Return the placement of steps on these cores, or on a recorder; with `run_eagerly`, on the host."""
        if self.config.run_eagerly:
            if cores.hosts > 1:
                raise ArgumentError(
                    "run_eagerly=True computes on one host's processor, but this is one of several hosts: leave it out"
                )
            return HOST
        placement = make_placement(cores, recorder)
        if placement.eager:
            warn_of_emulation(self.config.precision, placement.device)
        else:
            set_matmul_precision(self.config.matmul_precision)
        return placement

    def move_to(self, placement: Placement) -> None:
        """Move the tensors of the module, the loss, the kept models and modules, and the optimizers, each in place."""
        # Kept models move first, because their engines may hold the values of their modules.
        for engine in reversed(self._engines()):
            engine.move_alone(placement)

    def move_alone(self, placement: Placement) -> None:
        """Like `move_to`, but leave kept models in place."""
        # Captured graphs take the old tensors, on the old placement.
        if self.state.move_to(placement):
            self.drop_programs()
        if placement.on_host and self.hook is not None:
            self.hook.remove()
            self.hook = None
        elif not placement.on_host and self.hook is None:
            self.hook = self.model.module.register_forward_pre_hook(refuse_host_inputs, with_kwargs=True)

    def _engines(self) -> list[Engine]:
        """Return this engine and the engines of all kept models."""
        engines = [self]
        for engine in engines:  # the loop also visits the engines that it appends
            inner = [vars(value).get("_engine") for _, value in walk_kept(engine.model) if isinstance(value, Holder)]
            engines += [other for other in dict.fromkeys(inner) if isinstance(other, Engine) and other not in engines]
        return engines

    # Modes

    def _learns(self) -> set[int]:
        """Return the `id` of each parameter that learns: it requires a gradient, and an optimizer has it."""
        used = self.state.named_optimizers().values()
        return {id(p) for optimizer in used for p in optimizers.list_parameters(optimizer) if p.requires_grad}

    @property
    def compiled_module(self) -> nn.Module | None:
        """The module wrapped by `torch.compile`, for a step on a GPU with `jit_compile=True`; else None.

        It is None in the first step, whose hook notes the layers' outputs and would become a part of the compiled code.
        """
        placement = self.state.placement
        if self.config.jit_compile is not True or placement.on_host or not placement.eager or not self.context.compiles:
            return None
        module = self.model.module
        if self._compiled is None or self._compiled[0] is not module:
            self._compiled = module, cast(nn.Module, torch.compile(module))
        return self._compiled[1]

    def note_modes(self) -> None:
        """Note the modes of the module's parts as the user has set them, before training."""
        self.modes.note(self.model.module, self._learns())

    def train_mode(self) -> None:
        """Put the module into training mode, except frozen parts in eval mode, see `modules.train`.

        Other modules of the model stay in the modes that the user has set.
        """
        self.modes.train(self.model.module, self._learns())

    def leave_mode(self) -> None:
        """Put the module into eval mode at the end of `fit`, ready for use."""
        self.modes.leave(self.model.module, self._learns())

    def eval_mode(self) -> None:
        """Put the module and the model's other modules into eval mode."""
        for module in self.state.modules:
            module.eval()

    @contextmanager
    def calling(self, training: bool) -> Iterator[None]:
        """A context in which the module is in training or in eval mode; frozen parts keep their modes in training."""
        module = self.model.module
        with keeping_modes(module):
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
        """Multiply the learning rates by the factor for a number of cores, once, and return the previous rates."""
        optimizer = optimizers.require_optimizer(self.model.optimizer)
        before = optimizers.list_rates(optimizer)
        optimizers.scale_rates(optimizer, self.config.rate_factor(cores))
        return before

    def seed_of_pass(self) -> int:
        """Return the seed of a new evaluation or prediction.

        Outside `fit` it is drawn from PyTorch's generator. Inside `fit` the data may draw from that generator in
        another thread at the same time; there the run's seed determines it, so that a resumed run repeats it.
        """
        numbers = self.state.numbers
        if not self.options.fitting:
            return draw_seed()
        numbers.passes += 1
        return step_seed(numbers.seed, -numbers.passes)  # counted down, because steps count up

    def run_once(self, inputs: list[Tensor], body: Body) -> Any:
        """Run Python outside of a pass as a separate step, without keeping its graph.

        Args:
            inputs: Tensors on the device, which the body gets.
            body: The Python; it must be one graph.
        """
        state = self.state
        program = make_program(
            state.placement,
            "predict",
            state.device,
            PassMetrics([], state.placement),
            jit_compile=False,
            matmul_precision=self.config.matmul_precision,
        )
        with torch.no_grad():
            return program((), inputs, [self.seed_of_pass()], body)

    def reset(self, weights: Mapping[int, Tensor]) -> None:
        """Return to the host with other weights, after a failed step lost the old ones; see `TrainState.reset`."""
        self.state.reset(weights)
        self.drop_programs()

    def reset_to(self, saved: SavedState) -> None:
        """Return to the host with the weights of a checkpoint; see `saved_state.reset_to`."""
        reset_to(self.state, saved)
        self.drop_programs()

    @contextmanager
    def trial(self, role: str = "train") -> Iterator[None]:
        """A context whose steps of one role are undone at its end; see `snapshot.put_back`."""
        before = take_snapshot(self.state)
        bad = self.log.first_bad_step
        latest = self.latest
        try:
            yield
        finally:
            put_back(self.state, before)
            # Drop the trial's graphs: they may take state that the trial's first step created and that is gone, and
            # training may have no batches of the trial's shapes. XLA still caches the compiled graphs.
            self.roles[role] = Role(role, self._python_state, self._find_kept_tensors, self.attention)
            self.log.first_bad_step = bad
            self.latest = latest

    def register_new_state(self) -> None:
        """Adopt the state that a traced step has created; graphs without it are dropped and captured again."""
        if self.state.register_new():
            for program in self.programs:
                program.forget()

    def note_user_code(self, every_batch: bool) -> None:
        """Note that the user's code has run, which may have changed what a step's Python reads.

        `every_batch`: this code runs at each batch.
        """
        for program in self.programs:
            program.note_user_code(every_batch)

    def require_weights(self, method: str) -> None:
        """Check that the module's tensors will keep their values after a method has returned them to the user.

        The error names the method.

        Raises:
            BusyError: Another thread is running steps, during which the tensors are empty.
        """
        busy = turns.describe_other_call() if self.options.fitting or self.state.device.held else ""
        if busy:
            raise BusyError(
                f"{method} gives the module's own tensors, which are empty during {busy}: use state_dict() or "
                "get_weights(), which wait until a step has ended and copy the values"
            )

    def expose(self) -> None:
        """Write the weights back before user code reads them, unless a device fault lost them."""
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
    def translating_device_errors(self) -> Iterator[None]:
        """A context that raises the device's errors as tpufit's: a `StateLostError` if weights are lost.

        Most errors of a step surface later, when the host next waits for the device.
        """
        try:
            yield
        except StateLostError:
            raise
        except Exception as error:
            device = self.state.device
            # Only reading shows which values are lost. Reading waits, so errors that can't be the device's skip it.
            if not device.lost and may_come_from_device(error):
                device.find_lost()
            fault = translate(error, self._measure_memory() if isinstance(error, RuntimeError) else None)
            if device.lost:
                message = describe_lost_weights(self.state.numbers.step, self.log.last_saved, fault or error)
                raise StateLostError(message) from error
            if fault is not None:
                raise fault from error
            raise

    def _measure_memory(self) -> StepMemory:
        """Return the sizes of the current or the last step, in bytes per core."""
        cores = self.state.placement.count
        role = self.latest
        group = None if role is None else role.group
        module = [*self.model.module.parameters(), *self.model.module.buffers()]
        bytes_per_core = self.state.bytes_per_core
        weights = bytes_per_core(module)
        return StepMemory(
            role="train" if role is None else role.name,
            rows=0 if group is None else group.forms[0].rows,
            cores=cores,
            weights=weights,
            learns=bytes_per_core(tensor for tensor in module if tensor.requires_grad),
            optimizer=bytes_per_core(self.state.device.tensors) - weights,
            batch=0 if group is None else group.nbytes // cores,
            precision=self.config.precision,
            split=bool(self.state.device.shardings),
            remat=self.keeps_only_inputs,
        )

    def _python_state(self, role: Role, deep: bool) -> dict[str, Any]:
        """Return the numbers, strings and flags in the user's Python, by name; replayed steps don't read them."""
        weights = self.options.class_weight if role.learns else None
        return list_values(self._list_user_objects(role), deep) | (
            {} if weights is None else {"class_weight": weights.summary}
        )

    def _find_kept_tensors(self, role: Role) -> dict[str, Tensor]:
        """Return the tensors on the device in the user's Python, by name, without parameters and buffers."""
        return list_device_tensors(self._list_user_objects(role))

    def _list_user_objects(self, role: Role) -> dict[str, Any]:
        """Return the user's objects that a role's steps may read, by name."""
        model = self.model
        kind = type(model)
        attributes = {
            f"{kind.__name__}.{name}": value
            for name, value in vars(model).items()
            if name not in MODEL_ATTRIBUTES and not isinstance(value, Optimizer)
        }
        user_code = self.config.loss and self.config.loss.user_code
        parts = {kind.__name__: kind, type(model.module).__name__: model.module, "loss": user_code}
        parts["transform"] = role.transform
        parts |= {metric.name: metric.user_code for metric in self.config.metrics if metric.user_code is not None}
        if role.learns:
            # Without optimizers whose numbers are inputs of the graph: their changes need no new graph.
            used = self.state.named_optimizers().items()
            parts |= {f"{kind.__name__}.{name}": value for name, value in used if not optimizers.has_inputs(value)}
        return parts | attributes

    def note_formats(self, products: set[torch.dtype]) -> None:
        """Note the floating-point formats of the first training step, and warn if they contradict `precision`."""
        weights = {p.dtype for p in self.model.module.parameters() if p.is_floating_point()}
        formats = Formats(frozenset(products), frozenset(weights), self.observed.loss)
        self.observed.formats = formats
        fault = formats.fault(self.config.precision)
        if fault:
            warn(fault)

    @property
    def memory_used(self) -> int | None:
        """The bytes of a core's memory that are in use; None if unknown."""
        return self.state.placement.memory_used

    def speed(self, steps_per_second: float) -> dict[str, float]:
        """Return the throughput of training steps at this pace; see `Model.speed`."""
        training = self.log.training
        return {} if training is None else training.speed(steps_per_second, self.state.placement.peak)

    def report(self, verbose: bool) -> Report:
        """Report on the steps since the last `fit` began; see `Model.report`."""
        train = self.roles["train"].program
        run = {role.name: program for role in self.roles.values() if (program := role.program) and program.traced_keys}
        cores = self.state.placement.count
        return Report(
            passes=tuple(self.log.passes),
            counts=counts() - self.log.since,
            traced={role: program.traced_because for role, program in run.items()},
            eager=frozenset(role for role, program in run.items() if program.runs_eagerly),
            donated=train.donated if train else 0,
            cores=cores,
            available=count_available_cores(cores),
            joined=self.config.steps_per_execution != 1,
            metrics_report=metrics_report() if verbose else "",
            peak=self.state.placement.peak,
            predicted=self.log.predicted,
            attention=self.attention.named(self.model.module),
            data=self.log.data,
        )
