"""`Program`: a step, and how it is run. The defaults are those of one whose Python runs at each call."""
# ruff: noqa: B027 - such a one has nothing to do for most of them

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from ..utils.strict import Strict

Body = Callable[[list[Tensor], Callable[[int], None]], Any]
"""`body(inputs, seed)`: the Python of one step or several. `seed(i)` begins the random numbers of the i-th. The body
changes the state's tensors in place, replaces the sums, and returns a nest of tensors."""

Pause = Callable[[], AbstractContextManager[object]]
"""A function that returns a context in which nothing else sends anything to the device."""


class Sums(Protocol):
    """Running sums. A step takes them in and gives new ones out; the old stay valid for whoever keeps them."""

    tensors: list[Tensor]
    """The sums as they stand."""

    begun: list[Tensor]
    """The sums that the step being traced began with, and those that it made itself."""

    def begin(self) -> None:
        """Begin a trace."""

    def roll_back(self) -> None:
        """Take a trace back that isn't run."""


class Program(ABC):
    """A step of one role.

    Calls are told apart by a key: everything that a graph depends on but the values of tensors.

    Args:
        jit_compile: `"auto"`: replay what can be replayed. True: an error if it can't be. False: trace every call.

    Attributes:
        jit_compile: The argument.
        traced_because: The reason why the step is traced on every call; empty as long as it isn't.
        products: The formats in which the last trace computed matrix products.
        cause: The reason for the next graph, for the report.
        traced_keys: The keys of all calls that have been traced.
        donated: The size of the state that a replay writes over, in bytes.
        operations: What the graph that ran last computes, in operations; 0 if nobody has counted.
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
        """Run the body's Python once, and whatever it computes. No step is waited for.

        Args:
            key: Everything that the graph depends on but the values of tensors: shapes, modes, options.
            inputs: Batches, rates and numbers. The body may add to the list: the next call gives those, too.
            seeds: One for each step.
            body: The Python of the steps.
            pause: Gives a context in which nothing else sends anything to the device.

        Returns:
            The body's result. Its tensors have values as soon as the device has computed them.
        """

    @property
    def captures(self) -> bool:
        """True if calls are captured, to be replayed: then their keys must be right, and they may join steps."""
        return False

    @property
    def runs_eagerly(self) -> bool:
        """True if the device computes operation by operation, as no trace can have the whole step."""
        return False

    def begin_pass(self, strict: Strict, new: Strict) -> None:
        """Begin a pass over data.

        Args:
            strict: The policy on whatever makes steps slow.
            new: The policy on a new graph of a step that is replayed.
        """

    def forget(self) -> None:
        """Forget all graphs: the state has other tensors than they have."""

    def try_again(self) -> None:
        """Try again to replay a step that was given up: another `fit` may have other data, or be strict."""

    def note_users_code(self, seldom: bool) -> None:
        """Note that user code has run between steps, at each or `seldom`: it may have changed what the body reads."""

    def replays(self, key: Hashable) -> bool:
        """True if the next call with this key needs none of the body's Python: `replay` will do."""
        return False

    def replay(self, key: Hashable, inputs: list[Tensor], seeds: list[int]) -> Any:
        """Run once without the body's Python, and without waiting for the device. `replays` must be true."""
        raise NotImplementedError

    def audit_due(self, key: Hashable, remaining: int | None) -> bool:
        """True if the next replay should be audited first.

        Args:
            key: See `__call__`. Its graph is replayed, see `replays`.
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
        """Trace a step that is replayed, and compare. If it is another one, `replays` is false from then on.

        Nothing is run, and the state is left as it is. The arguments are those of `__call__` and `trace_sample`.
        """

    def lacks_sample(self, key: Hashable) -> bool:
        """True if a step with this key has just been shown to be replayable, and has no sample for audits."""
        return False

    def trace_sample(
        self, key: Hashable, inputs: list[Tensor], seeds: list[int], sample: Body, pause: Pause = nullcontext
    ) -> None:
        """Trace one of several joined steps alone, for audits to compare: to trace all would take them as many times.

        Args:
            key: See `__call__`.
            inputs: Batches and rates, of all steps.
            seeds: One for each step.
            sample: The Python of the one step.
            pause: See `__call__`.
        """

    def pop_change(self) -> tuple[str, int] | None:
        """Return the change that the last audit has found, once: in words if it is known, and the steps in doubt."""
        return None
