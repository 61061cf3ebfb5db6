"""`CSVLogger`: the logs of every epoch as rows of a CSV file."""

import os
from collections.abc import Mapping
from typing import Any

from ..errors import ArgumentError
from ._support.csv_table import CSVFile
from .base import Callback, Logs


class CSVLogger(Callback):
    """Writes a row for each epoch into a CSV file: `epoch`, from 0, and the logs by name.

    A log that an epoch lacks, such as `val_loss` without a validation, is `NA`. An array becomes `[a, b]`. A
    training that is resumed goes on in its file, and has each epoch once.

    Args:
        filename: The file, e.g. `"run/log.csv"`, or its URL (`"gs://..."`). Missing folders are made.
        separator: The character between two values (default `","`).
        append: Let each `fit` add to a file that is there, under one row of names (default False: it is replaced).

    Raises:
        ArgumentError: A separator of another length.

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

    def __init__(self, filename: str | os.PathLike[str], separator: str = ",", append: bool = False) -> None:
        if not isinstance(separator, str) or len(separator) != 1:
            raise ArgumentError(f"separator must be one character, got {separator!r}")
        self.filename = os.fspath(filename)
        self.sep = separator
        self.append = append
        self._table: CSVFile | None = None
        self._first_row = 0  # of this training; those before it are of earlier ones
        self._resumes = False

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Forget the training before. The file is opened when an epoch begins."""
        self._table = None
        self._resumes = False

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Open the file, if it is the first epoch."""
        self._open(epoch)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Add a row."""
        self._open(epoch).add({"epoch": epoch, **dict(sorted((logs or {}).items()))})

    def state_dict(self) -> dict[str, Any]:
        """The first of the training's rows."""
        return {"first_row": self._first_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on in the file of a training that is resumed, with its next epoch.

        Args:
            state: The dict that `state_dict` returned; after `on_train_begin`, which forgets everything.
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
