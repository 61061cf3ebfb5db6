"""`CSVFile`: a table in a file that grows by rows, and by columns too. With no hooks and no model."""

import csv
import os
from collections.abc import Iterable, Mapping
from typing import Any

from ...utils.files import replacing
from ...utils.urls import Mirror

_MISSING = "NA"


class CSVFile:
    """A CSV file or URL that is whole after every row, whenever the process may die. Missing folders are made.

    The first row names the columns. A later row may bring new ones: the whole file is then written again, with `NA`
    where the rows before have nothing. To `append` goes on with a file that is there, and its columns.

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
        if append:
            self._mirror.pull()
        self._columns: list[str] = []
        self.rows = 0  # without the one of names
        if append and self._path.is_file():
            self._columns, rows = self._read()
            self.rows = len(rows)
        else:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._write([])

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a row: values by column; an array or another iterable becomes `[a, b]`."""
        new = [name for name in row if name not in self._columns]
        if new:
            rows = self._read()[1]
            self._columns += new
            self._write(rows)
        with open(self._path, "a", newline="") as file:
            csv.writer(file, delimiter=self._separator, lineterminator="\n").writerow(
                [_as_cell(row.get(name, _MISSING)) for name in self._columns]
            )
        self.rows += 1
        self._mirror.push()

    def drop_epochs_from(self, epoch: int, first_row: int) -> None:
        """Drop the last rows of a training that is to be taken up again at an epoch, from 0, and one that is cut short.

        Rows before the training's first one stay.
        """
        self._columns, rows = self._read()
        column = self._columns.index("epoch") if "epoch" in self._columns else 0
        while len(rows) > first_row and not _is_before(rows[-1], column, epoch, len(self._columns)):
            rows.pop()
        self._write(rows)
        self.rows = len(rows)

    def _read(self) -> tuple[list[str], list[list[str]]]:
        with open(self._path, newline="") as file:
            columns, *rows = [*csv.reader(file, delimiter=self._separator)] or [[]]
        return columns, rows

    def _write(self, rows: Iterable[list[str]]) -> None:
        with replacing(self._path) as draft, open(draft, "w", newline="") as file:
            writer = csv.writer(file, delimiter=self._separator, lineterminator="\n")
            if self._columns:
                writer.writerow(self._columns)
            writer.writerows(row + [_MISSING] * (len(self._columns) - len(row)) for row in rows)
        self._mirror.push()


def _is_before(row: list[str], column: int, epoch: int, columns: int) -> bool:
    return len(row) == columns and row[column].isdecimal() and int(row[column]) < epoch


def _as_cell(value: Any) -> Any:
    if hasattr(value, "tolist"):  # arrays and tensors of any shape
        value = value.tolist()
    return f"[{', '.join(map(str, value))}]" if isinstance(value, (list, tuple)) else value
