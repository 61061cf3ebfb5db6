"""Makes placements, and their states and programs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..backend import AttentionForms, Cores, DeviceState, Placement, Program, Sharding, Slot, Sums
from ..backend.device_state import no_slots
from ..backend.eager import EagerPlacement, EagerProgram, HostState
from .device_state import HeldState
from .driver import driver
from .placement import CorePlacement
from .program import CapturedProgram
from .program_recorder import Recorder
from .weight_packing import Packing

_PLAIN = AttentionForms()


def make_placement(cores: Cores, recorder: Recorder | None = None) -> Placement:
    """Return the placement of steps on cores, or on a recorder that stands in for absent cores."""
    if cores.platform == "CUDA" and recorder is None:
        return EagerPlacement(torch.device("cuda", cores.index))
    return driver().make_placement(cores, recorder)


def set_matmul_precision(name: str) -> None:
    """Set the precision of float32 matrix products in graphs traced from now on, which only matters on a TPU."""
    driver().set_matmul_precision(name)


def make_state(
    placement: Placement,
    tensors: Iterable[Tensor],
    shardings: Mapping[int, Sharding] | None = None,
    slots: Callable[[], Sequence[Slot]] = no_slots,
) -> DeviceState:
    """Return the state of tensors at a placement. `slots` lists the slots in which the user keeps them."""
    if isinstance(placement, CorePlacement):
        return HeldState(tensors, shardings, Packing(placement), slots)
    return HostState(tensors, shardings)


def make_program(
    placement: Placement,
    role: str,
    state: DeviceState,
    sums: Sums,
    *,
    jit_compile: str | bool = "auto",
    donate: bool = False,
    matmul_precision: str = "default",
    attention: AttentionForms = _PLAIN,
    python_state: Callable[[], dict[str, Any]] = dict,
    kept: Callable[[], Mapping[str, Tensor]] = dict,
) -> Program:
    """Return the program of a step at a placement, with a state of `make_state`; for arguments see `CapturedProgram`.

    The actual form of each layer's attention is noted in `attention`.
    """
    if isinstance(placement, CorePlacement):
        assert isinstance(state, HeldState)
        return CapturedProgram(
            placement=placement,
            role=role,
            state=state,
            sums=sums,
            jit_compile=jit_compile,
            donate=donate,
            attention=attention,
            matmul_precision=matmul_precision,
            python_state=python_state,
            kept=kept,
        )
    return EagerProgram(sums, jit_compile, placement.device)
