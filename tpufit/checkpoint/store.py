"""`LocalStore` and `UrlStore`: a folder where the checkpoints of a run are kept.

A checkpoint is committed as a whole: on a disk it is written beside its place, synced, and renamed; behind a URL its
manifest is sent last. Only a checkpoint's own files are ever deleted or replaced: others in its folder stay there.
"""

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from glob import escape
from pathlib import Path
from typing import Any

from ..utils.files import LOCK, Lock, flush
from ..utils.urls import Url, is_url

MANIFEST = "manifest.json"
_STEP = re.compile(r"step-\d{10,}")
# The folders that a killed process leaves behind, with its mark: what was being written, and what was being replaced.
_LEFT = re.compile(r"\.(.+)\.(tmp|old)-(\d+(?:-[0-9a-f]{8})?)")
_FILES = {MANIFEST, "state.json", "model.safetensors", "training.safetensors"}
_TEMPORARY = re.compile(r"\.tmp[A-Za-z0-9]{6}")  # safetensors' own, which a killed process leaves in a draft
# The files of a checkpoint behind a URL may have further letters in their names, see `_rename_files`.
_SENT_FILE = re.compile(r"manifest\.json|state(\.[0-9a-f]{8})?\.json|(model|training)(\.[0-9a-f]{8})?\.safetensors")
_MARK = secrets.token_hex(4)


def sealed(manifest: Mapping[str, Any]) -> str:
    """Return the text of a manifest, with its checksum."""
    return json.dumps(dict(manifest) | {"checksum": checksum(manifest)}, indent=1)


def checksum(manifest: Mapping[str, Any]) -> str:
    """Return a hash of a manifest, without its checksum."""
    plain = {name: value for name, value in manifest.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def name_of(step: int) -> str:
    """Return the name of a step's checkpoint, e.g. `"step-0000000010"`."""
    return f"step-{step:010d}"


def is_step(name: str) -> bool:
    """True for a name that `name_of` returns."""
    return bool(_STEP.fullmatch(name))


def step_of(name: str) -> int:
    """Return the step of a checkpoint, from its name."""
    return int(name.removeprefix("step-"))


def _own_mark() -> str:
    """The mark of what this process writes. Its id alone won't do: in a container each run may have the same one."""
    return f"{os.getpid()}-{_MARK}"


class LocalStore:
    """Checkpoints in a local folder: written beside their place, synced, and renamed. The folder need not exist."""

    def __init__(self, where: str | os.PathLike[str]) -> None:
        self.where = Path(where)
        self._lock: Lock | None = None

    def names(self) -> list[str]:
        """Return the committed checkpoints, in ascending order, also those moved aside. Links don't count."""
        if not self.where.is_dir():
            return []
        folders = [entry.name for entry in os.scandir(self.where) if entry.is_dir(follow_symlinks=False)]
        found = {name for name in folders if is_step(name) and not _is_users(self.where / name)}
        aside = {left[1] for left in map(_LEFT.fullmatch, folders) if left and left[2] == "old" and is_step(left[1])}
        return sorted(found | aside, key=step_of)

    def commit(self, name: str, fill: Callable[[Path], object]) -> None:
        """Write a checkpoint's files, wait until the disk holds them, and only then make it visible.

        One of that name is replaced. What else is in its folder stays there.

        Raises:
            OSError: The file system refused, or a file or a link has that name. The store is as it was.
        """
        target = self.where / name
        if target.is_symlink() or (target.exists() and not target.is_dir()):
            kind = "a link" if target.is_symlink() else "no folder"
            raise FileExistsError(errno.EEXIST, f"It is {kind}, and can't be replaced by a checkpoint", str(target))
        draft, old = (self.where / f".{name}.{kind}-{_own_mark()}" for kind in ("tmp", "old"))
        shutil.rmtree(draft, ignore_errors=True)
        _drop(old, home=target)
        draft.mkdir(parents=True)
        try:
            fill(draft)
            for file in draft.iterdir():
                flush(file)
            flush(draft)
            # Moved aside, not deleted: if the process dies between the renames, `clean` brings it back.
            if target.exists():
                target.rename(old)
            draft.rename(target)
        except BaseException:
            if old.exists():
                old.rename(target)
            shutil.rmtree(draft, ignore_errors=True)
            raise
        flush(self.where)  # else a power cut may undo the rename
        for aside in _left_of(target, "old"):  # killed processes' too
            _drop(aside, home=target)

    def reserve(self) -> list[str]:
        """Make the folder and lock it, and delete the remains of killed processes; return their names.

        Raises:
            HeldError: Another process has locked it.
            OSError: The file system refused.
        """
        if self._lock is not None:
            return []
        self.where.mkdir(parents=True, exist_ok=True)
        self._lock = Lock(self.where)
        return self.clean()  # under the lock: else the drafts may be those of a live run

    def release(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def discard(self) -> None:
        """Remove the folder, if nothing but its lock is left in it."""
        with suppress(OSError):  # a link to a folder stays, and one that is gone is gone
            if self._lock is not None and [entry.name for entry in self.where.iterdir()] == [LOCK]:
                (self.where / LOCK).unlink()
                self.where.rmdir()

    def free(self) -> int | None:
        """The bytes that are free, or None if nobody knows."""
        return shutil.disk_usage(self.where).free

    def remove(self, name: str) -> None:
        """Delete a checkpoint's files, and its folder if nothing else is in it.

        It never looks whole while half of it is gone.
        """
        folder = self.where / name
        if not _others(folder):
            hidden = self.where / f".{name}.tmp-{_own_mark()}"
            folder.rename(hidden)  # first: the process may die while files are being deleted
            _drop(hidden)
        else:
            for file in reversed(_own(folder)):  # the manifest first
                file.unlink()

    def clean(self) -> list[str]:
        """Delete the remains of killed processes, and return their names. The caller has the folder's lock."""
        dropped = []
        for entry in sorted(self.where.iterdir()):
            left = _LEFT.fullmatch(entry.name)
            if left is None or not is_step(left[1]) or entry.is_symlink() or not entry.is_dir():
                continue
            if left[3] == _own_mark():  # it is still being written
                continue
            home = self.where / left[1]
            if left[2] == "old" and (entry / MANIFEST).is_file() and not home.exists():  # killed between two renames
                entry.rename(home)
            elif _is_users(entry):
                continue
            elif left[2] == "old":
                _drop(entry, home)
            elif not _others(entry):
                _drop(entry)
                dropped.append(entry.name)
        return dropped


def moved_aside(folder: Path) -> Path | None:
    """Find a checkpoint that isn't in its place, as a process was killed while it put another one there."""
    left = [path for path in _left_of(folder, "old") if (path / MANIFEST).is_file()]
    return max(left, key=lambda path: (path / MANIFEST).stat().st_mtime, default=None)


def _left_of(folder: Path, kind: str) -> list[Path]:
    """The folders that processes have left beside a checkpoint of that name, see `_LEFT`."""
    found = [(path, _LEFT.fullmatch(path.name)) for path in folder.parent.glob(f".{escape(folder.name)}.{kind}-*")]
    return [path for path, left in found if left is not None and path.is_dir() and not path.is_symlink()]


def _named(manifest: bytes) -> set[str]:
    """The names of a checkpoint's files, with its manifest, which says them.

    Raises:
        ValueError: It isn't a manifest.
    """
    try:
        files: dict[str, dict[str, str]] = json.loads(manifest)["files"]
        names = {entry.get("path", file) for file, entry in files.items()}
        return {MANIFEST, *filter(_SENT_FILE.fullmatch, names)}
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"it isn't a checkpoint's: {error}") from error


def _own(folder: Path) -> list[Path]:
    """The files of a checkpoint in a folder, the manifest last."""
    try:
        names = _named((folder / MANIFEST).read_bytes())
    except (OSError, ValueError):  # a draft has none yet
        names = _FILES.union(filter(_TEMPORARY.fullmatch, os.listdir(folder)))
    found = [entry for entry in folder.iterdir() if entry.name in names]
    files = [entry for entry in found if entry.is_file() and not entry.is_symlink()]
    return sorted(files, key=lambda file: file.name == MANIFEST)


def _others(folder: Path) -> list[Path]:
    """What else is in a checkpoint's folder."""
    own = _own(folder)
    return [entry for entry in folder.iterdir() if entry not in own]


def _is_users(folder: Path) -> bool:
    """True if a folder has files, but none of a checkpoint: a checkpoint's were deleted, or there never were any."""
    try:
        entries = [*folder.iterdir()]
    except OSError:  # said where it is read
        return False
    return bool(entries) and not any(entry.name in _FILES for entry in entries)


def _drop(folder: Path, home: Path | None = None) -> None:
    """Delete a checkpoint's files in a folder, and the folder if nothing is left in it.

    What else is in it moves to the folder `home`, if that is given, unless something there has its name.
    """
    with suppress(OSError):  # the folder isn't there, or isn't empty
        for entry in _others(folder):
            if home is not None and not os.path.lexists(home / entry.name):
                home.mkdir(exist_ok=True)
                entry.rename(home / entry.name)
        for file in _own(folder):  # the manifest last: without it nothing in the folder is looked for any more
            file.unlink()
        folder.rmdir()


class UrlStore:
    """Checkpoints behind a URL. One counts once its manifest is there, which is sent last and removed first.

    One that replaces another gets files of other names, and counts from the moment its manifest has the other's place.

    An object store has no locks: two trainings into one folder would overwrite each other.
    """

    def __init__(self, where: Url) -> None:
        self.where = where

    def names(self) -> list[str]:
        """Return the committed checkpoints, in ascending order."""
        found = [name for name in self.where.names() if is_step(name)]
        return sorted((name for name in found if (self.where / name / MANIFEST).is_file()), key=step_of)

    def commit(self, name: str, fill: Callable[[Path], object]) -> None:
        """Write a checkpoint's files to a local folder, by `fill`, and send them. One of that name is replaced.

        Raises:
            OSError: A file system refused.
        """
        target = self.where / name
        with tempfile.TemporaryDirectory(prefix="tpufit-") as folder:
            draft = Path(folder)
            fill(draft)
            if (target / MANIFEST).is_file():
                _rename_files(draft)  # beside those that are there, which count until the new manifest takes its place
            for file in sorted(draft.iterdir(), key=lambda file: file.name == MANIFEST):
                (target / file.name).send(file)
        self._drop_others(name)

    def remove(self, name: str) -> None:
        """Delete a checkpoint's files. It never looks whole while half of it is gone."""
        manifest = self.where / name / MANIFEST
        try:
            files = _named(manifest.read_bytes())
        except ValueError:
            files = _FILES
        manifest.remove()
        self._drop(name, files - {MANIFEST})

    def reserve(self) -> list[str]:
        """Make sure that files can be written here, and delete the remains of killed processes; return their names."""
        trial = self.where / f".tpufit-{_own_mark()}"
        trial.write_bytes(b"")
        trial.remove()
        whole = self.names()
        for name in whole:
            self._drop_others(name)
        dropped = [name for name in self.where.names() if is_step(name) and name not in whole and self._files(name)]
        for name in dropped:
            self._drop(name, self._files(name))
        return dropped

    def _files(self, name: str) -> list[str]:
        """The names of a checkpoint's files; a folder may hold others."""
        return [file for file in (self.where / name).names() if _SENT_FILE.fullmatch(file)]

    def _drop(self, name: str, files: Iterable[str]) -> None:
        """Remove some files of a checkpoint, and its folder if nothing is left: an object store has none."""
        for file in files:
            (self.where / name / file).remove()
        if not (self.where / name).names():
            (self.where / name).remove()

    def _drop_others(self, name: str) -> None:
        """Remove the files that a checkpoint's manifest doesn't name: of the one before, or of one that broke off."""
        with suppress(ValueError):  # a damaged manifest, which is said where it is read
            named = _named((self.where / name / MANIFEST).read_bytes())
            self._drop(name, [file for file in self._files(name) if file not in named])

    def release(self) -> None:
        """Do nothing: there are no locks."""

    def discard(self) -> None:
        """Do nothing: a folder is gone with its last file."""

    def free(self) -> int | None:
        """Return None: nobody knows."""
        return None


def _rename_files(folder: Path) -> None:
    """Give a checkpoint's files names that no others have, and note them in its manifest."""
    manifest = json.loads((folder / MANIFEST).read_bytes())
    mark = secrets.token_hex(4)
    for file, entry in manifest["files"].items():
        entry["path"] = f"{Path(file).stem}.{mark}{Path(file).suffix}"
        (folder / file).rename(folder / entry["path"])
    (folder / MANIFEST).write_text(sealed(manifest))


Store = LocalStore | UrlStore


def store_at(where: str | os.PathLike[str] | Url) -> Store:
    """Return the store for a path or URL."""
    if isinstance(where, Url):
        return UrlStore(where)
    return UrlStore(Url(os.fspath(where))) if is_url(where) else LocalStore(where)
