"""`Masks`: sees how the masks of attention are made, and finds out what a kernel needs of one: places and segments.

A mask of (rows, 1, queries, keys) is mostly made of smaller ones: of places alone, which are known while a step is
traced, of keys alone (padding), and of equal numbers of a query and a key (texts that are joined in one row). The
shapes that these have before they are put together, and the values of the first, prove what the whole mask is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

# The most numbers that are computed once more on the host.
_LARGEST = 1 << 26
_uncounted = count(-1, -1)
# Numbers of segments that nobody has: of keys that nobody looks at, and of queries that look at nothing.
FILLING = -(2**31)
BLIND = -(2**31) + 1


def _both(*names: str) -> set[Any]:
    """The functions and methods of these names."""
    return {getattr(place, name) for place in (torch, Tensor) for name in names if hasattr(place, name)}


_ANDS = _both("logical_and", "bitwise_and", "__and__", "__rand__", "mul", "__mul__", "__rmul__")
_SUMS = _both("add", "__add__", "__radd__")
_COMPARED = {way: name for name in ("le", "lt", "ge", "gt", "eq") for way in _both(name, f"__{name}__")}
# Those that change at most the form of a mask.
_VIEWS = {Tensor.view, Tensor.reshape, torch.reshape}
_FORMS = {Tensor.__getitem__, Tensor.expand, Tensor.expand_as} | _VIEWS | _both("unsqueeze")
_SAME = {Tensor.to, Tensor.bool, Tensor.contiguous, Tensor.type, Tensor.float, torch.clone, Tensor.clone}
_VALUES = {torch.ones, torch.zeros, torch.full, torch.arange}
_ALIKE = {torch.ones_like: 1, torch.zeros_like: 0, Tensor.new_ones: 1, Tensor.new_zeros: 0}
_FOLDED = (
    _VALUES | _ANDS | _SUMS | _FORMS | _COMPARED.keys()
    | _both("sub", "__sub__", "__rsub__", "abs", "__abs__", "neg", "__neg__", "floor_divide", "__floordiv__")
    | _both("ne", "__ne__", "tril", "triu", "logical_not", "__invert__", "logical_or", "__or__", "diff", "cumsum")
    | _both("where", "masked_fill")
    | {Tensor.long, Tensor.int}
)  # fmt: skip
# Of whose results it is kept how they were made: counts of texts, negations, and places that were shifted.
_KEPT = _both("diff", "ne", "__ne__", "cumsum", "logical_not", "bitwise_not", "__invert__", "sub", "__sub__")
_FILLED = {torch.masked_fill, Tensor.masked_fill, Tensor.masked_fill_}


@dataclass(frozen=True)
class Pattern:
    """What a query looks at.

    Attributes:
        left: The number of places before its own; None (default): all.
        right: The number of places after its own; None (default): all.
        of_queries: The segment of each query, shape (rows, queries), int32; None (default): there is but one.
        of_keys: The segment of each key, shape (rows, keys), int32. A query looks at those of its own.
        blind: True for a query that looks at nothing, shape (rows, queries); None (default): there is none.
        tells_blind: False if `blind` isn't known, which only the mask tells then (default True).
    """

    left: int | None = None
    right: int | None = None
    of_queries: Tensor | None = None
    of_keys: Tensor | None = None
    blind: Tensor | None = None
    tells_blind: bool = True


@dataclass(frozen=True)
class _Condition:
    """A mask that must be true with others."""

    mask: Tensor
    how: str  # it was compared, e.g. "le"; nothing if it wasn't
    sides: tuple[Any, ...]  # what was compared
    versions: tuple[int, ...]  # how often these were written into by then

    @classmethod
    def of(cls, mask: Tensor, how: str = "", *sides: Any) -> _Condition:
        return cls(mask, how, sides, tuple(_version(x) for x in _tensors((mask, sides))))

    @property
    def holds(self) -> bool:
        """True if nothing of it was written into since."""
        return self.versions == tuple(_version(x) for x in _tensors((self.mask, self.sides)))


class Masks(TorchFunctionMode):
    """Sees how the masks of attention are made in the Python of a step."""

    def __init__(self) -> None:
        super().__init__()
        self._values: Any = WeakIdKeyDictionary()  # of tensors on the device, with their version
        self._conditions: Any = WeakIdKeyDictionary()
        self._made: Any = WeakIdKeyDictionary()  # the function and arguments of results of `_KEPT`
        self._sources: Any = WeakIdKeyDictionary()  # what a tensor repeats or picks all of

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _SEEN and isinstance(result, Tensor) and result.device.type != "cpu":
            self._see(func, result, args, kwargs or {})
        return result

    def _see(self, func: Any, result: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        value = self._folded(func, result, args, kwargs)
        if value is not None:
            self._values[result] = _version(result), value
        first: Any = args[0] if args else None
        if func in _KEPT:
            self._made[result] = _Made(func, args, kwargs, _version(first))
        joins = func in _ANDS if result.dtype is torch.bool else func in _SUMS
        conditions: tuple[_Condition, ...] | None = None
        if func in _COMPARED and len(args) == 2:
            conditions = (_Condition.of(result, _COMPARED[func], *args),)
        elif joins and len(args) == 2 and all(map(self._known, args)):
            conditions = (*self._conditions_of(args[0]), *self._conditions_of(args[1]))
        elif func in _FILLED and len(args) == 3 and args[2] == -math.inf and self._is_zero(func, args):
            conditions = self._conditions_of(self._negated(args[1]))
        elif func in _SAME and self._known(first) and result.is_floating_point() == first.is_floating_point():
            conditions = self._conditions_of(first)
        elif func in _FORMS and isinstance(first, Tensor):
            conditions = self._formed(func, result, args, kwargs)
        if conditions is not None:
            self._conditions[result] = _version(result), conditions

    def _call(self, func: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Call a function, and see it."""
        result: Tensor = self.__torch_function__(func, (), args, kwargs)
        return result

    def _negated(self, mask: Tensor) -> Tensor:
        """The negation of a mask: what it is a negation of, or one that is made."""
        made = self._made_by(mask, "logical_not", "bitwise_not", "__invert__")
        is_mask = made is not None and made.args[0].dtype is torch.bool and _version(mask) == 0
        found: Tensor = made.args[0] if made is not None and is_mask else self._call(torch.logical_not, mask)
        return found

    # What is known of a tensor

    def value(self, tensor: Tensor) -> Tensor | None:
        """The values of a tensor, on the host, if the trace tells them."""
        if tensor.device.type == "cpu":
            return tensor
        version, value = self._values.get(tensor, (None, None))
        return value if version == _version(tensor) else None

    def _noted_conditions(self, tensor: Tensor) -> tuple[_Condition, ...] | None:
        version, conditions = self._conditions.get(tensor, (None, None))
        return conditions if version == _version(tensor) else None

    def _known(self, tensor: Any) -> bool:
        """True for a mask, or for what is added to scores and known to be one."""
        return isinstance(tensor, Tensor) and (tensor.dtype is torch.bool or self._noted_conditions(tensor) is not None)

    def _conditions_of(self, tensor: Tensor) -> tuple[_Condition, ...]:
        conditions = self._noted_conditions(tensor)
        return (_Condition.of(tensor),) if conditions is None else conditions

    def _is_zero(self, func: Any, args: Sequence[Any]) -> bool:
        """True if what is filled was zeros; `masked_fill_` has just written into it."""
        version, value = self._values.get(args[0], (None, None))
        return value is not None and version == _version(args[0]) - (func is Tensor.masked_fill_) and not value.any()

    def _folded(self, func: Any, result: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor | None:
        """The values of a result, computed on the host; None if those that it is made of aren't known."""
        if func in _ALIKE:
            return torch.full((1,) * result.dim(), _ALIKE[func], dtype=result.dtype).expand(result.shape)
        if func in _SAME:
            value = self.value(args[0])
            return None if value is None else value.to(result.dtype, copy=value is args[0])
        if func not in _FOLDED or "out" in kwargs or (func not in _FORMS and result.numel() > _LARGEST):
            return None
        if any(self.value(x) is None for x in _tensors((args, kwargs))):
            return None
        if "device" in kwargs:
            kwargs = kwargs | {"device": "cpu"}
        args, kwargs = tree_map(lambda x: self.value(x) if isinstance(x, Tensor) else x, (args, kwargs))
        found: Tensor = func(*args, **kwargs)
        return found if found.device.type == "cpu" and found.shape == result.shape else None

    def _formed(
        self, func: Any, result: Tensor, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[_Condition, ...] | None:
        """The conditions of a mask in another form; notes the source of a tensor that repeats another, or picks all."""
        first = args[0]
        rest = args[1:]
        expands = func in (Tensor.expand, Tensor.expand_as)
        if (expands and first.dim() == result.dim()) or self._picks_all(func, first, rest):
            source = self._source(first)
            self._sources[result] = source, _version(source)
        conditions = self._noted_conditions(first)
        if conditions is None:
            return (_Condition.of(first),) if expands and first.dtype is torch.bool else None
        if expands or (func in _VIEWS and _without_ones(first) == _without_ones(result)):
            return conditions  # whose dimensions are the last ones
        if func in _VIEWS:
            return None
        index = rest[0] if rest else None
        index = index if isinstance(index, tuple) else (index,)
        if func is Tensor.__getitem__ and not all(i is None or i is Ellipsis or _is_all(i) for i in index):
            return None

        def formed(x: Tensor) -> Tensor:
            given = x.view((1,) * (first.dim() - x.dim()) + tuple(x.shape)), *rest
            found: Tensor = func(*given, **kwargs)
            value = self.value(x)
            if value is not None:
                self._values[found] = _version(found), func(value.reshape(given[0].shape), *rest, **kwargs)
            return found

        if not all(condition.holds for condition in conditions):
            return None
        if any(x.dim() > first.dim() for condition in conditions for x in _tensors((condition.mask, condition.sides))):
            return None
        return tuple(
            _Condition.of(
                formed(condition.mask),
                condition.how,
                *(formed(x) if isinstance(x, Tensor) else x for x in condition.sides),
            )
            for condition in conditions
        )

    def _source(self, tensor: Tensor) -> Tensor:
        """What a tensor repeats, or picks all of; if that has been written into since, or is nothing else, itself."""
        source, version = self._sources.get(tensor, (tensor, _version(tensor)))
        found: Tensor = source if _version(source) == version else tensor
        return found

    def _picks_all(self, func: Any, first: Tensor, rest: Sequence[Any]) -> bool:
        """True for `numbers[rows, places]` with all rows and all places, each once."""
        if func is not Tensor.__getitem__ or first.dim() != 2 or not (isinstance(rest[0], tuple) and len(rest[0]) == 2):
            return False
        if not all(isinstance(i, Tensor) for i in rest[0]):
            return False
        values = [self.value(i) for i in rest[0]]
        return all(
            value is not None and value.numel() == size and torch.equal(value.flatten(), torch.arange(size))
            for value, size in zip(values, first.shape, strict=True)
        )

    # What a kernel needs

    def pattern(self, mask: Tensor, rows: int, queries: int, keys: int) -> Pattern | None:
        """What queries look at by a mask, if that is of a kind that a kernel takes, which this proves; else None.

        The mask is True for the keys that a query may look at, or is what is added to their scores.
        """
        if not self._known(mask):
            return None
        seen = _Seen(self, rows, queries, keys)
        conditions = self._conditions_of(mask)
        return seen.pattern() if all(condition.holds and seen.take(condition) for condition in conditions) else None

    def counts(self, numbers: Tensor, places: Tensor) -> bool:
        """True if numbers of texts were counted from places, one more wherever a place isn't the next one."""
        counted = self._made_by(self._source(numbers), "cumsum")
        begins = counted and counted.of_rows(1) and self._made_by(counted.args[0], "ne", "__ne__")
        steps = begins and begins.args[1:] == (1,) and self._made_by(begins.args[0], "diff")
        if not steps or not steps.of_rows(2) or "append" in steps.kwargs or steps.args[1:2] not in ((), (1,)):
            return False
        return self._source(steps.args[0]) is self._source(places)

    def shifted(self, places: Tensor) -> tuple[Tensor, int]:
        """The places that a whole number was taken from, and the number; 0 if none was."""
        made = self._made_by(places, "sub", "__sub__")
        by: Any = made.args[1] if made is not None and len(made.args) == 2 and not made.kwargs else None
        return (made.args[0], by) if made is not None and type(by) is int else (places, 0)

    def _made_by(self, tensor: Tensor, *names: str) -> _Made | None:
        """How a tensor was made, if it was by one of these functions, of what hasn't changed since."""
        made = self._made.get(tensor)
        return made if made is not None and made.func in _both(*names) and made.holds else None

    def are_one(self, a: Tensor, b: Tensor) -> bool:
        """True if two tensors have picked all of the same one."""
        return self._source(a) is self._source(b)

    def same(self, copy: Tensor, tensor: Tensor) -> None:
        """Note that a tensor is a copy of another."""
        for known in (self._values, self._conditions):
            version, found = known.get(tensor, (None, None))
            if version == _version(tensor):
                known[copy] = _version(copy), found

    def forget(self) -> None:
        """Forget all tensors, which must not outlive a trace."""
        for known in (self._values, self._conditions, self._made, self._sources):
            known.clear()


@dataclass(frozen=True)
class _Made:
    """The function and the arguments of which a tensor was made, and how often the first was written into by then."""

    func: Any
    args: Sequence[Any]
    kwargs: dict[str, Any]
    version: int

    @property
    def holds(self) -> bool:
        return bool(_version(self.args[0]) == self.version)

    def of_rows(self, at: int) -> bool:
        """True if it goes along the last of two dimensions, at this of its arguments."""
        axis = self.kwargs.get("dim", self.args[at] if len(self.args) > at else -1)
        return self.args[0].dim() == 2 and axis in (-1, 1)


class _Seen:
    """What is left for queries to look at, while the conditions of a mask are taken one after the other."""

    def __init__(self, masks: Masks, rows: int, queries: int, keys: int) -> None:
        self._masks = masks
        self._shape = (rows, queries, keys)
        # Of each query the first key, and the one after the last.
        self._low = np.zeros(queries, np.int64)
        self._high = np.full(queries, keys)
        self._of_keys: list[Tensor] = []
        self._of_queries: list[Tensor] = []
        self._numbers: tuple[Tensor, Tensor] | None = None  # of the texts of queries and of keys
        self._places: list[tuple[Tensor, Tensor, str]] = []  # of queries and keys, and how a key's is to its query's

    def take(self, condition: _Condition) -> bool:
        """Take a condition; False if a kernel can't."""
        shape = _four(condition.mask)
        if shape is None or shape[1] != 1:
            return False
        if shape[2] == 1 and not self._is_true(condition.mask):
            self._of_keys.append(condition.mask)
        elif shape[3] == 1 and not self._is_true(condition.mask):
            self._of_queries.append(condition.mask)
        elif shape[2] != 1 and shape[3] != 1:
            return self._take_wide(condition, shape[0])
        return True

    def _is_true(self, mask: Tensor) -> bool:
        value = self._masks.value(mask)
        return value is not None and bool(value.all())

    def _take_wide(self, condition: _Condition, rows: int) -> bool:
        sides = _sides(condition)
        if sides is None:
            value = self._masks.value(condition.mask)
            return value is not None and rows == 1 and self._take_values(value.reshape(self._shape[1:]).numpy())
        of_query, of_key, how = sides
        queries, keys = (self._masks.value(x) for x in (of_query, of_key))
        if queries is None or keys is None or rows != 1:
            return self._take_unknown(of_query, of_key, how)
        q = queries.flatten().numpy()
        k = keys.flatten().numpy()
        if how == "eq":
            return bool((k == q[0]).all() and (q == q[0]).all()) or self._take_unknown(of_query, of_key, how)
        if not (np.diff(k) > 0).all():
            return False
        ends = np.searchsorted(k, q, "right" if how in ("le", "gt") else "left")
        if how in ("le", "lt"):  # of keys that are below
            self._high = np.minimum(self._high, ends)
        else:
            self._low = np.maximum(self._low, ends)
        return True

    def _take_values(self, seen: Any) -> bool:
        """Take a condition whose values are all known: of each query some keys without a gap."""
        low = seen.argmax(1)
        places = np.arange(seen.shape[1])
        high = low + seen.sum(1)
        if not seen.any(1).all() or not (seen == ((places >= low[:, None]) & (places < high[:, None]))).all():
            return False
        self._low = np.maximum(self._low, low)
        self._high = np.minimum(self._high, high)
        return True

    def _take_unknown(self, of_query: Tensor, of_key: Tensor, how: str) -> bool:
        if of_query.is_floating_point() or of_key.is_floating_point():
            return False
        if how == "eq" and self._numbers is None:
            self._numbers = of_query, of_key
            return True
        if how in ("le", "gt"):
            self._places.append((of_query, of_key, how))
        return how in ("le", "gt")

    def pattern(self) -> Pattern | None:
        rows, queries, keys = self._shape
        for of_query, of_key, how in self._places:
            # Within a text places are those of the row, but for where they begin.
            of_query, by = self._masks.shifted(of_query)
            if self._numbers is None or not self._masks.counts(self._numbers[0], of_query):
                return None
            if not self._masks.counts(self._numbers[1], of_key) or queries != keys:
                return None
            ends = np.arange(1, queries + 1) - by
            if how == "le":
                self._high = np.minimum(self._high, ends)
            else:
                self._low = np.maximum(self._low, ends)
        if not (self._low < self._high).all():
            return None
        right = int(self._high[0]) - 1
        left = queries - 1 - int(self._low[-1])
        places = np.arange(queries)
        whole = bool((self._high == keys).all()), bool((self._low == 0).all())
        if not whole[0] and (right < 0 or not (self._high == np.minimum(places + 1 + right, keys)).all()):
            return None
        if not whole[1] and (left < 0 or not (self._low == np.maximum(places - left, 0)).all()):
            return None
        limits = None if whole[1] else left, None if whole[0] else right
        if self._numbers is None and not self._of_keys and not self._of_queries:
            return Pattern(*limits)
        device = next(x.device for x in (*self._of_keys, *self._of_queries, *(self._numbers or ())))
        numbers = self._numbers or (torch.zeros(1, 1, dtype=torch.int32, device=device),) * 2
        of_queries, of_keys = (
            _rows_of(x.to(torch.int32)).expand(rows, size) for x, size in zip(numbers, (queries, keys), strict=True)
        )
        for mask in self._of_keys:
            of_keys = of_keys.masked_fill(~_rows_of(mask).expand(rows, keys), FILLING)
        for mask in self._of_queries:
            of_queries = of_queries.masked_fill(~_rows_of(mask).expand(rows, queries), BLIND)
        if self._numbers is not None and (self._of_keys or not self._sees_itself()):
            return Pattern(*limits, of_queries, of_keys, tells_blind=False)
        blind = None if self._numbers is not None else self._count(of_keys != FILLING, *limits) == 0
        for mask in self._of_queries:
            hidden = ~_rows_of(mask).expand(rows, queries)
            blind = hidden if blind is None else blind | hidden
        return Pattern(*limits, of_queries, of_keys, blind)

    def _sees_itself(self) -> bool:
        """True if each query looks at the key of its own place, which has its number."""
        places = np.arange(len(self._low))
        _, queries, keys = self._shape
        seen = queries == keys and bool((self._low <= places).all() and (places < self._high).all())
        return seen and self._numbers is not None and self._masks.are_one(*self._numbers)

    def _count(self, seen: Tensor, left: int | None, right: int | None) -> Tensor:
        """The number of keys that each query looks at, of those that are seen at all."""
        _, queries, keys = self._shape
        below = F.pad(seen.to(torch.int32).cumsum(-1, dtype=torch.int32), (1, 0))  # of the keys before each place
        if right is None:
            end = below[:, -1:].expand(-1, queries)
        else:
            more = max(0, 1 + right + queries - (keys + 1))
            last = below[:, -1:].expand(-1, more)
            end = torch.cat([below, last], -1)[:, 1 + right : 1 + right + queries]
        if left is None:
            return end
        return end - F.pad(below, (left, 0))[:, :queries]


def _sides(condition: _Condition) -> tuple[Tensor, Tensor, str] | None:
    """What a condition compares: of a query, of a key, and how the key is to the query."""
    turned = {"le": "ge", "lt": "gt", "ge": "le", "gt": "lt", "eq": "eq"}
    shapes = [_four(side) for side in condition.sides if isinstance(side, Tensor)]
    if len(shapes) != 2 or shapes[0] is None or shapes[1] is None or not shapes[0][1] == shapes[1][1] == 1:
        return None
    left, right = condition.sides
    if shapes[0][2] == 1 == shapes[1][3]:
        return right, left, condition.how
    if shapes[0][3] == 1 == shapes[1][2]:
        return left, right, turned[condition.how]
    return None


def _four(tensor: Tensor) -> tuple[int, ...] | None:
    """A shape of (rows, heads, queries, keys)."""
    return None if tensor.dim() > 4 else (1,) * (4 - tensor.dim()) + tuple(tensor.shape)


def _rows_of(tensor: Tensor) -> Tensor:
    """A tensor of queries alone, or of keys alone, as one of (rows or 1, queries or keys)."""
    return tensor.reshape(len(tensor) if tensor.dim() == 4 else 1, -1)


def _without_ones(tensor: Tensor) -> tuple[int, ...]:
    """A shape without the ones that it begins with."""
    begin = next((i for i, size in enumerate(tensor.shape) if size != 1), tensor.dim())
    return tuple(tensor.shape[begin:])


def _version(tensor: Tensor) -> int:
    """How often a tensor was written into; of one of inference mode nobody counts, and each answer is another."""
    return next(_uncounted) if tensor.is_inference() else tensor._version


def _is_all(index: Any) -> bool:
    return isinstance(index, slice) and index == slice(None)


def _tensors(nest: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(nest) if isinstance(leaf, Tensor)]


_SEEN = _FOLDED | _SAME | _ALIKE.keys() | _FILLED | _KEPT
_now: Masks | None = None


@contextmanager
def seeing_masks() -> Iterator[Masks]:
    """A context of a trace in which it is seen how masks are made."""
    global _now
    before = _now
    _now = Masks()
    try:
        with _now:
            yield _now
    finally:
        _now.forget()
        _now = before


def pattern_of(mask: Tensor, query: Tensor, key: Tensor) -> Pattern | None:
    """What queries look at by a mask, see `Masks.pattern`."""
    masks = Masks() if _now is None else _now
    return masks.pattern(mask, len(query), query.shape[-2], key.shape[-2])


@contextmanager
def seeing_again(copies: Iterable[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """A context in the backward pass, in which a block's Python runs once more, on copies of what it was given."""
    if _now is None:
        yield
        return
    for copy, tensor in copies:
        _now.same(copy, tensor)
    with _now:
        yield
