"""`SavedAttributes`: the attributes of Python objects that change during training, to save and restore them.

With them a resumed training continues the counters and random generators of the user's own objects.

An attribute that changes is state: a counter, a list, a random generator. PyTorch's state, in modules and optimizers,
is saved elsewhere.
"""

import operator
import random
import types
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from copy import copy
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .list_attributes import list_attributes, list_closure, list_pytorch_attributes
from .object_walk import Named, ObjectWalk
from .random import state_from_hex, state_to_hex
from .user_code import is_user_module

# The limits of the walk: its depth, also in libraries' objects, the number of objects, and the items of a container or
# tensor to save.
_DEPTH = 6
_DEPTH_IN_LIBRARIES = 3
_OBJECTS = 20_000
_ITEMS = 10_000

_PLAIN: tuple[type, ...] = (bool, int, float, str, type(None))
_NONE = object()  # in place of a value that can't be encoded
_GONE = object()  # a missing attribute

_LEAVES = (*_PLAIN, Tensor, np.ndarray, type, types.ModuleType)
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)


class ItemsExcept(NamedTuple):
    """A dict's items except some names, in place of an object's attributes."""

    values: MutableMapping[str, Any]  # for example `vars(object)`
    omitted: Container[str]  # names


class SavedAttributes:
    """The attributes of some objects, and of objects in them, that change after this object is made.

    It saves numbers, strings, small tensors and arrays, nests of these, random generators, and objects with
    `state_dict` and `load_state_dict`: as attributes, and as variables in a function's closure. In libraries' objects,
    other than modules, it saves random generators only. Objects in `skip` are left out.

    Example:
        >>> def counter():
        ...     return types.SimpleNamespace(calls=0, rng=random.Random(0), size=8)
        >>> one, other = counter(), counter()
        >>> saved, again = (SavedAttributes({"counter": each}) for each in (one, other))
        >>> one.calls, draw = 3, one.rng.random()
        >>> state = saved.state_dict()
        >>> sorted(state["counter"])
        ['calls', 'rng']
        >>> again.load_state_dict(state)
        []
        >>> other.calls, other.rng.random() == one.rng.random()
        (3, True)
    """

    def __init__(self, roots: Mapping[str, Any], skip: Iterable[object] = ()) -> None:
        self._roots = dict(roots)
        self._skip = list(skip)
        self._holders = self._find_holders()
        self._encoded = {name: _encode_all(_values(holder)) for name, holder in self._holders.items()}
        self._snapshots = {name: _snapshot_plain(_values(holder)) for name, holder in self._holders.items()}
        self._marks = {name: _mark_all(_values(holder)) for name, holder in self._holders.items()}

    def _find_holders(self) -> dict[str, Any]:
        walk = _Walk(_OBJECTS, self._skip)
        found = {name: holder for key, root in self._roots.items() for name, holder in walk.walk(key, root)}
        return {name: holder for name, holder in found.items() if not _belongs_to_library(holder) or _values(holder)}

    def refresh(self) -> None:
        """Update objects that have been replaced. New objects aren't state: steps create them."""
        now = self._find_holders()
        self._holders = {name: now.get(name, holder) for name, holder in self._holders.items()}

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return the attributes that have changed since this object was made, by object, as JSON values."""
        changed = {}
        for name, holder in self._holders.items():
            before = self._encoded[name]
            snapshots = self._snapshots[name]
            # This runs for each batch, and encoding long lists is slow.
            others = {k: v for k, v in _values(holder).items() if k not in snapshots or not snapshots[k].is_still(v)}
            now = {key: form for key, form in _encode_all(others).items() if form != before.get(key, _GONE)}
            if now:
                changed[name] = now
        return changed

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Restore attributes, and reset all others to their values when this object was made.

        The state is of the same objects, or of objects made in the same way.

        Returns:
            The names of values whose objects no longer exist, in existing roots.
        """
        for name, holder in self._holders.items():
            given = state.get(name, {})
            now = _encode_all(_values(holder))
            for key, form in {**self._encoded[name], **given}.items():
                if now.get(key, _GONE) != form:
                    _restore(holder, key, form)
        inside = tuple(f"{root}{mark}" for root in self._roots for mark in ".[")
        missing = [name for name in state if name not in self._holders and name.startswith(inside)]
        return [f"{name}.{key}" for name in missing for key in state[name]]

    def list_unsaved(self) -> list[str]:
        """Return the names of changed values that can't be saved."""
        names = []
        for name, holder in self._holders.items():
            encoded = self._encoded[name]
            before = self._marks[name]
            now = _mark_all(_values(holder))
            # New values aren't state: a step that needs them creates them.
            names += [f"{name}.{key}" for key, mark in now.items() if key in encoded or before.get(key, mark) != mark]
        return names


# Finding the objects


class _Walk(ObjectWalk):
    """Finds the objects whose attributes may be state."""

    def walk(self, name: str, value: Any, depth: int = _DEPTH) -> Named:
        """Yield the objects in a value, with their names."""
        if not isinstance(value, (*_LEAVES, *_GENERATORS)):
            yield from super().walk(name, value, depth)

    def visit_container(self, name: str, value: Any, depth: int) -> Named:
        if isinstance(value, ItemsExcept):
            yield from self._visit_attributes(name, value, depth)
        # The items of other mappings aren't read: reading lazy logs waits for the device.
        elif not isinstance(value, (dict, list, tuple, deque)):
            yield from self.visit_object(name, value, depth)
        elif len(value) <= _ITEMS:
            for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
                yield from self.walk(f"{name}[{key!r}]", item, depth - 1)

    def visit_function(self, name: str, function: types.FunctionType, depth: int) -> Named:
        yield from self._visit_attributes(name, function, depth)

    def visit_part(self, name: str, path: str, part: nn.Module, depth: int) -> Named:
        yield from self._visit_attributes(f"{name}.{path}" if path else name, part, depth)

    def visit_object(self, name: str, value: Any, depth: int) -> Named:
        if hasattr(value, "__dict__") or hasattr(type(value), "__slots__"):
            depth = min(depth, _DEPTH_IN_LIBRARIES) if _belongs_to_library(value) else depth
            yield from self._visit_attributes(name, value, depth)

    def _visit_attributes(self, name: str, holder: Any, depth: int) -> Named:
        yield name, holder
        for key, value in list(_attributes(holder)):
            yield from self.walk(f"{name}.{key}", value, depth - 1)


def _attributes(holder: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an object, or the variables in a function's closure."""
    if isinstance(holder, types.FunctionType):
        yield from list_closure(holder)
    elif isinstance(holder, ItemsExcept):
        yield from ((name, value) for name, value in list(holder.values.items()) if name not in holder.omitted)
    else:
        hidden = list_pytorch_attributes(holder)
        if hidden:
            hidden |= getattr(type(holder), "saved_elsewhere", frozenset())  # in the state of training
        yield from ((name, value) for name, value in list_attributes(holder) if name not in hidden)


def _values(holder: Any) -> dict[str, Any]:
    """Return the attributes that may be state."""
    in_library = _belongs_to_library(holder)
    return {name: value for name, value in _attributes(holder) if not in_library or isinstance(value, _GENERATORS)}


def _belongs_to_library(holder: Any) -> bool:
    """True for a library's object, in which only random generators are state."""
    if isinstance(holder, (ItemsExcept, nn.Module, Optimizer, types.SimpleNamespace)):
        return False
    return not is_user_module(getattr(holder, "__module__", None))


class _Snapshot(NamedTuple):
    """A snapshot of a plain value, or a container of plain values, that can be compared quickly."""

    value: Any
    copy: Any

    def is_still(self, value: Any) -> bool:
        """True if a value is the same object, with the same items."""
        return value is self.value and (self.copy is value or value == self.copy)


def _snapshot_plain(values: Mapping[str, Any]) -> dict[str, _Snapshot]:
    found = {}
    for name, value in values.items():
        if type(value) in _PLAIN:
            found[name] = _Snapshot(value, value)
        elif type(value) in (list, tuple, set, deque, dict) and len(value) <= _ITEMS:
            items = [*value, *value.values()] if isinstance(value, dict) else value
            if all(type(item) in _PLAIN for item in items):
                found[name] = _Snapshot(value, copy(value))
    return found


# Encoding values


def _encode_all(values: Mapping[str, Any]) -> dict[str, Any]:
    encoded = {name: _encode(value, [_ITEMS]) for name, value in values.items()}
    return {name: form for name, form in encoded.items() if form is not _NONE}


def _encode(value: Any, room: list[int]) -> Any:
    """Encode a value for JSON: plain values unchanged, others as {kind: ...}; `_NONE` if it can't be saved."""
    if isinstance(value, float) and value != value:
        return {"float": "nan"}  # NaN isn't equal to itself
    if isinstance(value, _PLAIN) and type(value).__module__ == "builtins":
        return value
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return _encode(value.item(), room)
    if isinstance(value, (Tensor, np.ndarray)):
        return _encode_numbers(value, room)
    if isinstance(value, _GENERATORS):
        return _encode_generator(value)
    if isinstance(value, Enum):
        return {"enum": value.name}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        items = _encode_items(value, room)
        return _NONE if items is _NONE else {"namedtuple": items}
    if type(value) in (list, tuple, deque, set):
        if len(value) > room[0]:
            return _NONE
        copied = list(value)  # at once: a thread that reads the data may change it
        items = _encode_items(sorted(copied, key=repr) if isinstance(value, set) else copied, room)
        return _NONE if items is _NONE else {type(value).__name__: items}
    if isinstance(value, dict):
        if len(value) > room[0]:
            return _NONE
        items = _encode_items([part for pair in list(value.items()) for part in pair], room)
        return _NONE if items is _NONE else {"dict": items}
    if _is_stateful(value):
        state = _encode(value.state_dict(), room)
        return _NONE if state is _NONE else {"own": state}
    return _NONE


def _is_stateful(value: Any) -> bool:
    elsewhere = isinstance(value, (type, nn.Module, Optimizer))
    return not elsewhere and all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


def _encode_items(items: Any, room: list[int]) -> Any:
    room[0] -= len(items)
    if room[0] < 0:
        return _NONE
    forms = []
    for item in items:
        form = _encode(item, room)
        if form is _NONE or (isinstance(form, dict) and "own" in form):
            return _NONE
        forms.append(form)
    return forms


def _encode_numbers(value: Any, room: list[int]) -> Any:
    tensor = value if isinstance(value, Tensor) else torch.from_numpy(value) if value.dtype.kind in "biuf" else None
    if (
        tensor is None
        or tensor.device.type != "cpu"
        or tensor.requires_grad  # computed from weights, or a weight
        or tensor.layout != torch.strided
    ):
        return _NONE
    room[0] -= tensor.numel()
    if room[0] < 0:
        return _NONE
    data = tensor.detach().contiguous().flatten().view(torch.uint8) if tensor.numel() else torch.empty(0)
    kind = "tensor" if isinstance(value, Tensor) else "array"
    return {kind: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), bytes(data.numpy()).hex()]}


def _encode_generator(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return {"Generator": state_to_hex(value.get_state())} if value.device.type == "cpu" else _NONE
    if isinstance(value, random.Random):
        with suppress(NotImplementedError):  # `SystemRandom` has no state
            version, words, gauss = value.getstate()
            return {"Random": [version, list(words), gauss]}
        return _NONE
    legacy = isinstance(value, np.random.RandomState)
    state: Any = value.get_state(legacy=False) if legacy else value.bit_generator.state
    return {"RandomState" if legacy else "numpy": _to_plain(state)}


def _to_plain(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: _to_plain(part) for name, part in state.items()}
    return {"uint": [state.dtype.name, state.tolist()]} if isinstance(state, np.ndarray) else state


def _from_plain(state: Any) -> Any:
    if isinstance(state, dict):
        if state.keys() == {"uint"}:
            name, numbers = state["uint"]
            return np.array(numbers, dtype=name)
        return {name: _from_plain(part) for name, part in state.items()}
    return state


# Decoding values


def _restore(holder: Any, name: str, encoded: Any) -> None:
    current = dict(_attributes(holder)).get(name)
    if isinstance(holder, nn.Module) and isinstance(current, Tensor):
        current = None  # its memory may be a parameter's
    value = _decode(encoded, current)
    if value is current:  # changed in place, since other objects may refer to it
        return
    if isinstance(holder, types.FunctionType):
        (holder.__closure__ or ())[holder.__code__.co_freevars.index(name)].cell_contents = value
    elif isinstance(holder, ItemsExcept):
        holder.values[name] = value
    elif name in getattr(holder, "__dict__", {}):
        vars(holder)[name] = value
    else:
        object.__setattr__(holder, name, value)


def _decode(encoded: Any, current: Any = None) -> Any:
    """Decode a value. The current value is changed in place if possible."""
    if not isinstance(encoded, dict):
        return encoded
    ((kind, content),) = encoded.items()
    if kind in _DECODERS:
        return _DECODERS[kind](content, current)
    return float(content)


def _decode_list(content: Any, current: Any) -> Any:
    items = [_decode(item) for item in content]
    if type(current) is list:
        current[:] = items
        return current
    return items


def _refill(kind: Any, content: Any, current: Any) -> Any:
    """Replace the items of the current deque or set, or make a new one."""
    filled = current if type(current) is kind else kind()
    filled.clear()
    fill = filled.extend if kind is deque else filled.update
    fill([_decode(item) for item in content])
    return filled


def _decode_enum(content: Any, current: Any) -> Any:
    return type(current)[content] if isinstance(current, Enum) else current


def _decode_namedtuple(content: Any, current: Any) -> Any:
    items = tuple(_decode(item) for item in content)
    return type(current)(*items) if isinstance(current, tuple) and hasattr(current, "_fields") else items


def _decode_dict(content: Any, current: Any) -> Any:
    items = {_decode(key): _decode(item) for key, item in zip(content[::2], content[1::2], strict=True)}
    if isinstance(current, dict):
        current.clear()
        current.update(items)
        return current
    return items


def _decode_tensor(content: Any, current: Any) -> Any:
    dtype, shape, data = content
    flat = torch.frombuffer(bytearray.fromhex(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    value = flat.view(getattr(torch, dtype)).reshape(shape)
    if (
        isinstance(current, Tensor)
        and current.device.type == "cpu"
        and (current.shape, current.dtype) == (value.shape, value.dtype)
    ):
        with torch.no_grad():
            current.copy_(value)
        return current
    return value


def _decode_array(content: Any, current: Any) -> Any:
    value = _decode_tensor(content, None).numpy()
    if (
        isinstance(current, np.ndarray)
        and (current.shape, current.dtype) == (value.shape, value.dtype)
        and current.flags.writeable
    ):
        current[...] = value
        return current
    return value


def _decode_python(content: Any, current: Any) -> Any:
    generator = current if isinstance(current, random.Random) else random.Random()
    version, words, gauss = content
    generator.setstate((version, tuple(words), gauss))
    return generator


def _decode_numpy_legacy(content: Any, current: Any) -> Any:
    generator = current if isinstance(current, np.random.RandomState) else np.random.RandomState()
    generator.set_state(_from_plain(content))
    return generator


def _decode_numpy(content: Any, current: Any) -> Any:
    generator = current
    if (
        not isinstance(current, np.random.Generator)
        or current.bit_generator.state["bit_generator"] != content["bit_generator"]
    ):
        generator = np.random.Generator(getattr(np.random, content["bit_generator"])())
    generator.bit_generator.state = _from_plain(content)
    return generator


def _decode_pytorch(content: Any, current: Any) -> Any:
    generator = current if isinstance(current, torch.Generator) else torch.Generator()
    generator.set_state(state_from_hex(content))
    return generator


def _decode_stateful(content: Any, current: Any) -> Any:
    if _is_stateful(current):
        current.load_state_dict(_decode(content))
    return current


_DECODERS: dict[str, Callable[[Any, Any], Any]] = {
    "list": _decode_list,
    "tuple": lambda content, current: tuple(_decode(item) for item in content),
    "namedtuple": _decode_namedtuple,
    "enum": _decode_enum,
    "deque": partial(_refill, deque),
    "set": partial(_refill, set),
    "dict": _decode_dict,
    "tensor": _decode_tensor,
    "array": _decode_array,
    "Random": _decode_python,
    "RandomState": _decode_numpy_legacy,
    "numpy": _decode_numpy,
    "Generator": _decode_pytorch,
    "own": _decode_stateful,
}


# Values that can't be encoded


def _mark_all(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: mark for name, value in values.items() if (mark := _mark(value)) is not None}


def _mark(value: Any) -> Any:
    """Return a mark that changes with a value that can't be saved. Dicts have none: they are mostly caches."""
    if (
        isinstance(value, (*_PLAIN, *_GENERATORS, nn.Module, nn.Parameter, Optimizer))
        or _encode(value, [_ITEMS]) is not _NONE
    ):
        return None
    if isinstance(value, (list, deque, set)):
        return type(value), len(value)
    if isinstance(value, Tensor):
        return None if value.requires_grad else (id(value), value._version)
    if isinstance(value, types.GeneratorType):
        return value.gi_frame and value.gi_frame.f_lasti
    if isinstance(value, Iterator):
        return repr(value) if type(value).__module__ == "itertools" else operator.length_hint(value, -1)
    return None
