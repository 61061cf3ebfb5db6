"""`Role`: what steps of one kind keep from pass to pass: the program, its sums and its graphs' keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from ..backend import AttentionForms, Program
from ..metrics import DatasetMetric, PassMetrics, TrackedMetric
from ..runtime import make_program
from ..utils.strict import LENIENT, Strict
from .batch import DeviceGroup
from .compile_config import CompileConfig
from .graph_key import GraphKeys
from .state import TrainState

if TYPE_CHECKING:
    import torchmetrics
    from torch import Tensor

_METHODS = {"train": "train_step", "eval": "test_step", "predict": "predict_step"}
ROLES = tuple(_METHODS)


class Role:
    """Steps of one kind. A model has one object for each kind, and each pass over data borrows it."""

    def __init__(
        self,
        name: str,
        python_state: Callable[[Role, bool], dict[str, Any]],
        kept: Callable[[Role], dict[str, Tensor]],
        attention: AttentionForms | None = None,
    ) -> None:
        self.name = name
        self.method = _METHODS[name]  # the method of `Model` that is the Python of its steps
        self.learns = name == "train"  # whether its steps change the weights
        self.makes_logs = name != "predict"  # whether its steps return logs instead of outputs
        self._attention = attention or AttentionForms()
        self._python_state = python_state  # names and values in the Python of a role's steps; True searches deeply
        self._kept = kept  # tensors on the device in that Python, by name
        self.keys = GraphKeys(name, partial(python_state, self, False))
        self.program: Program | None = None  # None before the first pass, and after `Engine.drop_programs`
        self.sums: PassMetrics | None = None  # of the last pass
        self.transform: Callable[[Any], Any] | None = None  # applied to each batch on the device
        self.runner: object = None  # the `StepRunner` of the current pass
        self.group: DeviceGroup | None = None  # of the steps that were started last or are being started

    def begin_pass(self, runner: object, transform: Callable[[Any], Any] | None, strict: Strict, warm: bool) -> None:
        """Begin a pass over data. In a `warm` pass no step should need a new graph."""
        self.runner = runner
        self.transform = transform
        policy = strict if self.makes_logs else LENIENT
        now = policy if warm else LENIENT
        self.keys.begin_pass(transform, now)
        assert self.program is not None
        self.program.begin_pass(policy, now)

    def prepare(
        self, config: CompileConfig, state: TrainState, tracked: Mapping[str, torchmetrics.Metric]
    ) -> tuple[Program, PassMetrics]:
        """Return the program and its sums; make new ones if what they depend on has changed.

        `tracked` are the torchmetrics objects that the user's steps update, by name.
        """
        program = self.program
        sums = self.sums
        # Graphs take and return the sums as a flat list, so other metrics need other graphs.
        if (
            program is None
            or sums is None
            or program.jit_compile != config.jit_compile
            or not sums.tracks(tracked.values())
        ):
            compiled = [metric for metric in config.metrics if not (self.learns and isinstance(metric, DatasetMetric))]
            compiled = compiled if self.makes_logs else []
            users = [TrackedMetric(*pair) for pair in tracked.items()]
            sums = self.sums = PassMetrics([*compiled, *users], state.placement, watches=self.learns)
            program = self.program = make_program(
                state.placement,
                self.name,
                state.device,
                sums,
                jit_compile=config.jit_compile,
                donate=self.learns,
                matmul_precision=config.matmul_precision,
                attention=self._attention,
                python_state=partial(self._python_state, self, True),
                kept=partial(self._kept, self),
            )
        return program, sums

    def compute_logs(self) -> dict[str, Any]:
        """Compute the logs of the last pass so far. **This waits** for the device."""
        return {} if self.sums is None else self.sums.results("logs")
