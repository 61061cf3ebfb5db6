"""The other modules, models and parameters among the attributes of a user's `Model`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from ..metrics import is_collection, is_metric

# The depth to which nested lists and dicts are searched.
_DEPTH = 3


class Holder:
    """The base of `Model`: an object with a module, which another model may keep."""

    module: nn.Module


def find_kept_modules(owner: Any) -> dict[str, nn.Module]:
    """Return the modules among a model's attributes, and in their lists, tuples and dicts, by name.

    A kept model counts as its module. torchmetrics' objects are left out, because each pass resets them.

    Example:
        >>> from types import SimpleNamespace
        >>> owner = SimpleNamespace(module=nn.Linear(1, 1), teachers=[nn.Identity(), nn.Tanh()])
        >>> find_kept_modules(owner)
        {'teachers.0': Identity(), 'teachers.1': Tanh()}
    """
    modules: dict[str, nn.Module] = {}
    for name, value in walk_kept(owner):
        part = value.module if isinstance(value, Holder) else value
        if isinstance(part, nn.Module) and part is not owner.module and part not in modules.values():
            modules[name] = part
    return modules


def find_kept_parameters(owner: Any) -> dict[str, nn.Parameter]:
    """Return the parameters among a model's attributes, and in their lists, tuples and dicts, by name."""
    return {name: value for name, value in walk_kept(owner) if isinstance(value, nn.Parameter)}


def walk_kept(owner: Any) -> Iterator[tuple[str, Any]]:
    """Yield the modules, models and parameters among a model's attributes, by name, starting with its own module."""
    for name, value in vars(owner).items():
        yield from _walk(name, value, _DEPTH)


def _walk(name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (Holder, nn.Parameter)):
        yield name, value
    elif isinstance(value, nn.Module):
        if not is_metric(value) and not is_collection(value):
            yield name, value
    elif depth and isinstance(value, (list, tuple, Mapping)):
        # Of mappings only dicts are read: reading lazy logs would wait for the device.
        items = value.items() if isinstance(value, dict) else () if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from _walk(f"{name}.{key}", item, depth - 1)
