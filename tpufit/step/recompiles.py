"""`ShapeWatch`: warns of batches of too many shapes, because each new one costs a graph."""

from typing import Any

from ..data.batches import fields, tensors_of
from ..utils.strict import Strict
from ..utils.users_code import warn

# Full batches and a shorter last one, in a few buckets, are normal; more shapes are probably a mistake.
_MANY = 8

_CURE = (
    "Let all batches but the last have equally many rows, and pad what varies to a few lengths: DataLoader(..., "
    "collate_fn=tpufit.data.PadToBuckets([32, 64, 128]))"
)


class ShapeWatch:
    """Counts the shapes of one role's batches, and warns once if there are many."""

    def __init__(self, role: str) -> None:
        self._role = role
        # What made each shape new, by its number: "x had the shape (32, 8), and now (5, 8)".
        self.changes: dict[int, str] = {}
        self._last: dict[str, tuple[str, Any]] = {}

    def note(self, number: int, batch: Any, strict: Strict) -> None:
        """Note a batch; `number` is that of its structure and shapes.

        Raises:
            StrictError: The shape is new, and the policy refuses it.
        """
        if number in self.changes:
            return
        before = self._last
        now = _shapes(batch)
        change = _change(before, now)
        if before:
            strict.refuse(
                f"after its first pass over the data the {self._role} step met a batch of a new shape, for which a "
                f"graph would be compiled: {change}. {_CURE}"
            )
        self._last = now
        self.changes[number] = change
        if len(self.changes) != _MANY:
            return
        warn(
            f"the {self._role} step meets batches of shape after shape, {_MANY} so far, and a graph is compiled for "
            f"each: {change}. {_CURE}",
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
    """Return the shapes and dtypes of a batch's tensors, by field."""
    return {name: (str(tuple(tensor.shape)), tensor.dtype) for name, tensor in tensors_of(fields(batch)).items()}
