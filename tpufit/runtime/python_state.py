"""`facts`: the numbers, words and flags that the user's Python keeps between two steps.

A graph that is replayed runs no Python. So a step that changes any of these can't be replayed, and a change between two
steps needs another graph.
"""

import enum
import functools
import itertools
import operator
import random
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

# The limits of the walk: its depth, the items of one container (of a larger one only the number counts), and all facts
# together, for a nest of lists may hold a whole data set.
_DEPTH = 4
_ITEMS = 100
_FACTS = 10_000

_PLAIN = (int, float, complex, str, bytes, type(None), enum.Enum, torch.dtype, torch.device)
_OTHER = object()
_FORMS: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    ((np.generic, itertools.count), repr),
    (random.Random, lambda value: hash(value.getstate())),
    (np.random.Generator, lambda value: repr(value.bit_generator.state)),
    (np.random.RandomState, lambda value: repr(value.get_state(legacy=False))),
)

# The attributes of every module. Only the mode among them is a matter of the user's.
_TORCHS = frozenset(vars(nn.Module())) - {"training"}
_LIBRARIES = ("torch", "tpufit", "numpy", "builtins")  # torchmetrics and its like too

_Facts = Iterator[tuple[str, Any]]
_Globals = dict[str, tuple[dict[str, Any], str]]


def facts(objects: Mapping[str, Any]) -> dict[str, Any]:
    """List the values that some objects keep, by name, in a form that can be compared and hashed.

    It lists their attributes and those of a module's parts, through lists, dicts and objects of the user's; small host
    tensors and arrays; the positions of iterators and random number generators; and of functions and methods the plain
    values among their closure's variables and the globals that they name. It leaves out tensors on a device.

    Args:
        objects: Modules, functions, classes and any other objects, by name.

    Example:
        >>> class Net(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.scale, self.calls = {"alpha": 0.5}, [7]
        >>> facts({"Net": Net()})
        {'Net.training': True, 'Net.scale': 1, "Net.scale['alpha']": 0.5, 'Net.calls': 1, 'Net.calls[0]': 7}
    """
    found: dict[str, Any] = {}
    seen: set[int] = set()
    for name, value in objects.items():
        found.update(itertools.islice(_of_value(name, value, _DEPTH, seen), _FACTS))
    return found


def _of_value(name: str, value: Any, depth: int, seen: set[int]) -> _Facts:
    plain = _plain(value)
    if plain is not _OTHER:
        yield name, plain
        return
    if isinstance(value, (Tensor, Optimizer, types.ModuleType)) or not depth or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, (Mapping, list, tuple, deque)):
        yield name, len(value)
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in itertools.islice(items, _ITEMS):
            yield from _of_value(f"{name}[{key!r}]", item, depth - 1, seen)
    elif isinstance(value, (set, frozenset)):
        yield name, frozenset(map(repr, value)) if len(value) <= _ITEMS else len(value)
    elif isinstance(value, types.GeneratorType):
        if value.gi_frame is not None:
            yield name, value.gi_frame.f_lasti
            yield from _of_value(name, value.gi_frame.f_locals, depth - 1, seen)
    elif isinstance(value, functools.partial):
        yield from _of_value(name, (value.func, value.args, value.keywords), depth, seen)
    elif isinstance(value, types.MethodType):
        yield from _of_value(name, value.__self__, depth, seen)
    elif isinstance(value, types.FunctionType):
        yield from _of_function(value)
    elif isinstance(value, type):
        yield from _of_class(value)
    elif isinstance(value, nn.Module):
        for path, part in value.named_modules():
            if part is value or id(part) not in seen:
                seen.add(id(part))
                yield from _of_object(path or name, part, depth, seen)
    elif not _is_a_librarys(type(value)):
        yield from _of_object(name, value, depth, seen)


def _of_object(name: str, value: Any, depth: int, seen: set[int]) -> _Facts:
    yield from _of_value(name, type(value), depth, seen)
    hidden = _TORCHS if isinstance(value, nn.Module) else ()
    for key, attribute in _attributes(value):
        if key not in hidden:
            yield from _of_value(f"{name}.{key}", attribute, depth - 1, seen)


def _attributes(value: Any) -> _Facts:
    yield from getattr(value, "__dict__", {}).items()
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, slot) and slot != "__dict__":
                yield slot, getattr(value, slot)


def _of_class(kind: type) -> _Facts:
    for label, (variables, name) in _globals_of_class(kind).items():
        if (plain := _plain(variables.get(name, _OTHER))) is not _OTHER:
            yield label, plain


@functools.lru_cache(maxsize=1024)
def _globals_of_class(kind: type) -> _Globals:
    """The plain globals that the methods of a class name. Later none is added: a function doesn't become a number."""
    found: _Globals = {}
    for base in kind.__mro__:
        functions = () if _is_a_librarys(base) else vars(base).values()
        for function in functions:
            if isinstance(function, types.FunctionType):
                found |= _globals_of(function)
    return found


def _globals_of(function: types.FunctionType) -> _Globals:
    """The plain globals that a function names: where each is kept, by its module and name."""
    variables = function.__globals__
    plain = [name for name in function.__code__.co_names if _plain(variables.get(name, _OTHER)) is not _OTHER]
    return {f"{function.__module__}.{name}": (variables, name) for name in plain}


def _of_function(function: types.FunctionType) -> _Facts:
    if _is_a_librarys(function):
        return
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            plain = _plain(cell.cell_contents)
        except ValueError:  # of a name that has no value yet
            continue
        if plain is not _OTHER:
            yield f"{function.__qualname__}'s {name}", plain
    for label, (variables, name) in _globals_of(function).items():
        yield label, _plain(variables[name])


def _plain(value: Any) -> Any:
    """A value in a form that can be compared, if it has one; else a mark."""
    if isinstance(value, float) and value != value:
        return "nan"  # which is not equal to itself
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (Tensor, np.ndarray)):
        if isinstance(value, Tensor) and (value.device.type != "cpu" or isinstance(value, nn.Parameter)):
            return _OTHER
        # For a large one its identity, and the number of changes that PyTorch has made to it.
        small = (value.numel() if isinstance(value, Tensor) else value.size) <= _ITEMS
        return repr(value.tolist()) if small else (id(value), getattr(value, "_version", 0))
    for kind, form in _FORMS:
        if isinstance(value, kind):
            return form(value)
    if isinstance(value, torch.Generator) and value.device.type == "cpu":
        return hash(value.get_state().numpy().tobytes())
    if isinstance(value, Iterator) and not isinstance(value, types.GeneratorType):
        return operator.length_hint(value, -1)
    return _OTHER


def _is_a_librarys(thing: type | types.FunctionType) -> bool:
    return (thing.__module__ or "").startswith(_LIBRARIES)
