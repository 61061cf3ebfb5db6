"""`build`: builds the optimizer of a model; and the optimizer's state, created before the first step."""

import functools
import inspect
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import ArgumentError, UnknownNameError, say_count
from ..runtime import keeps_count
from ..utils.text import find_answer
from .keras_names import NEAREST
from .learning_rates import list_rates, require_rates, set_rate
from .parameter_groups import GroupConfig
from .shared_counters import SharedStepCounters

OptimizerArgument = str | Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer]

# LBFGS evaluates the loss several times a step; SparseAdam needs sparse gradients, which XLA doesn't have.
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
        optimizer: A name of `torch.optim` in lower case, such as `"adamw"`, with its default rate; a class, a partial
            or any function of the parameters that returns an optimizer; or an optimizer of the module's parameters.
        module: The module.
        groups: How to split the optimizer's groups (default: don't split).
        others: Further parameters that the optimizer may have, of the loss and of the model's attributes (default:
            none).

    Returns:
        The optimizer; a given optimizer is returned as the same object.

    Raises:
        UnknownNameError: No optimizer has this name.
        ArgumentError: The argument isn't an optimizer, has parameters outside the model, or can't run on XLA.

    Example:
        >>> from functools import partial
        >>> from torch import nn, optim
        >>> build(partial(optim.SGD, lr=0.1, momentum=0.9), nn.Linear(2, 1)).param_groups[0]["momentum"]
        0.9
    """
    if isinstance(optimizer, str):
        if optimizer.lower() not in NAMES:
            raise UnknownNameError("optimizer", optimizer, NAMES, find_answer(optimizer, NEAREST))
        if optimizer.lower() == "muon":
            _require_matrices(module)
        optimizer = cast("Callable[[Iterable[nn.Parameter]], Optimizer]", NAMES[optimizer.lower()])
    is_built_here = not isinstance(optimizer, Optimizer)
    if not isinstance(optimizer, Optimizer):
        if isinstance(optimizer, (list, tuple, dict)):
            raise ArgumentError(
                f"compile takes one optimizer, got {say_count(len(optimizer), 'optimizer')}. Pass one, keep the others "
                "as attributes of your Model,\nand call self.apply_gradients(loss, self.critics_optimizer) for each in "
                "train_step, as examples/gan.py does"
            )
        other_class = isinstance(optimizer, type) and not issubclass(optimizer, Optimizer)
        if not callable(optimizer) or other_class:
            raise ArgumentError(
                "optimizer must be a name, a torch.optim class, a function of the parameters or an optimizer, got "
                f"{optimizer!r}"
            )
        nothing: Any = [{"params": []}]  # PyTorch's optimizers refuse an empty list, but not an empty group
        optimizer = optimizer(module.parameters() if next(module.parameters(), None) is not None else nothing)
        if not isinstance(optimizer, Optimizer):
            raise ArgumentError(f"the optimizer function must return a torch.optim.Optimizer, got {optimizer!r}")
    if isinstance(optimizer, _UNSUPPORTED):
        raise ArgumentError(
            f"{type(optimizer).__name__} can't run inside one XLA graph; use another optimizer, e.g. 'adamw'"
        )
    if not hasattr(optimizer, "learning_rate"):
        kind: Any = type(optimizer)
        # Callbacks write Keras's `model.optimizer.learning_rate = 0.01`, which needs a property, so the user's object
        # gets a class with it: a subclass of the same name, so nothing else changes.
        optimizer.__class__ = _add_learning_rate(kind, SharedStepCounters.fits(optimizer))
    require_rates(optimizer)
    allowed = {id(p) for p in (*module.parameters(), *others)}
    foreign = [p for p in list_parameters(optimizer) if id(p) not in allowed]
    if foreign:
        raise ArgumentError(
            f"the optimizer has {say_count(len(foreign), 'parameter')} other than the module's, e.g. one of shape "
            f"{tuple(foreign[0].shape)}. Build it on module.parameters() of the same module that tpufit.Model gets, or "
            "pass a function: optimizer=lambda params: torch.optim.SGD(params, lr=0.1). To train another module, make "
            "it the loss or an attribute of the Model"
        )
    if groups is not None and groups.wanted:
        if not is_built_here:
            raise ArgumentError(
                "exclude_from_weight_decay and layer_decay split the optimizer's groups, and this one has groups "
                f"already: pass a function, optimizer=lambda params: torch.optim.{type(optimizer).__name__}(params, "
                "...)"
            )
        groups.split(optimizer, module)
    return optimizer


def _require_matrices(module: nn.Module) -> None:
    """Raise an `ArgumentError` if `torch.optim.Muon` would refuse parameters of the module."""
    others = [tuple(p.shape) for p in module.parameters() if p.dim() != 2]
    if others:
        raise ArgumentError(
            f"'muon' trains matrices only, and the module has {say_count(len(others), 'other parameter')}, e.g. one of "
            f"shape {others[0]}. Pass timm.optim.Muon of the package timm, which trains all other parameters as AdamW "
            "does"
        )


def create_state(optimizer: Optimizer) -> None:
    """Create the state that PyTorch's optimizers would create in their first step, so that steps 1 and 2 share a graph.

    Existing state stays. Optimizers of other libraries create theirs in their first step, which isn't replayed in the
    first `fit`.
    """
    initialize = getattr(optimizer, "_init_group", None)
    if initialize is None:
        return
    lists = len(inspect.signature(initialize).parameters) - 1
    for group in optimizer.param_groups:
        without_state = [p for p in group["params"] if p.requires_grad and not optimizer.state.get(p)]
        all_parameters = group["params"]
        group["params"] = without_state
        for p in without_state:
            p.grad = torch.zeros_like(p)
        try:
            initialize(group, *([] for _ in range(lists)))
        finally:
            group["params"] = all_parameters
            for p in without_state:
                p.grad = None
        # SGD makes its buffer from the first gradient g. A buffer of zeros gives the same, 0 * momentum + g, unless g
        # is dampened; then SGD creates the buffer in its first step, and needs a second graph.
        if isinstance(optimizer, torch.optim.SGD) and group["momentum"] and not group["dampening"]:
            for p in without_state:
                optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)


# Scalar tensors in the state of PyTorch's optimizers that are step counts or computed from step counts.
_COUNTS = ("step", "mu_product", "eta", "mu")


def list_device_state(optimizer: Optimizer) -> list[Tensor]:
    """Return the tensors of the optimizer's state that belong on the device.

    If the optimizer can't count on the device, its step counters stay on the host, where reading them costs nothing.
    Counters that its step has created on the device stay there.
    """
    counts_on_device = keeps_count(optimizer)

    def belongs(value: Tensor, parameter: Tensor, name: str) -> bool:
        # The momentum of a scalar parameter is a scalar.
        momentum = not (parameter.dim() or name in _COUNTS)
        return bool(value.dim()) or counts_on_device or momentum or value.device.type != "cpu"

    values = [
        value
        for parameter, state in optimizer.state.items()
        for name, value in state.items()
        if isinstance(value, Tensor) and belongs(value, parameter, name)
    ]
    if isinstance(optimizer, SharedStepCounters):
        values = [*(value for value in optimizer.list_counters() if value.dim() or counts_on_device), *values]
    return list({id(value): value for value in values}.values())


def step_counts(optimizer: Optimizer) -> list[Tensor]:
    """Return the counts in the optimizer's state that PyTorch's steps read on the host."""
    return [
        value
        for state in optimizer.state.values()
        for name, value in state.items()
        if name in _COUNTS and isinstance(value, Tensor) and value.device.type == "cpu"
    ]


def share_counters(optimizer: Optimizer) -> None:
    """Let parameters that step together share a step counter, if the optimizer counts on the device."""
    if isinstance(optimizer, SharedStepCounters) and keeps_count(optimizer):
        optimizer.share()


def clear_state(optimizer: Optimizer) -> None:
    """Drop the optimizer's state."""
    optimizer.state.clear()
    if isinstance(optimizer, SharedStepCounters):
        optimizer.share()


def list_parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters of the optimizer's groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def drop_gradients(optimizer: Optimizer) -> None:
    """Drop the gradients of the optimizer's parameters, without the cost of the profiler mark in `zero_grad`."""
    for parameter in list_parameters(optimizer):
        parameter.grad = None


class PerParameter:
    """A tensor for each parameter that learns, and one number for all: a part of the training state.

    Args:
        optimizer: The optimizer of the parameters.
        make: Makes the tensor of a parameter.
        number: The number's name in a checkpoint.
    """

    def __init__(self, optimizer: Optimizer, make: Callable[[nn.Parameter], Tensor], number: str) -> None:
        learning = [p for p in list_parameters(optimizer) if p.requires_grad]
        self._optimizer = optimizer
        self._make = make
        self._tensors = {p: make(p) for p in learning}
        self._number = torch.zeros(1, dtype=torch.float32, device=learning[0].device if learning else None)
        self._name = number

    def extend(self, others: Container[nn.Parameter] = ()) -> None:
        """Make the tensors of parameters that have begun to learn since the last call, and of `others`."""
        for parameter in list_parameters(self._optimizer):
            if (parameter.requires_grad or parameter in others) and parameter not in self._tensors:
                self._tensors[parameter] = self._make(parameter)

    @property
    def tensors(self) -> list[Tensor]:
        """The number and the tensors of all parameters."""
        return [self._number, *self._tensors.values()]

    @property
    def by_parameter(self) -> Iterable[tuple[Tensor, Tensor]]:
        """Pairs of a parameter and its tensor."""
        return self._tensors.items()

    def named(self, names: Mapping[int, str]) -> dict[str, Tensor]:
        """Return the number and the tensors by name; `names` has the parameters' names by `id`."""
        return {self._name: self._number} | {names[id(p)]: tensor for p, tensor in self._tensors.items()}


@functools.cache
def _add_learning_rate(kind: Any, shares_counters: bool) -> Any:
    """Make a subclass with Keras's property `learning_rate`; with `shares_counters`, of `SharedStepCounters` too."""
    rate = property(lambda self: list_rates(self)[0], set_rate, doc="The actual learning rate.")
    same = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    bases = (SharedStepCounters, kind) if shares_counters else (kind,)
    return type(kind.__name__, bases, same | {"learning_rate": rate})
