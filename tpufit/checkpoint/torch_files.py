"""Reads weights from a file of `torch.save`, without running any code in it."""

import os
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import WeightsError, join_few

SUFFIXES = (".pt", ".pth", ".ckpt", ".bin")

# The keys of the weights in trainers' checkpoints, such as Lightning's and PyTorch's examples'.
_KEYS = ("state_dict", "model_state_dict", "model")

# The class that `weights_only` refuses, in PyTorch's message.
_UNKNOWN = re.compile(r"(?:GLOBAL|class|type) ([\w.]+\.\w+)")


def read_torch_file(path: Path, name: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Read a file of `torch.save` with tensors by name, at the top or under `"state_dict"` or the like.

    PyTorch loads tensors, numbers, strings, lists and dicts from it, and refuses anything else.

    Args:
        path: The file.
        name: The file's name in errors.

    Raises:
        WeightsError: The file needs a pickle's code, is damaged, or has its weights elsewhere.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        kind = _UNKNOWN.search(str(error))
        if kind is None:
            why = f" ({str(error).splitlines()[0][:200]})" if isinstance(error, RuntimeError) else ""
            raise WeightsError(f"{name} is not a file of torch.save, or it is damaged{why}") from error
        raise WeightsError(
            f"{name} contains an object, {kind[1]}, that needs unpickling, and a pickle can run any code. If you "
            f"trust the file, pass the weights from {_format_load_call(name, False)} to model.load_state_dict"
        ) from error
    inside = [content.get(place) for place in _KEYS] if isinstance(content, Mapping) else []
    for candidate in (content, *inside):
        if _are_weights(candidate):
            return dict(candidate)
    what = (
        f"a dict of {join_few([*map(repr, content)])}"
        if isinstance(content, Mapping)
        else f"a {type(content).__name__}"
    )
    raise WeightsError(
        f"{name} contains {what}: weights are tensors by name, at the top or under {', '.join(map(repr, _KEYS))}. "
        f"Load other places yourself: model.load_state_dict({_format_load_call(name, True)}[...])"
    )


def _format_load_call(name: str | os.PathLike[str], weights_only: bool) -> str:
    return f"torch.load({os.fspath(name)!r}, map_location='cpu', weights_only={weights_only})"


def _are_weights(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(isinstance(key, str) and isinstance(tensor, Tensor) for key, tensor in value.items())
    )
