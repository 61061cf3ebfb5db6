"""Reads the rows of a batch from a cache: from its mapped files, or from memory."""

import threading
import weakref
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

# Shorter rows are copied file by file; longer rows are faster one by one.
_LONG = 2048  # bytes
# The memory of batches is reused if it is large; at most as many as a prefetcher and a device use at once.
_LARGE = 1 << 20
_MOST_ALLOCATED = 4


class _Memory:
    """Allocates memory for a field's batches, and reuses it when it is free: new memory costs as much as filling it.

    An array is free when only this class refers to its memory. A transfer to a device, which refers to the array while
    it reads, is therefore not disturbed.
    """

    def __init__(self, field: Field) -> None:
        self._field = field
        # Memory, and the array allocated in it.
        self._allocated: list[tuple[NDArray[Any], weakref.ref[NDArray[Any]]]] = []
        self._turn = threading.Lock()

    def allocate(self, rows: int) -> NDArray[Any]:
        """Return memory for some rows, as `Field.empty` does."""
        if rows * self._field.row_bytes < _LARGE:
            return self._field.empty(rows)
        with self._turn:
            free = [i for i, (_, reference) in enumerate(self._allocated) if reference() is None]
            fitting = [i for i in free if len(self._allocated[i][0]) >= rows]
            memory = self._allocated[fitting[0]][0] if fitting else self._field.empty(rows)
            array = memory[:rows]
            index = (fitting or free or [len(self._allocated)])[0]
            if index < _MOST_ALLOCATED:
                self._allocated[index : index + 1] = [(memory, weakref.ref(array))]
            return array


class Mapped:
    """Reads a cache's rows from the mapped files, each of which is checked at its first read."""

    def __init__(self, manifest: Manifest, shards: Sequence[Shard]) -> None:
        self._fields = manifest.fields
        self._shards = shards
        self._rows_per_file = manifest.rows_per_file
        self._unchecked = set(range(len(shards)))
        self._memory = {field.name: _Memory(field) for field in manifest.fields}
        self._columns = {field.name: [shard.columns[field.name] for shard in shards] for field in manifest.fields}

    def read(self, rows: Rows, ordered: bool) -> dict[str, Tensor]:
        """Copy rows, by field name, of shape `(len(rows), *shape)`, in this order or sorted (faster).

        Raises:
            CacheDamagedError: A file is damaged.
        """
        rows = rows if ordered else np.sort(rows)
        files, local = np.divmod(rows, self._rows_per_file)
        for number in self._unchecked.intersection(files.tolist()) if self._unchecked else ():
            self._shards[number].check()
            self._unchecked.discard(number)
        positions = np.argsort(files, kind="stable")
        bounds = np.searchsorted(files[positions], np.arange(len(self._shards) + 1)).tolist()
        spans = [(number, span) for number, span in enumerate(pairwise(bounds)) if span[0] < span[1]]
        read = {}
        for field in self._fields:
            columns = self._columns[field.name]
            batch = self._memory[field.name].allocate(len(rows))
            if not ordered or len(spans) == 1:
                for number, (a, b) in spans:  # mode="raise" would copy twice
                    np.take(columns[number], local[a:b], axis=0, out=batch[a:b], mode="clip")
            elif field.row_bytes >= _LONG and spans:
                one_by_one = [columns[number][row] for number, row in zip(files.tolist(), local.tolist(), strict=True)]
                np.concatenate(one_by_one, out=batch.reshape(-1))
            else:
                for number, (a, b) in spans:
                    batch[positions[a:b]] = columns[number].take(local[positions[a:b]], axis=0)
            read[field.name] = field.tensor(batch)
        return read


class InMemory(Mapped):
    """Reads rows from memory, to which all rows are copied, and checked, at the beginning."""

    def __init__(self, manifest: Manifest, shards: Sequence[Shard]) -> None:
        super().__init__(manifest, shards)
        self._rows_per_file = rows = manifest.rows * manifest.copies
        self._shards = shards[:1]
        self._unchecked = set()
        self._columns = {field.name: [field.empty(rows)] for field in manifest.fields}
        for number, shard in enumerate(shards):
            span = manifest.span(number)
            part = {name: column[span.start : span.stop] for name, (column,) in self._columns.items()}
            for name, column in part.items():
                column[...] = shard.columns[name]
            shard.check(part)
