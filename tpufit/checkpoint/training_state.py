"""What of a model's training a checkpoint holds: how it is taken out of a model, and put into one again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import CheckpointMismatchError, WeightsError, few
from ..optimizers import device_state, parameters
from ..runtime import copy_into, move
from ..step import Steps, copies
from .directory import Checkpoint, Score
from .json_codec import is_plain
from .weights import match_weights, named_tensors


def take(
    model: Steps,
    state: Mapping[str, Any],
    extra: Mapping[str, Tensor] | None = None,
    metric: Score | None = None,
) -> Checkpoint:
    """A copy of all that training changes, on the host. **This waits** for the device, once.

    Args:
        model: Whose training.
        state: What the checkpoint's `state` holds besides, as JSON can hold it.
        extra: Further tensors, on the host or the device, by name.
        metric: How good it is.

    Raises:
        WeightsError: The module keeps something in its state that isn't a tensor.
    """
    model.write_back()
    weights = named_tensors(model.module)
    training = {**_training_tensors(model), **(extra or {})}
    unique = {id(tensor): tensor for tensor in (*weights.values(), *training.values())}
    host = dict(zip(unique, copies(list(unique.values()), "checkpoint"), strict=True))
    learned = {id(parameter) for parameter in model.module.parameters() if parameter.requires_grad}
    return Checkpoint(
        step=model._step,
        weights={name: host[id(tensor)] for name, tensor in weights.items()},
        training={name: host[id(tensor)] for name, tensor in training.items()},
        state={
            **state,
            "model": {
                "step": model._step,
                "seed": model._seed,
                "updates": model._updates,
                "batches_waiting": model._batches_waiting,
                "chosen_steps": model._chosen_steps,
                "swapped": {name: model._averages[id(o)].swapped for name, o in _own_averages(model)},
            },
            "optimizers": {name: _options(optimizer, _names(model)) for name, optimizer in _optimizers(model)},
            "settings": settings(model),
        },
        learned=[name for name, tensor in weights.items() if id(tensor) in learned],
        metric=metric,
        mesh={"cores": model._place.count},
    )


def put_back(model: Steps, checkpoint: Checkpoint) -> None:
    """Make a model's training what it was when a checkpoint was taken. The model is where it shall be trained.

    Args:
        model: A model over the same net, compiled in the same way.
        checkpoint: What it shall go on from.

    Raises:
        CheckpointMismatchError: It is of another net or another optimizer. Nothing has been changed then.
    """
    weights = named_tensors(model.module)
    check_weights(weights, checkpoint.weights)
    optimizers = dict(_optimizers(model))
    _check_optimizers(model, optimizers, checkpoint.state["optimizers"])
    _check_training(_training_tensors(model), checkpoint.training)
    made = _missing_state(model, optimizers, checkpoint.training)

    for optimizer, parameter, key, value in made:
        optimizer.state[parameter][key] = value.clone()
    move((t for optimizer in optimizers.values() for t in device_state(optimizer)), model._place)
    training = _training_tensors(model)
    values = [checkpoint.weights[name] for name in weights] + [checkpoint.training[name] for name in training]
    copy_into([*weights.values(), *training.values()], values, model._place)
    for name, optimizer in optimizers.items():
        _set_options(optimizer, _names(model), checkpoint.state["optimizers"][name])
    model._take_in_new_state()
    numbers = checkpoint.state["model"]
    model._step, model._seed = numbers["step"], numbers["seed"]
    model._updates, model._batches_waiting = numbers["updates"], numbers["batches_waiting"]
    model._chosen_steps.update(numbers["chosen_steps"])
    for name, optimizer in _own_averages(model):
        model._averages[id(optimizer)].swapped = numbers["swapped"].get(name, False)


def begin_anew(model: Steps, checkpoint: Checkpoint) -> None:
    """After a step that has cost the weights: be on the host, with those of a checkpoint. `put_back` does the rest.

    Raises:
        CheckpointMismatchError: It is of another net.
    """
    own = named_tensors(model.module)
    check_weights(own, checkpoint.weights)
    values = {id(tensor): checkpoint.weights[name] for name, tensor in own.items()}
    kept = {name: t for name, t in _training_tensors(model).items() if name.startswith(("buffer/", "loss/"))}
    values |= {id(t): checkpoint.training[name] for name, t in kept.items() if name in checkpoint.training}
    model.begin_anew(values)


def check_weights(own: Mapping[str, Tensor], given: Mapping[str, Tensor], dtypes: bool = True) -> None:
    """Make sure that weights are those of a module.

    Args:
        own: The module's tensors by name.
        given: The weights.
        dtypes: Whether their dtypes must agree too.

    Raises:
        CheckpointMismatchError: They aren't; the message names what differs.
    """
    try:
        match_weights(own, given)
    except WeightsError as error:
        raise CheckpointMismatchError(
            f"the checkpoint is of another net: {error}".removesuffix(". skip_mismatch=True loads the rest")
            + ". model.load_weights(..., skip_mismatch=True) takes over the weights that fit, and begins anew otherwise"
        ) from error
    others = [f"{n}: {given[n].dtype} then, {t.dtype} now" for n, t in own.items() if given[n].dtype != t.dtype]
    if dtypes and others:
        raise CheckpointMismatchError(
            f"the checkpoint has other dtypes: {few(others)}. compile with the precision that it was made with"
        )


def settings(model: Steps) -> dict[str, Any]:
    """What else the last digits of training depend on."""
    return {
        "precision": model._precision,
        "steps_per_execution": model._steps_per_execution,
        "accumulate_steps": model._gradients.accumulate_steps,
        "run_on": "host" if model._place.on_host else "device",
    }


def _training_tensors(model: Steps) -> dict[str, Tensor]:
    """What training changes beside the module's own state, by name: the live tensors."""
    names = _names(model)
    saved = {id(tensor) for tensor in named_tensors(model.module).values()}
    found = {f"buffer/{name}": b for name, b in model.module.named_buffers() if id(b) not in saved}
    for i, module in enumerate(model._loss.modules if model._loss else ()):
        found |= {f"loss/{i}/{name}": t for name, t in (*module.named_parameters(), *module.named_buffers())}
    for name, optimizer in _optimizers(model):
        for parameter, state in optimizer.state.items():
            found |= {
                f"{name}/{key}/{names[id(parameter)]}": value
                for key, value in state.items()
                if isinstance(value, Tensor)
            }
        for kind, parts in (("accumulated", model._accumulators), ("average", model._averages)):
            if id(optimizer) in parts:
                found |= {f"{kind}/{name}/{key}": t for key, t in parts[id(optimizer)].named(names).items()}
    return found


def _missing_state(
    model: Steps, optimizers: Mapping[str, Optimizer], given: Mapping[str, Tensor]
) -> list[tuple[Optimizer, nn.Parameter, str, Tensor]]:
    """State that an optimizer makes in its first step, and hasn't yet: whose, what of, its key and its value."""
    own = dict(model.module.named_parameters())
    made = []
    for full, value in given.items():
        owner, _, rest = full.partition("/")
        key, _, name = rest.partition("/")
        if owner in optimizers and name in own and key not in optimizers[owner].state.get(own[name], {}):
            made.append((optimizers[owner], own[name], key, value))
    return made


def _check_training(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    missing = [name for name in own if name not in given]
    if missing:
        raise CheckpointMismatchError(
            f"the checkpoint lacks {few(missing)}: it was made with other arguments of compile, such as another loss, "
            "use_ema or accumulate_steps"
        )
    others = [
        f"{name}: {given[name].dtype} {tuple(given[name].shape)} then, {tensor.dtype} {tuple(tensor.shape)} now"
        for name, tensor in own.items()
        if (given[name].shape, given[name].dtype) != (tensor.shape, tensor.dtype)
    ]
    if others:
        raise CheckpointMismatchError(f"the checkpoint's training state has other shapes or dtypes: {few(others)}")


def _check_optimizers(model: Steps, own: Mapping[str, Optimizer], given: Mapping[str, Any]) -> None:
    names = _names(model)
    if own.keys() != given.keys():
        raise CheckpointMismatchError(f"the checkpoint is of the optimizers {[*given]}, and the model has {[*own]}")
    for name, optimizer in own.items():
        kind = type(optimizer).__name__
        if kind != given[name]["class"]:
            raise CheckpointMismatchError(
                f"the checkpoint is of {given[name]['class']}, and {name} is {kind}: compile with the same optimizer, "
                "or take over the weights only, with load_weights"
            )
        groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        before = [group["params"] for group in given[name]["groups"]]
        if groups != before:
            sizes = [[len(group) for group in which] for which in (before, groups)]
            raise CheckpointMismatchError(
                f"the parameter groups of {name} ({kind}) are others: {sizes[0]} parameters then, {sizes[1]} now, or "
                "other ones. Build the groups as they were"
            )


def _options(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """An optimizer's options and numbers, as JSON can hold them."""
    return {
        "class": type(optimizer).__name__,
        "groups": [
            {"params": [names[id(p)] for p in group["params"]]}
            | {key: plain for key, value in group.items() if key != "params" and is_plain(plain := _plain(value))}
            for group in optimizer.param_groups
        ],
        "numbers": {
            names[id(parameter)]: {key: value for key, value in state.items() if is_plain(value)}
            for parameter, state in optimizer.state.items()
        },
    }


def _set_options(optimizer: Optimizer, names: Mapping[int, str], given: Mapping[str, Any]) -> None:
    for group, options in zip(optimizer.param_groups, given["groups"], strict=True):
        for key, value in options.items():
            if key != "params":
                group[key] = tuple(value) if isinstance(group.get(key), tuple) else value
    for parameter in parameters(optimizer):
        numbers = given["numbers"].get(names[id(parameter)])
        if numbers:
            optimizer.state[parameter].update(numbers)


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value.item() if isinstance(value, Tensor) and not value.dim() else value


def _optimizers(model: Steps) -> Iterator[tuple[str, Optimizer]]:
    """The model's optimizers, by the names of its attributes."""
    return ((name, value) for name, value in vars(model).items() if isinstance(value, Optimizer))


def _own_averages(model: Steps) -> Iterator[tuple[str, Optimizer]]:
    return ((name, optimizer) for name, optimizer in _optimizers(model) if id(optimizer) in model._averages)


def _names(model: Steps) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.module.named_parameters()}
