"""`StateAliases`: the user's tensors outside of the state that share memory with it.

A callback makes one by `p.data = best`, for instance. As long as the state's values are taken out of the user's
tensors, its state aliases are empty, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from .aliases import Alias, find_aliases, is_shared_elsewhere, make_view
from .pending_tensors import find_alive
from .transfer import swap_value


@dataclass(frozen=True)
class StateAlias:
    """A tensor outside of a list that shares memory with a tensor of the list."""

    tensor: TensorWeakRef
    alias: Alias


def list_state_aliases(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> list[StateAlias]:
    """Find the tensors among `others` that share all of their memory with a tensor of the list."""
    first = len(tensors)
    return [
        StateAlias(TensorWeakRef(others[alias.index - first]), alias)
        for alias in find_aliases([*tensors, *others])
        if alias.index >= first > alias.owner and not alias.overlaps
    ]


class StateAliases:
    """The known state aliases of the state's tensors."""

    def __init__(self) -> None:
        self._aliases: list[StateAlias] = []

    def replace(self, state_aliases: list[StateAlias]) -> None:
        """Replace the known state aliases by others."""
        self._aliases = state_aliases

    def list_alive(self) -> list[Tensor]:
        """Return the state aliases that the user still keeps."""
        return [tensor for state_alias in self._aliases if (tensor := state_alias.tensor()) is not None]

    def search(self, tensors: Sequence[Tensor], everywhere: bool) -> list[Tensor]:
        """Find the state aliases of the state's tensors, which must have been computed.

        A search among all tensors takes a tenth of a second or more. Without `everywhere` it is made only if a tensor
        that isn't known shares memory with the state.

        Returns:
            The searched tensors that share all their memory with no tensor of the state.
        """
        others = self.list_alive()
        if everywhere or is_shared_elsewhere([*tensors, *others]):
            own = set(map(id, tensors))
            others = [tensor for tensor in find_alive() if id(tensor) not in own]
        self._aliases = list_state_aliases(tensors, others)
        aliasing = set(map(id, self.list_alive()))
        return [tensor for tensor in others if id(tensor) not in aliasing]

    def empty(self) -> None:
        """Take the values out of the state aliases; `link` gives them the state's values again."""
        for tensor in self.list_alive():
            swap_value(tensor, torch.empty_like(tensor, device="meta"))

    def link(self, tensors: Sequence[Tensor]) -> None:
        """Let each state alias share the memory of its tensor of the state."""
        for state_alias in self._aliases:
            tensor = state_alias.tensor()
            if tensor is None:
                continue
            owner = tensors[state_alias.alias.owner]
            if tensor.is_meta:
                swap_value(tensor, torch.empty_like(tensor, device=owner.device))
            tensor.data = make_view(owner, state_alias.alias)
