"""Learning rates in an optimizer's `param_groups`, and the keys that tpufit adds there."""

import math

from torch.optim import Optimizer

from ..errors import ArgumentError, NotCompiledError, short_repr
from .inner_optimizers import find_rated_groups

_RATIO = "lr_ratio"  # the proportion of a group's rate to the first group's
_FACTOR = "lr_factor"  # the factor by which `scale_rates` has multiplied the rate
_SCALED = "scaled_lr"  # the rate after `scale_rates`
_SCHEDULED = "scheduled_lr"  # the last rate that a schedule by name has set
_PEAK = "initial_lr"  # PyTorch's name of the rate that a schedule begins with or rises to


# The keys of a group that hold its rate and the rate's origin, both tpufit's and PyTorch's.
RATE_KEYS = ("lr", _PEAK, _RATIO, _FACTOR, _SCALED, _SCHEDULED)


def require_optimizer(optimizer: Optimizer | None) -> Optimizer:
    """Return the optimizer, or raise `NotCompiledError` if `compile` got none."""
    if optimizer is None:
        raise NotCompiledError("there is no optimizer: call model.compile(optimizer='adamw', ...) first")
    return optimizer


def list_rates(optimizer: Optimizer) -> list[float]:
    """Return the learning rates of the groups, see `find_rated_groups`."""
    return [float(group["lr"]) for group in find_rated_groups(optimizer)]


def group_rates(optimizer: Optimizer) -> list[float]:
    """Return the learning rates of an optimizer's own groups, except groups without a rate."""
    return [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]


def check_rate(rate: object, name: str = "learning_rate") -> float:
    """Return a learning rate as a number; an `ArgumentError` if it isn't a number, or is NaN, infinite or negative.

    A tensor or an array of one number is accepted, because schedules return them.
    """
    try:
        number = math.nan if isinstance(rate, (str, bytes, bool)) else float(rate)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError, OverflowError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise ArgumentError(f"{name} must be a finite number of at least 0, got {short_repr(rate)}")
    return number


def require_rates(optimizer: Optimizer) -> None:
    """Check the rate of each group: PyTorch's optimizers refuse negative rates, but not NaN."""
    for group in find_rated_groups(optimizer):
        if "lr" not in group:
            given = sorted(group.keys() - {"params"})
            raise ArgumentError(
                f"the groups of {type(optimizer).__name__} have no 'lr', only {given}: name the learning rate 'lr', as "
                "PyTorch's optimizers do, so that schedules and the number of cores can change it"
            )
        if group["lr"] is None:
            raise ArgumentError(
                f"{type(optimizer).__name__} has lr=None and computes its rate itself, so schedules and the number of "
                "cores can't change it: set a rate (for transformers' Adafactor: lr=1e-3, relative_step=False)"
            )
        check_rate(group["lr"], f"the learning rate (lr) of {type(optimizer).__name__}")


def set_rate(optimizer: Optimizer, rate: float) -> None:
    """Set the rate of the first group, and the other groups' rates in proportion.

    Example:
        >>> from torch import nn, optim, zeros
        >>> a, b = nn.Parameter(zeros(1)), nn.Parameter(zeros(1))
        >>> optimizer = optim.SGD([{"params": [a]}, {"params": [b], "lr": 0.05}], lr=0.1)
        >>> set_rate(optimizer, 0.0)
        >>> set_rate(optimizer, 1.0)
        >>> list_rates(optimizer)
        [1.0, 0.5]
    """
    rate = check_rate(rate)
    first, *others = find_rated_groups(optimizer)
    before = float(first["lr"])
    for group in others:
        if before:  # else the noted proportion stays
            group[_RATIO] = float(group["lr"]) / before
        group["lr"] = rate * group.get(_RATIO, 1.0)
    first["lr"] = rate


def scale_rates(optimizer: Optimizer, factor: float) -> None:
    """Multiply the rate of each group once: the factor is noted in the group, which is skipped from then on."""
    for group in find_rated_groups(optimizer):
        if _FACTOR not in group:
            group["lr"] = group[_SCALED] = float(group["lr"]) * factor
            group[_FACTOR] = factor


def read_scaled_rates(optimizer: Optimizer) -> list[float]:
    """Return the groups' rates after `scale_rates`, even if they changed later; else the current rates."""
    return [float(group.get(_SCALED, group["lr"])) for group in find_rated_groups(optimizer)]


def begin_from_peak(optimizer: Optimizer) -> None:
    """Set each group's rate to the peak of the previous schedule, unless the user has set a new rate since then."""
    for group in find_rated_groups(optimizer):
        if _PEAK in group and group["lr"] == group.get(_SCHEDULED):  # schedule-free optimizers use this key, too
            group["lr"] = group[_PEAK]
        group.pop(_PEAK, None)  # else PyTorch's schedules would begin with it


def note_scheduled(optimizer: Optimizer) -> None:
    """Note that a schedule by name has set the groups' current rates."""
    for group in find_rated_groups(optimizer):
        group[_SCHEDULED] = group["lr"]
