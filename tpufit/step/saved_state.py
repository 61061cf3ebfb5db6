"""`SavedState`: the state of training as a checkpoint keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..errors import CheckpointMismatchError, join_few
from ..optimizers import list_parameters
from ..runtime import copy_into, move
from .optimizer_state import is_of_second_part
from .state import TrainState
from .weight_names import OTHER_PREFIXES, check_weights, named_tensors


class SavedState(NamedTuple):
    """The state of training, as a checkpoint keeps it."""

    weights: Mapping[str, Tensor]  # the names of a tied tensor share one object
    training: Mapping[str, Tensor]  # the other tensors, by tpufit's names
    numbers: Mapping[str, Any]  # as JSON
    optimizers: Mapping[str, Any]  # the options and numbers of each, as JSON


def collect_state(state: TrainState) -> SavedState:
    """Return the state as a checkpoint keeps it, with the live tensors on their devices.

    Raises:
        WeightsError: The module's state has objects other than tensors.
    """
    state.write_back()  # before the tensors are listed, because held tensors are empty
    names = _names(state)
    now = state.numbers
    named = state.named_optimizers()
    for optimizer in named.values():
        if not optimizer.state:  # before the first fit; `load` expects it
            state.state_of(optimizer).create(shares=not state.placement.eager)
    swapped = {n: ema.swapped for n, o in named.items() if (ema := state.state_of(o).ema) is not None}
    numbers = {name: value for name, value in asdict(now).items() if name != "rows_seen"}
    return SavedState(
        named_tensors(state.owner.module),
        _training_tensors(state),
        numbers | {"swapped": swapped},
        {name: state.state_of(optimizer).options(names) for name, optimizer in named.items()},
    )


def trains_other_parameters(state: TrainState) -> bool:
    """True if an optimizer has parameters that aren't the module's."""
    inside = {id(parameter) for parameter in state.owner.module.parameters()}
    return any(id(p) not in inside for optimizer in state.list_every_optimizer() for p in list_parameters(optimizer))


def load_state(state: TrainState, saved: SavedState) -> None:
    """Load the state of a checkpoint into the tensors on their devices.

    Raises:
        CheckpointMismatchError: The checkpoint is of another net or optimizer. Nothing has changed.
    """
    weights = _check(state, saved)  # before the first change
    names = _names(state)
    named = state.named_optimizers()
    # Adopt before the training tensors are listed, so that the list includes the adopted tensors.
    parameters = {name: t for name, t in state.list_every_tensor().items() if isinstance(t, nn.Parameter)}
    for name, optimizer in named.items():
        state.state_of(optimizer).drop_parts()
        state.state_of(optimizer).adopt(name, parameters, saved.training, saved.optimizers[name])
    shardings = state.shardings(state.placement)
    on_device = [t for optimizer in named.values() for t in state.state_of(optimizer).list_device_state()]
    move(on_device, state.placement, shardings=shardings)
    training = _training_tensors(state)
    values = [saved.weights[name] for name in weights] + [saved.training[name] for name in training]
    copy_into([*weights.values(), *training.values()], values, state.placement, shardings)
    for name, optimizer in named.items():
        state.state_of(optimizer).load_options(names, saved.optimizers[name])
    chosen = state.numbers.chosen_steps | saved.numbers["chosen_steps"]
    kept = {name: saved.numbers[name] for name in ("step", "seed", "updates", "batches_waiting", "passes")}
    state.numbers = replace(state.numbers, **kept, chosen_steps=chosen)
    for name, optimizer in named.items():
        ema = state.state_of(optimizer).ema
        if ema is not None:
            ema.swapped = saved.numbers["swapped"].get(name, False)


def reset_to(state: TrainState, saved: SavedState) -> None:
    """Return to the host with a checkpoint's weights, see `TrainState.reset`; `load_state` loads the rest.

    Raises:
        CheckpointMismatchError: The checkpoint is of another net.
    """
    tensors = named_tensors(state.owner.module)
    check_weights(tensors, saved.weights)
    values = {id(tensor): saved.weights[name] for name, tensor in tensors.items()}
    kept = {n: t for n, t in _training_tensors(state).items() if n.startswith(OTHER_PREFIXES)}
    values |= {id(t): saved.training[name] for name, t in kept.items() if name in saved.training}
    state.reset(values)


def _check(state: TrainState, saved: SavedState) -> dict[str, Tensor]:
    """Check that a checkpoint fits, and return the module's tensors whose values it has."""
    weights = named_tensors(state.owner.module)
    names = _names(state)
    named = state.named_optimizers()
    left_out = dict.fromkeys(saved.numbers.get("left_out", []))
    unknown = [name for name in left_out if name not in weights]
    if unknown:
        raise CheckpointMismatchError(
            f"the checkpoint's net had frozen weights that this one lacks: {join_few(unknown)}. Build the net as "
            "it was when the checkpoint was saved"
        )
    weights = {name: tensor for name, tensor in weights.items() if name not in left_out}
    check_weights(weights, saved.weights)
    if named.keys() != saved.optimizers.keys():
        raise CheckpointMismatchError(
            f"the checkpoint has the optimizers {[*saved.optimizers]}, but the model has {[*named]}: compile with "
            "the same optimizers, or load only the weights, with load_weights"
        )
    for name, optimizer in named.items():
        state.state_of(optimizer).check_options(name, names, saved.optimizers[name])
    now = _training_tensors(state)
    _check_training({n: t for n, t in now.items() if n in saved.training or not is_of_second_part(n)}, saved.training)
    return weights


def _names(state: TrainState) -> dict[int, str]:
    return {id(tensor): name for name, tensor in state.list_every_tensor().items()}


def _training_tensors(state: TrainState) -> dict[str, Tensor]:
    """Return the live tensors outside the module's `state_dict`, by their names in checkpoints."""
    module = state.owner.module
    named = state.list_every_tensor()
    names = {id(tensor): name for name, tensor in named.items()}
    saved = {id(tensor) for tensor in named_tensors(module).values()}
    tensors = {f"buffer/{name}": b for name, b in module.named_buffers() if id(b) not in saved}
    known = saved | {id(tensor) for tensor in tensors.values()}
    tensors |= {name: t for name, t in named.items() if name.startswith(OTHER_PREFIXES) and id(t) not in known}
    for name, optimizer in state.named_optimizers().items():
        tensors |= state.state_of(optimizer).tensors_by_name(name, names)
    return tensors


def _check_training(expected: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    missing = [name for name in expected if name not in given]
    if missing:
        raise CheckpointMismatchError(
            f"the checkpoint lacks {join_few(missing)}: it was made with different arguments of compile, such as "
            "another loss, use_ema or accumulate_steps"
        )
    others = [
        f"{name}: {given[name].dtype} {tuple(given[name].shape)} then, {tensor.dtype} {tuple(tensor.shape)} now"
        for name, tensor in expected.items()
        if (given[name].shape, given[name].dtype) != (tensor.shape, tensor.dtype)
    ]
    if others:
        raise CheckpointMismatchError(f"the checkpoint's training state has other shapes or dtypes: {join_few(others)}")
