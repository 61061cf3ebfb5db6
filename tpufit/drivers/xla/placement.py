"""`XlaCores`: one core or a mesh, and `AbsentXlaCores`, for which a `Recorder` keeps the programs.

Over a mesh, the number of rows needn't be divisible by the number of cores: the partitioner pads and masks rows
exactly, if indices have 32 bits (see `narrow_indices`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...backend import Sharding, sharding_of_each
from ...runtime import device_counters
from ...runtime.absent_cores import AbsentPlacement
from ...runtime.device_errors import translate
from ...runtime.placement import CorePlacement
from ...utils.counters import waiting
from .cpp_bindings import xla

_SMALL = 4096  # bytes


@dataclass(frozen=True)
class XlaCores(CorePlacement):
    """One core, or all cores of the process as one device."""

    _specs: dict[tuple[int | None, int], Any] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def local_shards(self) -> tuple[int, ...] | None:
        if not self.has_mesh:
            return None
        local = set(xla()._xla_get_runtime_devices())
        return tuple(i for i, device in enumerate(xla()._xla_get_all_runtime_devices()) if device in local)

    @cached_property
    def device(self) -> torch.device:
        import torch_xla

        # The index is passed even if it is 0, because this also makes the core the default for seeds and syncs.
        device: torch.device = torch_xla.device() if self.cores.spmd else torch_xla.device(self.cores.index)
        return device

    @cached_property
    def device_name(self) -> str:
        """torch_xla's name of the device."""
        return str(self.device)

    @cached_property
    def _mesh(self) -> Any:
        import torch_xla.distributed.spmd as spmd

        try:
            return spmd.Mesh(np.arange(self.count), (self.count,), ("data",))
        except AssertionError as error:
            raise translate(error) or error from error

    def spec(self, sharding: Sharding, tensor: Tensor) -> Any:
        """Return torch_xla's description of a sharding, for a host tensor that will be sent to the mesh."""
        key = sharding.axis, tensor.dim()
        if key not in self._specs:
            import torch_xla.distributed.spmd as spmd

            self._specs[key] = spmd.ShardingSpec(self._mesh, sharding.axes(tensor.dim()))
        return self._specs[key].xla_spec(tensor)

    def layout(self, sharding: Sharding, ndim: int) -> Any:
        """Return torch_xla's form of a sharding over the mesh, for a tensor with `ndim` dimensions."""
        return self._mesh.get_op_sharding(sharding.axes(ndim))

    def pin(self, tensor: Tensor, sharding: Sharding = Sharding.WHOLE) -> Tensor:
        # A tensor with a value keeps the sharding with which it was sent.
        if self.has_mesh and xla()._check_tensor_need_materialization([tensor])[0]:
            xla()._xla_mark_sharding(tensor, self.layout(sharding, tensor.dim()))
        return tensor

    def lay_out(self, tensor: Tensor, sharding: Sharding) -> Tensor:
        if not self.has_mesh:
            return tensor
        result = tensor.clone()
        xla()._xla_annotate_custom_sharding(result, self.layout(sharding, tensor.dim()))
        return result

    def to_core(self, tensor: Tensor) -> Tensor:
        if not self.has_mesh:
            return tensor
        shard: Tensor = xla()._spmd_full_to_shard_shape(self.lay_out(tensor, Sharding.ROWS))
        return shard

    def from_core(self, tensor: Tensor, rows: int) -> Tensor:
        if not self.has_mesh:
            return tensor
        xla()._mark_manual_sharding(tensor, self._manual)
        layout = self.layout(Sharding.ROWS, tensor.dim())
        whole: Tensor = xla()._spmd_shard_to_full_shape(tensor, layout, [rows, *tensor.shape[1:]], tensor.dtype)
        return whole

    @cached_property
    def _manual(self) -> Any:
        import torch_xla.distributed.spmd as spmd

        return xla().OpSharding([], [], [], spmd.ShardingType.MANUAL)

    def launch(self, role: str, cause: str = "", tensors: Sequence[Tensor] | None = None) -> None:
        with device_counters.role(role, cause):
            # `sync_functions` adds the argument `tensors`.
            xla()._xla_step_marker(self.device_name, [], wait=False, tensors=tensors)

    def send(self, tensors: Sequence[Tensor], sharding: Sharding | Sequence[Sharding] = Sharding.WHOLE) -> list[Tensor]:
        on_device = [t.is_xla for t in tensors]  # type: ignore[attr-defined]  # missing in PyTorch's stubs
        values = [
            t if t.is_contiguous() and not t.requires_grad else t.detach().contiguous()
            for t, skipped in zip(tensors, on_device, strict=True)
            if not skipped
        ]
        specs = None
        if self.has_mesh and values:
            each = sharding_of_each(sharding, len(tensors))
            shardings = [one for one, skipped in zip(each, on_device, strict=True) if not skipped]
            specs = [self.spec(one, t) for one, t in zip(shardings, values, strict=True)]
        sent: list[Tensor] = xla()._xla_tensors_from_aten(values, [self.device_name] * len(values), specs)
        if len(sent) == len(tensors):
            return sent
        remaining = iter(sent)
        return [t if skipped else next(remaining) for t, skipped in zip(tensors, on_device, strict=True)]

    # For programs

    def prepare_start(self, name: Any, inputs: list[Tensor]) -> Iterator[list[Tensor]]:
        return map(partial(xla()._run_cached_graph, name), [inputs])

    def compute_and_wait(self, copies: list[Tensor]) -> list[Tensor]:
        with waiting("packing"), device_counters.role("transfer"):
            xla()._xla_sync_multi(copies, devices=[], wait=True)
        return copies


@dataclass(frozen=True)
class AbsentXlaCores(AbsentPlacement, XlaCores):
    """Absent cores: steps are traced for them, and a recorder keeps the programs."""

    def send(self, tensors: Sequence[Tensor], sharding: Sharding | Sequence[Sharding] = Sharding.WHOLE) -> list[Tensor]:
        return super().send([stand_in(t) if t.is_meta else t for t in tensors], sharding)


def stand_in(tensor: Tensor) -> Tensor:
    """Return a tensor that can be sent to an absent device, in place of a meta tensor.

    A small tensor becomes zeros on the host, so that sums and counts have values as on a real device. A large tensor
    becomes a placeholder.
    """
    from torch_xla.core.xla_builder import create_placeholder_tensor

    if tensor.nbytes <= _SMALL:
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    placeholder: Tensor = create_placeholder_tensor(tuple(tensor.shape), tensor.dtype)
    return placeholder
