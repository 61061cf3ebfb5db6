"""`CSVFile`: a table in a file that grows by rows, and by columns too. With no hooks and no model."""

import csv
import io
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from ...utils.files import DISK_FULL, replacing, require_replaceable
from ...utils.urls import Mirror

_MISSING = "NA"


class CSVFile:
    """A CSV file or URL that is whole after every row, whenever the process may die. Missing folders are made.

    The first row names the columns. A later row may bring new ones: the whole file is then written again, with `NA`
    where the rows before have nothing. To `append` goes on with a file that is there, and its columns.

    Rows that can't be written, because a disk is full, are kept and written with the next one.

    Raises:
        OSError: The file system refused for another reason, or something but a file is there.

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
        self.rows = 0  # without the one of names
        self.waiting: list[Mapping[str, Any]] = []  # rows to be written
        self._instead: list[list[str]] | None = None  # the rows to write the file anew with, before any other is added
        if append and self._path.is_file():
            self._columns, rows = self._read()
            self.rows = len(rows)
        else:
            self._instead = []
            self._try_now()

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a row: values by column; an array or another iterable becomes `[a, b]`.

        Raises:
            OSError: The file system refused; the row is kept.
        """
        self.waiting.append(row)
        self.flush()

    def flush(self) -> None:
        """Write the rows that wait.

        Raises:
            OSError: The file system refused; they are kept.
        """
        new = list(dict.fromkeys(name for row in self.waiting for name in row if name not in self._columns))
        if self._instead is None and (new or not self._path.exists()):
            self._instead = self._read()[1] if self._path.exists() else []
        self._columns += new
        if self._instead is not None:
            self._write(self._instead)
            self._instead = None
        if self.waiting:
            self._append([[_as_cell(row.get(name, _MISSING)) for name in self._columns] for row in self.waiting])
            self.rows += len(self.waiting)
            self.waiting = []
        self._mirror.push()

    def drop_epochs_from(self, epoch: int, first_row: int) -> None:
        """Drop the last rows of a training that is to be taken up again at an epoch, from 0, and one that is cut short.

        Rows before the training's first one stay.
        """
        self._columns, rows = self._read()
        column = self._columns.index("epoch") if "epoch" in self._columns else 0
        while len(rows) > first_row and not _is_before(rows[-1], column, epoch, len(self._columns)):
            rows.pop()
        self._instead = rows
        self.rows = len(rows)
        self._try_now()

    def _try_now(self) -> None:
        try:
            self.flush()
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise

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
            content = b"\n" * is_cut + self._as_bytes(rows)
            try:
                while content:  # a full disk may take a part of it
                    content = content[file.write(content) :]
                os.fsync(file.fileno())
            except OSError:
                with suppress(OSError):
                    file.truncate(end)  # half a row
                raise

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
