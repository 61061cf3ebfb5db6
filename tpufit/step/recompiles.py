"""The shapes of batches: told in errors, and watched, because each that is new costs a graph."""

from __future__ import annotations

import warnings
from typing import Any

from ..data.batches import fields, tensors_of
from ..errors import StrictError

# Whole batches and a shorter last one, of training and of a few buckets, are no fault; more are likely to be one.
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
        changes: What was new about each, by the batch's number, e.g. `"x had the shape (32, 8), and now (5, 8)"`.
    """

    def __init__(self, role: str) -> None:
        self._role = role
        self.changes: dict[int, str] = {}
        self._last: dict[str, tuple[str, Any]] = {}

    def note(self, number: int, batch: Any, strict_at: str = "") -> None:
        """Note a batch.

        Args:
            number: A number for its structure and shapes.
            batch: A nest of tensors.
            strict_at: The line of the `fit` in which one that is new is an error, if in any.

        Raises:
            StrictError: Its shapes are new, and none may be.
        """
        if number in self.changes:
            return
        before, now = self._last, _shapes(batch)
        change = _change(before, now)
        if strict_at and before:
            raise StrictError(
                f"strict=True, in the fit {strict_at}: after its first pass over the data the {self._role} step met a "
                f"batch of a new shape, for which a graph would be compiled: {change}. {_CURE}"
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
        return "its nest changed"
    if field not in before:
        return f"{field} is new"
    (shape, dtype), (new_shape, new_dtype) = before[field], now[field]
    if shape != new_shape:
        return f"{field} had the shape {shape}, and now {new_shape}"
    return f"{field} had the dtype {dtype}, and now {new_dtype}"


def _shapes(batch: Any) -> dict[str, tuple[str, Any]]:
    """The shapes and dtypes of a batch's tensors by their fields."""
    return {name: (str(tuple(tensor.shape)), tensor.dtype) for name, tensor in tensors_of(fields(batch)).items()}
