"""`Placement`: the host, one core, or a mesh of cores, and `Sharding`: how a tensor lies over them.

Over a mesh a batch is split by its rows, and everything else is whole on every core. The rows need not be divisible by
the cores: the partitioner pads and masks them itself, exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from .bindings import xla
from .devices import Cores
from .faults import translate
from .recorder import Recorder


@dataclass(frozen=True)
class Sharding:
    """The layout of a tensor over the cores.

    Attributes:
        axis: The dimension that is split over the cores; None (default): the tensor is whole on every core.
        ROWS: The sharding of a batch, split by its first dimension.
        WHOLE: The sharding of everything else.

    Example:
        >>> Sharding.ROWS
        Sharding(axis=0)
    """

    axis: int | None = None
    ROWS: ClassVar[Sharding]
    WHOLE: ClassVar[Sharding]

    def axes(self, ndim: int) -> tuple[str | None, ...]:
        """The axis of the mesh for each of `ndim` dimensions. A tensor without dimensions is always whole."""
        return tuple("data" if i == self.axis else None for i in range(ndim))


Sharding.ROWS, Sharding.WHOLE = Sharding(0), Sharding()


@dataclass(frozen=True)
class Placement:
    """A place to compute at: the host (`cores` is None), one core, or all cores as one.

    Attributes:
        cores: The cores of the process, or None for plain PyTorch on the host.
        recorder: Takes the cores' place if they are absent (default: they are there).
    """

    cores: Cores | None
    recorder: Recorder | None = field(default=None, compare=False)
    _specs: dict[tuple[int | None, int], Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def on_host(self) -> bool:
        """True for plain PyTorch, without the device runtime."""
        return self.cores is None

    @property
    def has_mesh(self) -> bool:
        """True if one program runs on several cores."""
        return self.cores is not None and self.cores.spmd

    @property
    def most_in_flight(self) -> int:
        """The number of steps of one role that may be under way; of all together three times as many may.

        XLA's CPU client lets 32 runs begin. It starts the parts of a further one as soon as their own core may, on the
        threads that the parts of the first one need: with several virtual cores these then wait for each other for
        good.
        """
        virtual = self.cores is not None and self.cores.spmd and self.cores.platform == "CPU"
        return 8 if virtual else 256

    @property
    def count(self) -> int:
        """The number of cores that share a batch, at least 1."""
        return 1 if self.cores is None else self.cores.count

    @property
    def hosts(self) -> int:
        """The number of hosts that the cores belong to, at least 1."""
        return 1 if self.cores is None else self.cores.hosts

    @cached_property
    def local_shards(self) -> tuple[int, ...] | None:
        """The positions of this process's devices along the mesh: the parts of a batch that it has to send.

        None without a mesh; with one process all of them. On a pod a host's devices need not be neighbours.
        """
        if not self.has_mesh:
            return None
        own = set(xla()._xla_get_runtime_devices())
        return tuple(i for i, device in enumerate(xla()._xla_get_all_runtime_devices()) if device in own)

    @cached_property
    def device(self) -> torch.device:
        """The device of every tensor here. With several cores it is one virtual device."""
        if self.cores is None:
            return torch.device("cpu")
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
        """Fix the sharding of a tensor in the graph being traced; else the partitioner may choose another.

        Args:
            tensor: A result of the step that is kept for the next one: a parameter, a sum.
            sharding: Its sharding (default: whole on every core).

        Returns:
            The same tensor.
        """
        # One that has a value lies over the cores as it was put there.
        if self.has_mesh and xla()._check_tensor_need_materialization([tensor])[0]:
            xla()._xla_mark_sharding(tensor, self.layout(sharding, tensor.dim()))
        return tensor

    def gather(self, tensor: Tensor) -> Tensor:
        """The same values, whole on every core, in the graph being traced.

        Args:
            tensor: Any tensor of a traced step, such as rows that are split over the cores.
        """
        return self.laid_out(tensor, Sharding.WHOLE)

    def laid_out(self, tensor: Tensor, sharding: Sharding) -> Tensor:
        """The same values with a sharding of their own, in the graph being traced; `tensor` keeps its own.

        Args:
            tensor: Any tensor of a traced step.
            sharding: How the result lies over the cores.
        """
        if not self.has_mesh:
            return tensor
        result = tensor.clone()
        xla()._xla_annotate_custom_sharding(result, self.layout(sharding, tensor.dim()))
        return result


HOST = Placement(None)
