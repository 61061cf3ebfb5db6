"""Encodes nests of plain values and tensors as JSON and a file of tensors."""

from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import ArgumentError

_PLAIN = (bool, int, float, str, type(None))


def is_json(nest: Any) -> bool:
    """True if JSON can represent a nest unchanged.

    Example:
        >>> is_json({"loss": ["mse", None]}), is_json({"loss": print})
        (True, False)
    """
    if isinstance(nest, Mapping):
        return all(isinstance(key, str) and is_json(value) for key, value in nest.items())
    return all(map(is_json, nest)) if isinstance(nest, (list, tuple)) else isinstance(nest, _PLAIN)


def encode(nest: Any, name: str, tensors: MutableMapping[str, Tensor]) -> Any:
    """Convert a nest to a nest for JSON. A tuple becomes a list.

    Tensors and arrays go to `tensors`, under names that begin with `name`, which errors also use.

    Raises:
        ArgumentError: The nest contains more than numbers, strings, tensors and arrays, in tuples, lists and dicts.

    Example:
        >>> tensors = {}
        >>> plain = encode({"best": 0.5, 3: [torch.ones(2)]}, "stopping", tensors)
        >>> sorted(tensors), decode(plain, tensors)
        (['stopping/3/0'], {'best': 0.5, 3: [tensor([1., 1.])]})
    """
    if isinstance(nest, Tensor):
        tensors[name] = nest
        return {"tensor": name}
    if isinstance(nest, np.ndarray) and nest.dtype.kind in "biuf":
        tensors[name] = torch.from_numpy(np.array(nest))
        return {"array": name}
    if isinstance(nest, np.generic):
        return nest.item()
    if isinstance(nest, _PLAIN):
        return nest
    if isinstance(nest, (list, tuple)):
        return [encode(item, f"{name}/{i}", tensors) for i, item in enumerate(nest)]
    if isinstance(nest, Mapping):  # as pairs, because JSON's keys must be strings
        pairs = [[key, encode(value, f"{name}/{key}", tensors)] for key, value in nest.items()]
        if all(isinstance(key, _PLAIN) for key, _ in pairs):
            return {"dict": pairs}
    cure = "nothing is ever pickled. Use numbers, strings, tensors and arrays, in lists and dicts"
    raise ArgumentError(f"{name} is a {type(nest).__name__}, which a checkpoint can't save: {cure}")


def decode(plain: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Convert the result of `encode` back to the nest, with its tensors."""
    if isinstance(plain, list):
        return [decode(item, tensors) for item in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, value),) = plain.items()
    if kind == "dict":
        return {key: decode(item, tensors) for key, item in value}
    return tensors[value] if kind == "tensor" else tensors[value].numpy()
