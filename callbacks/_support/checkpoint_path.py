"""`CheckpointPath`: the path of a checkpoint. Independent of models; writes nothing."""

import os
import re
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import ArgumentError
from ...utils.urls import Url, is_url
from .scalars import as_scalar

_SUFFIX = ".safetensors"
_WORD = re.compile(r"\.[A-Za-z]\w*")  # looks like a suffix: ".h5", but not the ".1" of "run-0.1"
_ALLOWED = re.compile(r"[A-Za-z0-9._=+-]+")
_LONGEST = 200  # bytes: most file systems allow 255, and a draft's name is a little longer than its target's
# Every kind of number that a field may get: a format must accept all of them now, not fail after hours of training.
_TRIALS = (0.5, -1234567.5, 1e-9, float("nan"), float("inf"))


class CheckpointPath:
    """A file, a template of file names, or a run directory.

    Args:
        filepath: `*.safetensors`, whose last component may have fields such as `{epoch:02d}` or `{val_loss:.2f}`; or a
            path with neither suffix nor braces, which is a run directory.
        per_batch: True if checkpoints are written between batches, which allows `{batch}`.

    Attributes:
        fields: The names of the template's fields.

    Raises:
        ArgumentError: Another suffix, or a field that isn't a plain name with a number format.

    Example:
        >>> path = CheckpointPath("ckpt/{epoch:02d}-{val_loss:.2f}.safetensors", per_batch=False)
        >>> path.file_path(epoch=10, batch=None, logs={"val_loss": 0.125}).as_posix()
        'ckpt/10-0.12.safetensors'
        >>> CheckpointPath("runs/a", per_batch=False).run.as_posix()
        'runs/a'
    """

    def __init__(self, filepath: str | os.PathLike[str], per_batch: bool) -> None:
        path = os.fspath(filepath)
        if not isinstance(path, str) or not path:
            raise ArgumentError(f"filepath must be a path, got {filepath!r}")
        if "\0" in path or any(len(os.fsencode(part)) > _LONGEST for part in Path(path).parts):
            raise ArgumentError(
                f"filepath must fit a file system: names of at most {_LONGEST} bytes, without NUL, got {path!r}"
            )
        # Only the last component is a template, so no log can lead to another folder.
        place = Url(path) if is_url(path) else Path(path)
        self._folder = place.parent
        self._name = place.name
        self.fields = frozenset[str]()
        if "{" in self._name or "}" in self._name:
            self._check_template(path, per_batch)
        suffix = Path(self._name).suffix
        # Object stores have no empty folders.
        is_there = isinstance(place, Path) and place.is_dir()
        is_folder = path.endswith("/") or (is_there and suffix != _SUFFIX)
        self._is_run = not self.fields and (is_folder or not _WORD.fullmatch(suffix))
        if not self._is_run and suffix == _SUFFIX and is_there:
            raise ArgumentError(f"a path ending in '{_SUFFIX}' is a file, and {path!r} is a directory")
        if not self._is_run and suffix != _SUFFIX:
            raise ArgumentError(
                f"checkpoints are safetensors: expected a path ending in '{_SUFFIX}' (weights), or without a suffix (a "
                f"run directory), got {path!r}. Use {Path(path).stem.removesuffix('.weights') + _SUFFIX!r}, or end the "
                "path with '/' if it is a directory"
            )
        if self._is_run and isinstance(place, Path) and place.is_file():
            raise ArgumentError(f"a path without a suffix is a run directory, and {path!r} is a file")

    def file_path(self, epoch: int, batch: int | None, logs: Mapping[str, Any]) -> Path | Url:
        """Return the file of a checkpoint, of an epoch and perhaps a batch in the epoch, from 1.

        Reads only the logs that the template names.

        Raises:
            ArgumentError: A field isn't the epoch, the batch or a log, or the file's name has forbidden characters.
        """
        if not self.fields:
            return self._folder / self._name
        known: dict[str, int] = {"epoch": epoch} if batch is None else {"epoch": epoch, "batch": batch}
        missing = sorted(self.fields - {*known, *logs})
        if missing:
            raise ArgumentError(
                f"{self._name!r} has fields that there are no logs for: {', '.join(missing)}. "
                f"Available: {', '.join(sorted({*known, *logs}))}"
            )
        values: dict[str, float | None] = {
            name: known[name] if name in known else as_scalar(logs[name]) for name in self.fields
        }
        for name, value in values.items():
            if value is None:
                raise ArgumentError(f"a file name holds single numbers only, and {name!r} is {logs[name]!r}")
        return self._folder / self._fill(values)

    @property
    def run(self) -> Path | Url | None:
        """The run directory, or None if this is a file or a template."""
        return self._folder / self._name if self._is_run else None

    def _check_template(self, path: str, per_batch: bool) -> None:
        if not self._name.endswith(_SUFFIX):
            raise ArgumentError(f"a path with {{fields}} must end in '{_SUFFIX}', got {path!r}")
        try:
            parts = list(string.Formatter().parse(self._name))
        except ValueError as error:
            raise ArgumentError(f"{self._name!r} is not a valid template: {error}. Double a literal brace") from error
        for _, field, form, conversion in parts:
            if field is None:
                continue
            if not field or field.isdecimal() or set(field) & set(".[]") or conversion or "{" in (form or ""):
                raise ArgumentError(
                    f"a field of {self._name!r} must be a plain name with or without a format, as {{epoch}} or "
                    f"{{val_loss:.2f}}, got {field!r}"
                )
        self.fields = frozenset(field for _, field, _, _ in parts if field is not None)
        if "batch" in self.fields and not per_batch:
            raise ArgumentError(f"{self._name!r} has {{batch}}, which needs save_freq to be a number of batches")
        for trial in _TRIALS:
            self._fill({name: 1234567 if name in ("epoch", "batch") else trial for name in self.fields})

    def _fill(self, values: Mapping[str, float | None]) -> str:
        try:
            name = self._name.format(**values)
        except (ValueError, TypeError) as error:
            raise ArgumentError(
                f"{self._name!r} can't be filled: {error}. epoch and batch are whole numbers ({{epoch:02d}}), logs are "
                "not ({val_loss:.2f})"
            ) from error
        if not _ALLOWED.fullmatch(name):
            raise ArgumentError(
                f"the file name {name!r}, made from {self._name!r}, may only have letters, digits and . _ = + -"
            )
        if len(name) > _LONGEST:
            raise ArgumentError(f"the file name {name!r}, made from {self._name!r}, is longer than {_LONGEST} letters")
        return name
