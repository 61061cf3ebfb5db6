"""A file of a cache: a safetensors file with a column for each field, and a checksum for each block of rows."""

import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from numpy.typing import NDArray
from torch import Tensor

from ...errors import CacheDamagedError
from ...utils.files import replacing, write_tensors
from .manifest import Manifest

Columns = dict[str, NDArray[Any]]  # the bits of some rows by field name, as in Field.bits

_NOTE = "tpufit"


def write_shard(folder: Path, manifest: Manifest, number: int, columns: Mapping[str, Tensor]) -> None:
    """Write a file of a cache atomically: rows by field name, of shape `(rows, *shape)`.

    Raises:
        OSError: The file can't be written. With an errno in `files.DISK_FULL` the disk is full.
    """
    checksums = {}
    for field in manifest.fields:
        blocks = _blocks(field.bits(columns[field.name]), manifest.rows_per_block)
        checksums[field.name] = [zlib.crc32(rows.data) for rows in blocks]
    note = json.dumps({"fingerprint": manifest.fingerprint, "number": number, "crc32": checksums})
    # Only one note: safetensors writes several in a varying order, and files should be reproducible byte for byte.
    notes = {_NOTE: f"{zlib.crc32(note.encode())} {note}"}
    with replacing(folder / manifest.name(number)) as draft:
        write_tensors(draft, columns, notes)


class Shard:
    """A memory-mapped file of a cache. Its size and header are checked at once, its rows by `check`.

    Raises:
        CacheDamagedError: The file is truncated, or isn't the expected file.
    """

    def __init__(self, folder: Path, manifest: Manifest, number: int) -> None:
        self.name = manifest.name(number)
        self._path = folder / self.name
        self._manifest = manifest
        self._rows = len(manifest.span(number))
        try:
            # safe_open checks the size, which protects the process: reading past a mapped file's end would kill it.
            with safetensors.safe_open(self._path, framework="pt") as file:
                notes = file.metadata() or {}
                tensors = file.get_tensors()
        except (safetensors.SafetensorError, OSError) as error:
            raise self._damage_error(str(error)) from error
        checksum, _, text = notes.get(_NOTE, "").partition(" ")
        note = json.loads(text) if checksum == str(zlib.crc32(text.encode())) else {}
        forms = {name: (column.dtype, tuple(column.shape)) for name, column in tensors.items()}
        if (note.get("fingerprint"), note.get("number")) != (manifest.fingerprint, number) or forms != {
            field.name: (field.dtype, (self._rows, *field.shape)) for field in manifest.fields
        }:
            raise self._damage_error("its header isn't the one written under this name")
        self._checksums: dict[str, list[int]] = note["crc32"]
        self.columns = {field.name: field.bits(tensors[field.name]) for field in manifest.fields}

    def check(self, columns: Columns | None = None) -> None:
        """Compare all rows, of the file or a copy, with their checksums.

        Raises:
            CacheDamagedError: Rows are damaged.
        """
        for name, column in (self.columns if columns is None else columns).items():
            for block, rows in enumerate(_blocks(column, self._manifest.rows_per_block)):
                if zlib.crc32(rows.data) != self._checksums[name][block]:
                    first = block * self._manifest.rows_per_block
                    last = first + len(rows) - 1
                    raise self._damage_error(f"{name} of its rows {first} to {last} has changed")

    def _damage_error(self, what: str) -> CacheDamagedError:
        cure = "warm_up(repair=True) remakes damaged files; without a source, copy the file from an intact cache"
        return CacheDamagedError(f"{self._path} is damaged: {what}. {cure}")


def _blocks(column: NDArray[Any], rows: int) -> Iterator[NDArray[Any]]:
    return (column[first : first + rows] for first in range(0, len(column), rows))
