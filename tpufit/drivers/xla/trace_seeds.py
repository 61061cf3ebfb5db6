"""`XlaSeeds`: the random numbers of a trace on torch_xla, where each draw uses the next seed of a sequence."""

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ...runtime.trace_seeds import Place, TraceSeeds
from ...utils.random import to_signed
from .cpp_bindings import xla

# torch_xla gives each random operation the next seed of this sequence, computed inside the graph.
_FACTOR = 214013
_ADDED = 2531011
_RANGE = 1 << 64


class XlaSeeds(TraceSeeds):
    """The random numbers of a trace.

    Attributes:
        places: The places at which the trace began or to which it returned, by the device's signed seed.
    """

    def __init__(self, device: str, seeds: Sequence[int]) -> None:
        super().__init__(seeds)
        self._device = device
        self._seeds_so_far: list[int] = []  # of the current step: its own, then the user's
        self.places: dict[int, Place] = {}
        self._base = self._first_base()

    def place_of(self, value: Tensor, handle: Hashable) -> Place | None:
        if value.dtype is not torch.int64 or value.dim():
            return None
        return self.places.get(int(xla()._xla_get_cpu_tensors([value])[0]))

    def inside(self) -> AbstractContextManager[object]:
        return nullcontext()

    def _first_base(self) -> Tensor:
        return _copy_base(self._device)

    def _begin_step(self, seed: int) -> Tensor:
        self._seeds_so_far = []
        base = self._begin_user_seed(seed)
        self.places.setdefault(self._seeds_so_far[0], (self._step, 0))
        return base

    def _begin_user_seed(self, seed: int) -> Tensor:
        self._seeds_so_far.append(to_signed(seed))
        self._set(seed)
        return self._first_base()

    def _native(self) -> Any:
        return to_signed(xla()._xla_get_rng_seed(self._device))

    def _go_to(self, native: Any) -> None:
        if native not in self.places:
            seeds = list(self._seeds_so_far)
            count = 0
            while native not in seeds:
                seeds = [to_signed(seed * _FACTOR + _ADDED) for seed in seeds]
                count += 1
            if seeds[0] == native:  # derived from the step's seed, so a replay can compute it
                self.places[native] = (self._step, count)
        self._set(native)

    def _set(self, seed: int) -> None:
        xla()._xla_set_rng_seed(seed % _RANGE, self._device)


def seed_tensors(device: str, seeds: Sequence[int], places: Sequence[Place]) -> list[Tensor]:
    """Return the generator's seeds at these places, advanced from these steps' seeds, each as a tensor."""
    tensors = []
    for step, count in places:
        xla()._xla_set_rng_seed(advance_seed(seeds[step], count), device)
        tensors.append(_copy_base(device))
    return tensors


def advance_seed(seed: int, count: int) -> int:
    """Return the seed that follows `seed` after `count` draws.

    Example:
        >>> advance_seed(8, 0), advance_seed(8, 1), advance_seed(advance_seed(8, 1), 1) == advance_seed(8, 2)
        (8, 4243115, True)
    """
    if not count:
        return seed
    # The sum of a geometric series. The modulus is multiplied by the divisor, so that the division stays exact.
    power = pow(_FACTOR, count, _RANGE * (_FACTOR - 1))
    return (seed * power + _ADDED * ((power - 1) // (_FACTOR - 1))) % _RANGE


def _copy_base(device: str) -> Tensor:
    """Copy a device's seed to it.

    torch_xla holds a lock meanwhile. If a dispatch mode's Python ran, so might the garbage collector, which waits for
    this lock forever to delete a tensor of the device.
    """
    with torch._C._DisableTorchDispatch():
        base: Tensor = xla()._get_base_seed_as_tensor(device)
    return base
