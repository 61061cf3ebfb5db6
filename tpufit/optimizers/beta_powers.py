"""`BetaPowers`: what optimizers compute from `beta ** steps`, without the cancellation that float32 numbers suffer.

PyTorch computes these numbers in Python, in float64. On a device they are computed from the step counter in float32,
where the difference of two nearly equal numbers is mostly rounding. So it is computed in another form.
"""

import math
from typing import Any

import torch
from torch import Tensor

from .traced_number import Traced

# Up to this base, rounding changes `1 - beta ** steps` by less than 1e-4. The default of all optimizers is in this
# range, and their programs don't change.
_ROUNDED = 0.999

# The Taylor series of (u/2 * coth(u/2) - 1) / u**2 in u**2, accurate to 1e-9 up to u = 1.
_SERIES = (1 / 12, -1 / 720, 1 / 30240, -1 / 1209600, 1 / 47900160)


class BetaPowers:
    """Computes functions of scalars in a form without cancellation, where it knows one."""

    def __init__(self) -> None:
        # Each scalar that was computed so far: itself, its version, the function's name and its arguments, by `id`.
        self._origins: dict[int, tuple[Tensor, int, str, tuple[Any, ...]]] = {}

    def compute(self, name: str, args: tuple[Any, ...]) -> Tensor | None:
        """Compute `1 - beta ** steps`, or the length of RAdam's average; return None for any other function.

        Example:
            >>> decays, steps = BetaPowers(), torch.tensor(1.0)
            >>> power = steps.__rpow__(0.99999)
            >>> decays.note(power, "__rpow__", (steps, 0.99999))
            >>> [f"{x.item():.4g}" for x in (1 - power, decays.compute("__rsub__", (power, 1)))]
            ['1.001e-05', '1e-05']
        """
        if name != "__rsub__" or not isinstance(args[0], Tensor) or isinstance(args[1], Tensor):
            return None
        if args[1] == 1:
            power = self._power(args[0])
            return None if power is None or power[1] <= _ROUNDED else -torch.expm1(_exponent(*power))
        power = self._averaged(args[0])
        if power is None or not math.isclose(args[1], 2 / (1 - power[1]) - 1):
            return None
        return _average_length(*power)

    def pin(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Replace a `Traced` number by its value, where `compute` has another form for numbers of its size."""
        if len(args) != 2 or not isinstance(args[1], Traced):
            return args
        near_one = name == "__rpow__" and args[1] > _ROUNDED
        return (args[0], args[1].pin()) if near_one or (name == "__rsub__" and self._averaged(args[0])) else args

    def note(self, result: Tensor, name: str, args: tuple[Any, ...]) -> None:
        """Note how a scalar was computed."""
        self._origins[id(result)] = result, result._version, name, args

    def _origin(self, scalar: Any, name: str) -> tuple[Any, Any] | None:
        """Return the two arguments of a function that computed a scalar, or None if another function did."""
        _, version, by, args = self._origins.get(id(scalar), (None, 0, "", ()))
        known = by == name and len(args) == 2 and scalar._version == version
        return (args[0], args[1]) if known else None

    def _power(self, scalar: Any) -> tuple[Tensor, float] | None:
        """Return the exponent and the base of a power of a number between 0 and 1."""
        steps, base = self._origin(scalar, "__rpow__") or (None, None)
        return (steps, base) if isinstance(steps, Tensor) and isinstance(base, float) and 0 < base < 1 else None

    def _averaged(self, quotient: Tensor) -> tuple[Tensor, float] | None:
        """Return the steps and the base of `2 * steps * base**steps / (1 - base**steps)`, as RAdam has it."""
        product, correction = self._origin(quotient, "div") or (None, None)
        doubled, power = self._origin(product, "mul") or (None, None)
        rest, one = self._origin(correction, "__rsub__") or (None, None)
        steps, two = self._origin(doubled, "mul") or (None, None)
        found = self._power(power)
        if found is None or rest is not power or one != 1 or two != 2 or found[0] is not steps:
            return None
        return found


def _number(value: float, like: Tensor) -> Tensor:
    # torch_xla would pass a Python number as float64, which a TPU emulates.
    return torch.full((), value, dtype=torch.float32, device=like.device)


def _exponent(steps: Tensor, base: float) -> Tensor:
    return steps * _number(math.log(base), steps)


def _average_length(steps: Tensor, base: float) -> Tensor:
    """Compute RAdam's `rho_t`, which is nearly `steps` at first: the difference of two numbers of about 2 / (1 - base).

    With x = -log(base) and u = x * steps it is coth(x/2) - 2/x * u / (exp(u) - 1). For a small u, the series of the
    second term begins with 2/x - steps.
    """
    x = -math.log(base)
    longest = 1 / math.tanh(x / 2)
    u = steps * _number(x, steps)
    late = _number(longest, u) - _number(2 / x, u) * (u / torch.expm1(u))
    series = _number(_SERIES[-1], u)
    for factor in _SERIES[-2::-1]:
        series = series * (u * u) + _number(factor, u)
    early = steps + _number(longest - 2 / x, u) - _number(2, u) * steps * (u * series)
    return torch.where(u < _number(1, u), early, late)
