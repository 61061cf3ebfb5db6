"""Learning rates in an optimizer's `param_groups`, and the keys that tpufit adds to these."""

import math

from torch.optim import Optimizer

from ..errors import ArgumentError, NotCompiledError, short_repr

_RATIO = "lr_ratio"  # the proportion of a group's rate to the first group's
_FACTOR = "lr_factor"  # the factor that `scale_rates` has multiplied the rate by
_SCALED = "scaled_lr"  # the rate that it gave
_SCHEDULED = "scheduled_lr"  # the rate that a schedule by name gave last
_PEAK = "initial_lr"  # PyTorch's name of the rate that a schedule begins with, or rises to


# The keys of a group that hold its rate, and where the rate came from: tpufit's, and PyTorch's own.
RATE_KEYS = ("lr", _PEAK, _RATIO, _FACTOR, _SCALED, _SCHEDULED)

# The numbers in the groups of schedule-free optimizers that a step changes.
RUNNING = ("k", "step", "lr_max", "weight_sum")


def runs_numbers(optimizer: Optimizer) -> bool:
    """True if an optimizer's steps change numbers in its groups, as those of schedule-free ones do."""
    return "weight_sum" in optimizer.param_groups[0]


def required(optimizer: Optimizer | None) -> Optimizer:
    """Return the optimizer, or raise `NotCompiledError` if `compile` was given none."""
    if optimizer is None:
        raise NotCompiledError("there is no optimizer: call model.compile(optimizer='adamw', ...) first")
    return optimizer


def rates(optimizer: Optimizer) -> list[float]:
    """The learning rates of the optimizer's groups."""
    return [float(group["lr"]) for group in optimizer.param_groups]


def checked_rate(rate: object, name: str = "learning_rate") -> float:
    """Return a learning rate as a number, or raise an `ArgumentError` if it is none, NaN, infinite or negative.

    A tensor or an array of one number is one, too, as schedules return them.
    """
    try:
        number = math.nan if isinstance(rate, (str, bytes, bool)) else float(rate)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError, OverflowError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise ArgumentError(f"{name} must be a finite number of at least 0, got {short_repr(rate)}")
    return number


def require_rates(optimizer: Optimizer) -> None:
    """Check the rate of each group: PyTorch's optimizers refuse negative ones, but not NaN."""
    for group in optimizer.param_groups:
        checked_rate(group["lr"], f"the learning rate (lr) of {type(optimizer).__name__}")


def set_rate(optimizer: Optimizer, rate: float) -> None:
    """Give the first group a rate, and the others theirs in proportion.

    Example:
        >>> from torch import nn, optim, zeros
        >>> a, b = nn.Parameter(zeros(1)), nn.Parameter(zeros(1))
        >>> optimizer = optim.SGD([{"params": [a]}, {"params": [b], "lr": 0.05}], lr=0.1)
        >>> set_rate(optimizer, 0.0)
        >>> set_rate(optimizer, 1.0)
        >>> rates(optimizer)
        [1.0, 0.5]
    """
    rate = checked_rate(rate)
    first, *others = optimizer.param_groups
    before = float(first["lr"])
    for group in others:
        if before:  # at a rate of 0 they keep the proportion of before
            group[_RATIO] = float(group["lr"]) / before
        group["lr"] = rate * group.get(_RATIO, 1.0)
    first["lr"] = rate


def scale_rates(optimizer: Optimizer, factor: float) -> None:
    """Multiply the rate of each group, once: the group keeps the factor, and a group that has one is left alone."""
    for group in optimizer.param_groups:
        if _FACTOR not in group:
            group["lr"] = group[_SCALED] = float(group["lr"]) * factor
            group[_FACTOR] = factor


def scaled_rates(optimizer: Optimizer) -> list[float]:
    """The rates that `scale_rates` gave the groups, whatever they are now; without it, those that they have."""
    return [float(group.get(_SCALED, group["lr"])) for group in optimizer.param_groups]


def begin_from_peak(optimizer: Optimizer) -> None:
    """Return each group to the peak of the schedule before, unless the rate has been set since; that is a new peak."""
    for group in optimizer.param_groups:
        if _PEAK in group and group["lr"] == group.get(_SCHEDULED):  # a name that schedule-free optimizers use as well
            group["lr"] = group[_PEAK]
        group.pop(_PEAK, None)  # PyTorch would begin with it


def note_scheduled(optimizer: Optimizer) -> None:
    """Note that the groups' rates are those of a schedule by name."""
    for group in optimizer.param_groups:
        group[_SCHEDULED] = group["lr"]
