"""`Snapshot`: all that training changes, as it was, so that what has been tried can be undone."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from torch import Tensor

from ..runtime import copy_into
from ..utils.random import RNGState
from .runner import Steps, copies


class Snapshot:
    """All that training changes, as it was.

    The values are kept on the host: on the device they would need as much memory again as the whole state has, which a
    net that just fits doesn't leave; a graph would have to be compiled to copy them; and they might be lost with the
    state when a step fails there. To fetch and to send them is one wait, and takes as long as a few steps.

    Args:
        model: Whose training.
    """

    def __init__(self, model: Steps) -> None:
        model.write_back()
        self._model = model
        self._draws = RNGState.now()
        optimizers = model._optimizers()
        losses = model._loss.modules if model._loss else ()
        modules = [part for module in (model.module, *losses) for part in module.modules()]
        # Of modules not only the modes: a flag may say whether a layer has seen its first batch, and a buffer may be
        # replaced by another tensor. Of the model the count of its steps, the seed, and what its own steps keep.
        self._dicts = [_kept(vars(owner)) for owner in (model, *modules)]
        self._dicts += [_kept(module._buffers) for module in modules]
        self._dicts += [_kept(group) for optimizer in optimizers for group in optimizer.param_groups]
        self._states = [_kept(optimizer.state) for optimizer in optimizers]
        self._states += [_kept(own) for optimizer in optimizers for own in optimizer.state.values()]
        tensors, _ = model._state_tensors()
        for _, state in self._states:
            tensors |= {id(value): value for value in state.values() if isinstance(value, Tensor)}
        self._swapped = [(averages, averages.swapped) for averages in model._averages.values()]
        self._tensors = list(tensors.values())
        self._values = copies(self._tensors, "state")

    def put_back(self) -> None:
        """Make it so again, whatever has happened since."""
        model = self._model
        model._state.revive()  # all of it gets its values anew
        model.write_back()
        for now, before in self._dicts + self._states:
            for key in now.keys() - before.keys():
                del now[key]
            now.update(before)
        for averages, swapped in self._swapped:
            averages.swapped = swapped
        # Its graphs may know of what a first step made, which is gone again. Made anew, they are found compiled.
        model._programs.pop("train", None)
        copy_into(self._tensors, self._values, model._place)
        self._draws.restore()


def _kept(values: MutableMapping[Any, Any]) -> tuple[MutableMapping[Any, Any], dict[Any, Any]]:
    """A dict, and what is in it now."""
    return values, dict(values)
