"""`Joiner`: joins an iterable's batches, one per core, into one batch for all cores.

An iterable may therefore yield batches for one core each, as a `DataLoader` does, including lists (such as boxes) and
graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves

from ..errors import BatchError, DataError
from ..utils.user_code import warn
from .batches import has_parts, list_tensors, name_parts, require_dense

# The parts of several batches at the same position in the nest, which differ in their rows only.
Column = Sequence[Any]
_FEW = 3  # a tuple of at most this many tensors counts as several inputs
_CURE = "yield whole batches, for all cores together, and pass batch_size='global': then they are only split"


class Joiner:
    """Joins batches row by row.

    Tensors are joined along their rows, and so are lists with an item per row, such as an image's boxes. Other tuples,
    lists and dicts are nests of columns, which are joined separately.

    Args:
        name: The data's name in errors and warnings.

    Example:
        >>> join = Joiner("x")
        >>> join([(torch.zeros(2, 3), ["a", "b"]), (torch.ones(1, 3), ["c"])])[1]
        ['a', 'b', 'c']
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._checked_first = False

    def __call__(self, parts: Sequence[Any]) -> Any:
        """Join some batches, nests of tensors.

        Raises:
            DataError: The batches differ in more than their rows.
            BatchError: In a batch x and y have different numbers of rows, which would misalign the joined rows.
        """
        joined = _Joined(parts)
        if _are_samples(parts):
            return [sample for part in parts for sample in part]
        whole = joined.join(parts, top=True)
        uneven = self._check_rows(parts, joined)
        if not self._checked_first:  # once, because it reads values
            self._checked_first = True
            self._warn_of_positions(joined, uneven)
        return whole

    def _check_rows(self, parts: Sequence[Any], joined: _Joined) -> str:
        """Check that no rows are misaligned, and return the shapes of a batch with unequal numbers of rows, or ""."""
        counts = joined.counts
        if all(count == counts[0] for count in counts):
            return ""
        # If x and y have equally many rows in total, but not in each batch, rows of y are now aligned with x's rows of
        # another batch. Parts without a row per sample, such as nodes and graphs, differ in total, too.
        together = [counts] if joined.split is None else [counts, [counts[0], *counts[joined.split :]]]
        for group in together:
            if len({sum(count) for count in group}) == 1 and any(count != group[0] for count in group):
                got = _describe_uneven_batch(parts, group)
                raise BatchError(f"{self._name} must yield batches whose parts have equally many rows, got {got}")
        return _describe_uneven_batch(parts, counts)

    def _warn_of_positions(self, joined: _Joined, uneven: str) -> None:
        """Warn about indices that count from a batch's first row: after joining, all point into the first batch."""
        if uneven:
            why = f"their parts have different numbers of rows ({uneven}). Numbers that count from a batch's first row"
        elif any(_are_positions(column, in_order) for column, in_order in joined.integers):
            why = "each has whole numbers that restart at 0. If they count from the batch's first row, they"
        else:
            return
        warn(
            f"{self._name} yields one batch per core, and these batches are joined row by row, but {why} then all "
            f"point into the first batch. If you have such numbers, {_CURE}"
        )


class _Joined:
    """Joins one group of batches, and records the rows of each tensor in each batch."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.counts: list[list[int]] = []  # for each column tensor: its rows in each batch
        self.split: int | None = None  # the number of x's tensors, if y has tensors too
        # The 1-D columns of whole numbers. A column of y may be classes, and counts as positions only if it is in
        # order.
        self.integers: list[tuple[Sequence[Tensor], bool]] = []
        lists = [_count_rows_in_lists(part) for part in parts]
        self._in_lists = None not in lists
        rows = lists if self._in_lists else [_count_rows(part) for part in parts]
        self._rows = None if None in rows else rows

    def join(self, column: Column, top: bool = False) -> Any:
        """Join the parts at one position of several batches, or at the `top` the batches themselves."""
        first = column[0]
        if any(type(part) is not type(first) for part in column):
            kinds = [type(part).__name__ for part in column]
            raise DataError(
                f"all batches must have the same structure, got {kinds} at the same position: let the data yield one "
                "structure"
            )
        if isinstance(first, Tensor):
            return self._join_tensors(column)
        if isinstance(first, dict):
            if any(part.keys() != first.keys() for part in column):
                keys = [[*part] for part in column]
                raise DataError(
                    f"all batches must have the same keys, got {keys} at the same position: let the data yield the "
                    "same keys"
                )
            return type(first)((key, self.join([part[key] for part in column])) for key in first)
        if isinstance(first, np.ndarray):  # of text
            return np.concatenate(column)
        if not isinstance(first, (tuple, list)):
            return first
        if not top and self._holds_rows(column):
            return type(first)(item for part in column for item in part)
        if any(len(part) != len(first) for part in column):
            raise DataError(
                f"all batches must have the same structure, got {type(first).__name__}s of {[*map(len, column)]} items "
                "at the same position: let the data yield one structure"
            )
        columns: list[Any] = []
        for i, parts in enumerate(zip(*column, strict=True)):
            if top and i == 1 and self.counts and len(first) <= 3:
                self.split = len(self.counts)
            columns.append(self.join(parts))
        return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)

    def _join_tensors(self, column: Sequence[Tensor]) -> Tensor:
        require_dense(column)
        first = column[0]
        if not first.dim():
            if any(part.dim() or part.item() != first.item() for part in column):
                numbers = [part.tolist() for part in column]
                raise BatchError(
                    f"the batches that make one step have different single numbers, {numbers}: give each row a "
                    f"number, or {_CURE}"
                )
            return first
        if any(part.shape[1:] != first.shape[1:] for part in column):
            raise DataError(
                "the batches that make one step must have rows of one shape, got batches of shapes "
                f"{[tuple(part.shape) for part in column]}. Pad them to a few lengths, see tpufit.data.PadToBuckets"
            )
        self.counts.append([len(part) for part in column])
        if first.dim() == 1 and not first.is_floating_point() and first.dtype is not torch.bool:
            self.integers.append((column, self.split is not None))
        return torch.cat([*column])

    def _holds_rows(self, column: Column) -> bool:
        """True for lists with an item per row of their batches."""
        first = column[0]
        if hasattr(first, "_fields"):
            return False
        if not any(isinstance(leaf, Tensor) for part in column for leaf in tree_leaves(part)):
            return isinstance(first, list) or self._rows == [len(part) for part in column] != [0] * len(column)
        if self._rows != [len(part) for part in column]:
            return False
        if self._in_lists or all(isinstance(item, dict) for part in column for item in part):
            return True
        # Columns have a row per row of the batch. A short tuple without them is several inputs, such as (nodes, edges).
        columns = all(leaf.dim() and len(leaf) == len(part) for part in column for leaf in _tensors(part))
        return not columns and all(map(_are_alike, column)) and all(map(_may_be_rows, column))


def _count_rows(part: Any) -> int | None:
    """Return a batch's number of rows by its tensors outside tuples and lists; None if there are none."""
    for item in part if has_parts(part) else (part,):
        for leaf in tree_leaves(item, is_leaf=_is_sequence):
            if isinstance(leaf, Tensor) and leaf.dim():
                return len(leaf)
    return None


def _count_rows_in_lists(part: Any) -> int | None:
    """Return a batch's number of rows if each part is a list of rows, as `zip(*samples)` makes them, else None."""
    items = part if has_parts(part) else (part,)
    if len(items) < 2 or not all(_is_sequence(item) and _are_alike(item) for item in items):
        return None
    lengths = {len(item) for item in items}
    uneven = len({len(leaf) if leaf.dim() else 0 for leaf in _tensors(part)}) > 1
    of_rows = any(isinstance(item[0], dict) for item in items) or (uneven and any(map(_may_be_rows, items)))
    return lengths.pop() if len(lengths) == 1 and of_rows else None


def _are_samples(parts: Sequence[Any]) -> bool:
    """True for batches that are lists of samples, as from a `collate_fn` that returns its argument."""
    for part in parts:
        if type(part) is not list or not all(isinstance(item, (dict, tuple)) for item in part) or not _are_alike(part):
            return False
        numbers = any(not leaf.dim() for leaf in _tensors(part))
        uneven = len({len(leaf) for leaf in _tensors(part) if leaf.dim()}) > 1
        if not numbers and not (uneven and isinstance(part[0], dict)):
            return False
    return True


def _are_alike(items: Sequence[Any]) -> bool:
    """True for items of one structure, whose tensors have the same dtypes and numbers of dimensions."""

    def structure(item: Any) -> Any:
        leaves, spec = tree_flatten(item)
        return spec, [(leaf.dtype, leaf.dim()) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves]

    return bool(items) and all(structure(item) == structure(items[0]) for item in items)


def _are_positions(column: Sequence[Tensor], in_order: bool) -> bool:
    """True for numbers that restart in each batch: each row's index once, or consecutive group indices."""
    for part in column:
        if not len(part):
            return False
        steps = part.diff()
        groups = int(part[0]) == 0 and int(part[-1]) > 1 and bool(((steps == 0) | (steps == 1)).all())
        numbers = part if in_order else part.sort().values
        each = len(part) > 2 and torch.equal(numbers, torch.arange(len(part), dtype=part.dtype))
        if not groups and not each:
            return False
    return True


def _may_be_rows(items: Sequence[Any]) -> bool:
    """True for a list, a long tuple, or a tuple with numbers; a short tuple of tensors is columns."""
    return isinstance(items, list) or len(items) > _FEW or any(not leaf.dim() for leaf in _tensors(items))


def _is_sequence(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and not hasattr(value, "_fields")


def _tensors(nest: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(nest) if isinstance(leaf, Tensor)]


def _describe_uneven_batch(parts: Sequence[Any], counts: Sequence[Sequence[int]]) -> str:
    """Describe the first batch whose tensors have different numbers of rows."""
    return list_tensors(
        name_parts(next(part for i, part in enumerate(parts) if len({count[i] for count in counts}) > 1))
    )
