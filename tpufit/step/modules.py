"""The user's module: which ones can be trained, and their modes."""

from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..errors import ArgumentError, PlacementError
from ..utils.users_code import warn


def usable(module: object) -> nn.Module:
    """Return the module, without `torch.compile` around it.

    Raises:
        ArgumentError: It is no module, or it has a part that torch.compile or torch.jit made for other devices.
    """
    if not isinstance(module, nn.Module):
        raise ArgumentError(f"tpufit.Model wraps a torch.nn.Module (an instance), got {module!r}")
    original = dict(module.named_children()).get("_orig_mod")
    if original is not None:
        warn("torch.compile has no effect here: tpufit uses the module inside, and compiles its steps for the device")
        module = original
    for name, layer in module.named_modules():
        what = f"the layer {name!r}" if name else "the module"
        if isinstance(layer, torch.jit.ScriptModule):
            raise ArgumentError(f"{what} was made by torch.jit, which can't be traced for XLA: pass the original one")
        if name.endswith("_orig_mod") or getattr(layer, "_compiled_call_impl", None) is not None:
            what = what.replace("._orig_mod", "")
            raise ArgumentError(f"{what} was compiled by torch.compile, which knows no XLA device: pass it uncompiled")
    return module


def refuse_host_inputs(module: nn.Module, args: Any, kwargs: Any) -> None:
    """Refuse inputs on the host for a module on the device: a forward pre-hook of the user's module while it is there.

    Raises:
        PlacementError: There are some.
    """
    parameter = next(module.parameters(), None)
    if parameter is None or parameter.device.type in ("cpu", "meta"):
        return
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if any(tensor.device.type == "cpu" and tensor.dim() for tensor in given):
        raise PlacementError(
            f"{type(module).__name__} is on the device since it was trained, and its input is on the host. Call the "
            "tpufit.Model instead, model(x), which takes both, or model.predict(x); or bring the module back with "
            "model.to_cpu()"
        )


@contextmanager
def modes_kept(*modules: nn.Module) -> Iterator[None]:
    """Restore the mode of each layer, training or not, at the end."""
    modes = [(part, part.training) for module in modules for part in module.modules()]
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def train(module: nn.Module, learns: Container[int], modes: Mapping[int, bool] | None = None) -> None:
    """Put a module into training mode, but for the parts that rest: in eval mode, and with nothing in them that learns.

    Such a part was put into eval mode by itself, while the module around it was in training mode. A module that is in
    eval mode as a whole, as Hugging Face's come, says nothing of its parts: there only frozen norms keep their
    statistics.

    Args:
        module: The module.
        learns: The `id` of each parameter that learns.
        modes: The mode of each part, by its `id`, as the user has set it (default: as it is).
    """
    was = {id(part): part.training if modes is None else modes[id(part)] for part in module.modules()}
    resting = [] if all(was.values()) else _resting(module, was, _learning(module, learns), True, False)
    module.train()
    for part in resting:
        part.training = False


def _resting(
    part: nn.Module, was: Mapping[int, bool], learning: Mapping[int, bool | None], around: bool, frozen: bool
) -> list[nn.Module]:
    """List the parts that rest; the part around this one was in training mode, or is `frozen`."""
    own = was[id(part)]
    learned = learning[id(part)]
    if not own and not learned and around:
        return [inner for inner in part.modules() if not was[id(inner)]]
    frozen = not learned and (frozen or learned is False)
    found = [part] if not own and frozen and getattr(part, "running_mean", None) is not None else []
    return found + [rests for child in part.children() for rests in _resting(child, was, learning, own, frozen)]


def _learning(module: nn.Module, learns: Container[int]) -> dict[int, bool | None]:
    """Tell of each part, by its `id`, if a parameter in it learns; None if there is none in it."""
    found: dict[int, bool | None] = {}

    def look(part: nn.Module) -> bool | None:
        if id(part) not in found:
            each = [id(p) in learns for p in part.parameters(recurse=False)]
            inner = [own for child in part.children() if (own := look(child)) is not None]
            found[id(part)] = any(each + inner) if each or inner else None
        return found[id(part)]

    look(module)
    return found


class Modes:
    """The modes of a module's parts as the user has set them. `fit` leaves all in eval mode, which says nothing."""

    def __init__(self) -> None:
        # What the last `fit` has put into eval mode, by `id`: each part, and whether something in it learned.
        self._left: dict[int, tuple[nn.Module, bool]] = {}
        self._set: dict[int, bool] = {}

    def note(self, module: nn.Module, learns: Container[int]) -> None:
        """Note the modes as they are. A part that `fit` has left in eval mode was set to training.

        Not so if it has been frozen since: then it is in the mode that the user sees.
        """
        ours = set(self._left)
        if ours:
            learning = _learning(module, learns)
            for part, learned in self._left.values():
                if learned and not learning.get(id(part)):
                    ours -= {id(inner) for inner in part.modules()}
        self._set = {id(part): part.training or id(part) in ours for part in module.modules()}

    def train(self, module: nn.Module, learns: Container[int]) -> None:
        """Put a module into training mode, but for the parts that rest, see `train`."""
        train(module, learns, {id(part): self._set.get(id(part), part.training) for part in module.modules()})

    def leave(self, module: nn.Module, learns: Container[int]) -> None:
        """Put a module into eval mode, as `fit` does."""
        learning = _learning(module, learns)
        resting = set(map(id, _resting(module, self._set, learning, True, False)))
        trained = [part for part in module.modules() if id(part) not in resting]
        self._left = {id(part): (part, bool(learning[id(part)])) for part in trained}
        module.eval()
