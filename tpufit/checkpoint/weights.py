"""Weights in one file: safetensors, written beside their target and committed by rename. Nothing is ever unpickled."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import safetensors
from torch import Tensor

from ..errors import ArgumentError, WeightsError
from ..runtime import is_first
from ..utils.files import replacing, write_tensors
from ..utils.urls import Mirror

NO_PICKLES = "Only safetensors are read; a pickle made by torch.save is not, because it could run any code"
_SUFFIX = ".safetensors"


def write_weights(path: str | os.PathLike[str], weights: Mapping[str, Tensor]) -> None:
    """Write host tensors to a file. It is whole or not there, whenever the process may die.

    Args:
        path: The file, `*.safetensors`, or its URL. Missing folders are made; a file there is replaced.
        weights: Tensors by name. A tied tensor is stored once, with its other names under `tied` in the metadata.

    Raises:
        ArgumentError: The path has another suffix.
        OSError: The file system refused.
    """
    if not is_first():  # of a pod only process 0 writes
        return
    mirror = Mirror(weights_path(path), file=True)
    mirror.path.parent.mkdir(parents=True, exist_ok=True)
    stored, metadata = untied(weights)
    with replacing(mirror.path) as draft:
        write_tensors(draft, stored, metadata)
    mirror.push()


def read_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Read the tensors of a file by name, tied ones under each of their names.

    Args:
        path: A safetensors file, by tpufit or by others.

    Raises:
        ArgumentError: The path has another suffix.
        FileNotFoundError: There is no such file.
        WeightsError: The file is not a safetensors file.
    """
    mirror = Mirror(weights_path(path), file=True)
    mirror.pull()
    source = mirror.path
    if not source.is_file():
        raise FileNotFoundError(f"no weights at {path}")
    try:
        with safetensors.safe_open(source, framework="pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
            tied = json.loads((file.metadata() or {}).get("tied", "{}"))
    except safetensors.SafetensorError as error:
        raise WeightsError(f"{source} is not a safetensors file, or it is damaged ({error}). {NO_PICKLES}") from error
    return weights | {name: weights[owner] for name, owner in tied.items() if owner in weights}


def first_broken(weights: Mapping[str, Tensor], learned: Iterable[str]) -> str | None:
    """Return the first learned weight that has NaN or infinities, or None. A mask may have some.

    Args:
        weights: Host tensors by name.
        learned: The names to look at.

    Example:
        >>> import torch
        >>> first_broken({"a": torch.ones(2), "b": torch.tensor([1.0, float("nan")])}, ["a", "b"])
        'b'
    """
    return next((name for name in learned if not bool(weights[name].isfinite().all())), None)


def untied(weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the content of a file of weights: each tensor once, and the metadata with other names of tied ones."""
    stored: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    names: dict[int, str] = {}
    for name, tensor in weights.items():
        owner = names.setdefault(id(tensor), name)
        if owner == name:
            stored[name] = tensor.contiguous()
        else:
            tied[name] = owner
    return stored, {"format": "pt", "tied": json.dumps(tied)}


def weights_path(path: str | os.PathLike[str]) -> str:
    """Check that a path is one of a weights file; the error names the one format there is.

    Example:
        >>> weights_path("runs/best.safetensors")
        'runs/best.safetensors'
    """
    if Path(path).suffix != _SUFFIX:
        raise ArgumentError(f"weights are kept as safetensors: pass a path ending in '{_SUFFIX}', got {str(path)!r}")
    return os.fspath(path)
