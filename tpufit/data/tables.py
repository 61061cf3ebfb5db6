"""Tables and series of pandas, polars, pyarrow and others, read by the array protocol, without importing them."""

from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..errors import DataError

_NUMBERS = "biufc"


def is_foreign(data: Any) -> bool:
    """True for tables, series and arrays of libraries other than PyTorch and NumPy."""
    return hasattr(type(data), "__array__") and not isinstance(data, (Tensor, np.ndarray, np.generic))


def table_to_array(data: Any) -> NDArray[Any]:
    """Convert a table to an array of shape `(rows, columns)` and a common dtype, or a series to shape `(rows,)`.

    Categories count as their values.

    Raises:
        DataError: A column has text or other objects, or a missing value.
    """
    array: NDArray[Any] = np.asarray(data)
    columns = [array] if array.ndim == 1 else list(array.T) if array.ndim == 2 else []
    if array.dtype.kind == "O":  # mixed types, or types with missing values
        columns = [_unify_type(column) for column in columns]
        if all(column.dtype.kind in _NUMBERS for column in columns):
            array = columns[0] if array.ndim == 1 else np.column_stack(columns)
    for number, column in enumerate(columns):
        for row in np.flatnonzero(_is_missing(column))[:1]:
            names = [getattr(data, "name", None) or None] if array.ndim == 1 else _list_column_names(data)
            which = f"a {type(data).__name__}" if names in ([], [None]) else f"column {names[number]!r}"
            raise DataError(
                f"{which} must hold numbers, but row {row} has {column[row : row + 1].tolist()[0]!r}. Fill missing "
                "values or drop their rows; encode text as numbers, e.g. pandas's .astype('category').cat.codes"
            )
    return array


def _is_missing(column: NDArray[Any]) -> NDArray[np.bool_]:
    """Return True for each value that isn't a number."""
    if column.dtype.kind in _NUMBERS:
        missing: NDArray[np.bool_] = np.isnan(column).any(axis=tuple(range(1, column.ndim)))
        return missing
    return np.array([column.dtype.kind != "O" or not isinstance(value, Real) for value in column])


def _unify_type(column: NDArray[Any]) -> NDArray[Any]:
    """Convert a column to a common type of its values, if there is one."""
    try:
        return np.array(column.tolist())
    except ValueError:  # lists of different lengths
        return column


def _list_column_names(table: Any) -> list[Any]:
    names = getattr(table, "column_names", None)  # pyarrow's; pandas and polars have `columns`
    return list(getattr(table, "columns", ()) if names is None else names)
