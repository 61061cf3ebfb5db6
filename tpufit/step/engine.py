"""`Engine`: a compiled model's programs and state. `Model.compile` makes a new one, so nothing of it gets stale."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..diagnostics.report import Pass, Report
from ..errors import StateLostError
from ..losses import ClassWeight
from ..metrics import PassMetrics
from ..runtime import (
    HOST,
    LENIENT,
    Cores,
    Counts,
    Load,
    Placement,
    Program,
    Strict,
    available,
    counts,
    facts,
    metrics_report,
    set_matmul_precision,
    translate,
)
from .batch import DeviceBatch
from .config import UNCOMPILED, CompileConfig
from .context import StepContext
from .failures import may_be_of_device, weights_lost
from .graph_key import GraphKeys
from .precision import Formats
from .state import SavedState, Snapshot, TrainState

# So many passes are kept for reports.
_PASSES_TOLD = 1000

# The attributes of a `Model` that are not the user's own: `fit` itself changes some, and no step depends on them.
_OURS = frozenset(
    [
        "module",
        "optimizer",
        "metrics",
        "history",
        "input_bound",
        "out_of_time",
        "stop_training",
        "stop_evaluating",
        "stop_predicting",
        "_engine",
    ]
)


class UserModel(Protocol):
    """The user's model, as far as its engine and the loops know it; see `Model` for the attributes."""

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


class Runner(Protocol):
    """A `StepRunner`, as far as errors tell of it."""

    role: str
    group: Sequence[DeviceBatch]


@dataclass
class FitOptions:
    """The options of the `fit` under way that its steps need; outside of `fit` the defaults hold.

    Attributes:
        strict: The policy on whatever makes steps slow.
        class_weight: The weights of rows by their class.
    """

    strict: Strict = LENIENT
    class_weight: ClassWeight | None = None


@dataclass
class RunLog:
    """The record of the steps that have run, for reports.

    Attributes:
        passes: The last passes over data.
        since: The counters when the last `fit` began.
        first_bad_step: The first step of the last `fit` whose logs were not finite, as far as known.
        last_saved: The path of the weights or checkpoint that was saved last.
        wanted_saves: The checkpoints that callbacks have asked for: the writer of each, and its score.
    """

    passes: deque[Pass] = field(default_factory=lambda: deque(maxlen=_PASSES_TOLD))
    since: Counts = field(default_factory=counts)
    first_bad_step: int | None = None
    last_saved: str | None = None
    wanted_saves: list[Any] = field(default_factory=list)

    def begin_fit(self) -> None:
        """Begin the record of a `fit`."""
        self.passes.clear()
        self.since, self.first_bad_step = counts(), None


@dataclass
class Observed:
    """The facts that the first step shows of the module.

    Attributes:
        shapes: The shapes of the layers' outputs, by the layers' names.
        loss: The format of the loss.
        formats: The formats that the first training step computed in.
    """

    shapes: dict[str, str] = field(default_factory=dict)
    loss: torch.dtype | None = None
    formats: Formats | None = None


class Engine:
    """A compiled model's programs and state.

    Args:
        model: The user's model, whose `train_step`, `test_step` and `predict_step` are traced.
        config: The arguments of `compile` (default: those of a model that is not compiled).
        before: The engine before this `compile`: the weights stay where they are, and the count of steps goes on.

    Attributes:
        model: The user's model.
        config: The arguments of `compile`.
        state: All that training changes.
        context: The step whose Python is running.
        options: The options of the `fit` under way.
        programs: The program of each role, with the sums that its steps add to.
        runners: The newest runner of each role.
        batch_runners: The runner of each `*_on_batch` method, by role.
        latest: The runner of the step that was started last.
        keys: The numbers of the parts of graphs' keys.
        log: The record of the steps that have run.
        observed: The facts that the first step shows of the module.
    """

    def __init__(self, model: UserModel, config: CompileConfig = UNCOMPILED, before: Engine | None = None) -> None:
        self.model, self.config = model, config
        self.state: TrainState = TrainState(model, config, None if before is None else before.state)
        self.context = StepContext()
        self.options = FitOptions()
        self.programs: dict[str, tuple[Program, PassMetrics]] = {}
        self.runners: dict[str, Runner] = {}
        self.latest: Runner | None = None
        self.batch_runners: dict[str, Any] = {}
        self.keys = GraphKeys()
        self.log: RunLog = RunLog() if before is None else before.log
        self.observed: Observed = Observed() if before is None else Observed(before.observed.shapes)

    @property
    def compiled(self) -> bool:
        """True after `compile`."""
        return self.config is not UNCOMPILED

    def place_on(self, cores: Cores) -> Placement:
        """The placement of steps on these cores: the host, for `run_eagerly`."""
        if self.config.run_eagerly:
            return HOST
        set_matmul_precision(self.config.matmul_precision)
        return Placement(cores)

    def move_to(self, placement: Placement) -> None:
        """Move the module, the loss and the optimizers' state, each tensor in place."""
        if self.state.move_to(placement):
            self.programs.clear()

    def begin_fit(self, history: Any, options: FitOptions, seed: int) -> None:
        """Take in the history, the options and the seed of a `fit` that begins."""
        self.model.history = history
        self.options, self.state.numbers.seed = options, seed
        self.log.begin_fit()

    def reset(self, weights: Mapping[int, Tensor]) -> None:
        """Return to the host with other weights, after a step that has cost the weights, see `TrainState.reset`."""
        self.state.reset(weights)
        self.programs.clear()

    def reset_to(self, saved: SavedState) -> None:
        """Return to the host with the weights of a checkpoint, see `TrainState.reset_to`."""
        self.state.reset_to(saved)
        self.programs.clear()

    def put_back(self, before: Snapshot) -> None:
        """Undo a trial, see `TrainState.put_back`."""
        self.state.put_back(before)
        # Its graphs may know of state that a first step made, which is gone again. Captured again, they are found
        # compiled.
        self.programs.pop("train", None)

    def take_in_new_state(self) -> None:
        """After a step was traced, take in the state that it made; graphs that don't know of it are captured again."""
        if self.state.take_in_new():
            for program, _ in self.programs.values():
                program.forget()

    def expose(self) -> None:
        """Let user code see the weights; after a fault of the device there are none to be seen."""
        if not self.state.device.lost:
            self.state.write_back()

    @contextmanager
    def tracing(self, context: StepContext) -> Iterator[None]:
        """A context in which a step's Python runs."""
        before, self.context = self.context, context
        try:
            yield
        finally:
            self.context = before

    @contextmanager
    def noticing_loss(self) -> Iterator[None]:
        """A context in which an error of the device that has cost the weights becomes a `StateLostError`.

        Most errors of a step come out later than it: where the host next waits for the device.
        """
        try:
            yield
        except StateLostError:
            raise
        except Exception as error:
            device = self.state.device
            if not device.lost and may_be_of_device(error):
                device.examine()
            fault = translate(error, self._load()) if isinstance(error, RuntimeError) else None
            if device.lost:
                lost = weights_lost(self.state.numbers.step, self.log.last_saved, fault or error)
                raise StateLostError(lost) from error
            if fault is not None:
                raise fault from error
            raise

    def _load(self) -> Load:
        """The step under way, or the last one, in bytes on each core."""
        cores = self.state.placement.count
        runner = self.latest
        group = () if runner is None else runner.group
        module = [*self.model.module.parameters(), *self.model.module.buffers()]
        weights = sum(tensor.nbytes for tensor in module)
        return Load(
            role="train" if runner is None else runner.role,
            rows=max((batch.rows for batch in group), default=0),
            cores=cores,
            weights=weights,
            learns=sum(tensor.nbytes for tensor in module if tensor.requires_grad),
            optimizer=sum(tensor.nbytes for tensor in self.state.device.tensors) - weights,
            batch=sum(batch.nbytes for batch in group) // cores,
            precision=self.config.precision,
        )

    def python_state(self, transform: Callable[[Any], Any] | None) -> dict[str, Any]:
        """The numbers, words and flags that the user's Python keeps, by name: a replayed step must not change them.

        Args:
            transform: The transform of the data under way.
        """
        model = self.model
        kind = type(model)
        own = {f"{kind.__name__}.{name}": value for name, value in vars(model).items() if name not in _OURS}
        users = self.config.loss and self.config.loss.users
        parts = {kind.__name__: kind, type(model.module).__name__: model.module, "loss": users, "transform": transform}
        return facts(parts | own)

    def note_formats(self, products: set[torch.dtype]) -> None:
        """Note the formats that the first training step computed in, and warn if another precision was asked for."""
        weights = {p.dtype for p in self.model.module.parameters() if p.is_floating_point()}
        formats = Formats(frozenset(products), frozenset(weights), self.observed.loss)
        self.observed.formats = formats
        fault = formats.fault(self.config.precision)
        if fault:
            warnings.warn(fault, stacklevel=2)

    def report(self, verbose: bool) -> Report:
        """Report on the steps since the last `fit` began, see `Model.report`."""
        train, cores = self.programs.get("train"), self.state.placement.count
        return Report(
            passes=tuple(self.log.passes),
            counts=counts() - self.log.since,
            traced={role: program.traced_because for role, (program, _) in self.programs.items() if program.met},
            donated=train[0].donated if train else 0,
            cores=cores,
            available=available(cores),
            joined=self.config.steps_per_execution != 1,
            metrics_report=metrics_report() if verbose else "",
        )
