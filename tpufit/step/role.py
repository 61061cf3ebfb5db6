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
    """Steps of one kind. There is one object for each kind and model, and each pass over data borrows it.

    Args:
        name: `"train"`, `"eval"` or `"predict"`.
        python_state: Returns the names and values in the Python that the steps of a role run; given True, deeply.
        attention: How attention is to be computed (default: plain).

    Attributes:
        name: The name.
        keys: The keys of its graphs.
        program: The program; None before the first pass, and once something has made it void.
        sums: The sums that its steps add to, of the pass that began last.
        transform: That pass's transform of each batch on the device, or None.
        borrower: That pass's `StepRunner`; None before the first.
        group: The batches of the steps started last, or being started; None before the first.
    """

    def __init__(
        self,
        name: str,
        python_state: Callable[[Role, bool], dict[str, Any]],
        attention: AttentionForms | None = None,
    ) -> None:
        self.name = name
        self._attention = attention or AttentionForms()
        self._python_state = python_state
        self.keys = GraphKeys(name, partial(python_state, self, False))
        self.program: Program | None = None
        self.sums: PassMetrics | None = None
        self.transform: Callable[[Any], Any] | None = None
        self.borrower: object = None
        self.group: DeviceGroup | None = None

    @property
    def learns(self) -> bool:
        """True if its steps change the weights."""
        return self.name == "train"

    @property
    def logs(self) -> bool:
        """True if its steps return logs, and not outputs."""
        return self.name != "predict"

    def lend(self, borrower: object, transform: Callable[[Any], Any] | None, strict: Strict, warm: bool) -> None:
        """Begin a pass over data.

        Args:
            borrower: The pass.
            transform: The data's transform of each batch on the device, or None.
            strict: The policy on whatever makes steps slow.
            warm: True if no step of the pass should need a new graph.
        """
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

        Args:
            config: The arguments of `compile`.
            state: The state that its steps read and change, at its place.
            tracked: The torchmetrics objects that the model's own steps update, by name.
        """
        program, sums = self.program, self.sums
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
