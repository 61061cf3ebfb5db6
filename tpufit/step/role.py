"""`Role`: what steps of one kind keep from pass to pass: their program with its graphs, its sums, the graphs' keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from ..backend import AttentionForms, Program
from ..metrics import PassMetrics, TrackedMetric
from ..runtime import program_at
from ..utils.strict import LENIENT, Strict
from .batch import DeviceGroup
from .config import CompileConfig
from .graph_key import GraphKeys
from .state import TrainState

if TYPE_CHECKING:
    import torchmetrics

ROLES = "train", "eval", "predict"


class Role:
    """Steps of one kind. There is one object for each kind and model, and each pass over data borrows it."""

    def __init__(
        self,
        name: str,
        python_state: Callable[[Role, bool], dict[str, Any]],
        attention: AttentionForms | None = None,
    ) -> None:
        self.name = name
        self._attention = attention or AttentionForms()
        self._python_state = python_state  # names and values in the Python of a role's steps; given True, deeply
        self.keys = GraphKeys(name, partial(python_state, self, False))
        self.program: Program | None = None  # None before the first pass, and once something has made it void
        self.sums: PassMetrics | None = None  # of the pass that began last
        self.transform: Callable[[Any], Any] | None = None  # of each of its batches, on the device
        self.borrower: object = None  # its `StepRunner`
        self.group: DeviceGroup | None = None  # of the steps started last, or being started

    @property
    def learns(self) -> bool:
        """True if its steps change the weights."""
        return self.name == "train"

    @property
    def logs(self) -> bool:
        """True if its steps return logs, and not outputs."""
        return self.name != "predict"

    def lend(self, borrower: object, transform: Callable[[Any], Any] | None, strict: Strict, warm: bool) -> None:
        """Begin a pass over data. If it is `warm`, none of its steps should need a new graph."""
        self.borrower = borrower
        self.transform = transform
        policy = strict if self.logs else LENIENT
        now = policy if warm else LENIENT
        self.keys.begin_pass(transform, now)
        assert self.program is not None
        self.program.begin_pass(policy, now)

    def prepare(
        self, config: CompileConfig, state: TrainState, tracked: Mapping[str, torchmetrics.Metric]
    ) -> tuple[Program, PassMetrics]:
        """Return the program and its sums, made anew if what they depend on has changed.

        `tracked` are the torchmetrics objects that the model's own steps update, by name.
        """
        program = self.program
        sums = self.sums
        # Graphs take and return the sums as a flat list: other metrics make other graphs.
        if (
            program is None
            or sums is None
            or program.jit_compile != config.jit_compile
            or not sums.tracks(tracked.values())
        ):
            own = config.metrics if self.logs else []
            users = [TrackedMetric(*pair) for pair in tracked.items()]
            sums = self.sums = PassMetrics([*own, *users], state.placement, watches=self.learns)
            program = self.program = program_at(
                state.placement,
                self.name,
                state.device,
                sums,
                jit_compile=config.jit_compile,
                donate=self.learns,
                matmul_precision=config.matmul_precision,
                attention=self._attention,
                python_state=partial(self._python_state, self, True),
            )
        return program, sums

    def computed(self) -> dict[str, Any]:
        """Compute the logs of the last pass so far, as numbers. **This waits** for the device."""
        return {} if self.sums is None else self.sums.results("logs")
