"""`CSVFile`: a table in a file, to which rows and columns can be added. Independent of hooks and models."""

import csv
import io
import os
from collections.abc import Iterable, Mapping
from typing import Any

from ...utils.files import append_or_undo, replacing, require_replaceable, tolerating_full_disk
from ...utils.urls import Mirror

_MISSING = "NA"


class CSVFile:
    """A CSV file or URL that is complete after every row, even if the process is killed. Missing folders are made.

    The first row names the columns. If a later row has new columns, the file is rewritten, with `NA` for the earlier
    rows. With `append` an existing file and its columns are continued.

    Rows that can't be written because the disk is full are kept, and written with the next row.

    Raises:
        OSError: The write failed for another reason, or the path isn't a file.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "log.csv")
        >>> table = CSVFile(path)
        >>> table.add({"epoch": 0, "loss": 0.5})
        >>> table.add({"epoch": 1, "loss": 0.25, "val_loss": 0.75})
        >>> print(path.read_text())
        epoch,loss,val_loss
        0,0.5,NA
        1,0.25,0.75
        <BLANKLINE>
    """

    def __init__(self, path: str | os.PathLike[str], separator: str = ",", append: bool = False) -> None:
        self._mirror = Mirror(path, file=True)
        self._separator = separator
        self._path = self._mirror.path
        require_replaceable(self._path)
        if append:
            self._mirror.pull()
        self._columns: list[str] = []
        self.rows = 0  # without the header
        self.pending: list[Mapping[str, Any]] = []  # rows to write
        self._replacement: list[list[str]] | None = None  # the rows to rewrite the file with, before others are added
        if append and self._path.is_file():
            self._columns, rows = self._read()
            self.rows = len(rows)
        else:
            self._replacement = []
            with tolerating_full_disk():
                self.flush()

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a row of values by column; an array or another iterable becomes `[a, b]`.

        Raises:
            OSError: The write failed; the row is kept.
        """
        self.pending.append(row)
        self.flush()

    def flush(self) -> None:
        """Write the pending rows.

        Raises:
            OSError: The write failed; the rows are kept.
        """
        new = list(dict.fromkeys(name for row in self.pending for name in row if name not in self._columns))
        if self._replacement is None and (new or not self._path.exists()):
            self._replacement = self._read()[1] if self._path.exists() else []
        self._columns += new
        if self._replacement is not None:
            self._write(self._replacement)
            self._replacement = None
        if self.pending:
            self._append([[_as_cell(row.get(name, _MISSING)) for name in self._columns] for row in self.pending])
            self.rows += len(self.pending)
            self.pending = []
        self._mirror.push()

    def drop_epochs_from(self, epoch: int, first_row: int) -> None:
        """Drop a resumed training's rows from an epoch (from 0) on, and a truncated last row.

        Rows before this training's first row stay.
        """
        self._columns, rows = self._read()
        column = self._columns.index("epoch") if "epoch" in self._columns else 0
        while len(rows) > first_row and not _is_before(rows[-1], column, epoch, len(self._columns)):
            rows.pop()
        self._replacement = rows
        self.rows = len(rows)
        with tolerating_full_disk():
            self.flush()

    def _read(self) -> tuple[list[str], list[list[str]]]:
        with open(self._path, newline="", encoding="utf-8", errors="surrogateescape") as file:
            columns, *rows = [*csv.reader(file, delimiter=self._separator)] or [[]]
        return columns, rows

    def _write(self, rows: Iterable[list[str]]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        names = [self._columns] if self._columns else []
        with replacing(self._path) as draft:
            draft.write_bytes(
                self._as_bytes([*names, *(row + [_MISSING] * (len(self._columns) - len(row)) for row in rows)])
            )

    def _append(self, rows: list[list[Any]]) -> None:
        with open(self._path, "rb+", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - 1))
            is_cut = end > 0 and file.read() != b"\n"
            append_or_undo(file, b"\n" * is_cut + self._as_bytes(rows), durable=True)

    def _as_bytes(self, rows: Iterable[list[Any]]) -> bytes:
        text = io.StringIO(newline="")
        csv.writer(text, delimiter=self._separator, lineterminator="\n").writerows(rows)
        return text.getvalue().encode(errors="surrogateescape")


def _is_before(row: list[str], column: int, epoch: int, columns: int) -> bool:
    return len(row) == columns and row[column].isdecimal() and int(row[column]) < epoch


def _as_cell(value: Any) -> Any:
    if hasattr(value, "tolist"):  # arrays and tensors of any shape
        value = value.tolist()
    return f"[{', '.join(map(str, value))}]" if isinstance(value, (list, tuple)) else value
