"""`LocalStore` and `UrlStore`: the folder of a run's checkpoints.

Checkpoints are committed atomically: on a disk they are written next to their place, synced, and renamed; behind a URL
the manifest is sent last. Only a checkpoint's files are ever deleted or replaced; other files in its folder stay.
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
# The folders that a killed process leaves behind, with its mark: a checkpoint being written or being replaced.
_LEFTOVER = re.compile(r"\.(.+)\.(tmp|old)-(\d+(?:-[0-9a-f]{8})?)")
_FILES = {MANIFEST, "state.json", "model.safetensors", "training.safetensors"}
_TEMPORARY = re.compile(r"\.tmp[A-Za-z0-9]{6}")  # safetensors' temporary files in a killed process's draft
# The files of a checkpoint behind a URL may have extra letters in their names, see `_rename_files`.
_SENT_FILE = re.compile(r"manifest\.json|state(\.[0-9a-f]{8})?\.json|(model|training)(\.[0-9a-f]{8})?\.safetensors")
_MARK = secrets.token_hex(4)


def seal(manifest: Mapping[str, Any]) -> str:
    """Return the text of a manifest, with its checksum."""
    return json.dumps(dict(manifest) | {"checksum": checksum(manifest)}, indent=1)


def checksum(manifest: Mapping[str, Any]) -> str:
    """Hash a manifest without its checksum."""
    plain = {name: value for name, value in manifest.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def checkpoint_name(step: int) -> str:
    """Return the name of a step's checkpoint, e.g. `"step-0000000010"`."""
    return f"step-{step:010d}"


def is_step(name: str) -> bool:
    """True for a name that `checkpoint_name` returns."""
    return bool(_STEP.fullmatch(name))


def parse_step(name: str) -> int:
    """Return the step in a checkpoint's name."""
    return int(name.removeprefix("step-"))


def _process_mark() -> str:
    """Return the mark of this process. Its id isn't enough: in a container each run may have the same id."""
    return f"{os.getpid()}-{_MARK}"


class LocalStore:
    """Checkpoints in a local folder: written next to their place, synced, and renamed. The folder need not exist."""

    def __init__(self, where: str | os.PathLike[str]) -> None:
        self.where = Path(where)
        self._lock: Lock | None = None

    def names(self) -> list[str]:
        """Return the names of the committed checkpoints, in ascending order, including moved-aside ones; no links."""
        if not self.where.is_dir():
            return []
        folders = [entry.name for entry in os.scandir(self.where) if entry.is_dir(follow_symlinks=False)]
        committed = {name for name in folders if is_step(name) and not _belongs_to_user(self.where / name)}
        leftovers = filter(None, map(_LEFTOVER.fullmatch, folders))
        aside = {leftover[1] for leftover in leftovers if leftover[2] == "old" and is_step(leftover[1])}
        return sorted(committed | aside, key=parse_step)

    def commit(self, name: str, fill: Callable[[Path], object]) -> None:
        """Write a checkpoint's files, wait until they are on the disk, and only then make the checkpoint visible.

        A checkpoint of that name is replaced. Other files in its folder stay.

        Raises:
            OSError: The write failed, or a file or a link has that name. The store is unchanged.
        """
        target = self.where / name
        if target.is_symlink() or (target.exists() and not target.is_dir()):
            why = "It is a link" if target.is_symlink() else "It isn't a folder"
            raise FileExistsError(errno.EEXIST, f"{why}, so a checkpoint can't replace it", str(target))
        draft, old = (self.where / f".{name}.{kind}-{_process_mark()}" for kind in ("tmp", "old"))
        shutil.rmtree(draft, ignore_errors=True)
        _drop(old, home=target)
        draft.mkdir(parents=True)
        try:
            fill(draft)
            for file in draft.iterdir():
                flush(file)
            flush(draft)
            # Moved aside, not deleted: if the process dies between the renames, `clean` restores it.
            if target.exists():
                target.rename(old)
            draft.rename(target)
        except BaseException:
            if old.exists():
                old.rename(target)
            shutil.rmtree(draft, ignore_errors=True)
            raise
        flush(self.where)  # else a power cut may undo the rename
        for aside in _list_moved_aside(target):  # including killed processes'
            _drop(aside, home=target)

    def reserve(self) -> list[str]:
        """Create and lock the folder, and delete the leftovers of killed processes; return their names.

        Raises:
            LockedError: Another process has locked it.
            OSError: The folder can't be written to.
        """
        if self._lock is not None:
            return []
        self.where.mkdir(parents=True, exist_ok=True)
        self._lock = Lock(self.where)
        return self.clean()  # under the lock: else the drafts may belong to a live run

    def release(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def discard(self) -> None:
        """Remove the folder, if only its lock remains."""
        with suppress(OSError):  # a link to a folder stays, and a missing folder is fine
            if self._lock is not None and [entry.name for entry in self.where.iterdir()] == [LOCK]:
                (self.where / LOCK).unlink()
                self.where.rmdir()

    def free(self) -> int | None:
        """Return the free bytes."""
        return shutil.disk_usage(self.where).free

    def remove(self, name: str) -> None:
        """Delete a checkpoint's files, and its folder if that has nothing else.

        It never looks complete while it is partly deleted.
        """
        folder = self.where / name
        if not _list_other_entries(folder):
            hidden = self.where / f".{name}.tmp-{_process_mark()}"
            folder.rename(hidden)  # first: the process may die while files are being deleted
            _drop(hidden)
        else:
            for file in reversed(_list_checkpoint_files(folder)):  # the manifest first
                file.unlink()

    def clean(self) -> list[str]:
        """Delete the leftovers of killed processes, and return their names. The caller must have the folder's lock."""
        dropped = []
        for entry in sorted(self.where.iterdir()):
            leftover = _LEFTOVER.fullmatch(entry.name)
            if leftover is None or not is_step(leftover[1]) or entry.is_symlink() or not entry.is_dir():
                continue
            if leftover[3] == _process_mark():  # it is still being written
                continue
            home = self.where / leftover[1]
            if leftover[2] == "old" and (entry / MANIFEST).is_file() and not home.exists():
                entry.rename(home)  # killed between two renames
            elif _belongs_to_user(entry):
                continue
            elif leftover[2] == "old":
                _drop(entry, home)
            elif not _list_other_entries(entry):
                _drop(entry)
                dropped.append(entry.name)
        return dropped


def find_moved_aside(folder: Path) -> Path | None:
    """Find a moved-aside checkpoint whose place is empty because a process was killed while replacing it."""
    left = [path for path in _list_moved_aside(folder) if (path / MANIFEST).is_file()]
    return max(left, key=lambda path: (path / MANIFEST).stat().st_mtime, default=None)


def _list_moved_aside(folder: Path) -> list[Path]:
    """List the folders to which processes have moved a checkpoint of that name, see `_LEFTOVER`."""
    pairs = [(path, _LEFTOVER.fullmatch(path.name)) for path in folder.parent.glob(f".{escape(folder.name)}.old-*")]
    return [path for path, leftover in pairs if leftover is not None and path.is_dir() and not path.is_symlink()]


def _read_file_names(manifest: bytes) -> set[str]:
    """Return the names of a checkpoint's files, including the manifest that lists them.

    Raises:
        ValueError: The bytes aren't a manifest.
    """
    try:
        files: dict[str, dict[str, str]] = json.loads(manifest)["files"]
        names = {entry.get("path", file) for file, entry in files.items()}
        return {MANIFEST, *filter(_SENT_FILE.fullmatch, names)}
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a checkpoint's manifest: {error}") from error


def _list_checkpoint_files(folder: Path) -> list[Path]:
    """List a checkpoint's files in a folder, the manifest last."""
    try:
        names = _read_file_names((folder / MANIFEST).read_bytes())
    except (OSError, ValueError):  # a draft has no manifest yet
        names = _FILES.union(filter(_TEMPORARY.fullmatch, os.listdir(folder)))
    entries = [entry for entry in folder.iterdir() if entry.name in names]
    files = [entry for entry in entries if entry.is_file() and not entry.is_symlink()]
    return sorted(files, key=lambda file: file.name == MANIFEST)


def _list_other_entries(folder: Path) -> list[Path]:
    """List the other entries in a checkpoint's folder."""
    files = _list_checkpoint_files(folder)
    return [entry for entry in folder.iterdir() if entry not in files]


def _belongs_to_user(folder: Path) -> bool:
    """True if a folder has files, but no checkpoint's files: they were deleted, or never existed."""
    try:
        entries = [*folder.iterdir()]
    except OSError:  # reported by `read`
        return False
    return bool(entries) and not any(entry.name in _FILES for entry in entries)


def _drop(folder: Path, home: Path | None = None) -> None:
    """Delete a checkpoint's files in a folder, and the folder if it is empty then.

    Other entries move to the folder `home`, if given, unless that has an entry of the same name.
    """
    with suppress(OSError):  # the folder isn't there, or isn't empty
        for entry in _list_other_entries(folder):
            if home is not None and not os.path.lexists(home / entry.name):
                home.mkdir(exist_ok=True)
                entry.rename(home / entry.name)
        for file in _list_checkpoint_files(folder):  # the manifest last, because it lists the other files
            file.unlink()
        folder.rmdir()


class UrlStore:
    """Checkpoints behind a URL. A checkpoint exists if its manifest does, which is sent last and removed first.

    A checkpoint that replaces another has files with other names, and takes its place when the manifest is replaced.

    An object store has no locks: two trainings into one folder would overwrite each other.
    """

    def __init__(self, where: Url) -> None:
        self.where = where

    def names(self) -> list[str]:
        """Return the committed checkpoints, in ascending order."""
        found = [name for name in self.where.names() if is_step(name)]
        return sorted((name for name in found if (self.where / name / MANIFEST).is_file()), key=parse_step)

    def commit(self, name: str, fill: Callable[[Path], object]) -> None:
        """Write a checkpoint's files to a local folder, by `fill`, and send them. Replaces a checkpoint of that name.

        Raises:
            OSError: A write failed.
        """
        target = self.where / name
        with tempfile.TemporaryDirectory(prefix="tpufit-") as folder:
            draft = Path(folder)
            fill(draft)
            if (target / MANIFEST).is_file():
                _rename_files(draft)  # next to the old files, which count until the new manifest replaces the old one
            for file in sorted(draft.iterdir(), key=lambda file: file.name == MANIFEST):
                (target / file.name).send(file)
        self._drop_others(name)

    def remove(self, name: str) -> None:
        """Delete a checkpoint's files. It never looks complete while it is partly deleted."""
        manifest = self.where / name / MANIFEST
        try:
            files = _read_file_names(manifest.read_bytes())
        except ValueError:
            files = _FILES
        manifest.remove()
        self._drop(name, files - {MANIFEST})

    def reserve(self) -> list[str]:
        """Check that the URL is writable, and delete the leftovers of killed processes; return their names."""
        trial = self.where / f".tpufit-{_process_mark()}"
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
        """Return the names of a checkpoint's files; its folder may have others."""
        return [file for file in (self.where / name).names() if _SENT_FILE.fullmatch(file)]

    def _drop(self, name: str, files: Iterable[str]) -> None:
        """Remove some of a checkpoint's files, and its folder if it is empty then; object stores have no folders."""
        for file in files:
            (self.where / name / file).remove()
        if not (self.where / name).names():
            (self.where / name).remove()

    def _drop_others(self, name: str) -> None:
        """Remove files that a checkpoint's manifest doesn't list: from a replaced or an interrupted checkpoint."""
        with suppress(ValueError):  # a damaged manifest, which `read` reports
            named = _read_file_names((self.where / name / MANIFEST).read_bytes())
            self._drop(name, [file for file in self._files(name) if file not in named])

    def release(self) -> None:
        """Do nothing: there are no locks."""

    def discard(self) -> None:
        """Do nothing: a folder vanishes with its last file."""

    def free(self) -> int | None:
        """Return None: unknown."""
        return None


def _rename_files(folder: Path) -> None:
    """Give a checkpoint's files unique names, and record them in its manifest."""
    manifest = json.loads((folder / MANIFEST).read_bytes())
    mark = secrets.token_hex(4)
    for file, entry in manifest["files"].items():
        entry["path"] = f"{Path(file).stem}.{mark}{Path(file).suffix}"
        (folder / file).rename(folder / entry["path"])
    (folder / MANIFEST).write_text(seal(manifest))


Store = LocalStore | UrlStore


def open_store(where: str | os.PathLike[str] | Url) -> Store:
    """Return the store for a path or URL."""
    if isinstance(where, Url):
        return UrlStore(where)
    return UrlStore(Url(os.fspath(where))) if is_url(where) else LocalStore(where)
