"""Lists an object's attributes, including slots, PyTorch's own attributes, and the variables in a closure."""

from collections.abc import Iterator
from functools import cache, lru_cache
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


def list_attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield an object's attributes and their names.

    Example:
        >>> from types import SimpleNamespace
        >>> list(list_attributes(SimpleNamespace(calls=3)))
        [('calls', 3)]
    """
    yield from list(getattr(value, "__dict__", {}).items())
    kind: type = type(value)
    for slot in _list_slots(kind):
        if hasattr(value, slot):
            yield slot, getattr(value, slot)


def list_closure(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the variables in a function's closure and their names.

    Example:
        >>> def counting(start):
        ...     return lambda: start + 1
        >>> list(list_closure(counting(3)))
        [('start', 3)]
    """
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # the variable has no value yet
            continue


def list_pytorch_attributes(value: Any) -> frozenset[str]:
    """Return the names of PyTorch's attributes of a module or an optimizer, with the attributes that schedulers add."""
    if isinstance(value, nn.Module):
        return _list_module_attributes()
    return _list_optimizer_attributes() if isinstance(value, Optimizer) else frozenset()


@cache
def _list_module_attributes() -> frozenset[str]:
    return frozenset(vars(nn.Module()))


@cache  # only when needed: the first optimizer of a process imports PyTorch's compiler, which takes a second
def _list_optimizer_attributes() -> frozenset[str]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    return frozenset(vars(optimizer)) | {"step", "_opt_called", "_step_count"}


@lru_cache(maxsize=1024)
def _list_slots(kind: type) -> tuple[str, ...]:
    by_class = [vars(base).get("__slots__", ()) for base in kind.__mro__]
    names = [name for slots in by_class for name in ((slots,) if isinstance(slots, str) else slots)]
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))
