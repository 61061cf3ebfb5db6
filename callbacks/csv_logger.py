"""`CSVLogger`: writes the logs of every epoch to a CSV file."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ArgumentError
from ..utils.failed_writes import FailedWrites
from ..utils.files import require_replaceable
from ..utils.urls import is_url
from ..utils.user_code import warn
from ._support.csv_table import CSVFile
from .base import Callback, Logs


class CSVLogger(Callback):
    """Writes a row for each epoch into a CSV file: `epoch`, from 0, and the logs by name.

    A log that is missing in an epoch, such as `val_loss` without a validation, is `NA`. An array becomes `[a, b]`. A
    resumed training continues its file, with each epoch once. If the disk is full, a warning says so, and the row is
    written with the next row; the third consecutive failure is an error.

    Args:
        filename: The file, e.g. `"run/log.csv"`, or its URL (`"gs://..."`). Missing folders are made.
        separator: The character between two values (default `","`).
        append: Each `fit` appends to an existing file, under the same header (default False: it replaces the file).

    Raises:
        ArgumentError: The separator isn't one character, or `filename` is a folder, a device or a pipe.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "log.csv")
        >>> logger = CSVLogger(path)
        >>> logger.on_train_begin()
        >>> logger.on_epoch_end(0, {"loss": 0.5, "accuracy": 0.75})
        >>> path.read_text()
        'epoch,accuracy,loss\\n0,0.75,0.5\\n'

    Source: `keras.callbacks.CSVLogger`.
    """

    reads_weights = False
    only_writes = True
    loads_before_train_begin = True  # the file is opened when an epoch begins, when the rows to keep must be known

    def __init__(self, filename: str | os.PathLike[str], separator: str = ",", append: bool = False) -> None:
        if not isinstance(separator, str) or len(separator) != 1:
            raise ArgumentError(f"separator must be one character, got {separator!r}")
        self.filename = os.fspath(filename)
        if not is_url(self.filename):
            try:
                require_replaceable(Path(self.filename))
            except OSError as error:
                raise ArgumentError(
                    f"filename must be the path of a file, got {self.filename!r}: {error.strerror}"
                ) from None
        self.sep = separator
        self.append = append
        self._table: CSVFile | None = None
        self._first_row = 0  # of this training; earlier rows are from earlier trainings
        self._resumes = False
        self._failed_writes = FailedWrites()

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Forget the previous training's file. The file is opened when an epoch begins."""
        self._table = None
        self._failed_writes = FailedWrites()

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Open the file, in the first epoch."""
        self._open(epoch)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Add a row."""
        table = self._open(epoch)
        with self._failed_writes.tolerate(self.filename):
            table.add({"epoch": epoch, **dict(sorted((logs or {}).items()))})

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Write the rows that are pending because the disk was full."""
        self._resumes = False
        if self._table is not None and self._table.pending:
            try:
                self._table.flush()
            except OSError as error:
                epochs = ", ".join(str(row["epoch"]) for row in self._table.pending)
                warn(f"{self.filename} lacks the rows of epochs {epochs}, which can't be written: {error}")

    def state_dict(self) -> dict[str, Any]:
        """Return the index of the training's first row."""
        return {"first_row": self._first_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue a resumed training's file with its next epoch.

        Args:
            state: The dict that `state_dict` returned; call it before the first epoch begins.
        """
        self._first_row = state["first_row"]
        self._resumes = True

    def _open(self, epoch: int) -> CSVFile:
        if self._table is None:
            self._table = CSVFile(self.filename, self.sep, self.append or self._resumes)
            if self._resumes:
                self._table.drop_epochs_from(epoch, self._first_row)
            else:
                self._first_row = self._table.rows
        return self._table
