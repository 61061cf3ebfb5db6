"""The state of training on disk: a run's folder of checkpoints, each whole or not there, and verified when it is read.

    run/step-0000000010/
        model.safetensors       the module's parameters and buffers, under their own names
        training.safetensors    the other tensors: the optimizer's, moving averages, sums of the epoch so far
        state.json              the numbers: steps, rates, seeds, the place in the data, callbacks' counters
        manifest.json           written last: the format's version, the size and SHA-256 of each file, shapes, versions

A tensor is stored whole, so that any number of cores can load it. A hash finds damage; it doesn't protect from somebody
who can write to the folder. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import re
import shutil
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, Protocol

import safetensors.torch
from torch import Tensor

from ..errors import (
    CheckpointBusyError,
    CheckpointDamagedError,
    CheckpointError,
    CheckpointMissingError,
    CheckpointNotWrittenError,
)
from ..runtime import versions as runtime_versions
from ..utils.files import DISK_FULL, HeldError, Lock, flush, write_tensors
from ..utils.text import dtype_name, size
from .weights import first_broken, untied

FORMAT = 1

_STEP = re.compile(r"step-\d{10,}")
_LEFT = re.compile(r"\.(step-\d{10,})\.(tmp|old)-(\d+)")  # what a killed process leaves, and its number
_MANIFEST, _STATE, _WEIGHTS, _TRAINING = "manifest.json", "state.json", "model.safetensors", "training.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """The state of training at one moment, on the host.

    Attributes:
        step: Steps of training so far.
        weights: The module's tensors by name; of tied ones each name has the same object.
        training: The other tensors, by names of our own.
        state: Everything else, as JSON can hold it.
        learned: Which of the weights are learned, so that they must be finite; a mask in a buffer need not be.
        metric: The value that says how good it is, if there is one, with its name and `"min"` or `"max"`.
        mesh: The cores that it was made on.
        versions: The versions that made it.
    """

    step: int
    weights: Mapping[str, Tensor]
    training: Mapping[str, Tensor]
    state: Mapping[str, Any]
    learned: Sequence[str] = ()
    metric: Score | None = None
    mesh: Mapping[str, int] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=lambda: versions())


@dataclass(frozen=True)
class Score:
    """How good a checkpoint is.

    Attributes:
        name: The log's name.
        value: Its value.
        mode: `"min"` or `"max"`: what is better.
    """

    name: str
    value: float
    mode: str

    @property
    def order(self) -> float:
        """A number that is smaller where this is better; NaN is worst."""
        return math.inf if math.isnan(self.value) else self.value if self.mode == "min" else -self.value


class Store(Protocol):
    """Where a run's checkpoints are kept: a local folder; later perhaps a bucket, or parts on several hosts."""

    where: Path

    def names(self) -> list[str]:
        """The committed checkpoints, in ascending order."""

    def commit(self, name: str, files: Mapping[str, Callable[[Path], None]], seal: Callable[[Path], None]) -> None:
        """Write a checkpoint's files, then its seal, and only then let it be seen."""

    def folder(self, name: str) -> Path:
        """Where the files of a committed checkpoint can be read."""

    def remove(self, name: str) -> None:
        """Delete a checkpoint, so that it never looks like a whole one."""


class LocalStore:
    """Checkpoints in a local folder: written beside their place, synced, and renamed.

    Args:
        where: The folder. It need not exist.
    """

    def __init__(self, where: str | os.PathLike[str]) -> None:
        self.where = Path(where)

    def names(self) -> list[str]:
        """The committed checkpoints, in ascending order. What lies elsewhere, behind a link, is none of them."""
        if not self.where.is_dir():
            return []
        found = [entry.name for entry in os.scandir(self.where) if entry.is_dir(follow_symlinks=False)]
        return sorted((name for name in found if _STEP.fullmatch(name)), key=_number)

    def commit(self, name: str, files: Mapping[str, Callable[[Path], None]], seal: Callable[[Path], None]) -> None:
        """Write a checkpoint's files, then its seal, and only then let it be seen.

        Args:
            name: Its name. One of that name is replaced.
            files: What writes each file, given its path.
            seal: What writes the last file, given the folder.

        Raises:
            OSError: The file system refused. Then nothing is left of it, and what was there is still there.
        """
        target, draft = self.where / name, self.where / f".{name}.tmp-{os.getpid()}"
        old = self.where / f".{name}.old-{os.getpid()}"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        try:
            for file, write in files.items():
                write(draft / file)
                flush(draft / file)
            seal(draft)
            flush(draft / _MANIFEST)
            flush(draft)
            if target.exists():
                target.rename(old)
            draft.rename(target)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        flush(self.where)  # else the rename itself may be lost with the power
        shutil.rmtree(old, ignore_errors=True)

    def folder(self, name: str) -> Path:
        """Where the files of a committed checkpoint can be read."""
        return self.where / name

    def remove(self, name: str) -> None:
        """Delete a checkpoint, so that it never looks like a whole one."""
        hidden = self.where / f".{name}.tmp-{os.getpid()}"
        (self.where / name).rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)

    def clean(self) -> list[str]:
        """Drop what killed processes left, and say what. The caller holds the folder's lock."""
        dropped = []
        for entry in sorted(self.where.iterdir()):
            left = _LEFT.fullmatch(entry.name)
            if left is None or entry.is_symlink() or int(left[3]) == os.getpid():  # our own is still being written
                continue
            if left[2] == "old" and not (self.where / left[1]).exists():  # killed between two renames
                entry.rename(self.where / left[1])
                continue
            shutil.rmtree(entry, ignore_errors=True)
            dropped.append(entry.name)
        return dropped


class CheckpointDirectory:
    """A run's folder of checkpoints.

    Args:
        path: The folder. It is made when it is opened for writing.
        keep_last: How many of the newest are kept (default: all).
        keep_best: How many of the best by their metric are kept besides (default 0).

    Example:
        >>> import tempfile, torch
        >>> place = tempfile.TemporaryDirectory()
        >>> run = RunFolder(place.name, keep_last=2)
        >>> for step in (10, 20, 30):
        ...     _ = run.write(Checkpoint(step, {"weight": torch.ones(2)}, {}, {"epoch": step // 10}))
        >>> run.steps()
        [20, 30]
        >>> run.newest().state
        {'epoch': 3}
        >>> place.cleanup()
    """

    def __init__(self, path: str | os.PathLike[str], keep_last: int | None = None, keep_best: int = 0) -> None:
        self.path, self.keep_last, self.keep_best = Path(path), keep_last, keep_best
        self._store = LocalStore(path)
        self._lock: Lock | None = None

    def open(self) -> None:
        """Make sure, before hours of training, that checkpoints can be written here and that nobody else does.

        Raises:
            CheckpointBusyError: Another process trains into this folder.
            CheckpointNotWrittenError: Nothing can be written here.
        """
        if self._lock is not None:
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = Lock(self.path)
            dropped = self._store.clean()
        except HeldError as held:
            raise CheckpointBusyError(
                f"{held} trains into {self.path.absolute()}: two runs in one folder would overwrite each other. Wait "
                "for its end, or pass another path"
            ) from None
        except OSError as error:
            raise CheckpointNotWrittenError(
                f"checkpoints can't be written to {self.path.absolute()}: {error.strerror}. Pass a folder that exists "
                "or can be made, and may be written to"
            ) from error
        if dropped:
            warnings.warn(
                f"dropped from {self.path}: {', '.join(dropped)}, which a process that was killed had not finished",
                stacklevel=3,
            )

    def close(self) -> None:
        """Let others write here."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def clear(self) -> None:
        """Remove all checkpoints: those whose manifest can be read, so that nothing else is ever deleted."""
        for name in self._numbers():
            self._store.remove(name)

    def steps(self) -> list[int]:
        """The steps of the checkpoints there are, whole or damaged, in ascending order."""
        return [_number(name) for name in self._store.names()]

    def write(self, checkpoint: Checkpoint) -> Path:
        """Write a checkpoint, and remove those that need not be kept any more.

        Args:
            checkpoint: What to write. One of the same step is replaced.

        Returns:
            Its folder.

        Raises:
            CheckpointNotWrittenError: There is no room, the file system refused, or a weight isn't finite. What was
                there is still there.
        """
        name = f"step-{checkpoint.step:010d}"
        bad = first_broken(checkpoint.weights, checkpoint.learned)
        if bad is not None:
            raise CheckpointNotWrittenError(
                f"the checkpoint of step {checkpoint.step} was not written: {bad} holds NaN or infinities. "
                f"{self._last_good()}"
            )
        try:
            write(self._store, name, checkpoint, 1 + max(self._numbers().values(), default=0))
        except OSError as error:
            raise CheckpointNotWrittenError(self._refused(checkpoint, error)) from error
        self._prune()
        return self._store.folder(name)

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint that is whole; None if there has never been one.

        Raises:
            CheckpointDamagedError: There are some, and all are damaged; the message says how each.
        """
        numbers = self._numbers()
        return self._first_whole(
            sorted(self._store.names(), key=lambda name: (numbers.get(name, math.inf), _number(name)), reverse=True)
        )

    def best(self) -> Checkpoint | None:
        """The best checkpoint by its metric that is whole; None if there has never been one with a metric."""
        return self._first_whole(self._by_metric())

    def _first_whole(self, names: Sequence[str]) -> Checkpoint | None:
        faults = []
        for name in names:
            try:
                found = read(self._store.folder(name))
            except CheckpointDamagedError as error:
                faults.append(str(error))
                continue
            for fault in faults:
                warnings.warn(f"{fault}. Going on from {self.path / name}", stacklevel=4)
            return found
        if faults:
            raise CheckpointDamagedError(
                f"none of the checkpoints in {self.path} can be read: {'; '.join(faults)}. To begin anew, pass another "
                "folder or resume=False"
            )
        return None

    def _numbers(self) -> dict[str, int]:
        """In which order those that can be read were written: that of their steps, unless one went back."""
        numbers = {}
        for name in self._store.names():
            with suppress(CheckpointDamagedError):  # whoever wants to read it is told
                numbers[name] = _manifest(self._store.folder(name))["number"]
        return numbers

    def _by_metric(self) -> list[str]:
        """The names of those that have a metric, the best first; of equal ones the earlier first."""
        rated = []
        for name in self._store.names():
            with suppress(CheckpointDamagedError):
                manifest = _manifest(self._store.folder(name))
                if manifest["metric"] is not None:
                    rated.append((Score(**manifest["metric"]).order, manifest["number"], name))
        return [name for *_, name in sorted(rated)]

    def _prune(self) -> None:
        if self.keep_last is None:
            return
        numbers = self._numbers()
        names = sorted(numbers, key=lambda name: numbers[name])
        kept = {*names[-self.keep_last :], *(self._by_metric()[: self.keep_best] if self.keep_best else ())}
        for name in names:
            if name not in kept:
                self._store.remove(name)

    def _last_good(self) -> str:
        steps = self.steps()
        return f"The last good one is that of step {steps[-1]}" if steps else "There is none yet"

    def _refused(self, checkpoint: Checkpoint, error: OSError) -> str:
        head = f"the checkpoint of step {checkpoint.step} was not written: "
        if error.errno in DISK_FULL:
            need = sum(t.nbytes for t in (*checkpoint.weights.values(), *checkpoint.training.values()))
            need += len(json.dumps(checkpoint.state))
            free = shutil.disk_usage(self.path).free
            return f"{head}no room in {self.path} (need {size(need)}, free {size(free)}). {self._last_good()}"
        return f"{head}{error}. {self._last_good()}"


def write(store: Store, name: str, checkpoint: Checkpoint, number: int = 1) -> None:
    """Write one checkpoint.

    Args:
        store: Where to.
        name: Its name there.
        checkpoint: What to write.
        number: How many were written into the run's folder, with this one.

    Raises:
        OSError: The store refused.
    """
    weights, metadata = untied(checkpoint.weights)
    training = {name: tensor.contiguous() for name, tensor in checkpoint.training.items()}
    state = json.dumps(checkpoint.state)

    def seal(folder: Path) -> None:
        manifest = {
            "format": FORMAT,
            "step": checkpoint.step,
            "number": number,
            "metric": None if checkpoint.metric is None else vars(checkpoint.metric),
            "mesh": dict(checkpoint.mesh),
            "versions": dict(checkpoint.versions),
            "files": _fingerprints(folder, (_WEIGHTS, _TRAINING, _STATE)),
            "tensors": {
                file: {name: {"dtype": dtype_name(t.dtype), "shape": list(t.shape)} for name, t in tensors.items()}
                for file, tensors in ((_WEIGHTS, weights), (_TRAINING, training))
            },
        }
        (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1))

    files: dict[str, Callable[[Path], None]] = {
        _WEIGHTS: lambda path: write_tensors(path, weights, metadata),
        _TRAINING: lambda path: write_tensors(path, training, {"format": "pt"}),
        _STATE: lambda path: _write_text(path, state),
    }
    store.commit(name, files, seal)


def read(folder: str | os.PathLike[str]) -> Checkpoint:
    """Read one checkpoint, and verify it.

    Args:
        folder: Its folder.

    Raises:
        CheckpointMissingError: There is no checkpoint.
        CheckpointDamagedError: A file of it isn't what was written.
        CheckpointError: It was made by a later version, or the folder is a link to another place.
    """
    folder = Path(folder)
    if folder.is_symlink():
        raise CheckpointError(f"{folder} is a link; checkpoints are read from folders only. Pass {folder.resolve()}")
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise CheckpointMissingError(
            f"{folder} is not a checkpoint of tpufit: it {what}, and a checkpoint is a folder with a {_MANIFEST}. "
            "Weights alone, in a .safetensors file, go into model.load_weights; a pickle made by torch.save is never "
            "read, because it could run any code"
        )
    manifest = _manifest(folder)
    _verify(folder, manifest)
    weights = safetensors.torch.load_file(folder / _WEIGHTS)
    with safetensors.safe_open(folder / _WEIGHTS, framework="pt") as file:
        tied = json.loads((file.metadata() or {}).get("tied", "{}"))
    metric = manifest["metric"]
    return Checkpoint(
        step=manifest["step"],
        weights=weights | {name: weights[owner] for name, owner in tied.items()},
        training=safetensors.torch.load_file(folder / _TRAINING),
        state=json.loads((folder / _STATE).read_bytes()),
        metric=None if metric is None else Score(**metric),
        mesh=manifest["mesh"],
        versions=manifest["versions"],
    )


def versions() -> dict[str, str]:
    """The installed versions of what training depends on."""
    return {"tpufit": version("tpufit"), **runtime_versions()}


def is_checkpoint(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder is one checkpoint, rather than a run's folder of them."""
    return (Path(folder) / _MANIFEST).exists() or bool(_STEP.fullmatch(Path(folder).name))


def save(folder: str | os.PathLike[str], checkpoint: Checkpoint) -> None:
    """Write one checkpoint to a folder of any name. A checkpoint there is replaced; anything else is left alone.

    Args:
        folder: The folder.
        checkpoint: What to write.

    Raises:
        CheckpointNotWrittenError: Something else is there, or the file system refused.
    """
    folder = Path(folder)
    if folder.exists() and not (folder / _MANIFEST).is_file():
        raise CheckpointNotWrittenError(f"{folder} exists and is no checkpoint of tpufit: pass a path that is free")
    try:
        write(LocalStore(folder.absolute().parent), folder.name, checkpoint)
    except OSError as error:
        raise CheckpointNotWrittenError(f"the checkpoint was not written to {folder}: {error}") from error


def _manifest(folder: Path) -> dict[str, Any]:
    manifest: dict[str, Any]
    try:
        manifest = json.loads((folder / _MANIFEST).read_bytes())
    except FileNotFoundError:
        raise CheckpointDamagedError(f"{folder} has no {_MANIFEST}, so that it was never finished") from None
    except ValueError as error:
        raise CheckpointDamagedError(f"{folder / _MANIFEST} is damaged: {error}") from None
    known = manifest.get("format") if isinstance(manifest, dict) else None
    if not isinstance(known, int):
        raise CheckpointDamagedError(f"{folder / _MANIFEST} is damaged: it names no format")
    if known > FORMAT:
        raise CheckpointError(
            f"{folder} is of format {known}, and this tpufit ({version('tpufit')}) knows formats up to {FORMAT}. It "
            f"was made by tpufit {manifest.get('versions', {}).get('tpufit')}: install that version or a later one"
        )
    if set(manifest.get("files", ())) != {_WEIGHTS, _TRAINING, _STATE}:
        raise CheckpointDamagedError(f"{folder / _MANIFEST} is damaged: it lists the files {manifest.get('files')}")
    return manifest


def _verify(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Compare the files with the manifest: sizes first, which say most."""
    for name, expected in manifest["files"].items():
        path = folder / name
        if path.is_symlink() or not path.is_file():
            raise CheckpointDamagedError(f"{path} is missing")
        if path.stat().st_size != expected["size"]:
            raise CheckpointDamagedError(
                f"{path} is damaged: it has {path.stat().st_size:,} bytes, and {expected['size']:,} were written"
            )
    for name, found in _fingerprints(folder, manifest["files"]).items():
        expected = manifest["files"][name]["sha256"]
        if found["sha256"] != expected:
            raise CheckpointDamagedError(
                f"{folder / name} is damaged: its SHA-256 is {found['sha256'][:12]}..., and {expected[:12]}... was "
                "written"
            )


def _fingerprints(folder: Path, names: Collection[str]) -> dict[str, dict[str, Any]]:
    """The size and hash of files; each is hashed in a thread, because that takes as long as reading them.

    These threads are daemons: who leaves for good shall not have to wait for them.
    """
    with ThreadPool(len(names)) as pool:
        hashes = pool.map(_sha256, [folder / name for name in names])
    return {n: {"size": (folder / n).stat().st_size, "sha256": h} for n, h in zip(names, hashes, strict=True)}


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
                digest.update(view)
    return digest.hexdigest()


def _write_text(path: Path, text: str) -> None:
    path.write_text(text)


def _number(name: str) -> int:
    return int(name.removeprefix("step-"))
