"""`facts`: the values that the user's Python keeps between two steps.

A graph that is replayed runs no Python. So a step that changes any of these can't be replayed, and a change between two
steps needs another graph. What no walk over objects can find, an audit does (see `audits`), but only the walk sees a
count that each step moves on: where no Python runs, it stands still.
"""

import contextvars
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

from .attributes import attributes, closure

# The limits of the walk: its depth, the items of one container (of a larger one the number and the plain values
# together), and all facts together, for a nest of lists may hold a whole data set.
_DEPTH = 4
_ITEMS = 100
_FACTS = 10_000

# The beginnings of names that Python gives classes of its own accord, and never changes.
_OF_PYTHON = ("__", "_is_protocol", "_is_runtime_protocol")

# An array of so many bytes is looked at.
_LOOKED_AT = 1 << 16

_PLAIN = (int, float, complex, str, bytes, type(None), enum.Enum, torch.dtype, torch.device, types.BuiltinFunctionType)
_SIMPLE = {int, float, bool, str, type(None)}
_OTHER = object()
_FORMS: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    ((np.generic, itertools.count), repr),
    (random.Random, lambda value: hash(value.getstate())),
    (np.random.Generator, lambda value: repr(value.bit_generator.state)),
    (np.random.RandomState, lambda value: repr(value.get_state(legacy=False))),
)

# The attributes of every module. Only the mode among them is a matter of the user's.
_TORCHS = frozenset(vars(nn.Module())) - {"training"}
# And of every optimizer, with those that a scheduler of rates sets.
_OPTIMIZERS = frozenset(vars(torch.optim.SGD([nn.Parameter(torch.zeros(1))]))) | {"step", "_opt_called", "_step_count"}
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OF_TORCH = "torch torch_geometric torch_xla torchao torchaudio torchdata torchmetrics torchtext torchtune torchvision"
_LIBRARIES = frozenset(("tpufit", "numpy", "builtins", "typing", "abc", *_OF_TORCH.split()))

_Facts = Iterator[tuple[str, Any]]
_Named = dict[str, tuple[Mapping[str, Any], str]]


def facts(objects: Mapping[str, Any], deep: bool = False) -> dict[str, Any]:
    """List the values that some objects keep, by name, in a form that can be compared and hashed.

    It lists their attributes and those of their classes and of a module's parts, through lists, dicts and objects of
    the user's; small host tensors and arrays; the positions of iterators and random number generators; and the plain
    values among a function's variables: those of its closure, its defaults, and the globals that it names. It leaves
    out tensors on a device.

    If `deep`, it follows functions to the lists, objects and functions among their variables, and lists the context
    variables and the numbers in the groups and state of a user's optimizer too, which may change at any time.

    Example:
        >>> class Net(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.scale, self.calls = {"alpha": 0.5}, [7]
        >>> facts({"Net": Net()})
        {'Net.training': True, 'Net.scale': 1, "Net.scale['alpha']": 0.5, 'Net.calls': 1, 'Net.calls[0]': 7}
    """
    walk = _Walk(deep)
    found: dict[str, Any] = {}
    for name, value in objects.items():
        found.update(itertools.islice(walk.of(name, value, _DEPTH), _FACTS))
    if deep:
        found.update({f"the context variable {v.name}": _comparable(x) for v, x in contextvars.copy_context().items()})
    return {name: value for name, value in found.items() if value is not _OTHER}


class _Walk:
    """One walk over objects, which comes to each of them once; `deep` as in `facts`."""

    def __init__(self, deep: bool) -> None:
        self._deep = deep
        self._seen: set[int] = set()

    def of(self, name: str, value: Any, depth: int) -> _Facts:
        """List what a value keeps, as deep as is left."""
        plain = _comparable(value)
        if plain is not _OTHER:
            yield name, plain
            return
        if isinstance(value, (Tensor, types.ModuleType)) or not depth or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, (Mapping, list, tuple, deque)):
            yield from self._of_container(name, value, depth)
        elif isinstance(value, (set, frozenset)):
            yield name, frozenset(map(repr, value)) if len(value) <= _ITEMS else len(value)
        elif isinstance(value, types.GeneratorType):
            if value.gi_frame is not None:
                yield name, value.gi_frame.f_lasti
                yield from self.of(name, value.gi_frame.f_locals, depth - 1)
        elif isinstance(value, functools.partial):
            yield from self.of(name, (value.func, value.args, value.keywords), depth)
        elif isinstance(value, types.MethodType):
            yield from self.of(name, value.__self__, depth)
        elif isinstance(value, types.FunctionType):
            yield name, value.__code__  # which is equal to that of another time, if it is made anew
            yield from self._of_function(value, depth)
        elif isinstance(value, type):
            yield from self._of_class(value, depth)
        elif isinstance(value, nn.Module):
            for path, part in value.named_modules():
                if part is value or id(part) not in self._seen:
                    self._seen.add(id(part))
                    yield from self._of_object(path or name, part, depth)
        elif not is_a_librarys(type(value)):
            yield from self._of_object(name, value, depth)

    def _of_container(self, name: str, value: Any, depth: int) -> _Facts:
        yield name, len(value)
        if len(value) > _ITEMS:
            items = tuple(value.values() if isinstance(value, Mapping) else value)
            if set(map(type, items)) <= _SIMPLE:
                yield f"{name}[...]", hash(items)
                return
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in itertools.islice(pairs, _ITEMS):
            yield from self.of(f"{name}[{key!r}]", item, depth - 1)

    def _of_object(self, name: str, value: Any, depth: int) -> _Facts:
        yield from self.of(name, type(value), depth)
        if isinstance(value, nn.Module):
            hooks = tuple(number for kind in _HOOKS for number in vars(value).get(kind) or ())
            if hooks:
                yield f"the hooks of {name}", hooks
        hidden = _TORCHS if isinstance(value, nn.Module) else _OPTIMIZERS if isinstance(value, Optimizer) else ()
        for key, attribute in attributes(value):
            if key not in hidden:
                yield from self.of(f"{name}.{key}", attribute, depth - 1)
        if isinstance(value, Optimizer) and self._deep:
            yield from self._of_counts(name, value)

    @staticmethod
    def _of_counts(name: str, optimizer: Optimizer) -> _Facts:
        """List the numbers in an optimizer's groups and state, which its Python may decide by."""
        for place, entries in (("param_groups", optimizer.param_groups), ("state", optimizer.state.values())):
            for i, entry in enumerate(entries):
                for key, value in entry.items():
                    if key != "lr" and isinstance(value, (int, float)):
                        yield f"{name}.{place}[{i}][{key!r}]", _comparable(value)

    def _of_class(self, kind: type, depth: int) -> _Facts:
        yield from self._of_variables(_variables_of_class(kind), depth)

    def _of_function(self, function: types.FunctionType, depth: int) -> _Facts:
        if is_a_librarys(function):
            return
        # Its own variables and defaults may be replaced, its code not.
        for name, value in (*closure(function), *_defaults(function)):
            yield from self._of_variable(f"{function.__qualname__}'s {name}", value, depth)
        yield from self._of_variables(_globals_of(function), depth)

    def _of_variables(self, variables: _Named, depth: int) -> _Facts:
        for label, (namespace, name) in variables.items():
            yield from self._of_variable(label, namespace.get(name, _OTHER), depth)

    def _of_variable(self, label: str, value: Any, depth: int) -> _Facts:
        if self._deep:
            yield from self.of(label, value, depth - 1)
        elif (plain := _comparable(value)) is not _OTHER:
            yield label, plain


def _defaults(function: types.FunctionType) -> _Facts:
    code = function.__code__
    given = function.__defaults__ or ()
    yield from zip(code.co_varnames[code.co_argcount - len(given) : code.co_argcount], given, strict=True)
    yield from (function.__kwdefaults__ or {}).items()


@functools.lru_cache(maxsize=1024)
def _variables_of_class(kind: type) -> _Named:
    """The variables of a class, and the globals that its methods name. Later none is added."""
    found: _Named = {}
    for base in kind.__mro__:
        for name, value in () if is_a_librarys(base) else vars(base).items():
            if isinstance(value, types.FunctionType):
                found |= _globals_of(value)
            elif not name.startswith(_OF_PYTHON) and not hasattr(value, "__get__"):  # properties and their like
                found[f"{base.__qualname__}.{name}"] = vars(base), name
    return found


def _globals_of(function: types.FunctionType) -> _Named:
    """The globals that a function names: where each is kept, by its module and name. Modules and types are left out."""
    variables = function.__globals__
    kept = [n for n in function.__code__.co_names if n in variables and not isinstance(variables[n], _NEVER_CHANGE)]
    return {f"{function.__module__}.{name}": (variables, name) for name in kept}


_NEVER_CHANGE = (types.ModuleType, types.BuiltinFunctionType)


def _comparable(value: Any) -> Any:
    """A value in a form that can be compared, if it has one; else a mark."""
    if isinstance(value, float) and value != value:
        return "nan"  # which is not equal to itself
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (Tensor, np.ndarray)):
        if isinstance(value, Tensor) and (value.device.type != "cpu" or isinstance(value, nn.Parameter)):
            return _OTHER
        if (value.numel() if isinstance(value, Tensor) else value.size) <= _ITEMS:
            return repr(value.tolist())
        # The number of changes that PyTorch has made to it says nothing of those by way of a NumPy view.
        return id(value), getattr(value, "_version", 0), _digest(value)
    for kind, form in _FORMS:
        if isinstance(value, kind):
            return form(value)
    if isinstance(value, torch.Generator) and value.device.type == "cpu":
        return hash(value.get_state().numpy().tobytes())
    if isinstance(value, Iterator) and not isinstance(value, types.GeneratorType):
        return operator.length_hint(value, -1)
    return _OTHER


def _digest(value: Tensor | np.ndarray) -> int:
    """A number that changes with the contents of an array, if it isn't large."""
    if value.nbytes > _LOOKED_AT or (isinstance(value, Tensor) and value.layout is not torch.strided):
        return 0
    array = value.detach().contiguous().view(torch.uint8).numpy() if isinstance(value, Tensor) else value
    return 0 if array.dtype.hasobject else hash(array.tobytes())


def is_a_librarys(thing: type | types.FunctionType) -> bool:
    """True for a class or function of a library, whose code is the same wherever its version is."""
    return (thing.__module__ or "").partition(".")[0] in _LIBRARIES
