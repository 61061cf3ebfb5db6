"""`Traced`: a number whose computations are recorded while a step is traced; see `GroupNumbers`."""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class Traced(torch.SymFloat):
    """A number of a `NumberTrace`; see `GroupNumbers`.

    In an operation of PyTorch it is an input of the graph. Any other use of its value, such as `math.sqrt`, makes the
    value a part of the trace. It isn't a `float`, because C code reads the value of a `float` unnoticed.
    """

    def __init__(self, trace: Any, index: int) -> None:
        self.trace = trace
        self.index = index

    @property
    def node(self) -> "Traced":
        """The object that PyTorch asks for the value where it takes only a number."""
        return self

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return call_with_inputs(func, args, kwargs or {})

    def on_device(self) -> Tensor:
        """Return the number as an input of the graph."""
        tensor: Tensor = self.trace.enter(self.index)
        return tensor

    def pin(self) -> Any:
        """Return the value, and make it a part of the trace: with another value, steps need another trace."""
        value = self.trace.values[self.index]
        self.trace.compare(operator.eq, self, value)
        return value

    # PyTorch calls these methods of `node`.

    def guard_float(self, file: str, line: int) -> float:
        """Return the value."""
        return float(self.pin())

    def is_symbolic(self) -> bool:
        """True: `guard_float` must be called for the value."""
        return True

    def is_constant(self) -> bool:
        """False: `guard_float` must be called for the value."""
        return False

    def is_float(self) -> bool:
        """True: the value is a floating-point number."""
        return True

    def is_int(self) -> bool:
        """False: the value is a floating-point number."""
        return False

    def is_bool(self) -> bool:
        """False: the value is a floating-point number."""
        return False

    # Python calls these methods.

    def __float__(self) -> float:
        return float(self.pin())

    def __int__(self) -> int:
        return int(self.pin())

    def __index__(self) -> int:
        return operator.index(self.pin())

    def __format__(self, spec: str) -> str:
        return format(self.pin(), spec)

    def __repr__(self) -> str:
        return repr(self.pin())

    def __bool__(self) -> bool:
        return bool(self.trace.compare(operator.ne, self, 0))

    def __neg__(self) -> Any:
        return self.trace.compute(operator.sub, 0, self)

    def __abs__(self) -> Any:
        return -self if self < 0 else self

    def __hash__(self) -> int:
        return hash(self.pin())


def call_with_inputs(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function of PyTorch with inputs of the graph for `Traced` numbers; if it takes no tensors, with values."""
    if not any(isinstance(arg, Traced) for arg in (*args, *kwargs.values())):
        return function(*args, **kwargs)

    def call(convert: Callable[[Traced], Any]) -> Any:
        given = [convert(arg) if isinstance(arg, Traced) else arg for arg in args]
        named = {name: convert(arg) if isinstance(arg, Traced) else arg for name, arg in kwargs.items()}
        return function(*given, **named)

    try:
        return call(Traced.on_device)
    except TypeError:
        return call(Traced.pin)


def _arithmetic(function: Callable[[Any, Any], Any], swapped: bool = False) -> Any:
    def method(self: Traced, other: Any) -> Any:
        if not isinstance(other, (int, float, Traced)):  # e.g. a tensor, whose method Python then calls
            return NotImplemented
        return self.trace.compute(function, *((other, self) if swapped else (self, other)))

    return method


def _comparison(function: Callable[[Any, Any], bool]) -> Any:
    def method(self: Traced, other: Any) -> Any:
        known = isinstance(other, (int, float, Traced))
        return self.trace.compare(function, self, other) if known else NotImplemented

    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(Traced, f"__{_name}__", _arithmetic(getattr(operator, _name)))
    setattr(Traced, f"__r{_name}__", _arithmetic(getattr(operator, _name), swapped=True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Traced, f"__{_name}__", _comparison(getattr(operator, _name)))
