"""`LocalStore` and `UrlStore`: a folder where the checkpoints of a run are kept.

A checkpoint is committed as a whole: on a disk it is written beside its place, synced, and renamed; behind a URL its
manifest is sent last.
"""

import json
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from glob import escape
from pathlib import Path

from ..utils.files import LOCK, Lock, flush
from ..utils.urls import Url, is_url

MANIFEST = "manifest.json"
_STEP = re.compile(r"step-\d{10,}")
_LEFT = re.compile(r"\.(step-\d{10,})\.(tmp|old)-(.+)")  # left behind by a killed process, with its mark
_MARK = secrets.token_hex(4)


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
        found = [entry.name for entry in os.scandir(self.where) if entry.is_dir(follow_symlinks=False)]
        aside = [left[1] for left in map(_LEFT.fullmatch, found) if left and left[2] == "old"]
        return sorted({name for name in (*found, *aside) if is_step(name)}, key=step_of)

    def commit(self, name: str, fill: Callable[[Path], object]) -> None:
        """Write a checkpoint's files, wait until the disk holds them, and only then make it visible.

        One of that name is replaced.

        Raises:
            OSError: The file system refused. The store is as it was.
        """
        target = self.where / name
        draft, old = (self.where / f".{name}.{kind}-{_own_mark()}" for kind in ("tmp", "old"))
        for remains in (draft, old):
            shutil.rmtree(remains, ignore_errors=True)
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
        for aside in self.where.glob(f".{escape(name)}.old-*"):  # killed processes' too
            shutil.rmtree(aside, ignore_errors=True)

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
            if [entry.name for entry in self.where.iterdir()] == [LOCK]:
                shutil.rmtree(self.where)

    def free(self) -> int | None:
        """The bytes that are free, or None if nobody knows."""
        return shutil.disk_usage(self.where).free

    def remove(self, name: str) -> None:
        """Delete a checkpoint. It never looks whole while half of it is gone."""
        hidden = self.where / f".{name}.tmp-{_own_mark()}"
        (self.where / name).rename(hidden)  # first: the process may die while files are being deleted
        shutil.rmtree(hidden, ignore_errors=True)

    def clean(self) -> list[str]:
        """Delete the remains of killed processes, and return their names. The caller has the folder's lock."""
        dropped = []
        for entry in sorted(self.where.iterdir()):
            left = _LEFT.fullmatch(entry.name)
            if left is None or entry.is_symlink() or left[3] == _own_mark():  # our own is still being written
                continue
            if left[2] == "old" and not (self.where / left[1]).exists():  # killed between two renames
                entry.rename(self.where / left[1])
                continue
            shutil.rmtree(entry, ignore_errors=True)
            dropped.append(entry.name)
        return dropped


def moved_aside(folder: Path) -> Path | None:
    """Find a checkpoint that isn't in its place, as a process was killed while it put another one there."""
    left = [path for path in folder.parent.glob(f".{escape(folder.name)}.old-*") if (path / MANIFEST).is_file()]
    return max(left, key=lambda path: (path / MANIFEST).stat().st_mtime, default=None)


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
        """Delete a checkpoint. It never looks whole while half of it is gone."""
        (self.where / name / MANIFEST).remove()
        (self.where / name).remove()

    def reserve(self) -> list[str]:
        """Make sure that files can be written here, and delete the remains of killed processes; return their names."""
        (self.where / ".tpufit").write_bytes(b"")
        (self.where / ".tpufit").remove()
        whole = self.names()
        for name in whole:
            self._drop_others(name)
        dropped = [name for name in self.where.names() if is_step(name) and name not in whole]
        for name in dropped:
            self.remove(name)
        return dropped

    def _drop_others(self, name: str) -> None:
        """Remove the files that a checkpoint's manifest doesn't name: of the one before, or of one that broke off."""
        found = (self.where / name).names()
        manifest = json.loads((self.where / name / MANIFEST).read_bytes())
        named = {MANIFEST, *(entry.get("path", file) for file, entry in manifest["files"].items())}
        for file in found:
            if file not in named:
                (self.where / name / file).remove()

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
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))


Store = LocalStore | UrlStore


def store_at(where: str | os.PathLike[str] | Url) -> Store:
    """Return the store for a path or URL."""
    if isinstance(where, Url):
        return UrlStore(where)
    return UrlStore(Url(os.fspath(where))) if is_url(where) else LocalStore(where)
