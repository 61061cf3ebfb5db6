"""Folders and files behind URLs, through fsspec: `gs://bucket/run`, `s3://bucket/run`, `hf://me/model/run`.

In an object store nothing can be appended to, renamed or locked. So whoever writes does it in a local folder, and the
files are sent as they are, in an order that matters where a reader must not take half of them for all.
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
    """A folder or file of a file system that fsspec knows, with the few methods of a `Path` that are needed.

    Raises:
        ArgumentError: Nothing is known of its protocol, or its library isn't installed.

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
        """The last part."""
        return self._url.rpartition("/")[2]

    @property
    def parent(self) -> Url:
        """The folder that it is in."""
        return Url(self._url.rpartition("/")[0])

    def absolute(self) -> Url:
        """The same: a URL is."""
        return self

    def exists(self) -> bool:
        """True if there is such a file or folder."""
        self._files.invalidate_cache()
        return bool(self._files.exists(self._path))

    def is_file(self) -> bool:
        """True if there is such a file."""
        self._files.invalidate_cache()
        return bool(self._files.isfile(self._path))

    def names(self) -> list[str]:
        """The names in the folder, sorted; none if it isn't there."""
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
        """Copy this file to a local one, which is whole or not there."""
        draft = file.with_name(f".{file.name}.tmp-{os.getpid()}")
        file.parent.mkdir(parents=True, exist_ok=True)
        self._files.get_file(self._path, str(draft))
        os.replace(draft, file)

    def sizes(self) -> dict[str, int]:
        """The size of each file below the folder, by its path from here."""
        self._files.invalidate_cache()
        found: dict[str, dict[str, Any]] = self._files.find(self._path, detail=True)
        prefix = self._path.strip("/") + "/"
        return {path.strip("/").removeprefix(prefix): int(entry["size"]) for path, entry in found.items()}

    def remove(self) -> None:
        """Remove the file, or the folder with all that is in it; nothing if it isn't there."""
        if self.exists():
            self._files.rm(self._path, recursive=True)

    def _make_folder(self) -> None:
        # Where there are no folders this does nothing; it may not make a bucket.
        self._files.makedirs(self._path.rpartition("/")[0], exist_ok=True)


class Mirror:
    """A local copy of a folder, or of a file, behind a URL; of a path it is that path itself.

    If `kept`, the copy stays for the next time, in `~/.cache/tpufit`. Then only what has another size is copied, and
    files of less than 1 MiB.

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
            home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
            self.path = home / "tpufit" / hashlib.sha256(str(self._url).encode()).hexdigest()[:16]
            self.path.mkdir(parents=True, exist_ok=True)
            return
        folder = tempfile.mkdtemp(prefix="tpufit-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.path = Path(folder, self._url.name)  # to read or write
        if not file:
            self.path.mkdir()

    def pull(self) -> None:
        """Copy what is there already."""
        if self._url is None:
            return
        if self._is_file:
            if self._url.exists():
                self._url.fetch(self.path)
            return
        # Large files first: the small ones say that the others are there.
        for name, size in sorted(self._url.sizes().items(), key=lambda item: -item[1]):
            here = self.path / name
            if not (self._kept and here.exists() and _are_same(here.stat().st_size, size)):
                (self._url / name).fetch(here)
        self._sent = self._here()

    def push(self) -> None:
        """Send what has changed, then remove what is no longer here, but for a kept copy's."""
        if self._url is None:
            return
        now = self._here()
        there = self._url.sizes() if self._kept else {}
        for name, state in sorted(now.items(), key=lambda item: -item[1][0]):
            if not _are_same(state[0], there.get(name)) if self._kept else self._sent.get(name) != state:
                (self._url / name if name else self._url).send(self.path / name if name else self.path)
        for name in () if self._kept else self._sent.keys() - now.keys():
            (self._url / name if name else self._url).remove()
        self._sent = now

    def _here(self) -> dict[str, tuple[int, int]]:
        """The size and time of each local file, by its path from here; of a file alone by no name. No drafts."""
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
    """True if a file needn't be copied: it is large, and has the size of the one that is there."""
    return size == other and size >= _SMALL


_SMALL = 1 << 20  # bytes
