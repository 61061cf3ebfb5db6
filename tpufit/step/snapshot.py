"""`Snapshot`: everything that training changes, at one moment, to undo a trial."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from ..runtime import copy_into, copy_to_host
from ..utils.random import RNGState
from .optimizer_state import OptimizerState
from .state import TrainNumbers, TrainState


class Snapshot(NamedTuple):
    """Everything that training changes, at one moment.

    The values are on the host, because on the device they would double the memory of the state, and a failed step
    could lose them too.
    """

    dicts: list[tuple[MutableMapping[Any, Any], dict[Any, Any]]]  # of Python objects, each with a copy of its items
    swapped: list[tuple[OptimizerState, bool]]  # each with averages, and True if the module has the averages
    tensors: list[Tensor]
    values: list[Tensor]  # of these tensors, on the host
    numbers: TrainNumbers
    random: RNGState


def take_snapshot(state: TrainState) -> Snapshot:
    """Copy everything, to put it back after a trial. **This waits** for the device."""
    state.write_back()
    optimizers = list(state.named_optimizers().values())
    modules = [part for module in state.modules for part in module.modules()]
    # All attributes of modules, not only modes: a flag may say that a layer has seen its first batch, and a buffer
    # may be replaced by another tensor. The model's attributes too, because the user's steps may change them.
    dicts = [_copy_items(vars(part)) for part in (state.owner, *modules)]
    dicts += [_copy_items(part._buffers) for part in modules]
    dicts += [_copy_items(group) for optimizer in optimizers for group in optimizer.param_groups]
    dicts += [_copy_items(optimizer.state) for optimizer in optimizers]
    values = [_copy_items(values) for optimizer in optimizers for values in optimizer.state.values()]
    tensors, _ = state.tensors()
    for items, _ in values:
        tensors |= {id(value): value for value in items.values() if isinstance(value, Tensor)}
    return Snapshot(
        dicts=[*dicts, *values],
        swapped=[(one, one.ema.swapped) for one in state.optimizers.values() if one.ema is not None],
        tensors=list(tensors.values()),
        values=copy_to_host(list(tensors.values()), "state"),
        numbers=replace(state.numbers, chosen_steps=dict(state.numbers.chosen_steps)),
        random=RNGState.now(),
    )


def put_back(state: TrainState, before: Snapshot) -> None:
    """Restore the snapshot `before`. Graphs captured since then become invalid."""
    state.device.clear_lost()  # every lost value is replaced below
    state.write_back()
    for now, kept in before.dicts:
        for key in now.keys() - kept.keys():
            del now[key]
        now.update(kept)
    for one, swapped in before.swapped:
        if one.ema is not None:
            one.ema.swapped = swapped
    state.numbers = before.numbers
    copy_into(before.tensors, before.values, state.placement, state.device.shardings)
    before.random.restore()


def _copy_items(values: MutableMapping[Any, Any]) -> tuple[MutableMapping[Any, Any], dict[Any, Any]]:
    return values, dict(values)
