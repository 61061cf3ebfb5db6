"""`DeviceRates`: the learning rates as an input of the step's graph.

The rates in `param_groups` stay Python numbers, which user code may read and set at any time. Only while a step is
traced are they elements of a vector on the device, so that a new rate needs no new graph.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..backend import Placement
from ..runtime import keeps_count, to_device
from ..utils.replacing_attributes import replacing_attributes
from .beta_powers import BetaPowers
from .group_options import has_inputs
from .shared_counters import SharedCounterMode, SharedStepCounters
from .traced_number import call_with_inputs

# Replaces a rate of 0, because Adam divides by a rate that is a tensor: a weight that has never had a gradient, such as
# the embedding of an unused word, would become NaN. So small a rate changes only weights of 0, by no more than itself.
_TINY_RATE = 1e-36


class DeviceRates:
    """The rates of an optimizer as one vector on the device, sent only when they have changed."""

    def __init__(self, optimizer: Optimizer, placement: Placement) -> None:
        self._optimizer = optimizer
        self._placement = placement
        self.sent: list[list[float]] = []  # for each step, the rates of the groups
        self._rates = torch.empty(0)

    def send(self, steps: list[list[float]]) -> Tensor:
        """Send the rates of the next steps unless the device has them already; never called inside a step.

        Args:
            steps: For each step the rates of the groups.

        Returns:
            The rates, shape `(groups,)`, or `(steps, groups)` for several steps.
        """
        if steps != self.sent:
            self.sent = steps
            host = torch.tensor(steps if len(steps) > 1 else steps[0], dtype=torch.float32)
            if isinstance(self._optimizer, (torch.optim.Adam, torch.optim.AdamW)):
                host[host == 0] = _TINY_RATE
            (self._rates,) = to_device([host], self._placement)
        return self._rates

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """A context for tracing steps, at whose end the groups get their numbers back; see `use`."""
        with self._restoring("lr"):
            yield

    def use(self, vector: Tensor) -> None:
        """Replace the groups' rates by elements of the vector, inside a step, so that its graph uses its input."""
        rated = [group for group in self._optimizer.param_groups if "lr" in group]
        for i, group in enumerate(rated):
            group["lr"] = vector[i]

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """A context in which the optimizer takes tensors for its rates, and counts its steps on the device."""
        options = {"foreach": False, "fused": False, "capturable": keeps_count(self._optimizer)}
        shares = isinstance(self._optimizer, SharedStepCounters)
        mode = _WithNumbers if has_inputs(self._optimizer) else _OnDevice
        with self._restoring(*options), replacing_attributes(self._optimizer, mode=mode) if shares else mode():
            for group in self._optimizer.param_groups:
                group.update({key: value for key, value in options.items() if key in group})
            yield

    @contextmanager
    def _restoring(self, *keys: str) -> Iterator[None]:
        """A context at whose end the groups get the values of these keys back."""
        groups = self._optimizer.param_groups
        before = [{key: group[key] for key in keys if key in group} for group in groups]
        try:
            yield
        finally:
            for group, values in zip(groups, before, strict=True):
                group.update(values)


# PyTorch checks the shapes of an in-place operation by running it in Python on tensors without values, which takes most
# of the time of tracing an optimizer. It doesn't for an operation with `out=`. If all shapes are equal, as here, the
# result has the shape of the tensor that it overwrites, so the check isn't needed.
_IN_PLACE = {f"{name}_": getattr(torch, name) for name in ("add", "addcdiv", "addcmul", "lerp", "mul")}


class _OnDevice(SharedCounterMode):
    """Runs PyTorch's optimizers with a tensor as the rate, and without checks that can't fail.

    Where they pass the rate as a scalar argument, PyTorch would read its value and so wait for the device.
    """

    def __init__(self, counters: Collection[int] = ()) -> None:
        super().__init__(counters)
        self._numbers: dict[tuple[float, torch.device], Tensor] = {}
        self.decays = BetaPowers()

    def compute(self, func: Any, args: tuple[Any, ...]) -> Any:
        result = self.decays.compute(func.__name__, args)
        if result is None:
            result = super().compute(func, args)
        self.decays.note(result, func.__name__, args)
        return result

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for scalar in ("alpha", "value") if kwargs else ():
            if isinstance(kwargs.get(scalar), Tensor):
                target, first, *rest = args
                args = (target, torch.mul(first, kwargs.pop(scalar)), *rest)
        same = _IN_PLACE.get(func.__name__)
        if same is None or torch.is_grad_enabled() or not _same_shapes(*args):
            return func(*args, **kwargs)
        target = args[0]
        takes_numbers = target.dtype is torch.float32 and target.device.type != "cpu"
        if takes_numbers and len(args) == 2 and type(args[1]) is float:
            args = target, self._number(args[1], target.device)
        elif takes_numbers and same is torch.addcmul and type(kwargs.get("value")) is float:
            # In torch_xla's order of operations. torch_xla would pass the number as float64, which a TPU emulates.
            same = torch.add
            value = self._number(kwargs.pop("value"), target.device)
            args = target, torch.mul(torch.mul(args[1], args[2]), value)
        return same(*args, **kwargs, out=target)

    def _number(self, value: float, device: torch.device) -> Tensor:
        """Return a number as a cached tensor, e.g. the momentum: PyTorch would convert it for each parameter."""
        tensor = self._numbers.get((value, device))
        if tensor is None:
            tensor = self._numbers[value, device] = torch.full((), value, dtype=torch.float32, device=device)
        return tensor


class _WithNumbers(_OnDevice):
    """Passes `Traced` numbers as inputs of the graph, see `GroupNumbers`."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args = self.decays.pin(func.__name__, args)
        return call_with_inputs(partial(self._run_on_tensors, func, types), args, kwargs or {})

    def _run_on_tensors(self, func: Any, types: Any, *args: Any, **kwargs: Any) -> Any:
        if func.__name__ == "lerp_" and isinstance(kwargs.get("weight"), Tensor):  # in the dtype of the weights
            target = args[0]
            end = kwargs["end"] if "end" in kwargs else args[1]
            return target.add_(torch.mul(torch.sub(end, target), kwargs["weight"]))
        return super().__torch_function__(func, types, args, kwargs)


def _same_shapes(target: Tensor, *others: Any) -> bool:
    shape = target.shape
    for other in others:  # noqa: SIM110 - faster than `all`, for each operation of each parameter
        if isinstance(other, Tensor) and other.shape != shape and other.dim():
            return False
    return True
