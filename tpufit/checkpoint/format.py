"""A checkpoint on disk: the state of training, verified at each read.

    run/step-0000000010/
        model.safetensors       the module's parameters and buffers, by name
        training.safetensors    the other tensors: the optimizer's, moving averages, sums of the epoch so far
        state.json              the numbers: steps, rates, seeds, the position in the data, callbacks' counters
        manifest.json           written last: the format's version, the size and SHA-256 of each file, shapes, versions,
                                and the manifest's checksum

Behind a URL, files of a checkpoint that replaced another have extra letters in their names, which the manifest lists
under `path`. Tensors are stored whole, so that any number of cores can load them. Hashes detect damage; they don't
protect from people who can write to the folder. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
from torch import Tensor

from ..errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointMissingError,
    CheckpointNotWrittenError,
    WeightsError,
)
from ..hosts import is_first
from ..runtime import versions as runtime_versions
from ..utils.text import dtype_name
from ..utils.urls import Mirror, Url, is_url
from ..utils.user_code import warn
from .store import MANIFEST, Store, checksum, find_moved_aside, is_step, open_store, seal
from .weight_files import OTHERS, NotFiniteError, are_on_host, fetch_checked, read_weights, sort_by_width, untie
from .weight_files import write as write_file

FORMAT = 2  # increased when a name in the files changes
_STATE = "state.json"
_WEIGHTS = "model.safetensors"
_TRAINING = "training.safetensors"
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Checkpoint:
    """The state of training at one moment."""

    step: int  # training steps so far
    weights: Mapping[str, Tensor]  # the names of a tied tensor share one object
    training: Mapping[str, Tensor]  # the other tensors, by tpufit's names
    state: Mapping[str, Any]  # everything else, as JSON values
    learned: Sequence[str] = ()  # weights that must be finite; a mask in a buffer need not be
    metric: Score | None = None
    mesh: Mapping[str, int] = field(default_factory=dict)  # the number of cores that wrote it, under "cores"
    # Of the software that wrote it.
    versions: Mapping[str, str] = field(default_factory=lambda: {"tpufit": version("tpufit"), **runtime_versions()})

    @property
    def is_on_host(self) -> bool:
        """True if it is on the host. Otherwise it must be written before the next step."""
        return are_on_host((*self.weights.values(), *self.training.values()))


@dataclass(frozen=True)
class Score:
    """The value of a log that ranks a checkpoint."""

    name: str
    value: float
    mode: str  # the better direction: "min" or "max"

    @property
    def order(self) -> float:
        """A number that is smaller for a better checkpoint; NaN is worst."""
        return math.inf if math.isnan(self.value) else self.value if self.mode == "min" else -self.value


def write(
    store: Store, name: str, checkpoint: Checkpoint, number: int = 1, check: Callable[[], None] = lambda: None
) -> None:
    """Write a checkpoint. If it is on the device, all hosts of a pod must call this, and process 0 writes.

    Args:
        number: The count of checkpoints written to the run's folder, including this one (default 1).
        check: Called first on the writing host, to refuse the write.

    Raises:
        NotFiniteError: A learned weight has NaN or infinities.
        OSError: The write failed.
    """
    weights, metadata = untie(checkpoint.weights)
    training = _separate(checkpoint.training) if checkpoint.is_on_host else sort_by_width(checkpoint.training)
    with fetch_checked(weights, checkpoint.learned, training.values()) as values:
        if is_first():
            check()
            store.commit(name, partial(_write_files, checkpoint, weights, training, values, metadata, number))


def _write_files(
    checkpoint: Checkpoint,
    weights: Mapping[str, Tensor],
    training: Mapping[str, Tensor],
    values: Iterator[Tensor],
    metadata: Mapping[str, str],
    number: int,
    folder: Path,
) -> None:
    """Write the files of a checkpoint."""
    write_file(folder / _WEIGHTS, weights, metadata, values)
    write_file(folder / _TRAINING, training, {"format": "pt"}, values)
    (folder / _STATE).write_text(json.dumps(checkpoint.state))
    manifest = {
        "format": FORMAT,
        "step": checkpoint.step,
        "number": number,
        "metric": None if checkpoint.metric is None else vars(checkpoint.metric),
        "mesh": dict(checkpoint.mesh),
        "versions": dict(checkpoint.versions),
        "files": _fingerprint({name: folder / name for name in (_WEIGHTS, _TRAINING, _STATE)}),
        "tensors": {
            file: {name: {"dtype": dtype_name(t.dtype), "shape": list(t.shape)} for name, t in tensors.items()}
            for file, tensors in ((_WEIGHTS, weights), (_TRAINING, training))
        },
    }
    (folder / MANIFEST).write_text(seal(manifest))


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Give each tensor separate memory, as a file needs: two metrics may keep the same batch."""
    apart: dict[str, Tensor] = {}
    taken: set[int] = set()
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone() if memory in taken else tensor.contiguous()
        taken.add(memory)
    return apart


def read(folder: str | os.PathLike[str] | Url) -> Checkpoint:
    """Read and verify a checkpoint.

    Raises:
        CheckpointMissingError: There is no checkpoint.
        CheckpointDamagedError: A file has changed.
        CheckpointError: A later version wrote the checkpoint, or the folder is a link.
    """
    if is_url(folder):
        url = folder if isinstance(folder, Url) else Url(os.fspath(folder))
        if not url.exists():
            raise _missing_error(url, "does not exist")
        copy = Mirror(url, file=url.is_file())
        copy.pull()
        try:
            return read(copy.path)
        except CheckpointError as error:
            raise type(error)(str(error).replace(str(copy.path), str(url))) from None
    assert not isinstance(folder, Url)
    folder = Path(folder)
    if folder.is_symlink():
        raise CheckpointError(f"{folder} is a link; checkpoints are read from folders only. Pass {folder.resolve()}")
    if not folder.exists() and (aside := find_moved_aside(folder)) is not None:
        why = "because a process was killed while it replaced the checkpoint"
        warn(f"{folder} is missing, {why}: resuming from the previous one, {aside}")
        return read(aside)
    if not folder.is_dir():
        raise _missing_error(folder, "is a file" if folder.exists() else "does not exist")
    manifest = read_manifest(folder)
    files = {name: folder / entry.get("path", name) for name, entry in manifest["files"].items()}
    try:
        _verify(files, manifest)  # before any file is parsed
        weights = read_weights(files[_WEIGHTS])
        training = safetensors.torch.load_file(files[_TRAINING])
        state = json.loads(files[_STATE].read_bytes())
    except (OSError, WeightsError, safetensors.SafetensorError, ValueError, RecursionError) as error:
        raise CheckpointDamagedError(f"{folder} is damaged: {_shorten(error)}") from error
    if not isinstance(state, dict):
        raise CheckpointDamagedError(f"{files[_STATE]} is damaged: it has no state")
    return Checkpoint(
        step=manifest["step"],
        weights=weights,
        training=training,
        state=state,
        metric=Score(**manifest["metric"]) if manifest["metric"] else None,
        mesh=manifest["mesh"],
        versions=manifest["versions"],
    )


def _missing_error(folder: Path | Url, what: str) -> CheckpointMissingError:
    return CheckpointMissingError(
        f"{folder} is not a tpufit checkpoint: it {what}, and a checkpoint is a folder with a {MANIFEST}. "
        f"Weights alone, in a .safetensors file, go into model.load_weights. {OTHERS}"
    )


def is_checkpoint(folder: str | os.PathLike[str]) -> bool:
    """True if a folder is a single checkpoint, not a run's folder, which may have another `manifest.json`."""
    place = Url(os.fspath(folder)) if is_url(folder) else Path(folder)
    return is_step(place.name) or ((place / MANIFEST).exists() and not open_store(place).names())


def save(folder: str | os.PathLike[str], checkpoint: Checkpoint) -> None:
    """Write a checkpoint to a folder of any name. It replaces a checkpoint's files, but nothing else.

    Raises:
        CheckpointNotWrittenError: The path has other content, or the write failed.
    """
    if not is_first() and checkpoint.is_on_host:  # on a pod only process 0 writes
        return
    place = Url(os.fspath(folder)) if is_url(folder) else Path(folder).absolute()

    def check() -> None:
        if isinstance(place, Path) and place.is_symlink():
            raise CheckpointNotWrittenError(f"{folder} is a link, which is never followed: pass {place.resolve()}")
        if place.exists() and not _is_ours(place):
            raise CheckpointNotWrittenError(f"{folder} exists and isn't a tpufit checkpoint: pass an unused path")

    try:
        write(open_store(place.parent), place.name, checkpoint, check=check)
    except NotFiniteError as error:
        raise CheckpointNotWrittenError(f"{folder} was not written: {error}") from error
    except OSError as error:
        raise CheckpointNotWrittenError(f"the checkpoint was not written to {folder}: {error}") from error


def _is_ours(folder: Path | Url) -> bool:
    """True if a folder has a tpufit manifest, and the files that it lists, with the listed sizes."""
    try:
        files = read_manifest(folder)["files"]
    except CheckpointError:
        return False
    paths = {name: folder / entry.get("path", name) for name, entry in files.items()}
    if isinstance(folder, Url):
        sizes = folder.sizes()
        return all(sizes.get(entry.get("path", name)) == entry["size"] for name, entry in files.items())
    return all(_is_file(path) and path.stat().st_size == files[name]["size"] for name, path in paths.items())


def _is_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def read_manifest(folder: Path | Url) -> dict[str, Any]:
    """Read a checkpoint's manifest. It is written last, so without it the checkpoint is incomplete.

    Raises:
        CheckpointDamagedError: The manifest is missing or damaged.
        CheckpointError: A later version wrote the checkpoint.
    """
    manifest: dict[str, Any]
    path = folder / MANIFEST
    if isinstance(path, Path) and path.exists() and not path.is_file():  # reading a pipe would block
        raise CheckpointDamagedError(f"{path} is damaged: it isn't a file")
    try:
        manifest = json.loads(path.read_bytes(), object_pairs_hook=_reject_duplicates)
    except FileNotFoundError:
        raise CheckpointDamagedError(f"{folder} has no {MANIFEST}, so it was never finished") from None
    except OSError as error:
        raise CheckpointDamagedError(f"{path} can't be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointDamagedError(f"{path} is damaged: {_shorten(error)}") from None
    known: Any = manifest.get("format") if isinstance(manifest, dict) else None
    if not fits_int64(known, 1):
        raise CheckpointDamagedError(f"{path} is damaged: it has no format")
    versions = manifest.get("versions")
    made_by = versions.get("tpufit") if isinstance(versions, dict) else None
    # If this very version wrote it, the format number must be corrupt: this version has no such format.
    if known > FORMAT and isinstance(made_by, str) and made_by != version("tpufit"):
        raise CheckpointError(
            f"{folder} has format {known}, and this tpufit ({version('tpufit')}) reads format {FORMAT}. It was "
            f"written by tpufit {made_by[:100]}: install that version or a later one"
        )
    wrong = _find_fault(manifest)
    if wrong:
        raise CheckpointDamagedError(f"{path} is damaged: {wrong}")
    return manifest


def _find_fault(manifest: Mapping[str, Any]) -> str:
    """Return what is wrong with a manifest of this format; "" if nothing is."""
    files = manifest.get("files")
    if not isinstance(files, dict) or set(files) != {_WEIGHTS, _TRAINING, _STATE}:
        return f"it lists the files {str(files)[:100]}"
    entries = [{"path": name} | entry if isinstance(entry, dict) else {} for name, entry in files.items()]
    paths = [entry.get("path") for entry in entries]
    if not all(isinstance(path, str) and path == Path(path).name and path.isprintable() for path in paths):
        return f"its files must be in its folder, not at {str(paths)[:100]}"
    metric, mesh, versions, tensors = (manifest.get(name) for name in ("metric", "mesh", "versions", "tensors"))
    fitting = {
        "format": manifest["format"] == FORMAT,
        "step": fits_int64(manifest.get("step")),
        "number": fits_int64(manifest.get("number")),
        "metric": metric is None or _is_score(metric),
        "mesh": isinstance(mesh, dict) and all(map(fits_int64, mesh.values())),
        "versions": isinstance(versions, dict) and all(isinstance(value, str) for value in versions.values()),
        "files": len(set(paths)) == len(paths) and all(map(_is_fingerprint, entries)),
        "tensors": isinstance(tensors, dict) and all(isinstance(value, dict) for value in tensors.values()),
    }
    wrong = [name for name, fits in fitting.items() if not fits] + sorted(manifest.keys() - fitting - {"checksum"})
    if wrong:
        return f"{', '.join(map(repr, wrong))[:100]} has been changed"
    # The first manifests have no checksum.
    given = manifest.get("checksum")
    return "" if given is None or given == checksum(manifest) else "its checksum doesn't match"


def fits_int64(value: Any, at_least: int = 0) -> bool:
    """True for a whole number of at least `at_least` that fits in 64 bits."""
    return isinstance(value, int) and not isinstance(value, bool) and at_least <= value < 1 << 63


def _is_score(metric: Any) -> bool:
    return (
        isinstance(metric, dict)
        and metric.keys() == {"name", "value", "mode"}
        and isinstance(metric["name"], str)
        and (isinstance(metric["value"], float) or fits_int64(abs(metric["value"])))
        and metric["mode"] in ("min", "max")
    )


def _is_fingerprint(entry: Mapping[str, Any]) -> bool:
    sha256 = entry.get("sha256")
    known = entry.keys() == {"path", "size", "sha256"}
    return known and fits_int64(entry["size"], 1) and isinstance(sha256, str) and bool(_SHA256.fullmatch(sha256))


def _reject_duplicates(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dict of JSON's pairs, and reject duplicate names."""
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs twice")
    return result


def _shorten(error: Exception) -> str:
    """Shorten an error: some of JSON's or safetensors' are long."""
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]


def _verify(files: Mapping[str, Path], manifest: Mapping[str, Any]) -> None:
    """Compare the files with the manifest: sizes first, which are free to check and tell the most."""
    for name, path in files.items():
        if not _is_file(path):
            raise CheckpointDamagedError(f"{path} is missing")
        size = path.stat().st_size
        written = manifest["files"][name]["size"]
        if size != written:
            raise CheckpointDamagedError(f"{path} is damaged: it has {size:,} bytes, and {written:,} were written")
    for name, fingerprint in _fingerprint(files).items():
        now = fingerprint["sha256"]
        then = manifest["files"][name]["sha256"]
        if now != then:
            raise CheckpointDamagedError(f"{files[name]} is damaged: its SHA-256 is {now[:9]}..., not {then[:9]}...")


def _fingerprint(files: Mapping[str, Path]) -> dict[str, dict[str, Any]]:
    """Return the sizes and hashes of files, each in a thread, because hashing takes as long as reading.

    The threads are daemons, so that the process can end without waiting for them.
    """
    with ThreadPool(len(files)) as pool:
        hashes = pool.map(_sha256, files.values())
    return {name: {"size": files[name].stat().st_size, "sha256": h} for name, h in zip(files, hashes, strict=True)}


def _sha256(path: Path) -> str:
    return hashlib.sha256(np.memmap(path, mode="r").data).hexdigest()
