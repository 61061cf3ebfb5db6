"""Reading the rows of a batch out of the files of a cache: mapped, or from memory."""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from .manifest import Manifest
from .schema import Field
from .shards import Shard

Rows = NDArray[np.int64]

# Shorter rows are copied file by file; for longer ones it is faster to list them one by one.
_LONG = 2048  # bytes
# Memory of batches is kept for the next ones if it is large, and no more than a feed and a device hold at once.
_LARGE, _KEPT = 1 << 20, 4


class Reader(ABC):
    """Reads rows of a cache.

    Args:
        layout: What the cache holds.
        shards: All its files.
    """

    def __init__(self, layout: Manifest, shards: Sequence[Shard]) -> None:
        self._layout = layout
        self._shards = shards
        self._memory = {field.name: _Memory(field) for field in layout.fields}

    def read(self, rows: Rows, ordered: bool) -> dict[str, Tensor]:
        """Copy rows.

        Args:
            rows: Which ones of the cache.
            ordered: Whether to keep their order. Else they come sorted, which is faster.

        Returns:
            The rows by the fields' names, each of shape `(len(rows), *shape)`.

        Raises:
            CacheDamagedError: They are not what was written.
        """
        rows = rows if ordered else np.sort(rows)
        return {field.name: field.tensor(bits) for field, bits in self._gather(rows, ordered)}

    @abstractmethod
    def _gather(self, rows: Rows, ordered: bool) -> list[tuple[Field, NDArray[Any]]]: ...


class _Memory:
    """Room for batches. What nobody holds any more is given out again: new memory costs as much as filling it.

    Nobody holds it when it would be freed if it weren't kept here. So a transfer to a device that still reads it, and
    holds it for that, is not disturbed.

    Args:
        field: What it is for.
    """

    def __init__(self, field: Field) -> None:
        self._field = field
        self._kept: list[tuple[NDArray[Any], weakref.ref[NDArray[Any]]]] = []  # memory, and who was given it
        self._turn = threading.Lock()

    def room(self, rows: int) -> NDArray[Any]:
        """Room for some rows, as `Field.empty` gives it."""
        if rows * self._field.row_bytes < _LARGE:
            return self._field.empty(rows)
        with self._turn:
            free = [place for place, (_, holder) in enumerate(self._kept) if holder() is None]
            fitting = [place for place in free if len(self._kept[place][0]) >= rows]
            memory = self._kept[fitting[0]][0] if fitting else self._field.empty(rows)
            room = memory[:rows]
            place = (fitting or free or [len(self._kept)])[0]
            if place < _KEPT:
                self._kept[place : place + 1] = [(memory, weakref.ref(room))]
            return room


class Mapped(Reader):
    """From the mapped files, each checked when it is first read from."""

    def __init__(self, layout: Manifest, shards: Sequence[Shard]) -> None:
        super().__init__(layout, shards)
        self._unchecked = set(range(len(shards)))
        self._columns = {field.name: [shard.columns[field.name] for shard in shards] for field in layout.fields}

    def _gather(self, rows: Rows, ordered: bool) -> list[tuple[Field, NDArray[Any]]]:
        files, local = np.divmod(rows, self._layout.rows_per_file)
        numbers, rows_there = files.tolist(), local.tolist()
        for number in self._unchecked.intersection(numbers) if self._unchecked else ():
            self._shards[number].check()
            self._unchecked.discard(number)
        positions = np.argsort(files, kind="stable")
        bounds = np.searchsorted(files[positions], np.arange(len(self._shards) + 1)).tolist()
        spans = [(number, span) for number, span in enumerate(pairwise(bounds)) if span[0] < span[1]]
        gathered = []
        for field in self._layout.fields:
            columns = self._columns[field.name]
            batch = self._memory[field.name].room(len(rows))
            if not ordered:
                for number, (a, b) in spans:
                    np.take(columns[number], local[a:b], axis=0, out=batch[a:b], mode="clip")
            elif field.row_bytes >= _LONG and len(rows):
                one_by_one = [columns[number][row] for number, row in zip(numbers, rows_there, strict=True)]
                np.concatenate(one_by_one, out=batch.reshape(-1))
            else:
                for number, (a, b) in spans:
                    batch[positions[a:b]] = columns[number].take(local[positions[a:b]], axis=0)
            gathered.append((field, batch))
        return gathered


class InMemory(Reader):
    """From memory, where all rows are copied, and checked, at the beginning."""

    def __init__(self, layout: Manifest, shards: Sequence[Shard]) -> None:
        super().__init__(layout, shards)
        self._columns = {field.name: field.empty(layout.rows * layout.copies) for field in layout.fields}
        for number, shard in enumerate(shards):
            span = layout.span(number)
            part = {name: column[span.start : span.stop] for name, column in self._columns.items()}
            for name, column in part.items():
                column[...] = shard.columns[name]
            shard.check(part)

    def _gather(self, rows: Rows, ordered: bool) -> list[tuple[Field, NDArray[Any]]]:
        gathered = [(field, self._memory[field.name].room(len(rows))) for field in self._layout.fields]
        for field, batch in gathered:
            np.take(self._columns[field.name], rows, axis=0, out=batch, mode="clip")  # mode="raise" would copy twice
        return gathered
