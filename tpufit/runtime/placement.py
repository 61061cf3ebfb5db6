"""`CorePlacement`: one core or a mesh of them, and `AbsentCores`, in whose place a `Recorder` keeps the programs.

Over a mesh a batch is split by its rows, and everything else is whole on every core. The rows need not be divisible by
the cores: the partitioner pads and masks them itself, exactly, given indices of 32 bits (see `ops.indices`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..backend import Cores, InFlight, Placement, Sharding
from ..utils import hardware
from ..utils.counters import waiting
from . import counters
from .bindings import xla
from .devices import memory_used, platform
from .faults import translate
from .in_flight import NothingRuns, RunsAhead
from .recorder import Recorder, Trace, stand_in

PACKED_ON = {"TPU"}  # the kinds of cores that keep weights in another order, see `packing`


@dataclass(frozen=True)
class CorePlacement(Placement):
    """One core, or all cores of the process as one."""

    cores: Cores
    _specs: dict[tuple[int | None, int], Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def has_mesh(self) -> bool:
        return self.cores.spmd

    @property
    def most_in_flight(self) -> int:
        # XLA's CPU client lets 32 runs begin. It starts the parts of a further one as soon as their own core may, on
        # the threads that the parts of the first one need: with several virtual cores these then wait for each other
        # for good.
        return 8 if self.cores.spmd and self.cores.platform == "CPU" else 256

    @property
    def count(self) -> int:
        return self.cores.count

    @property
    def hosts(self) -> int:
        return self.cores.hosts

    @cached_property
    def peak(self) -> float | None:
        chips = hardware.chips() if platform() == "TPU" else []
        return None if not chips or chips[0].peak is None else chips[0].peak * self.count

    @property
    def memory_used(self) -> int | None:
        return memory_used()

    @cached_property
    def local_shards(self) -> tuple[int, ...] | None:
        if not self.has_mesh:
            return None
        own = set(xla()._xla_get_runtime_devices())
        return tuple(i for i, device in enumerate(xla()._xla_get_all_runtime_devices()) if device in own)

    @cached_property
    def device(self) -> torch.device:
        import torch_xla

        # The index must be passed even where it is 0: it also makes that core the default for seeds and syncs.
        device: torch.device = torch_xla.device() if self.cores.spmd else torch_xla.device(self.cores.index)
        return device

    @cached_property
    def device_name(self) -> str:
        """The device by torch_xla's name."""
        return str(self.device)

    @cached_property
    def _mesh(self) -> Any:
        import torch_xla.distributed.spmd as spmd

        try:
            return spmd.Mesh(np.arange(self.count), (self.count,), ("data",))
        except AssertionError as error:
            raise translate(error) or error from error

    def spec(self, sharding: Sharding, tensor: Tensor) -> Any:
        """torch_xla's own description of a sharding, for a host tensor that is about to be sent over the mesh."""
        key = sharding.axis, tensor.dim()
        if key not in self._specs:
            import torch_xla.distributed.spmd as spmd

            self._specs[key] = spmd.ShardingSpec(self._mesh, sharding.axes(tensor.dim()))
        return self._specs[key].xla_spec(tensor)

    def layout(self, sharding: Sharding, ndim: int) -> Any:
        """torch_xla's own form of a sharding over the mesh, for a tensor of `ndim` dimensions."""
        return self._mesh.get_op_sharding(sharding.axes(ndim))

    def pin(self, tensor: Tensor, sharding: Sharding = Sharding.WHOLE) -> Tensor:
        # One that has a value lies over the cores as it was put there.
        if self.has_mesh and xla()._check_tensor_need_materialization([tensor])[0]:
            xla()._xla_mark_sharding(tensor, self.layout(sharding, tensor.dim()))
        return tensor

    def laid_out(self, tensor: Tensor, sharding: Sharding) -> Tensor:
        if not self.has_mesh:
            return tensor
        result = tensor.clone()
        xla()._xla_annotate_custom_sharding(result, self.layout(sharding, tensor.dim()))
        return result

    def to_core(self, tensor: Tensor) -> Tensor:
        """Return the rows of a tensor that a core has, to compute with them by the core's own program.

        If the cores don't share the rows evenly, some have rows of nothing in particular.
        """
        if not self.has_mesh:
            return tensor
        own: Tensor = xla()._spmd_full_to_shard_shape(self.laid_out(tensor, Sharding.ROWS))
        return own

    def from_core(self, tensor: Tensor, rows: int) -> Tensor:
        """Return the tensor of so many rows that a core's own program has computed, a part on each core."""
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

    def in_flight(self) -> InFlight:
        return RunsAhead(most=self.most_in_flight)

    def launch(self, role: str, cause: str = "") -> None:
        with counters.role(role, cause):
            xla()._xla_step_marker(self.device_name, [], wait=False)

    def send(self, tensors: Sequence[Tensor], sharding: Sharding | Sequence[Sharding] = Sharding.WHOLE) -> list[Tensor]:
        there = [t.is_xla for t in tensors]  # type: ignore[attr-defined]  # PyTorch's stubs don't know it
        values = [
            t if t.is_contiguous() and not t.requires_grad else t.detach().contiguous()
            for t, passed in zip(tensors, there, strict=True)
            if not passed
        ]
        specs = None
        if self.has_mesh and values:
            each = [sharding] * len(tensors) if isinstance(sharding, Sharding) else sharding
            wanted = [one for one, passed in zip(each, there, strict=True) if not passed]
            specs = [self.spec(one, t) for one, t in zip(wanted, values, strict=True)]
        sent: list[Tensor] = xla()._xla_tensors_from_aten(values, [self.device_name] * len(values), specs)
        if len(sent) == len(tensors):
            return sent
        rest = iter(sent)
        return [t if passed else next(rest) for t, passed in zip(tensors, there, strict=True)]

    # What programs ask

    @property
    def runs(self) -> bool:
        """True if graphs run, and their results can be waited for."""
        return True

    @property
    def gives_memory_freely(self) -> bool:
        """True if it costs no time to let a graph write the new state over the old: XLA:CPU then waits for a step."""
        return platform() != "CPU"

    @property
    def packs(self) -> bool:
        """True if weights are kept in another order of dimensions, see `packing`."""
        return platform() in PACKED_ON

    @property
    def starter(self) -> Callable[[Any, list[Tensor]], list[Tensor]]:
        """The function that starts a graph by its hash with its inputs."""
        start: Callable[[Any, list[Tensor]], list[Tensor]] = xla()._run_cached_graph
        return start

    def compile(self, trace: Trace) -> None:
        """Compile the graph of a trace."""
        from torch_xla.utils.buffer_donor_context import alias_with_buffer_donor_config

        with counters.role(trace.role, trace.cause), alias_with_buffer_donor_config():
            xla()._xla_warm_up_cache(trace.roots, [])

    def compute(self, copies: list[Tensor]) -> list[Tensor]:
        """Compute pending copies. **This waits**: only what is computed has memory that can be told apart."""
        with waiting("packing"), counters.role("transfer"):
            xla()._xla_sync_multi(copies, devices=[], wait=True)
        return copies


@dataclass(frozen=True)
class AbsentCores(CorePlacement):
    """Cores that aren't there: steps are traced for them, and a recorder keeps their programs."""

    recorder: Recorder = field(default_factory=Recorder, compare=False)

    @property
    def runs(self) -> bool:
        return False

    @property
    def gives_memory_freely(self) -> bool:
        return True

    @property
    def packs(self) -> bool:
        return True

    @property
    def starter(self) -> Callable[[Any, list[Tensor]], list[Tensor]]:
        return lambda name, inputs: self.send(self.recorder.outputs[name])

    def in_flight(self) -> InFlight:
        return NothingRuns()

    def send(self, tensors: Sequence[Tensor], sharding: Sharding | Sequence[Sharding] = Sharding.WHOLE) -> list[Tensor]:
        sent = super().send([stand_in(t) if t.is_meta else t for t in tensors], sharding)
        if sent:
            each = [sharding] * len(sent) if isinstance(sharding, Sharding) else sharding
            self.recorder.note(sent, [one.axis for one in each])
        return sent

    def compile(self, trace: Trace) -> None:
        self.recorder.keep(trace)

    def compute(self, copies: list[Tensor]) -> list[Tensor]:
        return self.send([torch.empty(t.shape, dtype=t.dtype, device="meta") for t in copies])


def placement_on(cores: Cores, recorder: Recorder | None = None) -> Placement:
    """Return the placement of steps on cores, or on a recorder in their place if they are absent."""
    return CorePlacement(cores) if recorder is None else AbsentCores(cores, recorder=recorder)
