"""Folders and files behind URLs, through fsspec: `gs://bucket/run`, `s3://bucket/run`, `hf://me/model/run`.

Object stores can't append, rename or lock. Files are therefore written to a local folder, and sent in an order in which
a reader never takes a part for the whole.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

from ..errors import ArgumentError
from .file_cache import cache_folder
from .files import replacing

_URL = re.compile(r"[a-z][a-z0-9+.-]+://")
_EXTRAS = {"gs": "tpufit[gcs]", "gcs": "tpufit[gcs]", "s3": "s3fs", "hf": "huggingface_hub"}


def is_url(path: str | os.PathLike[str] | Url) -> bool:
    """True for a URL, False for a path.

    Example:
        >>> is_url("gs://bucket/run"), is_url("runs/a")
        (True, False)
    """
    return isinstance(path, Url) or bool(_URL.match(os.fspath(path)))


class Url:
    """A folder or file in a file system that fsspec supports, with the methods of `Path` that tpufit needs.

    Raises:
        ArgumentError: The protocol is unknown, or its library isn't installed.

    Example:
        >>> folder = Url("memory://example")
        >>> (folder / "a.txt").write_bytes(b"here")
        >>> folder.names(), (folder / "a.txt").read_bytes(), (folder / "a.txt").name
        (['a.txt'], b'here', 'a.txt')
        >>> folder.remove()
    """

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        self._url = url.rstrip("/")
        protocol = url.partition("://")[0]
        try:
            self._files, self._path = url_to_fs(self._url)
        except (ImportError, ValueError) as error:
            cure = f"pip install '{_EXTRAS[protocol]}'" if protocol in _EXTRAS else "install its fsspec library"
            raise ArgumentError(f"{url!r} can't be used: {error}. For {protocol}:// {cure}") from error

    def __str__(self) -> str:
        return self._url

    def __truediv__(self, name: str) -> Url:
        return Url(f"{self._url}/{name}")

    @property
    def name(self) -> str:
        """The last component."""
        return self._url.rpartition("/")[2]

    @property
    def parent(self) -> Url:
        """The containing folder."""
        return Url(self._url.rpartition("/")[0])

    def absolute(self) -> Url:
        """Return the URL itself, which is always absolute."""
        return self

    def exists(self) -> bool:
        """True if the file or folder exists."""
        self._files.invalidate_cache()
        return bool(self._files.exists(self._path))

    def is_file(self) -> bool:
        """True if the file exists."""
        self._files.invalidate_cache()
        return bool(self._files.isfile(self._path))

    def names(self) -> list[str]:
        """Return the names in the folder, sorted; empty if it doesn't exist."""
        self._files.invalidate_cache()
        try:
            found = self._files.ls(self._path, detail=False)
        except FileNotFoundError:
            return []
        return sorted(name for path in found if (name := path.rstrip("/").rpartition("/")[2]))

    def read_bytes(self) -> bytes:
        """Read a file."""
        return bytes(self._files.cat_file(self._path))

    def write_bytes(self, content: bytes) -> None:
        """Write a file."""
        self._make_folder()
        self._files.pipe_file(self._path, content)

    def send(self, file: Path) -> None:
        """Copy a local file here."""
        self._make_folder()
        self._files.put_file(str(file), self._path)

    def fetch(self, file: Path) -> None:
        """Copy this file to a local file, atomically."""
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as draft:
            self._files.get_file(self._path, str(draft))

    def sizes(self) -> dict[str, int]:
        """Return the size of each file in the folder, at any depth, by relative path."""
        self._files.invalidate_cache()
        found: dict[str, dict[str, Any]] = self._files.find(self._path, detail=True)
        prefix = self._path.strip("/") + "/"
        return {path.strip("/").removeprefix(prefix): int(entry["size"]) for path, entry in found.items()}

    def remove(self) -> None:
        """Remove the file, or the folder with its content, if it exists."""
        if self.exists():
            self._files.rm(self._path, recursive=True)

    def _make_folder(self) -> None:
        # Does nothing in stores without folders; it may not create a bucket.
        self._files.makedirs(self._path.rpartition("/")[0], exist_ok=True)


class Mirror:
    """A local copy of a folder or file behind a URL; for a path, the path itself.

    With `kept`, the copy stays in `~/.cache/tpufit` for later use. Then only files of another size, or smaller than 1
    MiB, are copied.

    Example:
        >>> mirror = Mirror("memory://mirrored")
        >>> _ = (mirror.path / "a.txt").write_text("here")
        >>> mirror.push()
        >>> Url("memory://mirrored/a.txt").read_bytes()
        b'here'
        >>> Url("memory://mirrored").remove()
    """

    def __init__(self, place: str | os.PathLike[str] | Url, file: bool = False, kept: bool = False) -> None:
        self._is_file = file
        self._kept = kept
        self._sent: dict[str, tuple[int, int]] = {}
        if not isinstance(place, Url) and not is_url(place):
            self._url = None
            self.path = Path(place)
            return
        self._url = place if isinstance(place, Url) else Url(os.fspath(place))
        if kept:
            home = cache_folder()
            if home is None:
                raise ArgumentError(f"there is no folder for a copy of {place}: set HOME or XDG_CACHE_HOME")
            self.path = home / hashlib.sha256(str(self._url).encode()).hexdigest()[:16]
            self.path.mkdir(parents=True, exist_ok=True)
            return
        folder = tempfile.mkdtemp(prefix="tpufit-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.path = Path(folder, self._url.name)  # to read or write
        if not file:
            self.path.mkdir()

    def pull(self) -> None:
        """Copy the existing files from the URL."""
        if self._url is None:
            return
        if self._is_file:
            if self._url.exists():
                self._url.fetch(self.path)
            return
        # Large files first: small files, such as manifests, tell that the others exist.
        for name, size in sorted(self._url.sizes().items(), key=lambda item: -item[1]):
            here = self.path / name
            if not (self._kept and here.exists() and _are_same(here.stat().st_size, size)):
                (self._url / name).fetch(here)
        self._sent = self._list_local()

    def push(self) -> None:
        """Send changed files, then remove files that no longer exist here, unless the copy is `kept`."""
        if self._url is None:
            return
        now = self._list_local()
        there = self._url.sizes() if self._kept else {}
        for name, state in sorted(now.items(), key=lambda item: -item[1][0]):
            if not _are_same(state[0], there.get(name)) if self._kept else self._sent.get(name) != state:
                (self._url / name if name else self._url).send(self.path / name if name else self.path)
        for name in () if self._kept else self._sent.keys() - now.keys():
            (self._url / name if name else self._url).remove()
        self._sent = now

    def _list_local(self) -> dict[str, tuple[int, int]]:
        """Return the size and time of each local file, except drafts, by relative path; "" for a single file."""
        if self._is_file:
            files = [self.path]
        else:
            files = [path for path in self.path.rglob("*") if path.is_file() and not path.name.startswith(".")]
        found = {"" if self._is_file else path.relative_to(self.path).as_posix(): path for path in files}
        return {
            name: (stat.st_size, stat.st_mtime_ns)
            for name, path in found.items()
            if path.exists()
            for stat in [path.stat()]
        }


def _are_same(size: int, other: int | None) -> bool:
    """True if a file needn't be copied: it is large, and has the same size."""
    return size == other and size >= _SMALL


_SMALL = 1 << 20  # bytes
