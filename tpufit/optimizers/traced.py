"""`Traced`: a number that notes what is computed of it, while a step is traced; see `GroupNumbers`."""

import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor


class Traced(float):
    """A number of a course; see `GroupNumbers`. Whatever reads it otherwise makes its value a part of the course."""

    def __new__(cls, course: Any, index: int) -> "Traced":
        made = super().__new__(cls, course.values[index])
        made.course = course
        made.index = index
        return made

    course: Any
    index: int

    def on_device(self) -> Tensor:
        """The number as an input of the graph."""
        found: Tensor = self.course.enter(self.index)
        return found

    def _pinned(self) -> Any:
        value = self.course.values[self.index]
        self.course.decided(operator.eq, self, value)
        return value

    def __float__(self) -> float:
        return float(self._pinned())

    def __int__(self) -> int:
        return int(self._pinned())

    def __bool__(self) -> bool:
        return bool(self.course.decided(operator.ne, self, 0))

    def __neg__(self) -> Any:
        return self.course.computed(operator.sub, 0, self)

    def __hash__(self) -> int:
        return hash(self._pinned())


def _arithmetic(function: Callable[[Any, Any], Any], swapped: bool = False) -> Any:
    def method(self: Traced, other: Any) -> Any:
        if not isinstance(other, (int, float)):  # such as a tensor, which knows what to do with a number
            return NotImplemented
        return self.course.computed(function, *((other, self) if swapped else (self, other)))

    return method


def _comparison(function: Callable[[Any, Any], bool]) -> Any:
    def method(self: Traced, other: Any) -> Any:
        return self.course.decided(function, self, other) if isinstance(other, (int, float)) else NotImplemented

    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(Traced, f"__{_name}__", _arithmetic(getattr(operator, _name)))
    setattr(Traced, f"__r{_name}__", _arithmetic(getattr(operator, _name), swapped=True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Traced, f"__{_name}__", _comparison(getattr(operator, _name)))
