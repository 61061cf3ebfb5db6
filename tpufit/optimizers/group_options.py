"""The options in an optimizer's groups: which are inputs of a step's graph, and which are part of it.

A number, such as `momentum`, begins as a part of the graph. Once its value has changed, as by `OneCycle`, it is an
input, so that later changes need no new graph. Its name is noted in the group, and so in checkpoints: a resumed
training runs the same graphs.
"""

from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer

from .learning_rates import RATE_KEYS

_VARYING = "varying_options"  # the key of a group that lists the names of its options that are inputs

# The numbers in the groups of schedule-free optimizers that a step changes.
_RUNNING = ("k", "step", "lr_max", "weight_sum")

Options = dict[str, Any]
"""Some entries of a group, by name."""


def runs_numbers(optimizer: Optimizer) -> bool:
    """True if an optimizer's steps change numbers in its groups, as schedule-free optimizers do."""
    return "weight_sum" in optimizer.param_groups[0]


def has_inputs(optimizer: Optimizer) -> bool:
    """True if numbers in an optimizer's groups, besides rates, are inputs of the graph."""
    return any(_input_names(group) for group in optimizer.param_groups)


def let_vary(group: Options, name: str) -> None:
    """Make an option of a group an input of the graph.

    Example:
        >>> group = {"momentum": 0.9}
        >>> let_vary(group, "momentum")
        >>> find_inputs(group)
        {'momentum': 0.9}
    """
    group[_VARYING] = sorted({*group.get(_VARYING, ()), name})


def let_momentum_vary(groups: Iterable[Options]) -> None:
    """Make the momentum of groups an input of the graph: `momentum`, if any, else Adam's `betas`."""
    for group in groups:
        name = _momentum_name(group)
        if name is not None:
            let_vary(group, name)


def set_momentum(group: Options, momentum: float) -> None:
    """Set the momentum of a group, if it has one.

    Example:
        >>> group = {"betas": (0.9, 0.999)}
        >>> set_momentum(group, 0.85)
        >>> group
        {'betas': (0.85, 0.999)}
    """
    name = _momentum_name(group)
    if name is not None:
        group[name] = (momentum, *group[name][1:]) if name == "betas" else momentum


def find_inputs(group: Options) -> Options:
    """Return the options of a group that are inputs of the graph."""
    return {name: group[name] for name in _input_names(group) if name in group and is_numeric(group[name])}


def find_constants(group: Options) -> Options:
    """Return the options of a group that are part of the graph, as values that can be compared."""
    others = {*RATE_KEYS, _VARYING, *find_inputs(group)}
    return {name: _comparable(value) for name, value in group.items() if name not in others}


def list_constants(optimizers: Iterable[Optimizer]) -> tuple[tuple[str, Any], ...]:
    """List the options in the optimizers' groups that are part of the graph."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return tuple(item for group in groups for item in find_constants(group).items())


def list_numbers(optimizers: Iterable[Optimizer]) -> list[set[tuple[str, Any]]]:
    """Return the numbers in each group of the optimizers, by name."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return [{(name, _comparable(value)) for name, value in group.items() if is_numeric(value)} for group in groups]


def is_numeric(option: Any) -> bool:
    """True if an option can be an input: a number, or a tuple or list of numbers.

    Example:
        >>> [is_numeric(option) for option in (0.9, (0.9, 0.999), True, "fan_in")]
        [True, True, False, False]
    """
    numbers = option if isinstance(option, (tuple, list)) and option else [option]
    return all(isinstance(number, (int, float)) and not isinstance(number, bool) for number in numbers)


def _momentum_name(group: Options) -> str | None:
    return "momentum" if group.get("momentum") else "betas" if "betas" in group else None


def _input_names(group: Options) -> tuple[str, ...]:
    return (*(_RUNNING if "weight_sum" in group else ()), *group.get(_VARYING, ()))


def _comparable(value: Any) -> Any:
    if isinstance(value, (int, float, str, bool, tuple)):
        return value
    return tuple(value) if isinstance(value, list) and is_numeric(value) else id(value)
