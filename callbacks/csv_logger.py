"""`CSVLogger`: the logs of every epoch as rows of a CSV file."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ArgumentError
from ..utils.files import require_replaceable
from ..utils.urls import is_url
from ..utils.users_code import warn
from ._support.csv_table import CSVFile
from ._support.failed_writes import FailedWrites
from .base import Callback, Logs


class CSVLogger(Callback):
    """Writes a row for each epoch into a CSV file: `epoch`, from 0, and the logs by name.

    A log that an epoch lacks, such as `val_loss` without a validation, is `NA`. An array becomes `[a, b]`. A
    training that is resumed goes on in its file, and has each epoch once. A full disk is a warning: the row is written
    with the next one. The third in a row is an error.

    Args:
        filename: The file, e.g. `"run/log.csv"`, or its URL (`"gs://..."`). Missing folders are made.
        separator: The character between two values (default `","`).
        append: Let each `fit` add to a file that is there, under one row of names (default False: it is replaced).

    Raises:
        ArgumentError: A separator of another length, or a folder, a device or a pipe for the file.

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
    loads_first = True  # the file is opened when an epoch begins, and then it must be known what stays in it

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
        self._first_row = 0  # of this training; those before it are of earlier ones
        self._resumes = False
        self._failed = FailedWrites()

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Forget the file of the training before. It is opened when an epoch begins."""
        self._table = None
        self._failed = FailedWrites()

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Open the file, if it is the first epoch."""
        self._open(epoch)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Add a row."""
        table = self._open(epoch)
        with self._failed.tolerated(self.filename):
            table.add({"epoch": epoch, **dict(sorted((logs or {}).items()))})

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Write the rows that wait for room on the disk."""
        self._resumes = False
        if self._table is not None and self._table.waiting:
            try:
                self._table.flush()
            except OSError as error:
                epochs = ", ".join(str(row["epoch"]) for row in self._table.waiting)
                warn(f"{self.filename} lacks the rows of epochs {epochs}, which can't be written: {error}")

    def state_dict(self) -> dict[str, Any]:
        """The first of the training's rows."""
        return {"first_row": self._first_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on in the file of a training that is resumed, with its next epoch.

        Args:
            state: The dict that `state_dict` returned; before the first epoch begins.
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
