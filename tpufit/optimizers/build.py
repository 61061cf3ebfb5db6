"""`build`: the optimizer of a model; and the tensors beside its parameters, created before the first step."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import ArgumentError, UnknownNameError, counted
from ..runtime import keeps_count
from .groups import GroupConfig
from .rates import rates, require_rates, set_rate
from .shared_counters import SharedStepCounters

OptimizerArgument = str | Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer]

# They evaluate the loss several times a step, or need sparse gradients, which XLA doesn't have.
_UNSUPPORTED = (torch.optim.LBFGS, torch.optim.SparseAdam)

NAMES: dict[str, type[Optimizer]] = {
    name.lower(): value
    for name, value in vars(torch.optim).items()
    if isinstance(value, type) and issubclass(value, Optimizer) and value not in (Optimizer, *_UNSUPPORTED)
}


def build(
    optimizer: OptimizerArgument,
    module: nn.Module,
    groups: GroupConfig | None = None,
    others: Iterable[nn.Parameter] = (),
) -> Optimizer:
    """Build an optimizer of the module's parameters.

    Args:
        optimizer: A name (`"adamw"`: any of `torch.optim`, in lower case, with its default rate), a class, a partial or
            any function of the parameters that returns an optimizer, or an optimizer of the module's parameters.
        module: The module.
        groups: How to split its groups (default: not at all).
        others: Further parameters that the optimizer may have, of the loss and of what the model keeps (default: none).

    Returns:
        The optimizer; a given one is returned as it is.

    Raises:
        UnknownNameError: Nothing goes by that name.
        ArgumentError: It is no optimizer, or one of other parameters, or one that can't run on XLA.

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
    made = not isinstance(optimizer, Optimizer)
    if not isinstance(optimizer, Optimizer):
        if isinstance(optimizer, (list, tuple, dict)):
            raise ArgumentError(
                f"compile takes one optimizer, got {counted(len(optimizer), 'optimizer')}. Give it one, keep the "
                "others as attributes of your Model,\nand let its train_step call self.apply_gradients(loss, "
                "self.critics_optimizer) for each, as examples/gan.py does"
            )
        other_class = isinstance(optimizer, type) and not issubclass(optimizer, Optimizer)
        if not callable(optimizer) or other_class:
            raise ArgumentError(
                "optimizer must be a name, a torch.optim class, a function of the parameters or an optimizer, got "
                f"{optimizer!r}"
            )
        nothing: Any = [{"params": []}]  # PyTorch's optimizers refuse an empty list, but not a group of none
        optimizer = optimizer(module.parameters() if next(module.parameters(), None) is not None else nothing)
        if not isinstance(optimizer, Optimizer):
            raise ArgumentError(f"the optimizer function must return a torch.optim.Optimizer, got {optimizer!r}")
    if isinstance(optimizer, _UNSUPPORTED):
        raise ArgumentError(
            f"{type(optimizer).__name__} can't run inside one XLA graph; use another optimizer, e.g. 'adamw'"
        )
    if not hasattr(optimizer, "learning_rate"):
        kind: Any = type(optimizer)
        # The user's own object gets Keras's property, which only a class can have: callbacks write
        # `model.optimizer.learning_rate = 0.01`. The class is a subclass of the same name, so nothing else changes.
        optimizer.__class__ = _as_ours(kind, SharedStepCounters.fits(optimizer))
    require_rates(optimizer)
    own = {id(p) for p in (*module.parameters(), *others)}
    foreign = [p for p in parameters(optimizer) if id(p) not in own]
    if foreign:
        raise ArgumentError(
            f"the optimizer holds {counted(len(foreign), 'parameter')} other than the module's, e.g. one of shape "
            f"{tuple(foreign[0].shape)}. Build it on module.parameters() of the very module given to tpufit.Model, or "
            "pass a function: optimizer=lambda params: torch.optim.SGD(params, lr=0.1). A further module that it is to "
            "train must be the loss, or an attribute of the Model"
        )
    if groups is not None and groups.wanted:
        if not made:
            raise ArgumentError(
                "exclude_from_weight_decay and layer_decay make the optimizer's groups, and this one has its own: "
                f"pass a function, optimizer=lambda params: torch.optim.{type(optimizer).__name__}(params, ...)"
            )
        groups.split(optimizer, module)
    return optimizer


def create_state(optimizer: Optimizer) -> None:
    """Create the state that PyTorch's optimizers make in their first step, so that step 1 and 2 have one graph.

    An optimizer that isn't PyTorch's makes its state in the first step; such a step is not replayed in its first `fit`.
    State that there is already stays.
    """
    initialize = getattr(optimizer, "_init_group", None)
    if initialize is None:
        return
    lists = len(inspect.signature(initialize).parameters) - 1
    for group in optimizer.param_groups:
        waiting = [p for p in group["params"] if p.requires_grad and not optimizer.state.get(p)]
        all_parameters = group["params"]
        group["params"] = waiting
        for p in waiting:
            p.grad = torch.zeros_like(p)
        try:
            initialize(group, *([] for _ in range(lists)))
        finally:
            group["params"] = all_parameters
            for p in waiting:
                p.grad = None
        # SGD makes its buffer from the first gradient g. A zero buffer gives the same, 0 * momentum + g, unless g is
        # dampened; then SGD keeps its own way, and its second graph.
        if isinstance(optimizer, torch.optim.SGD) and group["momentum"] and not group["dampening"]:
            for p in waiting:
                optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)


# What PyTorch's optimizers count, or compute from a count, in tensors without dimensions.
_COUNTS = ("step", "mu_product", "eta", "mu")


def device_state(optimizer: Optimizer) -> list[Tensor]:
    """The tensors of the optimizer's state that belong on the device.

    The step counter of an optimizer that can't count on the device stays on the host, where reading it costs nothing.
    One that its step has made on the device stays there.
    """
    counts_there = keeps_count(optimizer)

    def belongs(value: Tensor, parameter: Tensor, name: str) -> bool:
        # A momentum of a parameter without dimensions has none itself.
        momentum = not (parameter.dim() or name in _COUNTS)
        return bool(value.dim()) or counts_there or momentum or value.device.type != "cpu"

    values = [
        value
        for parameter, state in optimizer.state.items()
        for name, value in state.items()
        if isinstance(value, Tensor) and belongs(value, parameter, name)
    ]
    if isinstance(optimizer, SharedStepCounters):
        values = [*(value for value in optimizer.counters() if value.dim() or counts_there), *values]
    return list({id(value): value for value in values}.values())


def share_counters(optimizer: Optimizer) -> None:
    """Let parameters that step together share their step counter, where the optimizer counts on the device."""
    if isinstance(optimizer, SharedStepCounters) and keeps_count(optimizer):
        optimizer.share()


def clear_state(optimizer: Optimizer) -> None:
    """Drop all that the optimizer keeps beside the parameters."""
    optimizer.state.clear()
    if isinstance(optimizer, SharedStepCounters):
        optimizer.share()


def parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    """The parameters of the optimizer's groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def drop_gradients(optimizer: Optimizer) -> None:
    """Drop the gradients of the optimizer's parameters. Its own `zero_grad` also reports itself to a profiler."""
    for parameter in parameters(optimizer):
        parameter.grad = None


class PerParameter:
    """A tensor beside each parameter that learns, and a number for all of them: part of what training changes.

    `number` is the number's name in a checkpoint.
    """

    def __init__(self, optimizer: Optimizer, make: Callable[[nn.Parameter], Tensor], number: str) -> None:
        learning = [p for p in parameters(optimizer) if p.requires_grad]
        self._optimizer = optimizer
        self._make = make
        self._beside = {p: make(p) for p in learning}
        self._number = torch.zeros(1, device=learning[0].device if learning else None)
        self._name = number

    def extend(self) -> None:
        """Make the tensors of parameters that have begun to learn since."""
        for parameter in parameters(self._optimizer):
            if parameter.requires_grad and parameter not in self._beside:
                self._beside[parameter] = self._make(parameter)

    @property
    def tensors(self) -> list[Tensor]:
        """All its tensors."""
        return [self._number, *self._beside.values()]

    @property
    def beside(self) -> Iterable[tuple[Tensor, Tensor]]:
        """Each parameter that learns, and the tensor beside it."""
        return self._beside.items()

    def named(self, names: Mapping[int, str]) -> dict[str, Tensor]:
        """All its tensors, by name; the parameters' names come by their `id`."""
        return {self._name: self._number} | {names[id(p)]: tensor for p, tensor in self._beside.items()}


@functools.cache
def _as_ours(kind: Any, shares_counters: bool) -> Any:
    """Make a subclass with Keras's name for the rate, and maybe with step counters that can be shared."""
    rate = property(lambda self: rates(self)[0], set_rate, doc="The actual learning rate.")
    same = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    bases = (SharedStepCounters, kind) if shares_counters else (kind,)
    return type(kind.__name__, bases, same | {"learning_rate": rate})
