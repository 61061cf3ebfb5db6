"""`ShapeWatch`: warns of batches of too many shapes, because each new shape compiles a graph."""

from typing import Any

from ..data.batches import collect_tensors, name_parts
from ..utils.strict import Strict
from ..utils.user_code import warn

# Full batches and a shorter last batch, in a few buckets, are normal; more shapes are probably a mistake.
_MANY = 8

_CURE = (
    "Give all batches but the last the same number of rows, and pad varying lengths to a few sizes: DataLoader(..., "
    "collate_fn=tpufit.data.PadToBuckets([32, 64, 128]))"
)


class ShapeWatch:
    """Counts the shapes of one role's batches, and warns once there are many."""

    def __init__(self, role: str) -> None:
        self._role = role
        # The change that made each shape new, by the shape's number: "x had the shape (32, 8), and now (5, 8)".
        self.changes: dict[int, str] = {}
        self._last: dict[str, tuple[str, Any]] = {}

    def note(self, number: int, batch: Any, strict: Strict) -> None:
        """Note a batch; `number` stands for its structure and shapes.

        Raises:
            StrictError: The shape is new, and `strict` refuses new shapes.
        """
        if number in self.changes:
            return
        before = self._last
        now = _list_shapes(batch)
        change = _describe_change(before, now)
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
            f"the {self._role} step has met batches of {_MANY} shapes, and compiles a graph for each: {change}. "
            f"{_CURE}",
        )


def _describe_change(before: dict[str, tuple[str, Any]], now: dict[str, tuple[str, Any]]) -> str:
    field = next((name for name, facts in now.items() if before.get(name) != facts), "")
    if not field:
        return "the structure of its tuples, lists and dicts changed"
    if field not in before:
        return f"{field} is new"
    (shape, dtype), (new_shape, new_dtype) = before[field], now[field]
    if shape != new_shape:
        return f"{field} had the shape {shape}, and now {new_shape}"
    return f"{field} had the dtype {dtype}, and now {new_dtype}"


def _list_shapes(batch: Any) -> dict[str, tuple[str, Any]]:
    """Return the shapes and dtypes of a batch's tensors, by field."""
    return {
        name: (str(tuple(tensor.shape)), tensor.dtype) for name, tensor in collect_tensors(name_parts(batch)).items()
    }
