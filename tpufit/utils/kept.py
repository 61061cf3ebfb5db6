"""`Kept`: what Python objects keep in their attributes while training goes on, to be saved and set back.

An attribute that changes is state: a count, a list, a random generator. PyTorch's own state, in modules and optimizers,
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

from .attributes import attributes, closure
from .users_code import is_users_module

# The limits of the walk: its depth, its objects, and the items of one container or tensor that are saved.
_DEPTH = 6
_OBJECTS = 20_000
_ITEMS = 10_000

_PLAIN: tuple[type, ...] = (bool, int, float, str, type(None))
_NONE = object()  # a value without a form
_GONE = object()  # an attribute that isn't there

# The attributes of every module and optimizer, which are PyTorch's.
_PYTORCHS = frozenset(vars(nn.Module())) | vars(torch.optim.SGD([torch.zeros(1)], 0.1)).keys() | {"_opt_called"}
_LEAVES = (*_PLAIN, Tensor, np.ndarray, type, types.ModuleType)
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)


class ItemsExcept(NamedTuple):
    """ItemsExcept of the items of a dict, in place of an object's attributes."""

    values: MutableMapping[str, Any]  # as of `vars`
    but: Container[str]  # the names that are left out


class Kept:
    """What some objects keep in their attributes and in those of the objects there, since it was made.

    It sees numbers, words, small tensors and arrays, nests of these, random generators, and objects with a `state_dict`
    and a `load_state_dict` of their own: as attributes, and as variables that a function keeps in its closure. Of a
    library's objects, other than modules, it sees the generators alone. Objects to `leave` are somebody else's.

    Example:
        >>> def counter():
        ...     return types.SimpleNamespace(calls=0, rng=random.Random(0), size=8)
        >>> one, other = counter(), counter()
        >>> kept, again = Kept({"counter": one}), Kept({"counter": other})
        >>> one.calls, draw = 3, one.rng.random()
        >>> state = kept.state_dict()
        >>> sorted(state["counter"])
        ['calls', 'rng']
        >>> again.load_state_dict(state)
        []
        >>> other.calls, other.rng.random() == one.rng.random()
        (3, True)
    """

    def __init__(self, roots: Mapping[str, Any], leave: Iterable[object] = ()) -> None:
        self._roots = dict(roots)
        self._leave = list(leave)
        self._holders = self._found()
        self._forms = {name: _forms(_values(holder)) for name, holder in self._holders.items()}
        self._simple = {name: _simple(_values(holder)) for name, holder in self._holders.items()}
        self._marks = {name: _marks(_values(holder)) for name, holder in self._holders.items()}

    def _found(self) -> dict[str, Any]:
        walk = _Walk(self._leave)
        found = {name: holder for key, root in self._roots.items() for name, holder in walk.under(key, root)}
        return {name: holder for name, holder in found.items() if not _is_bare(holder) or _values(holder)}

    def look_again(self) -> None:
        """Take the objects that are in the place of others by now. Further ones are no state: steps make them."""
        now = self._found()
        self._holders = {name: now.get(name, holder) for name, holder in self._holders.items()}

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return the attributes that have changed since this object was made, by object, as JSON holds them."""
        changed = {}
        for name, holder in self._holders.items():
            before = self._forms[name]
            simple = self._simple[name]
            # This is done for each batch that is read, and forms of long lists take long.
            others = {k: v for k, v in _values(holder).items() if k not in simple or not simple[k].is_still(v)}
            found = {key: form for key, form in _forms(others).items() if form != before.get(key, _GONE)}
            if found:
                changed[name] = found
        return changed

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Set attributes back, and all others that can be to what they were when this object was made.

        The state is of the same objects or of others made in the same way.

        Returns:
            The names of what has no place any more, in roots that are still there.
        """
        for name, holder in self._holders.items():
            given = state.get(name, {})
            now = _forms(_values(holder))
            for key, form in {**self._forms[name], **given}.items():
                if now.get(key, _GONE) != form:
                    _set(holder, key, form)
        inside = tuple(f"{root}{mark}" for root in self._roots for mark in ".[")
        missing = [name for name in state if name not in self._holders and name.startswith(inside)]
        return [f"{name}.{key}" for name in missing for key in state[name]]

    def lost(self) -> list[str]:
        """Return the names of what has changed in a form that can't be saved."""
        found = []
        for name, holder in self._holders.items():
            forms = self._forms[name]
            before = self._marks[name]
            now = _marks(_values(holder))
            # What is new is no state: a step that needs it makes it.
            found += [f"{name}.{key}" for key, mark in now.items() if key in forms or before.get(key, mark) != mark]
        return found


# The objects


class _Walk:
    """Finds the objects whose attributes are looked at."""

    def __init__(self, leave: Iterable[object]) -> None:
        self._seen = set(map(id, leave))

    def under(self, name: str, value: Any, depth: int = _DEPTH) -> Iterator[tuple[str, Any]]:
        """Yield the objects in a value, with their names."""
        if isinstance(value, (*_LEAVES, *_GENERATORS)) or not depth:
            return
        if id(value) in self._seen or len(self._seen) > _OBJECTS:
            return
        self._seen.add(id(value))
        if isinstance(value, nn.Module):
            for path, part in value.named_modules():
                self._seen.add(id(part))
                yield from self._with_attributes(f"{name}.{path}" if path else name, part, depth)
        elif isinstance(value, ItemsExcept):
            yield from self._with_attributes(name, value, depth)
        elif isinstance(
            value, (dict, list, tuple, deque)
        ):  # not any mapping: logs wait for the device if they are read
            if len(value) <= _ITEMS:
                for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
                    yield from self.under(f"{name}[{key!r}]", item, depth - 1)
        elif isinstance(value, partial):
            yield from self.under(name, [value.func, value.args, value.keywords], depth)
        elif isinstance(value, types.MethodType):
            yield from self.under(name, value.__self__, depth)
        elif isinstance(value, types.FunctionType):
            yield from self._with_attributes(name, value, depth)
        elif hasattr(value, "__dict__") or hasattr(type(value), "__slots__"):
            yield from self._with_attributes(name, value, min(depth, 3) if _is_bare(value) else depth)

    def _with_attributes(self, name: str, holder: Any, depth: int) -> Iterator[tuple[str, Any]]:
        yield name, holder
        for key, value in list(_attributes(holder)):
            yield from self.under(f"{name}.{key}", value, depth - 1)


def _attributes(holder: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an object, or the variables that a function keeps."""
    if isinstance(holder, types.FunctionType):
        yield from closure(holder)
    elif isinstance(holder, ItemsExcept):
        yield from ((name, value) for name, value in list(holder.values.items()) if name not in holder.but)
    else:
        hidden = _PYTORCHS if isinstance(holder, (nn.Module, Optimizer)) else ()
        yield from ((name, value) for name, value in attributes(holder) if name not in hidden)


def _values(holder: Any) -> dict[str, Any]:
    """Return the attributes that may be state."""
    bare = _is_bare(holder)
    return {name: value for name, value in _attributes(holder) if not bare or isinstance(value, _GENERATORS)}


def _is_bare(holder: Any) -> bool:
    """True for an object of a library's, of which the random generators alone are looked at."""
    if isinstance(holder, (ItemsExcept, nn.Module, Optimizer, types.SimpleNamespace)):
        return False
    return not is_users_module(getattr(holder, "__module__", None))


class _Simple(NamedTuple):
    """A value as it was, that can be compared quickly: a plain one, or a container of plain ones."""

    value: Any
    copy: Any

    def is_still(self, value: Any) -> bool:
        """True if a value is the same object, with the same items."""
        return value is self.value and (self.copy is value or value == self.copy)


def _simple(values: Mapping[str, Any]) -> dict[str, _Simple]:
    found = {}
    for name, value in values.items():
        if type(value) in _PLAIN:
            found[name] = _Simple(value, value)
        elif type(value) in (list, tuple, set, deque, dict) and len(value) <= _ITEMS:
            items = [*value, *value.values()] if isinstance(value, dict) else value
            if all(type(item) in _PLAIN for item in items):
                found[name] = _Simple(value, copy(value))
    return found


# Their values


def _forms(values: Mapping[str, Any]) -> dict[str, Any]:
    forms = {name: _form(value, [_ITEMS]) for name, value in values.items()}
    return {name: form for name, form in forms.items() if form is not _NONE}


def _form(value: Any, room: list[int]) -> Any:
    """A value as JSON holds it: a plain one as it is, any other as {kind: ...}; a mark if it can't be held."""
    if isinstance(value, float) and value != value:
        return {"float": "nan"}  # which is not equal to itself
    if isinstance(value, _PLAIN) and type(value).__module__ == "builtins":
        return value
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return _form(value.item(), room)
    if isinstance(value, (Tensor, np.ndarray)):
        return _form_of_numbers(value, room)
    if isinstance(value, _GENERATORS):
        return _form_of_generator(value)
    if isinstance(value, Enum):
        return {"enum": value.name}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        items = _form_of_items(value, room)
        return _NONE if items is _NONE else {"namedtuple": items}
    if type(value) in (list, tuple, deque, set):
        if len(value) > room[0]:
            return _NONE
        own = list(value)  # at once: a thread that reads the data may change it
        items = _form_of_items(sorted(own, key=repr) if isinstance(value, set) else own, room)
        return _NONE if items is _NONE else {type(value).__name__: items}
    if isinstance(value, dict):
        if len(value) > room[0]:
            return _NONE
        items = _form_of_items([part for pair in list(value.items()) for part in pair], room)
        return _NONE if items is _NONE else {"dict": items}
    if _is_stateful(value):
        own = _form(value.state_dict(), room)
        return _NONE if own is _NONE else {"own": own}
    return _NONE


def _is_stateful(value: Any) -> bool:
    own = isinstance(value, (type, nn.Module, Optimizer))
    return not own and all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


def _form_of_items(items: Any, room: list[int]) -> Any:
    room[0] -= len(items)
    if room[0] < 0:
        return _NONE
    forms = []
    for item in items:
        form = _form(item, room)
        if form is _NONE or (isinstance(form, dict) and "own" in form):
            return _NONE
        forms.append(form)
    return forms


def _form_of_numbers(value: Any, room: list[int]) -> Any:
    tensor = value if isinstance(value, Tensor) else torch.from_numpy(value) if value.dtype.kind in "biuf" else None
    if (
        tensor is None
        or tensor.device.type != "cpu"
        or tensor.requires_grad  # it was computed from weights, or is one
        or tensor.layout != torch.strided
    ):
        return _NONE
    room[0] -= tensor.numel()
    if room[0] < 0:
        return _NONE
    data = tensor.detach().contiguous().flatten().view(torch.uint8) if tensor.numel() else torch.empty(0)
    kind = "tensor" if isinstance(value, Tensor) else "array"
    return {kind: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), bytes(data.numpy()).hex()]}


def _form_of_generator(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return {"Generator": value.get_state().numpy().tobytes().hex()} if value.device.type == "cpu" else _NONE
    if isinstance(value, random.Random):
        with suppress(NotImplementedError):  # of one that asks the system
            version, words, gauss = value.getstate()
            return {"Random": [version, list(words), gauss]}
        return _NONE
    legacy = isinstance(value, np.random.RandomState)
    state: Any = value.get_state(legacy=False) if legacy else value.bit_generator.state
    return {"RandomState" if legacy else "numpy": _listed(state)}


def _listed(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: _listed(part) for name, part in state.items()}
    return {"uint": [state.dtype.name, state.tolist()]} if isinstance(state, np.ndarray) else state


def _unlisted(state: Any) -> Any:
    if isinstance(state, dict):
        if state.keys() == {"uint"}:
            name, numbers = state["uint"]
            return np.array(numbers, dtype=name)
        return {name: _unlisted(part) for name, part in state.items()}
    return state


# And back


def _set(holder: Any, name: str, form: Any) -> None:
    now = dict(_attributes(holder)).get(name)
    if isinstance(holder, nn.Module) and isinstance(now, Tensor):
        now = None  # its memory may be a parameter's
    value = _value(form, now)
    if value is now:  # which was changed in place, as others may hold it too
        return
    if isinstance(holder, types.FunctionType):
        (holder.__closure__ or ())[holder.__code__.co_freevars.index(name)].cell_contents = value
    elif isinstance(holder, ItemsExcept):
        holder.values[name] = value
    elif name in getattr(holder, "__dict__", {}):
        vars(holder)[name] = value
    else:
        object.__setattr__(holder, name, value)


def _value(form: Any, now: Any = None) -> Any:
    """The value of a form. The value that is there now is changed in place if it can be."""
    if not isinstance(form, dict):
        return form
    ((kind, own),) = form.items()
    if kind in _RESTORED:
        return _RESTORED[kind](own, now)
    return float(own)


def _list(own: Any, now: Any) -> Any:
    items = [_value(item) for item in own]
    if type(now) is list:
        now[:] = items
        return now
    return items


def _refilled(kind: Any, own: Any, now: Any) -> Any:
    """A deque or set of the same object, where there is one, and other items."""
    kept = now if type(now) is kind else kind()
    kept.clear()
    fill = kept.extend if kind is deque else kept.update
    fill([_value(item) for item in own])
    return kept


def _enum(own: Any, now: Any) -> Any:
    return type(now)[own] if isinstance(now, Enum) else now


def _namedtuple(own: Any, now: Any) -> Any:
    items = tuple(_value(item) for item in own)
    return type(now)(*items) if isinstance(now, tuple) and hasattr(now, "_fields") else items


def _dict(own: Any, now: Any) -> Any:
    items = {_value(key): _value(item) for key, item in zip(own[::2], own[1::2], strict=True)}
    if isinstance(now, dict):
        now.clear()
        now.update(items)
        return now
    return items


def _tensor(own: Any, now: Any) -> Any:
    dtype, shape, data = own
    flat = torch.frombuffer(bytearray.fromhex(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    value = flat.view(getattr(torch, dtype)).reshape(shape)
    if isinstance(now, Tensor) and now.device.type == "cpu" and (now.shape, now.dtype) == (value.shape, value.dtype):
        with torch.no_grad():
            now.copy_(value)
        return now
    return value


def _array(own: Any, now: Any) -> Any:
    value = _tensor(own, None).numpy()
    if isinstance(now, np.ndarray) and (now.shape, now.dtype) == (value.shape, value.dtype) and now.flags.writeable:
        now[...] = value
        return now
    return value


def _python(own: Any, now: Any) -> Any:
    generator = now if isinstance(now, random.Random) else random.Random()
    version, words, gauss = own
    generator.setstate((version, tuple(words), gauss))
    return generator


def _legacy(own: Any, now: Any) -> Any:
    generator = now if isinstance(now, np.random.RandomState) else np.random.RandomState()
    generator.set_state(_unlisted(own))
    return generator


def _numpy(own: Any, now: Any) -> Any:
    generator = now
    if not isinstance(now, np.random.Generator) or now.bit_generator.state["bit_generator"] != own["bit_generator"]:
        generator = np.random.Generator(getattr(np.random, own["bit_generator"])())
    generator.bit_generator.state = _unlisted(own)
    return generator


def _pytorch(own: Any, now: Any) -> Any:
    generator = now if isinstance(now, torch.Generator) else torch.Generator()
    generator.set_state(torch.frombuffer(bytearray.fromhex(own), dtype=torch.uint8))
    return generator


def _own(own: Any, now: Any) -> Any:
    if _is_stateful(now):
        now.load_state_dict(_value(own))
    return now


_RESTORED: dict[str, Callable[[Any, Any], Any]] = {
    "list": _list,
    "tuple": lambda own, now: tuple(_value(item) for item in own),
    "namedtuple": _namedtuple,
    "enum": _enum,
    "deque": partial(_refilled, deque),
    "set": partial(_refilled, set),
    "dict": _dict,
    "tensor": _tensor,
    "array": _array,
    "Random": _python,
    "RandomState": _legacy,
    "numpy": _numpy,
    "Generator": _pytorch,
    "own": _own,
}


# What has no form


def _marks(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: mark for name, value in values.items() if (mark := _mark(value)) is not None}


def _mark(value: Any) -> Any:
    """What tells that a value without a form has changed. A dict that only grows is a cache, which nobody misses."""
    if (
        isinstance(value, (*_PLAIN, *_GENERATORS, nn.Module, nn.Parameter, Optimizer))
        or _form(value, [_ITEMS]) is not _NONE
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
