"""`Manifest`: what a cache holds, and its layout on disk. It is the file `meta.json`, and arithmetic on it."""

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
from .schema import Field, nest

_FORMAT = 1
_META = "meta.json"
DRAFTED = r"meta\.json|shard-\d{5,}-of-\d{5,}\.safetensors"  # the files of a cache, of which there may be drafts
_CURE = "Copy the folder again from where it is good, or delete it and make the cache again"
_MIB = 1 << 20
# The size of a block, which has a checksum of its own.
_BLOCK = 2 * _MIB
# A cache that would fit a file or two is cut into more, if they hold enough rows: a file is what a worker makes at
# once, and what a kill costs.
_FILES = 16
_ROWS = 1024

# What a cache was made of: its words in an error, and True to show the two values there.
_ORIGINS = {
    "rows": ("the number of samples", True),
    "copies": ("copies", True),
    "seed": ("seed", True),
    "version": ("version", True),
    "source": ("source (its class, its code or its settings)", True),
    "transform": ("transform (its code or its settings)", True),
    "structure": ("how a sample is built", False),
    "fields": ("the shapes and dtypes of a sample", False),
    "probe": ("the samples themselves: the first, the middle or the last one", False),
}


@dataclass(frozen=True)
class Manifest:
    """The contents and the layout of a cache."""

    rows: int  # of the source
    copies: int  # variants of each row; copy c of sample i is row `c * rows + i` of the cache
    seed: int  # of their random numbers
    version: str  # the user's own
    source: str  # in short; so is the transform
    transform: str
    probe: str | None  # a hash of some samples, or None if they can't be made the same twice
    structure: Any  # of a sample, as `flatten` gives it
    fields: tuple[Field, ...]  # the leaves of a sample
    rows_per_file: int  # the last file may hold fewer
    rows_per_block: int  # rows of a file that have one checksum

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """Read a cache's `meta.json`; None if there is no cache.

        Raises:
            CacheDamagedError: The file is not as it was written.
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
            raise CacheError(f"{path} has a format that this version of tpufit doesn't know. Make another cache")
        if not isinstance(plain, dict) or plain.pop("fingerprint", None) != _hash(plain):
            raise CacheDamagedError(f"{path} is damaged: its fingerprint doesn't fit. {_CURE}")
        try:
            fields = [Field(name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in plain["fields"]]
            found = cls(**plain | {"fields": tuple(fields)})
            _check(found)
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise CacheDamagedError(f"{path} can't be what was written ({str(error)[:200]}). {_CURE}") from error
        return found

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
        """The size of a row."""
        return sum(field.row_bytes for field in self.fields)

    @property
    def fingerprint(self) -> str:
        """A hash of all the above."""
        return _hash(self._as_json)

    @property
    def _as_json(self) -> dict[str, Any]:
        fields = [[field.name, dtype_name(field.dtype), list(field.shape)] for field in self.fields]
        return {**vars(self), "fields": fields}

    def name(self, number: int) -> str:
        """The name of a file, by its number from 0."""
        return f"shard-{number:05d}-of-{self.files:05d}.safetensors"

    def span(self, number: int) -> range:
        """The rows of a file."""
        first = number * self.rows_per_file
        return range(first, min(first + self.rows_per_file, self.rows * self.copies))

    def missing(self, folder: Path) -> list[int]:
        """The numbers of the files that are still to be made. One that is there is finished."""
        return [number for number in range(self.files) if not (folder / self.name(number)).exists()]

    def differences(self, now: Manifest) -> list[str]:
        """Say what a cache that is made now has different; a probe that can't be repeated tells nothing."""
        found = []
        for name, (words, shown) in _ORIGINS.items():
            then = getattr(self, name)
            value = getattr(now, name)
            if then != value and not (name == "probe" and None in (then, value)):
                found.append(f"{words}: {then!r} then, {value!r} now" if shown else words)
        return found


def cut(rows: int, row_bytes: int, file_mb: float) -> tuple[int, int]:
    """Cut a cache into files of at most `file_mb` MiB, and blocks: the rows per file, and per block.

    Example:
        >>> cut(20_000, 27_656, file_mb=256)  # 16 files, because 3 would keep no more than 3 workers busy
        (1250, 75)
        >>> cut(560_000, 20_000, file_mb=256)
        (13421, 104)
    """
    fitting = max(1, int(file_mb * _MIB) // max(1, row_bytes))
    shared = -(-rows // max(1, min(_FILES, rows // _ROWS)))
    rows_per_file = min(fitting, shared)
    return rows_per_file, min(rows_per_file, max(1, _BLOCK // max(1, row_bytes)))


def _check(found: Manifest) -> None:
    """Raise a `ValueError`, or another error, if a part is of another kind than it must be."""
    counts = (found.rows + 1, found.copies, found.rows_per_file, found.rows_per_block)
    texts = (found.version, found.source, found.transform, *(field.name for field in found.fields))
    if not all(type(count) is int and count >= 1 for count in counts) or not all(type(text) is str for text in texts):
        raise ValueError("a number or a text is of another kind")
    for field in found.fields:
        if not isinstance(field.dtype, torch.dtype) or not all(type(n) is int and n >= 0 for n in field.shape):
            raise ValueError(f"the form of {field.name} is unknown")
    nest(found.structure, {field.name: field for field in found.fields})


def _hash(plain: Any) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]
