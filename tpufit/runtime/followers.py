"""`Followers`: the user's tensors outside of the state that share memory with it.

A callback makes one by `p.data = best`, for instance. As long as the state's values are taken out of the user's
tensors, its followers are empty, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from .aliases import Alias, aliases_of, is_shared_elsewhere, make_view
from .lazy import find_alive
from .transfer import swap_value


@dataclass(frozen=True)
class Follower:
    """A tensor outside of a list that shares memory with a tensor of the list."""

    tensor: TensorWeakRef
    alias: Alias


def followers_of(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> list[Follower]:
    """Find the tensors among `others` that share all of their memory with a tensor of the list."""
    first = len(tensors)
    return [
        Follower(TensorWeakRef(others[alias.index - first]), alias)
        for alias in aliases_of([*tensors, *others])
        if alias.index >= first > alias.owner and not alias.apart
    ]


class Followers:
    """The known followers of the state's tensors."""

    def __init__(self) -> None:
        self._followers: list[Follower] = []

    def replace(self, followers: list[Follower]) -> None:
        """Replace the known followers by others."""
        self._followers = followers

    def list_alive(self) -> list[Tensor]:
        """Return the followers that the user still keeps."""
        return [tensor for follower in self._followers if (tensor := follower.tensor()) is not None]

    def search(self, tensors: Sequence[Tensor], everywhere: bool) -> list[Tensor]:
        """Find the followers of the state's tensors, which must have been computed.

        A search among all tensors takes a tenth of a second or more. Without `everywhere` it is made only if a tensor
        that isn't known shares memory with the state.

        Returns:
            The searched tensors that follow no tensor of the state.
        """
        others = self.list_alive()
        if everywhere or is_shared_elsewhere([*tensors, *others]):
            own = set(map(id, tensors))
            others = [tensor for tensor in find_alive() if id(tensor) not in own]
        self._followers = followers_of(tensors, others)
        following = set(map(id, self.list_alive()))
        return [tensor for tensor in others if id(tensor) not in following]

    def empty(self) -> None:
        """Take the values out of the followers; `link` gives them the state's values again."""
        for tensor in self.list_alive():
            swap_value(tensor, torch.empty_like(tensor, device="meta"))

    def link(self, tensors: Sequence[Tensor]) -> None:
        """Let each follower share the memory of its tensor of the state."""
        for follower in self._followers:
            tensor = follower.tensor()
            if tensor is None:
                continue
            owner = tensors[follower.alias.owner]
            if tensor.is_meta:
                swap_value(tensor, torch.empty_like(tensor, device=owner.device))
            tensor.data = make_view(owner, follower.alias)
