"""One file of a cache: a safetensors file with a column for each field, and a checksum for each block of rows."""

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

Columns = dict[str, NDArray[Any]]  # the bits of some rows by the fields' names, as in Field.bits

_NOTE = "tpufit"


def write_shard(folder: Path, manifest: Manifest, number: int, columns: Mapping[str, Tensor]) -> None:
    """Write one file of a cache: rows by the fields' names, each of shape `(rows, *shape)`. It is whole or not there.

    Raises:
        OSError: The file system refused. With an errno of `files.DISK_FULL` there is no room.
    """
    checksums = {}
    for field in manifest.fields:
        blocks = _blocks(field.bits(columns[field.name]), manifest.rows_per_block)
        checksums[field.name] = [zlib.crc32(rows.data) for rows in blocks]
    note = json.dumps({"fingerprint": manifest.fingerprint, "number": number, "crc32": checksums})
    # One note only: safetensors writes several in an order that changes, and files are to be the same byte for byte.
    notes = {_NOTE: f"{zlib.crc32(note.encode())} {note}"}
    with replacing(folder / manifest.name(number)) as draft:
        write_tensors(draft, columns, notes)


class Shard:
    """A file of a cache, mapped into memory. Its size and header are checked at once, its rows when asked.

    Raises:
        CacheDamagedError: The file is cut short, or is another one than it should be.
    """

    def __init__(self, folder: Path, manifest: Manifest, number: int) -> None:
        self.name = manifest.name(number)
        self._path = folder / self.name
        self._manifest = manifest
        self._rows = len(manifest.span(number))
        try:
            # Not the mapping but the size is what protects: to read past the end of a file is the end of the process.
            with safetensors.safe_open(self._path, framework="pt") as file:
                notes = file.metadata() or {}
                tensors = file.get_tensors()
        except (safetensors.SafetensorError, OSError) as error:
            raise self._damaged(str(error)) from error
        checksum, _, text = notes.get(_NOTE, "").partition(" ")
        note = json.loads(text) if checksum == str(zlib.crc32(text.encode())) else {}
        forms = {name: (column.dtype, tuple(column.shape)) for name, column in tensors.items()}
        if (note.get("fingerprint"), note.get("number")) != (manifest.fingerprint, number) or forms != {
            field.name: (field.dtype, (self._rows, *field.shape)) for field in manifest.fields
        }:
            raise self._damaged("its header is not what was written under this name")
        self._checksums: dict[str, list[int]] = note["crc32"]
        self.columns = {field.name: field.bits(tensors[field.name]) for field in manifest.fields}

    def check(self, columns: Columns | None = None) -> None:
        """Compare all rows, the file's own or a copy of them, with their checksums.

        Raises:
            CacheDamagedError: Some are not what was written.
        """
        for name, column in (self.columns if columns is None else columns).items():
            for block, rows in enumerate(_blocks(column, self._manifest.rows_per_block)):
                if zlib.crc32(rows.data) != self._checksums[name][block]:
                    first = block * self._manifest.rows_per_block
                    last = first + len(rows) - 1
                    raise self._damaged(f"{name} of its rows {first} to {last} is not what was written")

    def _damaged(self, what: str) -> CacheDamagedError:
        cure = "warm_up(repair=True) makes such files again; where there is no source, copy it from where it is good"
        return CacheDamagedError(f"{self._path} is damaged: {what}. {cure}")


def _blocks(column: NDArray[Any], rows: int) -> Iterator[NDArray[Any]]:
    return (column[first : first + rows] for first in range(0, len(column), rows))
