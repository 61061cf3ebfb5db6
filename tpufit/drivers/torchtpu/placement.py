"""`TpuCore`: a placement on TorchTPU's cores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ...backend import Sharding, block_of_rows, sharding_of_each
from ...runtime.pending_tensors import put_behind_barrier
from ...runtime.placement import CorePlacement
from ...utils.counters import waiting
from .graph_marks import Kind, mark_of
from .one_core import OneCore, Program
from .tensor_identity import on_tpu


@dataclass(frozen=True)
class TpuCore(CorePlacement):
    """One core, or several cores that act as one. `programs` has the compiled programs by their graph's hash."""

    tpu: OneCore = field(default_factory=OneCore, compare=False, repr=False)
    programs: dict[Any, Program] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def device(self) -> torch.device:
        return torch.device("tpu", 0)

    def send(self, tensors: Sequence[Tensor], sharding: Sharding | Sequence[Sharding] = Sharding.WHOLE) -> list[Tensor]:
        shardings = sharding_of_each(sharding, len(tensors))
        away = [i for i, tensor in enumerate(tensors) if not on_tpu(tensor)]
        axes = [shardings[i].axis if tensors[i].dim() else None for i in away]
        sent = dict(zip(away, self.tpu.send([tensors[i].detach() for i in away], axes), strict=True))
        return [sent.get(i, tensor) for i, tensor in enumerate(tensors)]

    @cached_property
    def local_shards(self) -> tuple[int, ...] | None:
        return tuple(self.tpu.own) if self.has_mesh else None

    @property
    def shares_only_steps(self) -> bool:
        return self.has_mesh

    def launch(self, role: str, cause: str = "", tensors: Sequence[Tensor] | None = None) -> None:
        self.tpu.compute_all()

    def pin(self, tensor: Tensor, sharding: Sharding = Sharding.WHOLE) -> Tensor:
        return tensor

    def lay_out(self, tensor: Tensor, sharding: Sharding) -> Tensor:
        if not self.has_mesh:
            return tensor
        axis = sharding.axis
        return put_behind_barrier([tensor, mark_of(Kind.LAYOUT, 0 if axis is None else axis + 1)])[0]

    def prepare_start(self, name: Any, inputs: list[Tensor]) -> Iterator[list[Tensor]]:
        return self.programs[name].prepare_start(inputs)

    def note_start(self, name: Any, outputs: Sequence[list[Tensor]]) -> None:
        self.programs[name].note_start(outputs)

    def compute_and_wait(self, copies: list[Tensor]) -> list[Tensor]:
        with waiting("packing"):
            self.tpu.compute(copies, wait=True)
        return copies

    def to_core(self, tensor: Tensor) -> Tensor:
        rows = len(block_of_rows(0, self.count, len(tensor)))
        return self._reshape_rows(tensor, rows, Kind.TO_CORE)

    def from_core(self, tensor: Tensor, rows: int) -> Tensor:
        return self._reshape_rows(tensor, rows, Kind.FROM_CORE)

    def _reshape_rows(self, tensor: Tensor, rows: int, kind: Kind) -> Tensor:
        if not self.has_mesh:
            return tensor
        with torch.no_grad():
            like = torch.zeros((rows, *tensor.shape[1:]), dtype=tensor.dtype, device=self.device)
        return put_behind_barrier([tensor, like, mark_of(kind)])[1]
