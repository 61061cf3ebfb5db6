"""`NpyFile`: an array on disk that grows by rows, with one batch in memory."""

from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy_format

from ..errors import DataError, say_count

_npy: Any = npy_format  # older versions of NumPy have no types for it


class NpyFile:
    """A `.npy` file that grows along its first axis; `numpy.load(path, mmap_mode="r")` reads it as one array.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "a.npy")
        >>> file = NpyFile(path)
        >>> file.append(np.zeros((2, 3)))
        >>> file.append(np.ones((1, 3)))
        >>> file.close()
        >>> np.load(path).shape
        (3, 3)
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO = open(path, "wb")  # noqa: SIM115 - open from the first batch to the last
        self._rows = 0
        self._kind: tuple[tuple[int, ...], np.dtype[Any]] | None = None  # the shape of a row and the dtype

    def append(self, rows: np.ndarray[Any, Any]) -> None:
        """Append rows, the first axis of an array. The other dimensions and the dtype must not change.

        Raises:
            DataError: They have changed.
        """
        kind = (rows.shape[1:], rows.dtype)
        if self._kind is None:
            self._kind = kind
            self._write_header()
        if kind != self._kind:
            raise DataError(
                f"the rows of an array must all have one shape and dtype: after {say_count(self._rows, 'row')} of "
                f"shape {self._kind[0]} and {self._kind[1]} came rows of {kind[0]} and {kind[1]}. Pad the batches to "
                "one shape, or predict them separately"
            )
        self._file.write(np.ascontiguousarray(rows).data)
        self._rows += len(rows)

    def close(self) -> None:
        """Write the number of rows, and close the file. May be called again."""
        if self._kind is not None and not self._file.closed:
            self._file.seek(0)
            self._write_header()
        self._file.close()

    def _write_header(self) -> None:
        # NumPy reserves room for any number of rows, so the second header is as long as the first.
        assert self._kind is not None
        shape, dtype = self._kind
        header = {"descr": _npy.dtype_to_descr(dtype), "fortran_order": False, "shape": (self._rows, *shape)}
        _npy.write_array_header_1_0(self._file, header)
