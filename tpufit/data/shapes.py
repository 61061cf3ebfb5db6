"""The shapes of batches: told in errors, and watched, because each that is new costs a graph."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

# Whole batches and a shorter last one, of training and of a few buckets, are no fault; more are likely to be one.
_MANY = 8


class ShapeWatch:
    """Counts the shapes of the batches of one kind of step, and warns once if they are many.

    Args:
        role: The step, e.g. `"train"`.
    """

    def __init__(self, role: str) -> None:
        self._role = role
        self._met: set[int] = set()
        self._last: dict[str, tuple[int, ...]] = {}

    def note(self, number: int, batch: Any) -> None:
        """Note a batch.

        Args:
            number: A number for its structure and shapes.
            batch: A nest of tensors.
        """
        if number in self._met:
            return
        self._met.add(number)
        before, self._last = self._last, _shapes(batch)
        if len(self._met) != _MANY:
            return
        field = next((name for name, shape in self._last.items() if before.get(name) != shape), "")
        change = (
            f"{field} had the shape {before.get(field)}, and now {self._last[field]}" if field else "its nest changed"
        )
        warnings.warn(
            f"the {self._role} step meets batches of shape after shape, {_MANY} so far, and a graph is compiled for "
            f"each: {change}. Let all batches but the last have equally many rows, and pad what varies to a few "
            "lengths: DataLoader(..., collate_fn=tpufit.data.PadToBuckets([32, 64, 128]))",
            stacklevel=2,
        )


def fields(batch: Any) -> dict[str, Any]:
    """The parts of a batch by their names: x, y and sample_weight if it is a tuple of these.

    Args:
        batch: A nest of tensors.
    """
    parts = ("x", "y", "sample_weight")
    usual = type(batch) in (tuple, list) and 1 <= len(batch) <= len(parts)
    return dict(zip(parts, batch, strict=False)) if usual else {"batch": batch}


def listed(parts: Mapping[str, Any]) -> str:
    """The tensors of named parts with their dtypes and shapes, for errors.

    Args:
        parts: Nests of tensors by name.

    Example:
        >>> import torch
        >>> listed({"x": (torch.ones(4, 3), torch.ones(4)), "y": torch.tensor([1, 0])})
        'x[0]: float32 (4, 3), x[1]: float32 (4,), y: int64 (2,)'
    """
    return ", ".join(
        f"{name}: {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
        for name, tensor in _tensors(parts).items()
    )


def _shapes(batch: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in _tensors(fields(batch)).items()}


def _tensors(parts: Mapping[str, Any]) -> dict[str, Tensor]:
    return {
        name + keystr(path): leaf
        for name, part in parts.items()
        for path, leaf in tree_flatten_with_path(part)[0]
        if isinstance(leaf, Tensor)
    }
