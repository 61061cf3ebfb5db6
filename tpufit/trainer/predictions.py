"""The result of `predict`: the rows of all batches as NumPy arrays, in memory or in files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, bfloat16
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from ..errors import ArgumentError, DataError
from ..losses import describe_nest
from ..utils.files import replacing
from ..utils.npy_file import NpyFile


def as_array(tensor: Tensor) -> NDArray[Any]:
    """Return a host tensor as an array that shares its memory; bfloat16, which NumPy lacks, becomes float32."""
    array: NDArray[Any] = (tensor.float() if tensor.dtype is bfloat16 else tensor).detach().numpy()
    return array


class Predictions:
    """Joins the outputs of batches in order, without a second copy of any row.

    Args:
        batches: The number of batches (default: unknown), with which an array in memory is allocated only once.
        files: The path of a `.npy` file for the rows, or a nest of paths in the form of the outputs (default: memory).

    Raises:
        ArgumentError: A path doesn't end in `.npy`.

    Example:
        >>> import torch
        >>> predictions = Predictions(batches=2)
        >>> predictions.add({"a": torch.ones(2, 3)})
        >>> predictions.add({"a": torch.ones(1, 3)})
        >>> predictions.result()["a"].shape
        (3, 3)
    """

    def __init__(self, batches: int | None = None, files: Any = None) -> None:
        self._batches = batches
        self._files = files
        self._columns: list[_Column] = []
        self._spec: TreeSpec | None = None
        self._open = ExitStack()
        for path in () if files is None else tree_leaves(files):
            if not isinstance(path, (str, os.PathLike)) or Path(path).suffix != ".npy":
                raise ArgumentError(f"out must be a path ending in '.npy', or a nest of such paths, got {path!r}")

    def add(self, outputs: Any) -> None:
        """Add the outputs of a batch: host tensors of shape `(rows, ...)`; a scalar is one row.

        Raises:
            DataError: The rows differ in shape from earlier rows.
            ArgumentError: The nest of paths differs from the outputs'.
        """
        leaves, spec = tree_flatten(outputs)
        if self._spec is None:
            self._columns = self._columns_for(outputs, leaves, spec)
            self._spec = spec
        elif spec != self._spec:
            raise DataError(
                "the outputs of all batches must have the same structure, but "
                f"{describe_nest(outputs)} came after another"
            )
        for column, leaf in zip(self._columns, leaves, strict=True):
            column.add(np.atleast_1d(as_array(leaf)) if isinstance(leaf, Tensor) else leaf)

    def result(self) -> Any:
        """Return the rows of all batches, in the outputs' nest; None if nothing was added.

        Rows in files are mapped into memory, for reading.
        """
        if self._spec is None:
            return None
        return tree_unflatten([column.result() for column in self._columns], self._spec)

    @contextmanager
    def committed(self) -> Iterator[Predictions]:
        """A context at whose end all files are put in place; after an error, none."""
        with self._open:
            yield self
            for column in self._columns:
                column.finish()

    def _columns_for(self, outputs: Any, leaves: list[Any], spec: TreeSpec) -> list[_Column]:
        if self._files is None:
            return [_InMemory(self._batches) if isinstance(leaf, Tensor) else _Items() for leaf in leaves]
        paths, form = tree_flatten(self._files)
        if form != spec or not all(isinstance(leaf, Tensor) for leaf in leaves):
            raise ArgumentError(
                f"out must have a path for each output, in the same form: got {describe_nest(self._files)}, and the "
                f"module returns {describe_nest(outputs)}"
            )
        return [_InFile(Path(path), self._open) for path in paths]


class _Column(Protocol):
    """One of the model's outputs, over all batches."""

    def add(self, part: Any) -> None:
        """Add a batch's part."""

    def finish(self) -> None:
        """Finish the output after the last batch."""

    def result(self) -> Any:
        """Return the whole output."""


class _Items:
    """An output that isn't a tensor: a list with an item for each batch."""

    def __init__(self) -> None:
        self._items: list[Any] = []

    def add(self, part: Any) -> None:
        self._items.append(part)

    def finish(self) -> None:
        pass

    def result(self) -> list[Any]:
        return self._items


class _InMemory:
    """An array, allocated once if the number of batches is known, else grown by reallocation."""

    def __init__(self, batches: int | None) -> None:
        self._batches = batches or 1
        self._array: NDArray[Any] | None = None
        self._rows = 0

    def add(self, part: NDArray[Any]) -> None:
        if self._array is None:
            self._array = np.empty((len(part) * self._batches, *part.shape[1:]), part.dtype)
        _check_rows(self._array.shape, part)
        end = self._rows + len(part)
        if end > len(self._array):
            self._resize(max(end, len(self._array) * 5 // 4))
        self._array[self._rows : end] = part
        self._rows = end

    def finish(self) -> None:
        pass

    def result(self) -> NDArray[Any]:
        assert self._array is not None
        self._resize(self._rows)
        return self._array

    def _resize(self, rows: int) -> None:
        assert self._array is not None
        # No other reference to the array exists. If possible, the system moves its memory without a copy.
        self._array.resize((rows, *self._array.shape[1:]), refcheck=False)


class _InFile:
    """A `.npy` file, written sequentially."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = NpyFile(stack.enter_context(replacing(path)))
        stack.callback(self._file.close)

    def add(self, part: NDArray[Any]) -> None:
        self._file.append(part)

    def finish(self) -> None:
        self._file.close()

    def result(self) -> NDArray[Any]:
        mapped: NDArray[Any] = np.load(self._path, mmap_mode="r")
        return mapped


def _check_rows(shape: tuple[int, ...], part: NDArray[Any]) -> None:
    if shape[1:] != part.shape[1:]:
        raise DataError(
            f"predict joins the outputs of all batches, but some have rows of shape {shape[1:]} and others of "
            f"{part.shape[1:]}. Pad the data to one shape, or predict batch by batch with predict_on_batch"
        )
