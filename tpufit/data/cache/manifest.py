"""What a cache holds and how it is laid out on disk: the file `meta.json`, and arithmetic on it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...errors import CacheDamagedError, CacheError
from ...utils.files import replacing
from ...utils.text import dtype_name
from .schema import Field

_FORMAT = 1
_META = "meta.json"
_MIB = 1 << 20
# What has a checksum of its own.
_BLOCK = 2 * _MIB
# A cache that would fit a file or two is cut into more, if they hold enough rows: a file is what a worker makes at
# once, and what a kill costs.
_FILES = 16
_ROWS = 1024

# What a cache was made of, and how to call it in an error.
_ORIGINS = {
    "rows": "the number of samples",
    "copies": "copies",
    "seed": "seed",
    "version": "version",
    "source": "source (its class, its code or its settings)",
    "transform": "transform (its code or its settings)",
    "structure": "how a sample is built",
    "fields": "the shapes and dtypes of a sample",
    "probe": "the samples themselves: the first, the middle or the last one",
}


@dataclass(frozen=True)
class Manifest:
    """What a cache holds, and how.

    Attributes:
        rows: How many samples the source has.
        copies: How many variants of each are kept. Copy c of sample i is row `c * rows + i` of the cache.
        seed: What their random numbers come from.
        version: The user's own version.
        source: What the source was, in short.
        transform: What the transform was, in short.
        probe: A hash of some samples, or None if they can't be made alike twice.
        structure: How a sample is built, as `flatten` gives it.
        fields: The leaves of a sample.
        rows_per_file: How many rows a file holds; the last one may hold fewer.
        rows_per_block: How many rows of a file are checked at once.
    """

    rows: int
    copies: int
    seed: int
    version: str
    source: str
    transform: str
    probe: str | None
    structure: Any
    fields: tuple[Field, ...]
    rows_per_file: int
    rows_per_block: int

    @property
    def files(self) -> int:
        """How many files there are."""
        return -(-self.rows * self.copies // self.rows_per_file)

    @property
    def row_bytes(self) -> int:
        """The size of a row."""
        return sum(field.row_bytes for field in self.fields)

    @property
    def fingerprint(self) -> str:
        """A hash of all the above."""
        return _hash(_plain(self))

    def name(self, number: int) -> str:
        """What a file is called.

        Args:
            number: Which one, from 0.
        """
        return f"shard-{number:05d}-of-{self.files:05d}.safetensors"

    def span(self, number: int) -> range:
        """The rows of a file."""
        first = number * self.rows_per_file
        return range(first, min(first + self.rows_per_file, self.rows * self.copies))


def cut(rows: int, row_bytes: int, file_mb: float) -> tuple[int, int]:
    """How many rows a file and a block hold.

    Args:
        rows: How many rows there are in all.
        row_bytes: Their size.
        file_mb: How large a file may be, in MiB.

    Returns:
        `(rows_per_file, rows_per_block)`.

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


def differences(old: Manifest, new: Manifest) -> list[str]:
    """What has changed between two origins, in words; a probe that can't be repeated tells nothing.

    Args:
        old: What a cache was made of.
        new: What it would be made of now.
    """
    found = []
    for name, words in _ORIGINS.items():
        before, now = getattr(old, name), getattr(new, name)
        if before == now or (name == "probe" and None in (before, now)):
            continue
        shown = name in ("rows", "copies", "seed", "version", "source", "transform")
        found.append(f"{words}: {before!r} then, {now!r} now" if shown else words)
    return found


def write(folder: Path, layout: Manifest) -> None:
    """Write `meta.json`.

    Args:
        folder: The cache.
        layout: What it is to hold.
    """
    plain = _plain(layout)
    text = json.dumps({"format": _FORMAT, "fingerprint": _hash(plain), **plain}, indent=1)
    with replacing(folder / _META) as draft:
        draft.write_text(text + "\n")


def read(folder: Path) -> Manifest | None:
    """Read `meta.json`.

    Args:
        folder: The cache.

    Returns:
        What the cache holds, or None if there is no cache.

    Raises:
        CacheDamagedError: The file is not as it was written.
        CacheError: Another version of tpufit wrote it, in another format.
    """
    path = folder / _META
    try:
        plain = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise CacheDamagedError(f"{path} is damaged ({error}). {_CURE}") from error
    if isinstance(plain, dict) and plain.pop("format", _FORMAT) != _FORMAT:
        raise CacheError(f"{path} has a format that this version of tpufit doesn't know. Make the cache anew elsewhere")
    if not isinstance(plain, dict) or plain.pop("fingerprint", None) != _hash(plain):
        raise CacheDamagedError(f"{path} is damaged: its fingerprint doesn't fit. {_CURE}")
    plain["fields"] = tuple(_field(*field) for field in plain["fields"])
    return Manifest(**plain)


_CURE = "Copy the folder again from where it is good, or delete it and make the cache anew"


def _plain(layout: Manifest) -> dict[str, Any]:
    fields = [[field.name, dtype_name(field.dtype), list(field.shape)] for field in layout.fields]
    return {**vars(layout), "fields": fields}


def _field(name: str, dtype: str, shape: list[int]) -> Field:
    return Field(name, getattr(torch, dtype), tuple(shape))


def _hash(plain: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]
