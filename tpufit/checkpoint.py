"""Weights on disk: safetensors, written beside their target and committed by rename. Nothing is ever unpickled."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from .errors import ArgumentError, WeightsError
from .files import replacing

_SUFFIX = ".safetensors"


def write_weights(path: str | os.PathLike[str], weights: Mapping[str, Tensor]) -> None:
    """Write host tensors to a file, so that the file is whole or not there, whenever the process may die.

    Args:
        path: The file, `*.safetensors`. Missing folders are made; a file there is replaced.
        weights: Tensors by name. Two names of one tensor are stored once, and noted under `tied` in the metadata.

    Raises:
        ArgumentError: The path has another suffix.
        OSError: The file system refused.
    """
    target = weights_path(path)
    stored: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    names: dict[int, str] = {}
    for name, tensor in weights.items():
        owner = names.setdefault(id(tensor), name)
        if owner == name:
            stored[name] = tensor.contiguous()
        else:
            tied[name] = owner
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as draft:
        safetensors.torch.save_file(stored, draft, metadata={"format": "pt", "tied": json.dumps(tied)})


def read_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Read the tensors of a file by name, tied ones under each of their names.

    Args:
        path: A safetensors file, ours or anyone's.

    Raises:
        ArgumentError: The path has another suffix.
        FileNotFoundError: There is no such file.
        WeightsError: The file is not a safetensors file.
    """
    source = weights_path(path)
    if not source.is_file():
        raise FileNotFoundError(f"no weights at {source}")
    try:
        with safetensors.safe_open(source, framework="pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
            tied = json.loads((file.metadata() or {}).get("tied", "{}"))
    except safetensors.SafetensorError as error:
        raise WeightsError(
            f"{source} is not a safetensors file, or it is damaged ({error}). Only safetensors are read; a pickle made "
            "by torch.save is not, because it could run any code"
        ) from error
    return weights | {name: weights[owner] for name, owner in tied.items() if owner in weights}


def match_weights(
    own: Mapping[str, Tensor], given: Mapping[str, Tensor], skip_mismatch: bool = False
) -> dict[str, Tensor]:
    """Compare weights with a module's, name by name.

    Args:
        own: The module's tensors.
        given: The tensors to load.
        skip_mismatch: Leave out what doesn't fit, with a warning, instead of raising.

    Returns:
        The given tensors that fit, in the module's dtypes.

    Raises:
        WeightsError: A name is missing or unknown, or a shape differs.
    """
    shapes = [
        f"{name}: {tuple(given[name].shape)} in the weights, {tuple(tensor.shape)} in the module"
        for name, tensor in own.items()
        if name in given and given[name].shape != tensor.shape
    ]
    problems = {
        "missing in the weights": [name for name in own if name not in given],
        "unknown to the module": [name for name in given if name not in own],
        "of another shape": shapes,
    }
    found = [f"{what}: {', '.join(names[:8])}{' ...' * (len(names) > 8)}" for what, names in problems.items() if names]
    if found:
        message = f"the weights don't fit the module. {'; '.join(found)}"
        if not skip_mismatch:
            raise WeightsError(f"{message}. skip_mismatch=True loads the rest")
        warnings.warn(message, stacklevel=3)
    return {
        name: given[name].to(tensor.dtype)
        for name, tensor in own.items()
        if name in given and given[name].shape == tensor.shape
    }


def first_not_finite(weights: Mapping[str, Tensor]) -> str | None:
    """The name of the first tensor that holds NaN or an infinity; None if all are finite. Integers always are.

    A loss can be finite when the update that follows it is not.

    Args:
        weights: Host tensors by name.

    Example:
        >>> first_not_finite({"weight": torch.ones(2), "bias": torch.tensor([0.0, float("nan")])})
        'bias'
    """
    return next((name for name, tensor in weights.items() if not torch.isfinite(tensor).all()), None)


def weights_path(path: str | os.PathLike[str]) -> Path:
    """The path of a weights file, or an error that names the one format there is.

    Example:
        >>> weights_path("runs/best.safetensors").name
        'best.safetensors'
    """
    if Path(path).suffix != _SUFFIX:
        raise ArgumentError(
            f"weights are kept as safetensors: expected a path ending in '{_SUFFIX}', got {str(path)!r}"
        )
    return Path(path)


def named_tensors(module: torch.nn.Module) -> dict[str, Tensor]:
    """The tensors of a module's `state_dict`, themselves rather than detached, so that ties show as one object.

    Raises:
        WeightsError: The module keeps something else in its state, which only a pickle could hold.
    """
    state = module.state_dict(keep_vars=True)
    foreign = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if foreign:
        raise WeightsError(
            f"the module's state holds something other than tensors under {foreign}, which can't be saved"
        )
    return dict(state)
