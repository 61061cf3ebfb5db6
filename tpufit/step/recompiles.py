"""`ShapeWatch`: warns of batches of too many shapes, because each new one costs a graph."""

from __future__ import annotations

import warnings
from typing import Any

from ..data.batches import fields, tensors_of
from ..runtime import Strict

# Whole batches and a shorter last one, of a few buckets, are no fault; more shapes probably are.
_MANY = 8

_CURE = (
    "Let all batches but the last have equally many rows, and pad what varies to a few lengths: DataLoader(..., "
    "collate_fn=tpufit.data.PadToBuckets([32, 64, 128]))"
)


class ShapeWatch:
    """Counts the shapes of the batches of one kind of step, and warns once if they are many.

    Args:
        role: The step, e.g. `"train"`.

    Attributes:
        changes: The change that made each new, by the batch's number: `"x had the shape (32, 8), and now (5, 8)"`.
    """

    def __init__(self, role: str) -> None:
        self._role = role
        self.changes: dict[int, str] = {}
        self._last: dict[str, tuple[str, Any]] = {}

    def note(self, number: int, batch: Any, strict: Strict) -> None:
        """Note a batch.

        Args:
            number: A number for its structure and shapes.
            batch: A nest of tensors.
            strict: Refuses a new shape.

        Raises:
            StrictError: Its shapes are new, and none may be.
        """
        if number in self.changes:
            return
        before, now = self._last, _shapes(batch)
        change = _change(before, now)
        if before:
            strict.refuse(
                f"after its first pass over the data the {self._role} step met a batch of a new shape, for which a "
                f"graph would be compiled: {change}. {_CURE}"
            )
        self._last, self.changes[number] = now, change
        if len(self.changes) != _MANY:
            return
        warnings.warn(
            f"the {self._role} step meets batches of shape after shape, {_MANY} so far, and a graph is compiled for "
            f"each: {change}. {_CURE}",
            stacklevel=2,
        )


def _change(before: dict[str, tuple[str, Any]], now: dict[str, tuple[str, Any]]) -> str:
    field = next((name for name, facts in now.items() if before.get(name) != facts), "")
    if not field:
        return "the structure of its tuples, lists and dicts changed"
    if field not in before:
        return f"{field} is new"
    (shape, dtype), (new_shape, new_dtype) = before[field], now[field]
    if shape != new_shape:
        return f"{field} had the shape {shape}, and now {new_shape}"
    return f"{field} had the dtype {dtype}, and now {new_dtype}"


def _shapes(batch: Any) -> dict[str, tuple[str, Any]]:
    """The shapes and dtypes of a batch's tensors by their fields."""
    return {name: (str(tuple(tensor.shape)), tensor.dtype) for name, tensor in tensors_of(fields(batch)).items()}
