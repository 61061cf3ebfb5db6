"""Tables and series of pandas, polars, pyarrow and others, by the array protocol; none of them is imported."""

from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..errors import DataError

_NUMBERS = "biufc"


def is_foreign(data: Any) -> bool:
    """True for tables, series and arrays of other libraries than PyTorch and NumPy."""
    return hasattr(type(data), "__array__") and not isinstance(data, (Tensor, np.ndarray, np.generic))


def numbers_of(data: Any) -> NDArray[Any]:
    """Make an array of a table, shape `(rows, columns)` and of the columns' common dtype, or of a series, `(rows,)`.

    Categories count as their values.

    Raises:
        DataError: A column holds text or other objects, or lacks a value.
    """
    array: NDArray[Any] = np.asarray(data)
    columns = [array] if array.ndim == 1 else list(array.T) if array.ndim == 2 else []
    if array.dtype.kind == "O":  # what several types, or types with missing values, come as
        columns = [_of_one_type(column) for column in columns]
        if all(column.dtype.kind in _NUMBERS for column in columns):
            array = columns[0] if array.ndim == 1 else np.column_stack(columns)
    for number, column in enumerate(columns):
        for row in np.flatnonzero(_is_missing(column))[:1]:
            names = [getattr(data, "name", None) or None] if array.ndim == 1 else _names(data)
            which = f"a {type(data).__name__}" if names in ([], [None]) else f"column {names[number]!r}"
            raise DataError(
                f"{which} must hold numbers, but row {row} has {column[row : row + 1].tolist()[0]!r}. Fill missing "
                "values or drop their rows; give text as numbers, e.g. pandas's .astype('category').cat.codes"
            )
    return array


def _is_missing(column: NDArray[Any]) -> NDArray[np.bool_]:
    """True where there is no number."""
    if column.dtype.kind in _NUMBERS:
        missing: NDArray[np.bool_] = np.isnan(column).any(axis=tuple(range(1, column.ndim)))
        return missing
    return np.array([column.dtype.kind != "O" or not isinstance(value, Real) for value in column])


def _of_one_type(column: NDArray[Any]) -> NDArray[Any]:
    """The same values in the type that holds them all, if there is one."""
    try:
        return np.array(column.tolist())
    except ValueError:  # lists of different lengths
        return column


def _names(table: Any) -> list[Any]:
    names = getattr(table, "column_names", None)  # pyarrow's; pandas and polars have `columns`
    return list(getattr(table, "columns", ()) if names is None else names)
