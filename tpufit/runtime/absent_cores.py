"""`AbsentPlacement`: cores that aren't there. Steps are traced for them, and a recorder keeps their programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..backend import InFlight, NeverWaits, Sharding, sharding_of_each
from .driver import Trace
from .placement import CorePlacement
from .program_recorder import Recorder


@dataclass(frozen=True)
class AbsentPlacement(CorePlacement):
    """What all runtimes' absent cores share. List it before the runtime's own placement in the bases."""

    recorder: Recorder = field(default_factory=Recorder, compare=False)

    @property
    def runs(self) -> bool:
        return False

    @property
    def donates_from(self) -> float:
        return 0

    @property
    def packs(self) -> bool:
        return True

    def send(self, tensors: Sequence[Tensor], sharding: Sharding | Sequence[Sharding] = Sharding.WHOLE) -> list[Tensor]:
        sent = super().send(tensors, sharding)  # type: ignore[safe-super]  # super() is the runtime's placement
        if sent:
            self.recorder.note(sent, [one.axis for one in sharding_of_each(sharding, len(sent))])
        return sent

    def prepare_start(self, name: Any, inputs: list[Tensor]) -> Iterator[list[Tensor]]:
        yield self.send(*self.recorder.outputs[name])

    def note_start(self, name: Any, outputs: Sequence[list[Tensor]]) -> None:
        pass

    def compute_and_wait(self, copies: list[Tensor]) -> list[Tensor]:
        return self.send([torch.empty(t.shape, dtype=t.dtype, device="meta") for t in copies])

    def in_flight(self) -> InFlight:
        return NeverWaits()

    def compile(self, trace: Trace) -> None:
        self.recorder.keep(trace)
