"""`list_values`: the values that the user's Python objects keep between two steps.

A replayed graph runs no Python. So a step that changes such a value can't be replayed, and a change between two steps
needs another graph. An audit finds what no walk over objects can (see `replay_audits`), but only the walk detects a
counter that each step increments: during replays it doesn't change.
"""

import contextvars
import enum
import functools
import itertools
import operator
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .list_attributes import list_attributes, list_closure, list_pytorch_attributes
from .object_walk import Named, ObjectWalk

# The limits of the walk: its depth; the number of objects; the items of a container (larger containers of plain values
# give only a hash and their number); and the total number of values, because a nest of lists may be a whole data set.
_DEPTH = 4
_OBJECTS = 100_000
_ITEMS = 100
_VALUES = 10_000

# The prefixes of class attributes that Python creates, and never changes.
_PYTHON_PREFIXES = ("__", "_is_protocol", "_is_runtime_protocol")

# The largest array, in bytes, whose content is hashed.
_LARGEST_HASHED = 1 << 16

_PLAIN = (int, float, complex, str, bytes, type(None), enum.Enum, torch.dtype, torch.device, types.BuiltinFunctionType)
_SIMPLE = {int, float, bool, str, type(None)}
_OTHER = object()
_FORMS: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    ((np.generic, itertools.count), repr),
    (random.Random, lambda value: hash(value.getstate())),
    (np.random.Generator, lambda value: repr(value.bit_generator.state)),
    (np.random.RandomState, lambda value: repr(value.get_state(legacy=False))),
)

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OF_TORCH = "torch torch_geometric torch_xla torchao torchaudio torchdata torchmetrics torchtext torchtune torchvision"
_FIXED_MODULES = frozenset(("tpufit", "numpy", "builtins", "typing", "abc", *_OF_TORCH.split()))

# Objects that the walk enters itself. Of other objects it takes what `pickle` would save.
_ENTERED = (Mapping, list, tuple, deque, set, frozenset, types.GeneratorType)

_Variables = dict[str, tuple[Mapping[str, Any], str]]


def list_values(objects: Mapping[str, Any], deep: bool = False) -> dict[str, Any]:
    """List the values that some objects keep, by name, in a comparable and hashable form.

    Lists their attributes and the attributes of their classes and of a module's parts, through lists, dicts and the
    user's objects; what `pickle` saves of a `Decimal`, a `bytearray`, a `datetime` and the like; small host tensors and
    arrays; the positions of iterators and random number generators; and the plain values among a function's variables:
    its closure, its defaults, and the globals that it names. Omits tensors on a device.

    With `deep`, also follows functions to the lists, objects and functions among their variables, and lists context
    variables and the numbers in the groups and state of a user's optimizer, which may change at any time.

    Example:
        >>> class Net(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.scale, self.calls = {"alpha": 0.5}, [7]
        >>> list_values({"Net": Net()})
        {'Net.training': True, 'Net.scale': 1, "Net.scale['alpha']": 0.5, 'Net.calls': 1, 'Net.calls[0]': 7}
    """
    walk = _Walk(deep)
    found: dict[str, Any] = {}
    for name, value in objects.items():
        found.update(itertools.islice(walk.walk(name, value, _DEPTH), _VALUES))
    if deep:
        found.update({f"the context variable {v.name}": _comparable(x) for v, x in contextvars.copy_context().items()})
    return {name: value for name, value in found.items() if value is not _OTHER}


def list_device_tensors(objects: Mapping[str, Any]) -> dict[str, Tensor]:
    """List the tensors on a device that some objects keep, by name, except parameters and buffers.

    Example:
        >>> list_device_tensors({"Net": types.SimpleNamespace(hidden=torch.zeros(2, device="meta"))})
        {'Net.hidden': tensor(..., device='meta', size=(2,))}
    """
    walk = _Walk(deep=True)
    for name, value in objects.items():
        deque(itertools.islice(walk.walk(name, value, _DEPTH), _VALUES), maxlen=0)
    return walk.tensors


class _Walk(ObjectWalk):
    """Lists the values that objects keep; `deep` as in `list_values`.

    Attributes:
        tensors: The visited device tensors by name, except parameters.
    """

    def __init__(self, deep: bool) -> None:
        super().__init__(_OBJECTS)
        self._deep = deep
        self.tensors: dict[str, Tensor] = {}

    def walk(self, name: str, value: Any, depth: int) -> Named:
        """List the values in a value, to the remaining depth."""
        plain = _comparable(value)
        if plain is not _OTHER:
            yield name, plain
        elif not isinstance(value, Tensor):
            yield from super().walk(name, value, depth)
        elif not isinstance(value, nn.Parameter):
            self.tensors[name] = value

    def visit_container(self, name: str, value: Any, depth: int) -> Named:
        yield name, len(value)
        if len(value) > _ITEMS:
            items = tuple(value.values() if isinstance(value, Mapping) else value)
            if set(map(type, items)) <= _SIMPLE:
                yield f"{name}[...]", hash(items)
                return
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in itertools.islice(pairs, _ITEMS):
            yield from self.walk(f"{name}[{key!r}]", item, depth - 1)

    def visit_part(self, name: str, path: str, part: nn.Module, depth: int) -> Named:
        yield from self._walk_object(path or name, part, depth)

    def visit_object(self, name: str, value: Any, depth: int) -> Named:
        if isinstance(value, (set, frozenset)):
            yield name, frozenset(map(repr, value)) if len(value) <= _ITEMS else len(value)
        elif isinstance(value, types.GeneratorType):
            if value.gi_frame is not None:
                yield name, value.gi_frame.f_lasti
                yield from self.walk(name, value.gi_frame.f_locals, depth - 1)
        elif isinstance(value, type):
            yield from self._walk_variables(_find_class_variables(value), depth)
        elif not has_fixed_variables(type(value)):
            yield from self._walk_object(name, value, depth)

    def _walk_object(self, name: str, value: Any, depth: int) -> Named:
        yield from self.walk(name, type(value), depth)
        if isinstance(value, nn.Module):
            hooks = tuple(number for kind in HOOKS for number in vars(value).get(kind) or ())
            if hooks:
                yield f"the hooks of {name}", hooks
        hidden = list_pytorch_attributes(value) - {"training"}  # the user changes the mode
        for key, attribute in list_attributes(value):
            if key in hidden:
                continue
            if type(attribute) in _SIMPLE and attribute == attribute:  # most are; a generator for each takes longer
                yield f"{name}.{key}", attribute
            else:
                yield from self.walk(f"{name}.{key}", attribute, depth - 1)
        if isinstance(value, Optimizer) and self._deep:
            yield from self._walk_optimizer(name, value)

    @staticmethod
    def _walk_optimizer(name: str, optimizer: Optimizer) -> Named:
        """List the numbers in an optimizer's groups and state, on which its Python may depend."""
        for place, entries in (("param_groups", optimizer.param_groups), ("state", optimizer.state.values())):
            for i, entry in enumerate(entries):
                for key, value in entry.items():
                    if key != "lr" and isinstance(value, (int, float)):
                        yield f"{name}.{place}[{i}][{key!r}]", _comparable(value)

    def visit_function(self, name: str, function: types.FunctionType, depth: int) -> Named:
        yield name, function.__code__  # equal for a function that is defined again
        if has_fixed_variables(function):
            return
        # The closure and the defaults may change, the code doesn't.
        for variable, value in (*list_closure(function), *_defaults(function)):
            yield from self._walk_variable(f"{function.__qualname__}'s {variable}", value, depth)
        yield from self._walk_variables(_find_globals(function), depth)

    def _walk_variables(self, variables: _Variables, depth: int) -> Named:
        for label, (namespace, name) in variables.items():
            yield from self._walk_variable(label, namespace.get(name, _OTHER), depth)

    def _walk_variable(self, label: str, value: Any, depth: int) -> Named:
        if self._deep:
            yield from self.walk(label, value, depth - 1)
        elif (plain := _comparable(value)) is not _OTHER:
            yield label, plain


def _defaults(function: types.FunctionType) -> Named:
    code = function.__code__
    given = function.__defaults__ or ()
    yield from zip(code.co_varnames[code.co_argcount - len(given) : code.co_argcount], given, strict=True)
    yield from (function.__kwdefaults__ or {}).items()


@functools.lru_cache(maxsize=1024)
def _find_class_variables(kind: type) -> _Variables:
    """Return the variables of a class, and the globals that its methods name; cached, so later additions are missed."""
    found: _Variables = {}
    for base in kind.__mro__:
        for name, value in () if has_fixed_variables(base) else vars(base).items():
            if isinstance(value, types.FunctionType):
                found |= _find_globals(value)
            elif not name.startswith(_PYTHON_PREFIXES) and not hasattr(value, "__get__"):  # properties and the like
                found[f"{base.__qualname__}.{name}"] = vars(base), name
    return found


def _find_globals(function: types.FunctionType) -> _Variables:
    """Return the globals that a function names, with the namespace of each, except modules and built-in functions."""
    variables = function.__globals__
    kept = [n for n in function.__code__.co_names if n in variables and not isinstance(variables[n], _NEVER_CHANGE)]
    return {f"{function.__module__}.{name}": (variables, name) for name in kept}


_NEVER_CHANGE = (types.ModuleType, types.BuiltinFunctionType)


def _comparable(value: Any) -> Any:
    """Return a value's comparable form, or `_OTHER` if it has none."""
    if isinstance(value, float) and value != value:
        return "nan"  # NaN isn't equal to itself
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (Tensor, np.ndarray)):
        if isinstance(value, Tensor) and (value.device.type != "cpu" or isinstance(value, nn.Parameter)):
            return _OTHER
        if (value.numel() if isinstance(value, Tensor) else value.size) <= _ITEMS:
            return repr(value.tolist())
        # PyTorch's version doesn't count changes through a NumPy view.
        return id(value), getattr(value, "_version", 0), _digest(value)
    for kind, form in _FORMS:
        if isinstance(value, kind):
            return form(value)
    if isinstance(value, torch.Generator) and value.device.type == "cpu":
        return hash(value.get_state().numpy().tobytes())
    if isinstance(value, Iterator) and not isinstance(value, types.GeneratorType):
        return operator.length_hint(value, -1)
    own: Any = type(value)
    return _saved(value) if _has_native_value(own) else _OTHER


@functools.lru_cache(maxsize=1024)
def _has_native_value(kind: type) -> bool:
    """True for a type of Python's library that is written in C and has no attributes, as `Decimal`, or a subclass.

    Functions and methods in C are left out: they are code.
    """
    if issubclass(kind, _ENTERED) or any("__call__" in vars(base) for base in kind.__mro__):
        return False
    bases = [base for base in kind.__mro__ if base is not object and not _has_attributes(base)]
    return any(base.__module__.partition(".")[0] in sys.stdlib_module_names for base in bases)


def _has_attributes(kind: type) -> bool:
    return any("__dict__" in vars(base) or "__slots__" in vars(base) for base in kind.__mro__)


def _saved(value: Any) -> Any:
    """Return what `pickle` saves of an object, or its length if it is large; `_OTHER` if that fails, as for a lock."""
    if isinstance(value, memoryview):
        value = value.tobytes() if value.nbytes <= _LARGEST_HASHED else value.nbytes
        return "memoryview", value
    if sys.getsizeof(value) > _LARGEST_HASHED:
        return type(value).__name__, operator.length_hint(value, -1)
    try:
        saved = value.__reduce_ex__(4)
    except Exception:  # any error, because a user's subclass may define the method
        return _OTHER
    return type(value).__name__, saved if isinstance(saved, str) else _frozen(saved[1:3], _DEPTH)


def _frozen(content: Any, depth: int) -> Any:
    """Return what `pickle` saves in a comparable and hashable form, to the remaining depth."""
    if isinstance(content, Mapping):
        content = tuple(content.items())
    if isinstance(content, (tuple, list)):
        return tuple(_frozen(item, depth - 1) for item in content[:_ITEMS]) if depth else len(content)
    plain = _comparable(content)
    return type(content).__qualname__ if plain is _OTHER else plain


def _digest(value: Tensor | np.ndarray) -> int:
    """Hash an array's content, if it isn't large."""
    if value.nbytes > _LARGEST_HASHED or (isinstance(value, Tensor) and value.layout is not torch.strided):
        return 0
    array = value.detach().contiguous().view(torch.uint8).numpy() if isinstance(value, Tensor) else value
    return 0 if array.dtype.hasobject else hash(array.tobytes())


def has_fixed_variables(thing: type | types.FunctionType) -> bool:
    """True for a class or function of PyTorch and its like, whose variables don't change while a program trains.

    Other libraries have switches, such as `timm.layers.set_fused_attn`.
    """
    return (thing.__module__ or "").partition(".")[0] in _FIXED_MODULES
