"""`TraceSeeds`: the random numbers of a trace, and the places among them that it returns to."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..utils.replaced import replaced
from .bindings import xla

# torch_xla gives each drawing operation a seed of its own, the next of this sequence, computed inside the graph.
_FACTOR = 214013
_ADDED = 2531011
_RANGE = 1 << 64

Place = tuple[int, int]
"""A place among the random numbers of a trace: the number of the step, and that of the draws before."""


@dataclass(frozen=True)
class Draw:
    """What tells the bits of one dropout: the step's seed, on the device, and its number in the step."""

    seed: Tensor
    number: int


@dataclass(frozen=True, eq=False)
class Position:
    """Where a step has come to among its random numbers.

    Attributes:
        seed: The seed of the next number that torch_xla draws, signed.
        base: The seed of the step, or the user's own since, on the device.
        draws: The number of dropouts since then.
    """

    seed: int
    base: Tensor
    draws: int


class TraceSeeds:
    """The random numbers of a trace. Calling it with `i` begins those of the `i`-th step, which has a seed of its own.

    torch_xla gives each of its own draws the next seed. Dropout has the step's, and the number of the dropout.

    Attributes:
        places: The places that it began at or returned to, by the seed that the device was given for them, signed: the
            number of the step, and that of the draws before.
    """

    def __init__(self, device: str, seeds: Sequence[int]) -> None:
        self._device = device
        self._seeds = seeds
        self._step = 0
        self._base = xla()._get_base_seed_as_tensor(device)
        self._begun: list[int] = []  # the seeds that the step has begun with, its own and the user's
        self._draws = 0  # of dropout, since the last of them
        self.places: dict[int, Place] = {}

    def __call__(self, step: int) -> None:
        """Begin the random numbers of a step."""
        self._step = step
        self._begun = []
        self._begin(self._seeds[step])
        self.places.setdefault(self._begun[0], (step, 0))

    @contextmanager
    def seeded_by_torch(self) -> Iterator[None]:
        """A context in which `torch.manual_seed` also seeds the device: as the step says it, so a constant."""
        own = torch.manual_seed

        def manual_seed(seed: Any) -> torch.Generator:
            generator = own(seed)
            self._begin(int(seed))
            return generator

        with replaced(torch, manual_seed=manual_seed), replaced(torch.random, manual_seed=manual_seed):
            yield

    def draw(self) -> Draw:
        """Return what the next dropout is told by."""
        draw = Draw(self._base, self._draws)
        self._draws += 1
        return draw

    def position(self) -> Position:
        """Return where the step has come to."""
        return Position(_signed(xla()._xla_get_rng_seed(self._device)), self._base, self._draws)

    def drew_since(self, position: Position) -> bool:
        """True if anything was drawn since."""
        now = self.position()
        return (now.seed, now.draws) != (position.seed, position.draws) or now.base is not position.base

    @contextmanager
    def repeating(self, position: Position, seed: Tensor) -> Iterator[None]:
        """A context in which the numbers from a position on are drawn again, those of dropout by an equal seed."""
        now = self.position()
        self._return_to(replace(position, base=seed))
        try:
            yield
        finally:
            self._return_to(now)

    def _return_to(self, position: Position) -> None:
        seed = position.seed
        if seed not in self.places:
            seeds = list(self._begun)
            count = 0
            while seed not in seeds:
                seeds = [_signed(seed * _FACTOR + _ADDED) for seed in seeds]
                count += 1
            if seeds[0] == seed:  # a replay computes it from the step's seed
                self.places[seed] = (self._step, count)
        self._set(seed)
        self._base = position.base
        self._draws = position.draws

    def _begin(self, seed: int) -> None:
        self._begun.append(_signed(seed))
        self._set(seed)
        self._base = xla()._get_base_seed_as_tensor(self._device)
        self._draws = 0

    def _set(self, seed: int) -> None:
        xla()._xla_set_rng_seed(seed % _RANGE, self._device)


def seed_tensors(device: str, seeds: Sequence[int], places: Sequence[Place]) -> list[Tensor]:
    """Give the device the seeds of places in other steps, each as a tensor."""
    tensors = []
    for step, count in places:
        xla()._xla_set_rng_seed(later(seeds[step], count), device)
        tensors.append(xla()._get_base_seed_as_tensor(device))
    return tensors


def later(seed: int, count: int) -> int:
    """Return the seed that stands in for another after so many draws.

    Example:
        >>> later(8, 0), later(8, 1), later(later(8, 1), 1) == later(8, 2)
        (8, 4243115, True)
    """
    if not count:
        return seed
    # The sum of a geometric series; the modulus grows by what its division takes away.
    power = pow(_FACTOR, count, _RANGE * (_FACTOR - 1))
    return (seed * power + _ADDED * ((power - 1) // (_FACTOR - 1))) % _RANGE


def _signed(seed: int) -> int:
    return (seed + _RANGE // 2) % _RANGE - _RANGE // 2
