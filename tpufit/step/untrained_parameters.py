"""`UntrainedParameters`: the parameters that require a gradient, but that no optimizer has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import join_few
from ..optimizers import list_parameters
from ..utils.user_code import warn
from .weight_names import OTHER_PREFIXES, readable_name


class UntrainedParameters:
    """The parameters of a model that no optimizer has.

    Args:
        owner: The model, at `compile`: later parameters are in no optimizer unless the user adds them.
    """

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._compiled: list[nn.Parameter] = list(owner.module.parameters())
        self._warned: list[str] = []  # the names in the last warning

    def find_added(self, optimizers: Iterable[Optimizer]) -> list[str]:
        """Return the names of the module's parameters without an optimizer that were added after `compile`."""
        known = {id(p) for p in self._compiled} | _list_trained(optimizers)
        named = self._owner.module.named_parameters()
        return [name for name, p in named if p.requires_grad and id(p) not in known]

    def drop_gradients(self, tensors: Mapping[str, Tensor], optimizers: Iterable[Optimizer]) -> None:
        """Drop the gradients of parameters without an optimizer: nothing else would clear them."""
        for parameter in _find_untrained(tensors, optimizers).values():
            parameter.grad = None

    def warn_of_gradients(self, tensors: Mapping[str, Tensor], optimizers: Iterable[Optimizer]) -> None:
        """Warn of gradients of parameters outside the module that no optimizer has.

        The module's own parameters may be left out on purpose.
        """
        others = {name: tensor for name, tensor in tensors.items() if name.startswith(OTHER_PREFIXES)}
        found = [name for name, p in _find_untrained(others, optimizers).items() if p.grad is not None]
        if found and found != self._warned:
            self._warned = found
            warn(
                f"no optimizer has {join_few([readable_name(name) for name in found])}, for which the step computes a "
                "gradient: they don't learn. Give an optimizer these parameters too, as in compile(optimizer=lambda "
                "parameters: torch.optim.SGD([*parameters, *others], lr=0.1)), or freeze them with "
                "requires_grad_(False)"
            )


def _find_untrained(tensors: Mapping[str, Tensor], optimizers: Iterable[Optimizer]) -> dict[str, Tensor]:
    trained = _list_trained(optimizers)
    return {name: t for name, t in tensors.items() if t.requires_grad and id(t) not in trained}


def _list_trained(optimizers: Iterable[Optimizer]) -> set[int]:
    """Return the `id` of each parameter that an optimizer has."""
    return {id(parameter) for optimizer in optimizers for parameter in list_parameters(optimizer)}
