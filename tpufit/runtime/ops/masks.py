"""`Masks`: watches how attention masks are computed, and derives the positions and segments that a kernel needs.

A mask of shape (rows, 1, queries, keys) is usually a combination of smaller masks: of positions, whose values are known
while a step is traced; of keys (padding); and of equal text ids of a query and a key (texts packed in one row). The
shapes of these masks before they are combined, and the values of the first kind, prove the pattern of the whole mask.

A mask is a list of conditions that all must hold. The rules, by the function that returns a tensor:

| functions | what is known of the result |
| --- | --- |
| `_COMPARISONS` | it is one condition: the comparison of the two operands |
| `_ANDS` of boolean masks, `_SUMS` of additive masks | the conditions of both masks |
| `_MASKED_FILL` of zeros with -inf | the conditions of the negated mask |
| `_COPYING` | the conditions of the argument |
| `_RESHAPING` | the conditions of the argument, whose masks and operands are reshaped in the same way |
| `_CREATING`, `_FILLING_LIKE` | its values |
| `_FOLDING` | its values, if those of all arguments are known: it is computed a second time, on the host |
| `_RECORDED_CALLS` | the call: it identifies negations, text ids counted from positions, and shifted positions |
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

# Larger results aren't computed a second time on the host.
_MAX_ELEMENTS = 1 << 26
_inference_versions = count(-1, -1)
# Unused segment ids: for keys that are masked for all queries, and for queries whose keys are all masked.
MASKED_KEY = -(2**31)
BLIND_QUERY = -(2**31) + 1


def _find_functions(*names: str) -> set[Any]:
    """Return the functions of torch and the methods of tensors with these names."""
    return {getattr(place, name) for place in (torch, Tensor) for name in names if hasattr(place, name)}


_ANDS = _find_functions("logical_and", "bitwise_and", "__and__", "__rand__", "mul", "__mul__", "__rmul__")
_SUMS = _find_functions("add", "__add__", "__radd__")
_COMPARISONS = {
    function: name for name in ("le", "lt", "ge", "gt", "eq") for function in _find_functions(name, f"__{name}__")
}
_VIEWS = {Tensor.view, Tensor.reshape, torch.reshape}
_RESHAPING = {Tensor.__getitem__, Tensor.expand, Tensor.expand_as} | _VIEWS | _find_functions("unsqueeze")
_COPYING = {Tensor.to, Tensor.bool, Tensor.contiguous, Tensor.type, Tensor.float, torch.clone, Tensor.clone}
_CREATING = {torch.ones, torch.zeros, torch.full, torch.arange}
_FILLING_LIKE = {torch.ones_like: 1, torch.zeros_like: 0, Tensor.new_ones: 1, Tensor.new_zeros: 0}
_FOLDING = (
    _CREATING | _ANDS | _SUMS | _RESHAPING | _COMPARISONS.keys()
    | _find_functions("sub", "__sub__", "__rsub__", "abs", "__abs__", "neg", "__neg__", "floor_divide", "__floordiv__")
    | _find_functions("ne", "__ne__", "tril", "triu", "logical_not", "__invert__", "logical_or", "__or__")
    | _find_functions("diff", "cumsum", "where", "masked_fill")
    | {Tensor.long, Tensor.int}
)  # fmt: skip
_RECORDED_CALLS = _find_functions(
    "diff", "ne", "__ne__", "cumsum", "logical_not", "bitwise_not", "__invert__", "sub", "__sub__"
)
_MASKED_FILL = {torch.masked_fill, Tensor.masked_fill, Tensor.masked_fill_}


@dataclass(frozen=True)
class Pattern:
    """The keys to which a query attends.

    Attributes:
        left: How many positions before the query's own it attends to; None (default): all.
        right: How many positions after the query's own it attends to; None (default): all.
        query_segments: The segment of each query, shape (rows, queries), int32; None (default): a single segment.
        key_segments: The segment of each key, shape (rows, keys), int32. A query attends to the keys of its segment.
        blind: True for queries whose keys are all masked, shape (rows, queries); None (default): no such query.
        knows_blind: False if `blind` is unknown and must be computed from the mask (default True).
    """

    left: int | None = None
    right: int | None = None
    query_segments: Tensor | None = None
    key_segments: Tensor | None = None
    blind: Tensor | None = None
    knows_blind: bool = True


@dataclass(frozen=True)
class _Condition:
    """One of several masks that are combined by "and"."""

    mask: Tensor
    comparison: str  # that computed the mask, e.g. "le"; "" if none
    operands: tuple[Any, ...]  # of the comparison
    versions: tuple[int, ...]  # the versions of the mask and the operands, which writes into them increase

    @classmethod
    def of(cls, mask: Tensor, comparison: str = "", *operands: Any) -> _Condition:
        return cls(mask, comparison, operands, tuple(_version(x) for x in _tensors((mask, operands))))

    @property
    def holds(self) -> bool:
        """True if the mask and the operands haven't been modified since this was recorded."""
        return self.versions == tuple(_version(x) for x in _tensors((self.mask, self.operands)))


class Masks(TorchFunctionMode):
    """Watches how the Python of a step computes attention masks."""

    def __init__(self) -> None:
        super().__init__()
        self._values: Any = WeakIdKeyDictionary()  # the versions and values of tensors on the device
        self._conditions: Any = WeakIdKeyDictionary()
        self._calls: Any = WeakIdKeyDictionary()  # the calls of `_RECORDED_CALLS`, by the result
        # For a tensor made by expanding another, or by indexing all of it: that other tensor.
        self._sources: Any = WeakIdKeyDictionary()

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Checked before `masked_fill_` writes into the tensor.
        fills_zeros = func in _MASKED_FILL and len(args) == 3 and self._is_zero(args[0])
        result = func(*args, **(kwargs or {}))
        if func in _WATCHED and isinstance(result, Tensor) and result.device.type != "cpu":
            self._record(func, result, args, kwargs or {}, fills_zeros)
        return result

    def _record(
        self, func: Any, result: Tensor, args: Sequence[Any], kwargs: dict[str, Any], fills_zeros: bool
    ) -> None:
        value = self._fold(func, result, args, kwargs)
        if value is not None:
            self._values[result] = _version(result), value
        first: Any = args[0] if args else None
        if func in _RECORDED_CALLS:
            self._calls[result] = _version(result), _RecordedCall(func, args, kwargs, _version(first))
        joins = func in _ANDS if result.dtype is torch.bool else func in _SUMS
        conditions: tuple[_Condition, ...] | None = None
        if func in _COMPARISONS and len(args) == 2:
            conditions = (_Condition.of(result, _COMPARISONS[func], *args),)
        elif joins and len(args) == 2 and all(map(self._is_mask, args)):
            conditions = (*self._conditions_of(args[0]), *self._conditions_of(args[1]))
        elif fills_zeros and isinstance(args[2], float) and args[2] == -math.inf:
            conditions = self._conditions_of(self._negate(args[1]))
        elif func in _COPYING and self._is_mask(first) and result.is_floating_point() == first.is_floating_point():
            conditions = self._conditions_of(first)
        elif func in _RESHAPING and isinstance(first, Tensor):
            conditions = self._reshape(func, result, args, kwargs)
        if conditions is not None:
            self._conditions[result] = _version(result), conditions

    def _call(self, func: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Call a function, and record it."""
        result: Tensor = self.__torch_function__(func, (), args, kwargs)
        return result

    def _negate(self, mask: Tensor) -> Tensor:
        """Return the negation of a mask: the original if the mask is a negation itself, else a new tensor."""
        call = self._find_call(mask, "logical_not", "bitwise_not", "__invert__")
        is_mask = call is not None and call.args[0].dtype is torch.bool
        negation: Tensor = call.args[0] if call is not None and is_mask else self._call(torch.logical_not, mask)
        return negation

    # The known facts about a tensor

    def value(self, tensor: Tensor) -> Tensor | None:
        """Return the values of a tensor, on the host; None if they aren't known in the trace."""
        if tensor.device.type == "cpu":
            return tensor
        version, value = self._values.get(tensor, (None, None))
        return value if version == _version(tensor) else None

    def _recorded_conditions(self, tensor: Tensor) -> tuple[_Condition, ...] | None:
        version, conditions = self._conditions.get(tensor, (None, None))
        return conditions if version == _version(tensor) else None

    def _is_mask(self, tensor: Any) -> bool:
        """True for a boolean mask, and for an additive mask whose conditions are known."""
        return isinstance(tensor, Tensor) and (
            tensor.dtype is torch.bool or self._recorded_conditions(tensor) is not None
        )

    def _conditions_of(self, tensor: Tensor) -> tuple[_Condition, ...]:
        conditions = self._recorded_conditions(tensor)
        return (_Condition.of(tensor),) if conditions is None else conditions

    def _is_zero(self, tensor: Tensor) -> bool:
        """True for a tensor on the device that is known to be zero."""
        value = None if tensor.device.type == "cpu" else self.value(tensor)
        return value is not None and not value.any()

    def _fold(self, func: Any, result: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor | None:
        """Return the values of a result, computed on the host; None if the values of its inputs aren't known."""
        if func in _FILLING_LIKE:
            return torch.full((1,) * result.dim(), _FILLING_LIKE[func], dtype=result.dtype).expand(result.shape)
        if func in _COPYING:
            value = self.value(args[0])
            return None if value is None else value.to(result.dtype, copy=value is args[0])
        if func not in _FOLDING or "out" in kwargs or (func not in _RESHAPING and result.numel() > _MAX_ELEMENTS):
            return None
        if any(self.value(x) is None for x in _tensors((args, kwargs))):
            return None
        if "device" in kwargs:
            kwargs = kwargs | {"device": "cpu"}
        args, kwargs = tree_map(lambda x: self.value(x) if isinstance(x, Tensor) else x, (args, kwargs))
        folded: Tensor = func(*args, **kwargs)
        return folded if folded.device.type == "cpu" and folded.shape == result.shape else None

    def _reshape(
        self, func: Any, result: Tensor, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[_Condition, ...] | None:
        """Return the conditions of a reshaped mask; also record the source of an expansion or of all elements."""
        first = args[0]
        rest = args[1:]
        expands = func in (Tensor.expand, Tensor.expand_as)
        if (expands and first.dim() == result.dim()) or self._selects_all(func, first, rest):
            source = self._source(first)
            self._sources[result] = source, _version(source)
        conditions = self._recorded_conditions(first)
        if conditions is None:
            return (_Condition.of(first),) if expands and first.dtype is torch.bool else None
        if expands or (func in _VIEWS and _drop_leading_ones(first) == _drop_leading_ones(result)):
            return conditions  # the dimensions of the conditions are the last dimensions of the result
        if func in _VIEWS:
            return None
        index = rest[0] if rest else None
        index = index if isinstance(index, tuple) else (index,)
        if func is Tensor.__getitem__ and not all(i is None or i is Ellipsis or _is_full_slice(i) for i in index):
            return None

        def reshape(x: Tensor) -> Tensor:
            padded = x.view((1,) * (first.dim() - x.dim()) + tuple(x.shape))
            reshaped: Tensor = func(padded, *rest, **kwargs)
            value = self.value(x)
            if value is not None:
                self._values[reshaped] = _version(reshaped), func(value.reshape(padded.shape), *rest, **kwargs)
            return reshaped

        if not all(condition.holds for condition in conditions):
            return None
        if any(
            x.dim() > first.dim() for condition in conditions for x in _tensors((condition.mask, condition.operands))
        ):
            return None
        return tuple(
            _Condition.of(
                reshape(condition.mask),
                condition.comparison,
                *(reshape(x) if isinstance(x, Tensor) else x for x in condition.operands),
            )
            for condition in conditions
        )

    def _source(self, tensor: Tensor) -> Tensor:
        """Return the unmodified tensor of which this tensor is an expansion, or all elements; without one, itself."""
        source, version = self._sources.get(tensor, (tensor, _version(tensor)))
        unmodified: Tensor = source if _version(source) == version else tensor
        return unmodified

    def _selects_all(self, func: Any, first: Tensor, rest: Sequence[Any]) -> bool:
        """True for `ids[rows, positions]` with all rows and all positions, each once, in order."""
        if func is not Tensor.__getitem__ or first.dim() != 2 or not (isinstance(rest[0], tuple) and len(rest[0]) == 2):
            return False
        if not all(isinstance(i, Tensor) for i in rest[0]):
            return False
        values = [self.value(i) for i in rest[0]]
        return all(
            value is not None and value.numel() == size and torch.equal(value.flatten(), torch.arange(size))
            for value, size in zip(values, first.shape, strict=True)
        )

    # The input of a kernel

    def pattern(self, mask: Tensor, rows: int, queries: int, keys: int) -> Pattern | None:
        """Return the pattern of a mask; None unless the mask provably has a pattern that a kernel takes.

        The mask is True for the keys to which a query may attend, or is added to the scores.
        """
        if not self._is_mask(mask):
            return None
        reach = _Reach(self, rows, queries, keys)
        conditions = self._conditions_of(mask)
        return reach.pattern() if all(condition.holds and reach.add(condition) for condition in conditions) else None

    def are_counted_from(self, text_ids: Tensor, positions: Tensor) -> bool:
        """True if text ids were counted from positions: a new text begins where positions aren't consecutive."""
        counted = self._find_call(self._source(text_ids), "cumsum")
        begins = counted and counted.is_along_last_dim(1) and self._find_call(counted.args[0], "ne", "__ne__")
        steps = begins and begins.args[1:] == (1,) and self._find_call(begins.args[0], "diff")
        if not steps or not steps.is_along_last_dim(2) or "append" in steps.kwargs or steps.args[1:2] not in ((), (1,)):
            return False
        return self._source(steps.args[0]) is self._source(positions)

    def find_shift(self, positions: Tensor) -> tuple[Tensor, int]:
        """Return the positions from which an integer was subtracted, and the integer; else the positions and 0."""
        call = self._find_call(positions, "sub", "__sub__")
        shift: Any = call.args[1] if call is not None and len(call.args) == 2 and not call.kwargs else None
        return (call.args[0], shift) if call is not None and type(shift) is int else (positions, 0)

    def _find_call(self, tensor: Tensor, *names: str) -> _RecordedCall | None:
        """Return the call that computed a tensor, if it is one of these functions and its input is unmodified."""
        version, call = self._calls.get(tensor, (None, None))
        is_known = call is not None and version == _version(tensor) and call.holds
        return call if is_known and call.func in _find_functions(*names) else None

    def have_same_source(self, a: Tensor, b: Tensor) -> bool:
        """True if two tensors have the same source."""
        return self._source(a) is self._source(b)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """A context that watches a trace. It deletes its records at the end: tensors mustn't outlive a trace."""
        try:
            with self:
                yield
        finally:
            for records in (self._values, self._conditions, self._calls, self._sources):
                records.clear()

    @contextmanager
    def watch_again(self, copies: Iterable[tuple[Tensor, Tensor]]) -> Iterator[None]:
        """A context in which the backward pass reruns a block's Python on copies of its inputs."""
        for copy, tensor in copies:
            for records in (self._values, self._conditions):
                version, record = records.get(tensor, (None, None))
                if version == _version(tensor):
                    records[copy] = _version(copy), record
        with self:
            yield


@dataclass(frozen=True)
class _RecordedCall:
    """The call that computed a tensor, and the version of its first argument."""

    func: Any
    args: Sequence[Any]
    kwargs: dict[str, Any]
    version: int

    @property
    def holds(self) -> bool:
        return bool(_version(self.args[0]) == self.version)

    def is_along_last_dim(self, index: int) -> bool:
        """True for a 2-D input if the call's `dim`, by keyword or at this argument index, is the last dimension."""
        axis = self.kwargs.get("dim", self.args[index] if len(self.args) > index else -1)
        return self.args[0].dim() == 2 and axis in (-1, 1)


class _Reach:
    """The keys that queries can reach, narrowed by one condition of a mask after the other."""

    def __init__(self, masks: Masks, rows: int, queries: int, keys: int) -> None:
        self._masks = masks
        self._shape = (rows, queries, keys)
        # For each query: its first key, and the key after its last.
        self._first_keys = np.zeros(queries, np.int64)
        self._end_keys = np.full(queries, keys)
        self._key_masks: list[Tensor] = []
        self._query_masks: list[Tensor] = []
        self._text_ids: tuple[Tensor, Tensor] | None = None  # the text ids of queries and of keys
        self._positions: list[tuple[Tensor, Tensor, str]] = []  # positions of queries, of keys, and their comparison

    def add(self, condition: _Condition) -> bool:
        """Add a condition; False if no kernel supports it."""
        shape = _pad_to_four(condition.mask)
        if shape is None or shape[1] != 1:
            return False
        if shape[2] == 1 and not self._is_true(condition.mask):
            self._key_masks.append(condition.mask)
        elif shape[3] == 1 and not self._is_true(condition.mask):
            self._query_masks.append(condition.mask)
        elif shape[2] != 1 and shape[3] != 1:
            return self._add_two_sided(condition, shape[0])
        return True

    def _is_true(self, mask: Tensor) -> bool:
        value = self._masks.value(mask)
        return value is not None and bool(value.all())

    def _add_two_sided(self, condition: _Condition, rows: int) -> bool:
        operands = _match_operands(condition)
        if operands is None:
            value = self._masks.value(condition.mask)
            return value is not None and rows == 1 and self._add_values(value.reshape(self._shape[1:]).numpy())
        query_operand, key_operand, comparison = operands
        queries, keys = (self._masks.value(x) for x in (query_operand, key_operand))
        if queries is None or keys is None or rows != 1:
            return self._add_unknown(query_operand, key_operand, comparison)
        q = queries.flatten().numpy()
        k = keys.flatten().numpy()
        if comparison == "eq":
            return bool((k == q[0]).all() and (q == q[0]).all()) or self._add_unknown(
                query_operand, key_operand, comparison
            )
        if not (np.diff(k) > 0).all():
            return False
        ends = np.searchsorted(k, q, "right" if comparison in ("le", "gt") else "left")
        if comparison in ("le", "lt"):  # keys up to the query's position
            self._end_keys = np.minimum(self._end_keys, ends)
        else:
            self._first_keys = np.maximum(self._first_keys, ends)
        return True

    def _add_values(self, attended: Any) -> bool:
        """Add a condition with known values; False unless each query's keys are a range without gaps."""
        first = attended.argmax(1)
        positions = np.arange(attended.shape[1])
        end = first + attended.sum(1)
        if (
            not attended.any(1).all()
            or not (attended == ((positions >= first[:, None]) & (positions < end[:, None]))).all()
        ):
            return False
        self._first_keys = np.maximum(self._first_keys, first)
        self._end_keys = np.minimum(self._end_keys, end)
        return True

    def _add_unknown(self, query_operand: Tensor, key_operand: Tensor, comparison: str) -> bool:
        if query_operand.is_floating_point() or key_operand.is_floating_point():
            return False
        if comparison == "eq" and self._text_ids is None:
            self._text_ids = query_operand, key_operand
            return True
        if comparison in ("le", "gt"):
            self._positions.append((query_operand, key_operand, comparison))
        return comparison in ("le", "gt")

    def pattern(self) -> Pattern | None:
        rows, queries, keys = self._shape
        for query_operand, key_operand, comparison in self._positions:
            # Within a text, positions equal the positions in the row up to an offset.
            query_operand, shift = self._masks.find_shift(query_operand)
            if self._text_ids is None or not self._masks.are_counted_from(self._text_ids[0], query_operand):
                return None
            if not self._masks.are_counted_from(self._text_ids[1], key_operand) or queries != keys:
                return None
            ends = np.arange(1, queries + 1) - shift
            if comparison == "le":
                self._end_keys = np.minimum(self._end_keys, ends)
            else:
                self._first_keys = np.maximum(self._first_keys, ends)
        if not (self._first_keys < self._end_keys).all():
            return None
        right = int(self._end_keys[0]) - 1
        left = queries - 1 - int(self._first_keys[-1])
        positions = np.arange(queries)
        whole = bool((self._end_keys == keys).all()), bool((self._first_keys == 0).all())
        if not whole[0] and (right < 0 or not (self._end_keys == np.minimum(positions + 1 + right, keys)).all()):
            return None
        if not whole[1] and (left < 0 or not (self._first_keys == np.maximum(positions - left, 0)).all()):
            return None
        limits = None if whole[1] else left, None if whole[0] else right
        if self._text_ids is None and not self._key_masks and not self._query_masks:
            return Pattern(*limits)
        device = next(x.device for x in (*self._key_masks, *self._query_masks, *(self._text_ids or ())))
        text_ids = self._text_ids or (torch.zeros(1, 1, dtype=torch.int32, device=device),) * 2
        query_segments, key_segments = (
            _rows_of(x.to(torch.int32)).expand(rows, size) for x, size in zip(text_ids, (queries, keys), strict=True)
        )
        for mask in self._key_masks:
            key_segments = key_segments.masked_fill(~_rows_of(mask).expand(rows, keys), MASKED_KEY)
        for mask in self._query_masks:
            query_segments = query_segments.masked_fill(~_rows_of(mask).expand(rows, queries), BLIND_QUERY)
        if self._text_ids is not None and (self._key_masks or not self._attends_to_itself()):
            return Pattern(*limits, query_segments, key_segments, knows_blind=False)
        blind = None if self._text_ids is not None else self._count(key_segments != MASKED_KEY, *limits) == 0
        for mask in self._query_masks:
            hidden = ~_rows_of(mask).expand(rows, queries)
            blind = hidden if blind is None else blind | hidden
        return Pattern(*limits, query_segments, key_segments, blind)

    def _attends_to_itself(self) -> bool:
        """True if each query attends to the key at its own position, which belongs to the same text."""
        positions = np.arange(len(self._first_keys))
        _, queries, keys = self._shape
        attended = queries == keys and bool(
            (self._first_keys <= positions).all() and (positions < self._end_keys).all()
        )
        return attended and self._text_ids is not None and self._masks.have_same_source(*self._text_ids)

    def _count(self, unmasked: Tensor, left: int | None, right: int | None) -> Tensor:
        """Return the number of unmasked keys to which each query attends."""
        _, queries, keys = self._shape
        # The number of unmasked keys before each position.
        below = F.pad(unmasked.to(torch.int32).cumsum(-1, dtype=torch.int32), (1, 0))
        if right is None:
            end = below[:, -1:].expand(-1, queries)
        else:
            more = max(0, 1 + right + queries - (keys + 1))
            last = below[:, -1:].expand(-1, more)
            end = torch.cat([below, last], -1)[:, 1 + right : 1 + right + queries]
        if left is None:
            return end
        return end - F.pad(below, (left, 0))[:, :queries]


def _match_operands(condition: _Condition) -> tuple[Tensor, Tensor, str] | None:
    """Return a condition's operand of queries, its operand of keys, and the comparison of the key with the query."""
    swapped = {"le": "ge", "lt": "gt", "ge": "le", "gt": "lt", "eq": "eq"}
    shapes = [_pad_to_four(operand) for operand in condition.operands if isinstance(operand, Tensor)]
    if len(shapes) != 2 or shapes[0] is None or shapes[1] is None or not shapes[0][1] == shapes[1][1] == 1:
        return None
    left, right = condition.operands
    if shapes[0][2] == 1 == shapes[1][3]:
        return right, left, condition.comparison
    if shapes[0][3] == 1 == shapes[1][2]:
        return left, right, swapped[condition.comparison]
    return None


def _pad_to_four(tensor: Tensor) -> tuple[int, ...] | None:
    """Return the shape of a mask, padded to (rows, heads, queries, keys); None with more dimensions."""
    return None if tensor.dim() > 4 else (1,) * (4 - tensor.dim()) + tuple(tensor.shape)


def _rows_of(tensor: Tensor) -> Tensor:
    """Reshape a tensor of only queries, or only keys, to (rows or 1, queries or keys)."""
    return tensor.reshape(len(tensor) if tensor.dim() == 4 else 1, -1)


def _drop_leading_ones(tensor: Tensor) -> tuple[int, ...]:
    """Return a shape without its leading ones."""
    begin = next((i for i, size in enumerate(tensor.shape) if size != 1), tensor.dim())
    return tuple(tensor.shape[begin:])


def _version(tensor: Tensor) -> int:
    """Return a tensor's version; inference tensors have none, so each call returns a new number."""
    return next(_inference_versions) if tensor.is_inference() else tensor._version


def _is_full_slice(index: Any) -> bool:
    return isinstance(index, slice) and index == slice(None)


def _tensors(nest: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(nest) if isinstance(leaf, Tensor)]


_WATCHED = _FOLDING | _COPYING | _FILLING_LIKE.keys() | _MASKED_FILL | _RECORDED_CALLS
