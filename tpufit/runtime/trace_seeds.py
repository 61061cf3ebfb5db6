"""`TraceSeeds`: the random numbers of a trace, and the places among them that it returns to."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..utils.replaced import replaced
from .bindings import xla

# torch_xla gives each drawing operation a seed of its own, the next of this sequence, computed inside the graph.
_FACTOR, _ADDED, _RANGE = 214013, 2531011, 1 << 64

Place = tuple[int, int]
"""A place among the random numbers of a trace: the number of the step, and that of the draws before."""


class TraceSeeds:
    """The random numbers of a trace. Calling it with `i` begins those of the `i`-th step, which has a seed of its own.

    Attributes:
        places: The places that it began at or returned to, by the seed that the device was given for them, signed: the
            number of the step, and that of the draws before.
    """

    def __init__(self, device: str, seeds: Sequence[int]) -> None:
        self._device, self._seeds, self._step = device, seeds, 0
        self._begun: list[int] = []  # the seeds that the step has begun with, its own and the user's
        self.places: dict[int, Place] = {}

    def __call__(self, step: int) -> None:
        """Begin the random numbers of a step."""
        self._step, self._begun = step, [_signed(self._seeds[step])]
        self.places.setdefault(_signed(self._seeds[step]), (step, 0))
        self._set(self._seeds[step])

    @contextmanager
    def seeded_by_torch(self) -> Iterator[None]:
        """A context in which `torch.manual_seed` also seeds the device: as the step says it, so a constant."""
        own = torch.manual_seed

        def manual_seed(seed: Any) -> torch.Generator:
            generator = own(seed)
            self._begun.append(_signed(int(seed)))
            self._set(int(seed))
            return generator

        with replaced(torch, manual_seed=manual_seed), replaced(torch.random, manual_seed=manual_seed):
            yield

    def position(self) -> int:
        """Return where the step has come to."""
        return _signed(xla()._xla_get_rng_seed(self._device))

    def return_to(self, position: int) -> None:
        """Continue from where the step was when `position` returned this, with the numbers drawn there."""
        if position not in self.places:
            seeds, count = list(self._begun), 0
            while position not in seeds:
                seeds, count = [_signed(seed * _FACTOR + _ADDED) for seed in seeds], count + 1
            if seeds[0] == position:  # a replay computes it from the step's seed
                self.places[position] = (self._step, count)
        self._set(position)

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
