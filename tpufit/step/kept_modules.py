"""What a user's `Model` keeps beside its module: other modules, other models, single parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from ..metrics import is_collection, is_metric

# The attributes of `Model` itself; a loss that is a module is known to the arguments of `compile`.
_OURS = ("module", "optimizer", "loss", "loss_weights", "history")

# The depth of lists and dicts that are looked through.
_DEPTH = 3


class Holder:
    """The base of `Model`: what has a module, and may itself be kept by another model."""

    module: nn.Module


def kept_modules(owner: Any) -> dict[str, nn.Module]:
    """Return the modules among a model's attributes, and in lists, tuples and dicts there, by name.

    Of another model among them it is that one's module. torchmetrics' objects are left out: a pass resets them.

    Example:
        >>> from types import SimpleNamespace
        >>> owner = SimpleNamespace(module=nn.Linear(1, 1), teachers=[nn.Identity(), nn.Tanh()])
        >>> kept_modules(owner)
        {'teachers.0': Identity(), 'teachers.1': Tanh()}
    """
    found: dict[str, nn.Module] = {}
    for name, value in kept(owner):
        part = value.module if isinstance(value, Holder) else value
        if isinstance(part, nn.Module) and part is not owner.module and part not in found.values():
            found[name] = part
    return found


def kept_parameters(owner: Any) -> dict[str, nn.Parameter]:
    """Return the parameters among a model's attributes that no module has, in the same places, by name."""
    return {name: value for name, value in kept(owner) if isinstance(value, nn.Parameter)}


def kept(owner: Any) -> Iterator[tuple[str, Any]]:
    """Yield the modules, models and parameters among a model's attributes, by name."""
    for name, value in vars(owner).items():
        if name not in _OURS:
            yield from _in(name, value, _DEPTH)


def _in(name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (Holder, nn.Parameter)):
        yield name, value
    elif isinstance(value, nn.Module):
        if not is_metric(value) and not is_collection(value):
            yield name, value
    elif depth and isinstance(value, (list, tuple, Mapping)):
        # Not any mapping is a dict of the user's: logs wait for the device if they are read.
        items = value.items() if isinstance(value, dict) else () if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from _in(f"{name}.{key}", item, depth - 1)
