"""`NpyFile`: an array on disk that grows by rows, in the memory of one batch."""

from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy_format

from ..errors import DataError, counted

_npy: Any = npy_format  # older NumPys have no types for it


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
        self._kind: tuple[tuple[int, ...], np.dtype[Any]] | None = None  # what all batches have in common

    def append(self, rows: np.ndarray[Any, Any]) -> None:
        """Add rows: an array whose first axis is theirs; the rest of its shape, and its dtype, stay the same.

        Raises:
            DataError: They don't.
        """
        kind = (rows.shape[1:], rows.dtype)
        if self._kind is None:
            self._kind = kind
            self._write_header()
        if kind != self._kind:
            raise DataError(
                f"the rows of one array must all be of one shape and dtype: after {counted(self._rows, 'row')} of "
                f"shape {self._kind[0]} and {self._kind[1]} came some of {kind[0]} and {kind[1]}. Pad the batches to "
                "one shape, or predict them apart"
            )
        self._file.write(np.ascontiguousarray(rows).data)
        self._rows += len(rows)

    def close(self) -> None:
        """Write down how many rows there are, and close the file; again is no error."""
        if self._kind is not None and not self._file.closed:
            self._file.seek(0)
            self._write_header()
        self._file.close()

    def _write_header(self) -> None:
        # NumPy leaves room in it for any number of rows, so that the second one is as long as the first.
        assert self._kind is not None
        shape, dtype = self._kind
        header = {"descr": _npy.dtype_to_descr(dtype), "fortran_order": False, "shape": (self._rows, *shape)}
        _npy.write_array_header_1_0(self._file, header)
