"""Plain PyTorch on the host, as a backend: the Python of each step runs, and computes at once."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .in_flight import InFlight
from .placement import Placement, Sharding
from .program import Body, Pause, Program, Sums
from .state import DeviceState


class _Synchronous(InFlight):
    """Nothing is ever under way: a step is computed when its call returns."""

    def add(self, result: Tensor, nbytes: int) -> Tensor | None:
        return result


@dataclass(frozen=True)
class HostPlacement(Placement):
    """The host's own memory and processor."""

    @property
    def on_host(self) -> bool:
        return True

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def most_in_flight(self) -> int:
        return 0

    def send(self, tensors: Sequence[Tensor], sharding: Sharding | Sequence[Sharding] = Sharding.WHOLE) -> list[Tensor]:
        return list(tensors)

    def launch(self, role: str, cause: str = "") -> None:
        pass

    def pin(self, tensor: Tensor, sharding: Sharding = Sharding.WHOLE) -> Tensor:
        return tensor

    def laid_out(self, tensor: Tensor, sharding: Sharding) -> Tensor:
        return tensor

    def in_flight(self) -> InFlight:
        return _Synchronous()


HOST: Placement = HostPlacement()


class HostState(DeviceState):
    """The user's own tensors, which always have their values."""

    @property
    def lost(self) -> list[int]:
        return []

    def pin(self, tensors: Iterable[Tensor], placement: Placement) -> None:
        pass

    def replace(self, tensors: Iterable[Tensor], shardings: Mapping[int, Sharding]) -> None:
        self.tensors = list(tensors)

    def write_back(self) -> None:
        pass

    def find_lost(self) -> None:
        pass

    def clear_lost(self) -> None:
        pass


class EagerProgram(Program):
    """A step that runs as PyTorch does. Its random numbers are PyTorch's own, seeded for each step."""

    def __init__(self, sums: Sums, jit_compile: str | bool = "auto") -> None:
        super().__init__(jit_compile)
        self._sums = sums

    def __call__(
        self, key: Hashable, inputs: list[Tensor], seeds: list[int], body: Body, pause: Pause = nullcontext
    ) -> Any:
        self._sums.begin()
        with torch.random.fork_rng(devices=[]):

            def seed(i: int) -> None:
                torch.manual_seed(seeds[i])

            return body(inputs, seed)
