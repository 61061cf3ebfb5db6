"""`TraceSeeds`: the random numbers of a trace, and positions in them to which it can return."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..utils.replacing_attributes import replacing_attributes

Place = tuple[int, int]
"""A position in the random numbers of a trace: the number of the step, and of the draws before."""


@dataclass(frozen=True)
class Draw:
    """The source of one dropout's bits: the step's seed, on the device, and the number of the dropout in the step."""

    seed: Tensor
    number: int


@dataclass(frozen=True, eq=False)
class Position:
    """A step's current position in its random numbers.

    Attributes:
        native: The state of the device's generator, in the driver's form.
        base: The seed of the step, or the user's later seed, on the device.
        draws: The number of dropouts since then.
    """

    native: Any
    base: Tensor
    draws: int


class TraceSeeds(ABC):
    """The random numbers of a trace. Call it with `i` to begin the numbers of the `i`-th step, with that step's seed.

    For the device's own draws the driver keeps a generator. Dropout uses the step's seed and the dropout's number.
    """

    def __init__(self, seeds: Sequence[int]) -> None:
        self._seeds = seeds
        self._step = 0
        self._base: Tensor | None = None
        self._draws = 0  # of dropout, since the last seed

    def __call__(self, step: int) -> None:
        """Begin the random numbers of a step."""
        self._step = step
        self._begin(self._begin_step(self._seeds[step]))

    @contextmanager
    def seeded_by_torch(self) -> Iterator[None]:
        """A context in which `torch.manual_seed` also seeds the device, by a constant of the graph."""
        original = torch.manual_seed

        def manual_seed(seed: Any) -> torch.Generator:
            generator = original(seed)
            self._begin(self._begin_user_seed(int(seed)))
            return generator

        with (
            replacing_attributes(torch, manual_seed=manual_seed),
            replacing_attributes(torch.random, manual_seed=manual_seed),
        ):
            yield

    def draw(self) -> Draw:
        """Return the source of the next dropout's bits."""
        draw = Draw(self._seed(), self._draws)
        self._draws += 1
        return draw

    def position(self) -> Position:
        """Return the current position."""
        return Position(self._native(), self._seed(), self._draws)

    def has_drawn_since(self, position: Position) -> bool:
        """True if anything was drawn since a position."""
        now = self.position()
        return (now.native, now.draws) != (position.native, position.draws) or now.base is not position.base

    @contextmanager
    def repeating(self, position: Position, seed: Tensor) -> Iterator[None]:
        """A context that draws the numbers from a position on again; dropout uses `seed`, a copy of the same seed."""
        now = self.position()
        self._go_to(position.native)
        self._base = seed
        self._draws = position.draws
        try:
            yield
        finally:
            self._go_to(now.native)
            self._base = now.base
            self._draws = now.draws

    def _begin(self, base: Tensor) -> None:
        self._base = base
        self._draws = 0

    def _seed(self) -> Tensor:
        if self._base is None:
            self._base = self._first_base()
        return self._base

    @abstractmethod
    def place_of(self, value: Tensor, handle: Hashable) -> Place | None:
        """Return the place of the seed that is this input of the graph; None for another input."""

    @abstractmethod
    def inside(self) -> AbstractContextManager[object]:
        """A context in which the device draws from these seeds."""

    @abstractmethod
    def _first_base(self) -> Tensor:
        """Return the seed of a trace before its first step."""

    @abstractmethod
    def _begin_step(self, seed: int) -> Tensor:
        """Seed the device's generator for a step, and return the seed on the device as an input of the graph."""

    @abstractmethod
    def _begin_user_seed(self, seed: int) -> Tensor:
        """Seed the device's generator with the user's seed, and return the seed on the device as a constant."""

    @abstractmethod
    def _native(self) -> Any:
        """Return the state of the device's generator, which can be compared."""

    @abstractmethod
    def _go_to(self, native: Any) -> None:
        """Restore an earlier state of the device's generator."""
