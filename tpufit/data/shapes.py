"""`ShapeWatch`: notices that batches keep changing their shape, each of which costs a graph."""

from __future__ import annotations

import warnings
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


def _shapes(batch: Any) -> dict[str, tuple[int, ...]]:
    """The shapes of a batch's tensors by their fields: x, y and sample_weight if it is a tuple of these."""
    parts = ("x", "y", "sample_weight")
    usual = type(batch) in (tuple, list) and 1 <= len(batch) <= len(parts)
    named = zip(parts, batch, strict=False) if usual else [("batch", batch)]
    return {
        name + keystr(path): tuple(leaf.shape)
        for name, part in named
        for path, leaf in tree_flatten_with_path(part)[0]
        if isinstance(leaf, Tensor)
    }
