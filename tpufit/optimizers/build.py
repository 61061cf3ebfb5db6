"""Optimizers: PyTorch's, by name or as objects, and what makes them run inside a graph without a wait.

The rates in `param_groups` stay Python numbers, to be read and set by anyone at any time. Only while a step is traced
they are entries of one device vector, an input of the graph, so that a new rate needs no new graph.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from ..errors import ArgumentError, UnknownNameError
from ..runtime import Placement, to_device

OptimizerArgument = str | Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer]

# They evaluate the loss several times a step, or need sparse gradients, which XLA doesn't have.
_UNSUPPORTED = (torch.optim.LBFGS, torch.optim.SparseAdam)

NAMES: dict[str, type[Optimizer]] = {
    name.lower(): value
    for name, value in vars(torch.optim).items()
    if isinstance(value, type) and issubclass(value, Optimizer) and value not in (Optimizer, *_UNSUPPORTED)
}


def build(optimizer: OptimizerArgument, module: nn.Module) -> Optimizer:
    """An optimizer of the module's parameters.

    Args:
        optimizer: A name (`"adamw"`: any of `torch.optim`, in lower case, with its default rate), a class, a partial or
            any function of the parameters that returns an optimizer, or an optimizer of the module's parameters.
        module: The module.

    Returns:
        The optimizer; a given one is returned as it is.

    Raises:
        UnknownNameError: Nothing goes by that name.
        ArgumentError: Not an optimizer, one of other parameters, or one that can't run on XLA.

    Example:
        >>> from functools import partial
        >>> from torch import nn, optim
        >>> build(partial(optim.SGD, lr=0.1, momentum=0.9), nn.Linear(2, 1)).param_groups[0]["momentum"]
        0.9
    """
    if isinstance(optimizer, str):
        if optimizer.lower() not in NAMES:
            raise UnknownNameError("optimizer", optimizer, NAMES)
        optimizer = cast("Callable[[Iterable[nn.Parameter]], Optimizer]", NAMES[optimizer.lower()])
    if not isinstance(optimizer, Optimizer):
        if not callable(optimizer):
            raise ArgumentError(
                "optimizer must be a name, a torch.optim class, a function of the parameters or an optimizer, got "
                f"{optimizer!r}"
            )
        optimizer = optimizer(module.parameters())
        if not isinstance(optimizer, Optimizer):
            raise ArgumentError(f"the optimizer function must return a torch.optim.Optimizer, got {optimizer!r}")
    if isinstance(optimizer, _UNSUPPORTED):
        raise ArgumentError(
            f"{type(optimizer).__name__} can't run inside one XLA graph; use another optimizer, e.g. 'adamw'"
        )
    if not hasattr(optimizer, "learning_rate"):
        kind: Any = type(optimizer)
        optimizer.__class__ = _with_learning_rate(kind)
    own = {id(p) for p in module.parameters()}
    foreign = [p for p in parameters(optimizer) if id(p) not in own]
    if foreign:
        raise ArgumentError(
            f"the optimizer holds {len(foreign)} parameter(s) that are not the module's, e.g. one of shape "
            f"{tuple(foreign[0].shape)}. Build it on module.parameters() of the very module given to tpufit.Model, or "
            "pass a function: optimizer=lambda params: torch.optim.SGD(params, lr=0.1)"
        )
    return optimizer


def create_state(optimizer: Optimizer) -> None:
    """Create the state that PyTorch's optimizers make in their first step, so that step 1 and 2 have one graph.

    An optimizer that isn't PyTorch's makes its state in the first step; such a step is not replayed in its first `fit`.

    Args:
        optimizer: Any optimizer; state that is there already stays.
    """
    initialize = getattr(optimizer, "_init_group", None)
    if initialize is None:
        return
    lists = len(inspect.signature(initialize).parameters) - 1
    for group in optimizer.param_groups:
        waiting = [p for p in group["params"] if p.requires_grad and not optimizer.state.get(p)]
        everyone, group["params"] = group["params"], waiting
        for p in waiting:
            p.grad = torch.zeros_like(p)
        try:
            initialize(group, *([] for _ in range(lists)))
        finally:
            group["params"] = everyone
            for p in waiting:
                p.grad = None
        # SGD makes its buffer from the first gradient g. A zero buffer gives the same, 0 * momentum + g, unless g is
        # dampened; then SGD keeps its own way, and its second graph.
        if isinstance(optimizer, torch.optim.SGD) and group["momentum"] and not group["dampening"]:
            for p in waiting:
                optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)


def device_state(optimizer: Optimizer) -> list[Tensor]:
    """The tensors of the optimizer's state that belong on the device.

    The step counter of an optimizer that can't count on the device stays on the host, where reading it costs nothing.
    """
    counts_there = _counts_on_device(optimizer)
    values = (value for state in optimizer.state.values() for value in state.values())
    return [value for value in values if isinstance(value, Tensor) and (value.dim() or counts_there)]


def parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    """The parameters of the optimizer's groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def rates(optimizer: Optimizer) -> list[float]:
    """The learning rates of the optimizer's groups."""
    return [float(group["lr"]) for group in optimizer.param_groups]


def set_rate(optimizer: Optimizer, rate: float) -> None:
    """Give the first group a rate, and the others theirs in proportion.

    Args:
        optimizer: The optimizer.
        rate: The actual rate.

    Example:
        >>> a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
        >>> optimizer = torch.optim.SGD([{"params": [a]}, {"params": [b], "lr": 0.05}], lr=0.1)
        >>> set_rate(optimizer, 0.0)
        >>> set_rate(optimizer, 1.0)
        >>> rates(optimizer)
        [1.0, 0.5]
    """
    first, *others = optimizer.param_groups
    before = float(first["lr"])
    for group in others:
        if before:  # at a rate of 0 they keep the proportion of before
            group["lr_ratio"] = float(group["lr"]) / before
        group["lr"] = rate * group.get("lr_ratio", 1.0)
    first["lr"] = rate


@functools.cache
def _with_learning_rate(kind: Any) -> Any:
    """The optimizer's class with Keras's name for the rate of its objects."""
    rate = property(lambda self: rates(self)[0], set_rate, doc="The actual learning rate.")
    same = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), same | {"learning_rate": rate})


def scale_rates(optimizer: Optimizer, factor: float) -> None:
    """Multiply the rate of each group, once: the factor is kept in the group, and a group that has one is left alone.

    Args:
        optimizer: The optimizer; its `state_dict` holds the factor as `lr_factor`, and what it gave as `scaled_lr`.
        factor: What to multiply by.
    """
    for group in optimizer.param_groups:
        if "lr_factor" not in group:
            group["lr"] = group["scaled_lr"] = float(group["lr"]) * factor
            group["lr_factor"] = factor


class DeviceRates:
    """The rates of an optimizer as one vector on the device, sent anew only when they have changed.

    Args:
        optimizer: The optimizer.
        placement: Where its parameters are.
    """

    def __init__(self, optimizer: Optimizer, placement: Placement) -> None:
        self._optimizer, self._placement = optimizer, placement
        self._sent: list[list[float]] = []
        self._vectors: list[Tensor] = []
        self.send([rates(optimizer)])

    def send(self, steps: list[list[float]]) -> list[Tensor]:
        """Send the rates of the next steps, if they are not there yet: called before steps, never inside one.

        Args:
            steps: The rates of the groups, for each step.

        Returns:
            A vector of rates for each step, each in memory of its own.
        """
        if steps != self._sent[: len(steps)]:
            self._sent = steps
            self._vectors = to_device([torch.tensor(rates) for rates in steps], self._placement)
        return self._vectors[: len(steps)]

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Let the groups show the device's rates: what a step does with them is then done in its graph."""
        kept = [group["lr"] for group in self._optimizer.param_groups]
        self.use(self._vectors[0])
        try:
            yield
        finally:
            for group, rate in zip(self._optimizer.param_groups, kept, strict=True):
                group["lr"] = rate

    def use(self, vector: Tensor) -> None:
        """Go on with these rates, inside a step."""
        for i, group in enumerate(self._optimizer.param_groups):
            group["lr"] = vector[i]

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Let the optimizer take tensors for its rates, and count its steps on the device."""
        groups = self._optimizer.param_groups
        ours: dict[str, Any] = {"foreach": False, "fused": False}
        if _counts_on_device(self._optimizer):
            ours["capturable"] = True
        kept = [{key: group[key] for key in ours if key in group} for group in groups]
        for group in groups:
            group.update({key: value for key, value in ours.items() if key in group})
        try:
            with _TensorScalars():
                yield
        finally:
            for group, before in zip(groups, kept, strict=True):
                group.update(before)


class Counters:
    """The numbers of optimizers' state that stay on the host, mostly counts of steps. A replay runs no Python, which
    would move them on, so that they are moved on afterwards by as much as a trace did.
    """

    def __init__(self) -> None:
        self._by_step: dict[Hashable, list[tuple[dict[str, Any], str, float]]] = {}
        self._replayed: Counter[Hashable] = Counter()

    @contextmanager
    def traced(self, key: Hashable, optimizers: Iterable[Optimizer]) -> Iterator[None]:
        """A context in which a step's Python runs: what it adds to the numbers is what a replay must add.

        Args:
            key: Which step it is.
            optimizers: Whose numbers it may change.
        """
        self.catch_up()
        optimizers = list(optimizers)
        before = {(id(state), name): value for state, name, value in _host_numbers(optimizers)}
        yield
        added = [(s, name, value - before.get((id(s), name), value)) for s, name, value in _host_numbers(optimizers)]
        self._by_step[key] = [(state, name, value) for state, name, value in added if value]

    def replayed(self, key: Hashable) -> None:
        """Note a replay of a step that has been traced."""
        self._replayed[key] += 1

    def catch_up(self) -> None:
        """Move the numbers on by what has been replayed since."""
        for key, times in self._replayed.items():
            for state, name, added in self._by_step[key]:
                state[name] += times * added
        self._replayed.clear()


def _host_numbers(optimizers: Iterable[Optimizer]) -> Iterator[tuple[dict[str, Any], str, float]]:
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor) and not value.dim() and value.device.type == "cpu":
                    yield state, name, value.item()
                elif isinstance(value, (int, float)) and not isinstance(value, bool):
                    yield state, name, value


class _TensorScalars(TorchFunctionMode):
    """Multiplies by a tensor where PyTorch's optimizers pass it as a scalar, for which PyTorch would read its value."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for scalar in ("alpha", "value"):
            if isinstance(kwargs.get(scalar), Tensor):
                target, first, *rest = args
                factor = kwargs[scalar]
                kwargs = {key: value for key, value in kwargs.items() if key != scalar}
                args = (target, first * factor, *rest)
        return func(*args, **kwargs)


def _counts_on_device(optimizer: Optimizer) -> bool:
    """Whether the optimizer can keep its step counter on the device (PyTorch calls that capturable)."""
    return "capturable" in optimizer.param_groups[0] and not isinstance(optimizer, torch.optim.Adadelta)


class PerParameter:
    """A tensor beside each parameter that learns, and a number for all of them: part of what training changes.

    Args:
        optimizer: Whose parameters.
        make: Makes the tensor of a parameter.
        number: The number's name in a checkpoint.
    """

    def __init__(self, optimizer: Optimizer, make: Callable[[nn.Parameter], Tensor], number: str) -> None:
        learning = [p for p in parameters(optimizer) if p.requires_grad]
        self._beside = {p: make(p) for p in learning}
        self._number = torch.zeros(1, device=learning[0].device if learning else None)
        self._name = number

    @property
    def tensors(self) -> list[Tensor]:
        """Its tensors."""
        return [self._number, *self._beside.values()]

    def named(self, names: Mapping[int, str]) -> dict[str, Tensor]:
        """Its tensors by name.

        Args:
            names: The parameters' names by their `id`.
        """
        return {self._name: self._number} | {names[id(p)]: tensor for p, tensor in self._beside.items()}
