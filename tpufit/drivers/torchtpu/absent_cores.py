"""`ValuelessCores`: replaces absent cores, for a preflight. Its tensors have no values.

torch_tpu traces without a device, but PyTorch's backward pass asks for the number of devices, and ends the process if
there is none. So PyTorch's device guard for devices in Python replaces torch_tpu's guard, and reports one device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import PreflightError
from ...runtime.absent_cores import AbsentPlacement
from ...runtime.aliases import identify_storage
from .compute_modes import recording
from .one_core import OneCore, Program
from .placement import TpuCore
from .private_names import names
from .start import add_operations, register_quietly
from .trace_seeds import GeneratorState, TpuSeeds

_READ = "the step reads a value from the device, or runs an operation on the host"
_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"  # in libc10, a pointer for each type of device
_PRIVATE_USE_1 = 20  # the number of torch_tpu's device type


class ValuelessCores(OneCore):
    """Absent cores, without values.

    Args:
        count: The number of cores.
    """

    draws = False  # only a device has the generator

    def __init__(self, count: int) -> None:
        self.count = count
        self._axes: dict[int, int | None] = {}  # by the storages of the tensors that were sent
        self._kept: list[Any] = []  # these storages, so that no address is reused

    def send(self, tensors: Sequence[Tensor], axes: Sequence[int | None]) -> list[Tensor]:
        sent = []
        with recording(), torch.no_grad():
            for tensor, axis in zip(tensors, axes, strict=True):
                absent = names().placeholder(list(tensor.shape), tensor.dtype, False)
                self._note(absent, axis)
                sent.append(absent)
        return sent

    def _note(self, tensor: Tensor, axis: int | None = None) -> None:
        self._axes[identify_storage(tensor)] = axis
        self._kept.append(tensor.untyped_storage())

    def has_value(self, tensor: Tensor) -> bool:
        return identify_storage(tensor) in self._axes

    def compile(
        self, text: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor] = (), axes: Sequence[int | None] = ()
    ) -> Program:
        raise PreflightError(_READ)

    def read(self, tensors: Sequence[Tensor], collective: bool = False) -> list[Tensor]:
        raise PreflightError(_READ)

    def compute(self, tensors: Sequence[Tensor], wait: bool = False) -> None:
        for tensor in tensors:
            if not self.has_value(tensor):
                self._note(tensor)

    def compute_all(self) -> None:
        pass

    def copy(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor.detach() for tensor in tensors]

    def wait(self) -> None:
        pass

    def axis_of(self, tensor: Tensor) -> int | None:
        return self._axes.get(identify_storage(tensor))


@dataclass(frozen=True)
class AbsentTpu(AbsentPlacement, TpuCore):
    """Traces steps for absent cores; a recorder keeps their programs."""


class AbsentSeeds(TpuSeeds):
    """The random numbers of a trace without a device, and so without torch_tpu's generator.

    A dropout doesn't use the generator, and a session refuses operations that do.
    """

    _state: Tensor

    @contextmanager
    def inside(self) -> Iterator[None]:
        self._begin(self._first_base())
        yield

    def _native(self) -> Any:
        return GeneratorState(self._state)

    def _go_to(self, native: Any) -> None:
        self._state = native.tensor


def register_without_device() -> None:
    """Register torch_tpu's device with PyTorch, for traces without a device."""
    registry = (ctypes.c_void_p * (_PRIVATE_USE_1 + 1)).in_dll(_libc10(), _REGISTRY)
    accelerators = import_module("torch._C._acc")
    if not accelerators.register_python_privateuseone_device_guard(_guard()):
        raise PreflightError("torch_tpu was loaded before its preflight began: set TORCH_DEVICE_BACKEND_AUTOLOAD=0")
    ours = registry[_PRIVATE_USE_1]
    register_quietly()
    registry[_PRIVATE_USE_1] = ours  # torch_tpu has replaced it by its own guard
    names().push_mode(names().modes.INTERNAL_COMPILE_FX_GRAPH)  # permanently: nothing can be computed
    add_operations("TPU")


@cache
def _guard() -> Any:
    """Return a device guard for one device, which does nothing. Cached, because PyTorch doesn't reference it."""
    kind = torch._C._autograd.DeviceType.PrivateUse1
    base = import_module("torch._C._acc").DeviceGuard
    return type("OneDevice", (base,), {"type_": lambda self: kind})()


def _libc10() -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
