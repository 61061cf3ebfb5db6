"""`Program`: a step, and how it runs. The defaults are for a program whose Python runs at each call."""
# ruff: noqa: B027 - such a program needs to do nothing in most of these methods

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from ..utils.strict import Strict

Body = Callable[[list[Tensor], Callable[[int], None]], Any]
"""`body(inputs, seed)`: the Python of one or more steps. `seed(i)` starts the random numbers of the i-th step. The body
changes the state's tensors in place, replaces the sums, and returns a nest of tensors."""

Pause = Callable[[], AbstractContextManager[object]]
"""A function that returns a context in which nothing else sends anything to the device."""


class Sums(Protocol):
    """Running sums. A step takes the sums and returns new tensors for them; the old tensors stay valid."""

    tensors: list[Tensor]
    """The current sums."""

    before: list[Tensor]
    """The sums before the currently traced step, including sums that this step has created."""

    def begin(self) -> None:
        """Begin the trace of a step."""

    def roll_back(self) -> None:
        """Restore the sums from before a trace that won't run."""


class Program(ABC):
    """A step of one role.

    Each call has a key, which consists of everything that a graph depends on except the values of tensors.

    Args:
        jit_compile: `"auto"`: replay if possible. True: raise an error if not. False: trace every call.

    Attributes:
        jit_compile: The argument.
        traced_because: The reason why the step is traced on every call; empty if it isn't.
        products: The dtypes in which the last trace computed matrix products.
        cause: The reason for the next graph, for the report.
        traced_keys: The keys of all calls that have been traced.
        donated: The size of the state that a replay writes over, in bytes.
        operations: The number of operations in the graph that ran last; 0 if they weren't counted.
    """

    def __init__(self, jit_compile: str | bool = "auto") -> None:
        self.jit_compile = jit_compile
        self.traced_because = ""
        self.products: set[torch.dtype] = set()
        self.cause = ""
        self.traced_keys: set[Any] = set()
        self.donated = 0
        self.operations = 0

    @abstractmethod
    def __call__(
        self, key: Hashable, inputs: list[Tensor], seeds: list[int], body: Body, pause: Pause = nullcontext
    ) -> Any:
        """Run the body's Python once, and start the work that it records, without waiting for the device.

        Args:
            key: Everything that the graph depends on except the values of tensors: shapes, modes, options.
            inputs: Batches, rates and numbers. The body may add inputs to the list; the next call must pass these, too.
            seeds: One for each step.
            body: The Python of the steps.
            pause: Returns a context in which nothing else is sent to the device.

        Returns:
            The body's result. Its tensors have values once the device has computed them.
        """

    @property
    def captures(self) -> bool:
        """True if calls are captured for replays. Keys must then be correct, and a call may join several steps."""
        return False

    @property
    def runs_eagerly(self) -> bool:
        """True if the device computes operation by operation, because the step can't be traced as a whole."""
        return False

    def begin_pass(self, strict: Strict, new_graphs: Strict) -> None:
        """Begin a pass over data.

        Args:
            strict: The policy on everything that slows down steps.
            new_graphs: The policy on a new graph for a step that is already replayed.
        """

    def forget(self) -> None:
        """Forget all graphs, because the tensors of the state have changed."""

    def try_again(self) -> None:
        """Try again to capture a step that couldn't be replayed: another `fit` may have other data, or be strict."""

    def note_user_code(self, every_batch: bool) -> None:
        """Note that user code, which may run at `every_batch`, has run and may have changed what the body reads."""

    def prepare_replay(self, key: Hashable) -> bool:
        """Hold the state for a replay with this key, and return True, if `replay` suffices without the body's Python.

        If it doesn't, the next call must trace the body.
        """
        return False

    def replay(self, key: Hashable, inputs: list[Tensor], seeds: list[int]) -> Any:
        """Run once without the body's Python, and without waiting for the device. `prepare_replay` must be True."""
        raise NotImplementedError

    def audit_due(self, key: Hashable, remaining: int | None) -> bool:
        """True if the next replay should be audited first.

        Args:
            key: See `__call__`. `prepare_replay` must be True for it.
            remaining: The number of groups of steps in the pass after this one, or None if unknown.
        """
        return False

    def audit(
        self,
        key: Hashable,
        inputs: list[Tensor],
        seeds: list[int],
        body: Body,
        pause: Pause = nullcontext,
        sample: Body | None = None,
    ) -> None:
        """Trace a replayed step again, and compare the graphs. If they differ, the graph isn't replayed any more.

        Nothing runs, and the state doesn't change. The arguments are as in `__call__` and `trace_sample`.
        """

    def lacks_sample(self, key: Hashable) -> bool:
        """True if the graph of a step has no sample for audits. `prepare_replay` must be True for its key."""
        return False

    def trace_sample(
        self, key: Hashable, inputs: list[Tensor], seeds: list[int], sample: Body, pause: Pause = nullcontext
    ) -> None:
        """Trace only one of several joined steps, which audits compare: tracing all would take several times as long.

        Args:
            key: See `__call__`.
            inputs: Batches and rates, of all steps.
            seeds: One for each step.
            sample: The Python of this single step.
            pause: See `__call__`.
        """

    def pop_change(self) -> tuple[str, int] | None:
        """Return the change that the last audit has found: its description or "", and the number of doubtful steps.

        None if there is no change, or if this method has already returned it.
        """
        return None
