"""Plain PyTorch on the host or on a GPU, as a backend: each step's Python runs, and its operations start at once."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .device_state import DeviceState
from .in_flight import InFlight, NeverWaits
from .placement import Placement, Sharding, sharding_of_each
from .program import Body, Pause, Program, Sums


class _Synchronous(InFlight):
    """Steps are never pending: a step has been computed when its call returns."""

    def add(self, result: Tensor, nbytes: int) -> Tensor | None:
        return result


@dataclass(frozen=True)
class EagerPlacement(Placement):
    """A device that runs each PyTorch operation when Python calls it: the host's processor, or a GPU."""

    where: torch.device

    @property
    def eager(self) -> bool:
        return True

    @property
    def on_host(self) -> bool:
        return self.where.type == "cpu"

    @property
    def device(self) -> torch.device:
        return self.where

    @property
    def memory_used(self) -> int | None:
        # The peak so far: after a step, PyTorch has freed what the step needed in addition to the state.
        return torch.cuda.max_memory_allocated(self.where) if self.where.type == "cuda" else None

    @property
    def max_in_flight(self) -> int:
        return 0

    def send(self, tensors: Sequence[Tensor], sharding: Sharding | Sequence[Sharding] = Sharding.WHOLE) -> list[Tensor]:
        if self.on_host:
            return list(tensors)
        # The host waits for a copy unless the source is pinned. PyTorch reuses pinned memory for later copies instead
        # of freeing it, so pinned weights would stay in the host's memory twice.
        each = sharding_of_each(sharding, len(tensors))
        pins = self.where.type == "cuda"
        return [
            (t.pin_memory() if pins and t.is_cpu and own != Sharding.WHOLE else t).to(self.where, non_blocking=True)
            for t, own in zip(tensors, each, strict=True)
        ]

    def launch(self, role: str, cause: str = "", tensors: Sequence[Tensor] | None = None) -> None:
        pass

    def pin(self, tensor: Tensor, sharding: Sharding = Sharding.WHOLE) -> Tensor:
        return tensor

    def lay_out(self, tensor: Tensor, sharding: Sharding) -> Tensor:
        return tensor

    def in_flight(self) -> InFlight:
        return _Synchronous() if self.on_host else NeverWaits()


HOST: Placement = EagerPlacement(torch.device("cpu"))


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
    """A step that runs as plain PyTorch, with PyTorch's generators seeded for each step."""

    def __init__(self, sums: Sums, jit_compile: str | bool = "auto", device: torch.device = HOST.device) -> None:
        super().__init__(jit_compile)
        self._sums = sums
        self._gpus = [device] if device.type == "cuda" else []

    def __call__(
        self, key: Hashable, inputs: list[Tensor], seeds: list[int], body: Body, pause: Pause = nullcontext
    ) -> Any:
        self._sums.begin()
        with torch.random.fork_rng(devices=self._gpus):

            def seed(i: int) -> None:
                torch.manual_seed(seeds[i])

            return body(inputs, seed)
