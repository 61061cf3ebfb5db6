"""`Traced`: a number whose computations are recorded while a step is traced; see `GroupNumbers`."""

import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor


class Traced(float):
    """A number of a course; see `GroupNumbers`. Conversion to a plain number makes its value a part of the course."""

    def __new__(cls, course: Any, index: int) -> "Traced":
        number = super().__new__(cls, course.values[index])
        number.course = course
        number.index = index
        return number

    course: Any
    index: int

    def on_device(self) -> Tensor:
        """Return the number as an input of the graph."""
        tensor: Tensor = self.course.enter(self.index)
        return tensor

    def _pin(self) -> Any:
        value = self.course.values[self.index]
        self.course.compare(operator.eq, self, value)
        return value

    def __float__(self) -> float:
        return float(self._pin())

    def __int__(self) -> int:
        return int(self._pin())

    def __bool__(self) -> bool:
        return bool(self.course.compare(operator.ne, self, 0))

    def __neg__(self) -> Any:
        return self.course.compute(operator.sub, 0, self)

    def __hash__(self) -> int:
        return hash(self._pin())


def _arithmetic(function: Callable[[Any, Any], Any], swapped: bool = False) -> Any:
    def method(self: Traced, other: Any) -> Any:
        if not isinstance(other, (int, float)):  # e.g. a tensor, whose method Python then calls
            return NotImplemented
        return self.course.compute(function, *((other, self) if swapped else (self, other)))

    return method


def _comparison(function: Callable[[Any, Any], bool]) -> Any:
    def method(self: Traced, other: Any) -> Any:
        return self.course.compare(function, self, other) if isinstance(other, (int, float)) else NotImplemented

    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(Traced, f"__{_name}__", _arithmetic(getattr(operator, _name)))
    setattr(Traced, f"__r{_name}__", _arithmetic(getattr(operator, _name), swapped=True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Traced, f"__{_name}__", _comparison(getattr(operator, _name)))
