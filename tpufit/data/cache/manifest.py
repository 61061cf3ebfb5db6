"""`Manifest`: a cache's contents and its layout on disk, as in the file `meta.json`."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...errors import CacheDamagedError, CacheError
from ...utils.files import replacing
from ...utils.text import dtype_name
from .schema import Field, unflatten

_FORMAT = 1
_META = "meta.json"
DRAFTED = r"meta\.json|shard-\d{5,}-of-\d{5,}\.safetensors"  # a cache's files, which may have drafts
_CURE = "Copy an intact folder again, or delete it and remake the cache"
_MIB = 1 << 20
# The size of a block; each block has a checksum.
_BLOCK = 2 * _MIB
# A cache that would fit in a file or two is split into more files, if these have enough rows: a worker makes a file at
# a time, and a kill loses a file.
_FILES = 16
_LEAST_ROWS = 1024

# A cache's origin: each part's name in errors, and True to show both values.
_ORIGINS = {
    "rows": ("the number of samples", True),
    "copies": ("copies", True),
    "seed": ("seed", True),
    "version": ("version", True),
    "source": ("source (its class, its code or its settings)", True),
    "transform": ("transform (its code or its settings)", True),
    "structure": ("the structure of a sample", False),
    "fields": ("the shapes and dtypes of a sample", False),
    "probe": ("the samples themselves: the first, the middle or the last", False),
}


@dataclass(frozen=True)
class Manifest:
    """A cache's contents and layout."""

    rows: int  # of the source
    copies: int  # variants of each row; copy c of sample i is row `c * rows + i` of the cache
    seed: int  # the random numbers' seed
    version: str  # the user's
    source: str  # the source's and the transform's descriptions
    transform: str
    probe: str | None  # a hash of some samples, or None if they aren't reproducible
    structure: Any  # a sample's, as `flatten` returns it
    fields: tuple[Field, ...]  # the leaves of a sample
    rows_per_file: int  # the last file may have fewer
    rows_per_block: int  # rows with a common checksum

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """Read a cache's `meta.json`; None if there is no cache.

        Raises:
            CacheDamagedError: The file is damaged.
            CacheError: Another version of tpufit wrote it, in another format.
        """
        path = folder / _META
        try:
            plain = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CacheDamagedError(f"{path} can't be read ({error.strerror}). {_CURE}") from error
        except (ValueError, RecursionError) as error:
            raise CacheDamagedError(f"{path} is damaged ({str(error)[:200]}). {_CURE}") from error
        if isinstance(plain, dict) and plain.pop("format", _FORMAT) != _FORMAT:
            raise CacheError(f"{path} has a format that this version of tpufit doesn't know. Make a new cache")
        if not isinstance(plain, dict) or plain.pop("fingerprint", None) != _hash(plain):
            raise CacheDamagedError(f"{path} is damaged: its fingerprint doesn't match. {_CURE}")
        try:
            fields = [Field(name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in plain["fields"]]
            manifest = cls(**plain | {"fields": tuple(fields)})
            _check(manifest)
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise CacheDamagedError(f"{path} has been changed ({str(error)[:200]}). {_CURE}") from error
        return manifest

    def write(self, folder: Path) -> None:
        """Write `meta.json` into a folder."""
        text = json.dumps({"format": _FORMAT, "fingerprint": self.fingerprint, **self._as_json}, indent=1)
        with replacing(folder / _META) as draft:
            draft.write_text(text + "\n")

    @property
    def files(self) -> int:
        """The number of files."""
        return -(-self.rows * self.copies // self.rows_per_file)

    @property
    def row_bytes(self) -> int:
        """The size of a row in bytes."""
        return sum(field.row_bytes for field in self.fields)

    @property
    def fingerprint(self) -> str:
        """A hash of all fields."""
        return _hash(self._as_json)

    @property
    def _as_json(self) -> dict[str, Any]:
        fields = [[field.name, dtype_name(field.dtype), list(field.shape)] for field in self.fields]
        return {**vars(self), "fields": fields}

    def name(self, number: int) -> str:
        """Return a file's name, by its number from 0."""
        return f"shard-{number:05d}-of-{self.files:05d}.safetensors"

    def span(self, number: int) -> range:
        """Return a file's rows."""
        first = number * self.rows_per_file
        return range(first, min(first + self.rows_per_file, self.rows * self.copies))

    def list_missing(self, folder: Path) -> list[int]:
        """List the numbers of the missing files. Existing files are complete."""
        return [number for number in range(self.files) if not (folder / self.name(number)).exists()]

    def differences(self, now: Manifest) -> list[str]:
        """List the differences from a cache that would be made now, except those of an unreproducible probe."""
        different = []
        for name, (words, shown) in _ORIGINS.items():
            then = getattr(self, name)
            value = getattr(now, name)
            if then != value and not (name == "probe" and None in (then, value)):
                different.append(f"{words}: {then!r} then, {value!r} now" if shown else words)
        return different


def plan_files(rows: int, row_bytes: int, file_mb: float) -> tuple[int, int]:
    """Return the rows per file, for files of at most `file_mb` MiB, and the rows per block.

    Example:
        >>> plan_files(20_000, 27_656, file_mb=256)  # 16 files, because 3 would keep no more than 3 workers busy
        (1250, 75)
        >>> plan_files(560_000, 20_000, file_mb=256)
        (13421, 104)
    """
    fitting = max(1, int(file_mb * _MIB) // max(1, row_bytes))
    shared = -(-rows // max(1, min(_FILES, rows // _LEAST_ROWS)))
    rows_per_file = min(fitting, shared)
    return rows_per_file, min(rows_per_file, max(1, _BLOCK // max(1, row_bytes)))


def _check(found: Manifest) -> None:
    """Raise a `ValueError`, or another error, if a part has a wrong type."""
    counts = (found.rows + 1, found.copies, found.rows_per_file, found.rows_per_block)
    texts = (found.version, found.source, found.transform, *(field.name for field in found.fields))
    if not all(type(count) is int and count >= 1 for count in counts) or not all(type(text) is str for text in texts):
        raise ValueError("a number or a text has a wrong type")
    for field in found.fields:
        if not isinstance(field.dtype, torch.dtype) or not all(type(n) is int and n >= 0 for n in field.shape):
            raise ValueError(f"the form of {field.name} is unknown")
    unflatten(found.structure, {field.name: field for field in found.fields})


def _hash(plain: Any) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]
