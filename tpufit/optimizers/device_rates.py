"""`DeviceRates`: the learning rates as an input of the step's graph.

The rates in `param_groups` stay Python numbers, to be read and set by anyone at any time. Only while a step is traced
they are entries of one device vector, so that a new rate needs no new graph.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..backend import Placement
from ..runtime import keeps_count, to_device
from ..utils.replaced import replaced
from .rates import runs_numbers
from .shared_counters import SharedCounterMode, SharedStepCounters
from .traced import Traced

# Stands for a rate of 0. Adam divides by its rate where that is a tensor: a weight that has never had a gradient, such
# as the row of a word that no text has, would become NaN. So small a step changes no weight but one of 0, by no more.
_ALMOST_NONE = 1e-36


class DeviceRates:
    """The rates of an optimizer as one vector on the device, sent only when they have changed."""

    def __init__(self, optimizer: Optimizer, placement: Placement) -> None:
        self._optimizer = optimizer
        self._placement = placement
        self.sent: list[list[float]] = []  # of each step, those of the groups
        self._rates = torch.empty(0)

    def send(self, steps: list[list[float]]) -> Tensor:
        """Send the rates of the next steps, if they are not there yet: called before steps, never inside one.

        Each step's are those of the groups; the vector has a row for each step, if there are several.
        """
        if steps != self.sent:
            self.sent = steps
            host = torch.tensor(steps if len(steps) > 1 else steps[0])
            if isinstance(self._optimizer, (torch.optim.Adam, torch.optim.AdamW)):
                host[host == 0] = _ALMOST_NONE
            (self._rates,) = to_device([host], self._placement)
        return self._rates

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """A context in which steps are traced: the groups point at the device's rates, and get their numbers back."""
        with self._restoring("lr"):
            yield

    def use(self, vector: Tensor) -> None:
        """Point the groups at the rates of one step, inside it: its graph then computes from its input."""
        for i, group in enumerate(self._optimizer.param_groups):
            group["lr"] = vector[i]

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """A context in which the optimizer takes tensors for its rates, and counts its steps on the device."""
        ours = {"foreach": False, "fused": False, "capturable": keeps_count(self._optimizer)}
        shares = isinstance(self._optimizer, SharedStepCounters)
        own = _WithNumbers if runs_numbers(self._optimizer) else _OnDevice
        with self._restoring(*ours), replaced(self._optimizer, mode=_OnDevice) if shares else own():
            for group in self._optimizer.param_groups:
                group.update({key: value for key, value in ours.items() if key in group})
            yield

    @contextmanager
    def _restoring(self, *keys: str) -> Iterator[None]:
        """A context that gives the groups these values back in the end."""
        groups = self._optimizer.param_groups
        before = [{key: group[key] for key in keys if key in group} for group in groups]
        try:
            yield
        finally:
            for group, values in zip(groups, before, strict=True):
                group.update(values)


# PyTorch checks the shapes of what changes a tensor by running it in Python, on tensors without values: that takes most
# of the time of an optimizer's trace. It does not for a result that is written into a given tensor, and here that has
# the shape of what it replaces, where all tensors are alike.
_IN_PLACE = {f"{name}_": getattr(torch, name) for name in ("add", "addcdiv", "addcmul", "lerp", "mul")}


class _OnDevice(SharedCounterMode):
    """Runs what PyTorch's optimizers compute with a tensor for a rate, and without checks that can't fail.

    They pass the rate as a scalar in places, for which PyTorch would read its value.
    """

    def __init__(self, counters: Collection[int] = ()) -> None:
        super().__init__(counters)
        self._numbers: dict[tuple[float, torch.device], Tensor] = {}

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
            # In the order of torch_xla's own, which is given the number in 64 bits. A TPU emulates them.
            same = torch.add
            value = self._number(kwargs.pop("value"), target.device)
            args = target, torch.mul(torch.mul(args[1], args[2]), value)
        return same(*args, **kwargs, out=target)

    def _number(self, value: float, device: torch.device) -> Tensor:
        """A number that all parameters use, such as the momentum: PyTorch would convert it anew for each of them."""
        known = self._numbers.get((value, device))
        if known is None:
            known = self._numbers[value, device] = torch.full((), value, dtype=torch.float32, device=device)
        return known


class _WithNumbers(_OnDevice):
    """Gives tensors the numbers of a course as inputs of the graph, see `GroupNumbers`."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args = tuple(arg.on_device() if isinstance(arg, Traced) else arg for arg in args)
        given = {name: arg.on_device() if isinstance(arg, Traced) else arg for name, arg in (kwargs or {}).items()}
        if func.__name__ == "lerp_" and isinstance(given.get("weight"), Tensor):  # in the weights' own format
            target = args[0]
            end = given["end"] if "end" in given else args[1]
            return target.add_(torch.mul(torch.sub(end, target), given["weight"]))
        return super().__torch_function__(func, types, args, given)


def _same_shapes(target: Tensor, *others: Any) -> bool:
    shape = target.shape
    for other in others:  # noqa: SIM110 - runs for each operation of each parameter, where `all` takes longer
        if isinstance(other, Tensor) and other.shape != shape and other.dim():
            return False
    return True
