"""The states and programs of a placement: of its cores, or of the host."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..backend import AttentionForms, DeviceState, Placement, Program, Sharding, Slot, Sums
from ..backend.eager import EagerProgram, HostState
from ..backend.state import no_slots
from .device_state import HeldState
from .ops.forms import choosing
from .ops.kernels import own_kernels
from .packing import Packing
from .placement import CorePlacement
from .program import CapturedProgram

_PLAIN = AttentionForms()


def state_at(
    placement: Placement,
    tensors: Iterable[Tensor],
    shardings: Mapping[int, Sharding] | None = None,
    slots: Callable[[], Sequence[Slot]] = no_slots,
) -> DeviceState:
    """Return the state of tensors that are at a placement. `slots` lists the slots of the user's that they are in."""
    if isinstance(placement, CorePlacement):
        return HeldState(tensors, shardings, Packing(placement), slots)
    return HostState(tensors, shardings)


def program_at(
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
) -> Program:
    """Return a step at a placement, whose state `state_at` made; the arguments are those of `CapturedProgram`.

    What form of attention each layer gets is noted in `attention`.
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
            inside=lambda: own_kernels(
                forms=choosing(attention, placement)
            ),  # on one core too: there native batch norm in eval mode has no backward pass
            matmul_precision=matmul_precision,
            python_state=python_state,
        )
    return EagerProgram(sums, jit_compile)
