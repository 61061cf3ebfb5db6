"""Named learning-rate schedules: each step's share of the peak rate. Independent of hooks and models."""

import math
from dataclasses import dataclass

from ...errors import ArgumentError, UnknownNameError, require_whole

NAMES = ("linear", "cosine", "constant", "inverse_sqrt", "wsd")

# For "inverse_sqrt" without a warm-up: the steps after which the rate is 1 / sqrt(2) of the peak.
_TIMESCALE = 10_000


@dataclass(frozen=True)
class NamedSchedule:
    """A schedule by name, one of `NAMES`, for any number of steps.

    Raises:
        UnknownNameError: No schedule has this name.
        ArgumentError: A number is out of range.

    Example:
        >>> schedule = NamedSchedule("linear", warmup=1)
        >>> [schedule.factor(step, 5) for step in range(6)]
        [0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
    """

    name: str
    warmup: int | float = 0  # the number of steps, or as a float their share
    floor: float = 0.0  # the lowest share of the peak after the warm-up, from 0 to 1
    decay: int | float = 0.2  # the number of steps in the last phase of "wsd", or as a float their share

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise UnknownNameError("schedule", self.name, NAMES)
        for argument in ("warmup", "decay"):
            value = getattr(self, argument)
            if isinstance(value, float):
                if not 0 <= value <= 1:
                    raise ArgumentError(
                        f"{argument} must be a whole number of steps or a share from 0.0 to 1.0, got {value!r}"
                    )
            else:
                require_whole(argument, value, 0, otherwise="a share from 0.0 to 1.0")
        if isinstance(self.floor, bool) or not isinstance(self.floor, (int, float)) or not 0 <= self.floor <= 1:
            raise ArgumentError(f"floor must be a share of the rate from 0 to 1, got {self.floor!r}")

    @property
    def needs_total(self) -> bool:
        """True if the schedule depends on the number of steps."""
        return self.name in ("linear", "cosine", "wsd") or isinstance(self.warmup, float)

    def factor(self, step: int, total: int | None) -> float:
        """Return an optimizer step's share of the peak, for steps from 0; most schedules need the `total` of steps."""
        warmup = _resolve_steps(self.warmup, total)
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if self.name == "inverse_sqrt":
            timescale = warmup or _TIMESCALE
            return max(self.floor, math.sqrt(timescale / (step - warmup + timescale)))
        return self.floor + (1 - self.floor) * self._remaining_share(step, warmup, total)

    def _remaining_share(self, step: int, warmup: int, total: int | None) -> float:
        """Return the remaining share of the rate above the floor."""
        if self.name == "constant" or total is None:
            return 1.0
        begin = max(warmup, total - _resolve_steps(self.decay, total)) if self.name == "wsd" else warmup
        done = min(1.0, max(0.0, (step - begin) / max(1, total - begin)))
        return (1 + math.cos(math.pi * done)) / 2 if self.name == "cosine" else 1 - done


def _resolve_steps(amount: int | float, total: int | None) -> int:
    return round(amount * (total or 0)) if isinstance(amount, float) else amount
