"""The user's module: whether tpufit can train it, and the training modes of its parts."""

from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..errors import ArgumentError, PlacementError
from ..utils.user_code import warn


def unwrap_module(module: object) -> nn.Module:
    """Return the module without a wrapper of `torch.compile`.

    Raises:
        ArgumentError: It isn't a module, or torch.compile, torch.jit or torch.export has made a part of it.
    """
    if not isinstance(module, nn.Module):
        raise ArgumentError(f"tpufit.Model wraps a torch.nn.Module (an instance), got {module!r}")
    original = dict(module.named_children()).get("_orig_mod")
    if original is not None:
        warn(
            "torch.compile has no effect here: tpufit uses the module inside, and compiles its steps for the device. "
            "On a GPU compile(jit_compile=True) calls torch.compile"
        )
        module = original
    for name, layer in module.named_modules():
        what = f"the layer {name!r}" if name else "the module"
        if isinstance(layer, torch.jit.ScriptModule):
            raise ArgumentError(f"{what} was made by torch.jit, which can't be traced for XLA: pass the original")
        if isinstance(layer, torch.fx.GraphModule) and "eval" in vars(layer):  # a method that raises an error
            raise ArgumentError(
                f"{what} was made by torch.export, which fixes its mode and its batch size: pass the original"
            )
        if name.endswith("_orig_mod") or getattr(layer, "_compiled_call_impl", None) is not None:
            what = what.replace("._orig_mod", "")
            raise ArgumentError(
                f"{what} was compiled by torch.compile, which knows no XLA device: pass it uncompiled. On a GPU "
                "compile(jit_compile=True) calls torch.compile"
            )
    return module


def refuse_host_inputs(module: nn.Module, args: Any, kwargs: Any) -> None:
    """Refuse inputs on the host: a forward pre-hook of the user's module while the module is on the device.

    Raises:
        PlacementError: An input is on the host.
    """
    parameter = next(module.parameters(), None)
    if parameter is None or parameter.device.type in ("cpu", "meta"):
        return
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if any(tensor.device.type == "cpu" and tensor.dim() for tensor in given):
        raise PlacementError(
            f"{type(module).__name__} has been on the device since its training, but its input is on the host. Call "
            "the tpufit.Model instead, model(x), which takes both, or model.predict(x); or bring the module back with "
            "model.to_cpu()"
        )


@contextmanager
def keeping_modes(*modules: nn.Module) -> Iterator[None]:
    """A context that restores each layer's mode, training or eval, at its end."""
    modes = [(part, part.training) for module in modules for part in module.modules()]
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def train(module: nn.Module, learns: Container[int], modes: Mapping[int, bool] | None = None) -> None:
    """Put a module into training mode, except frozen parts that the user has put into eval mode.

    A frozen part stays in eval mode only if the module around it was in training mode. If the whole module is in eval
    mode, as Hugging Face delivers modules, the user has chosen no parts: then only frozen norms stay in eval mode, and
    keep their statistics.

    Args:
        module: The module.
        learns: The `id` of each parameter that learns.
        modes: The mode of each part, by its `id`, as the user has set it (default: the current mode).
    """
    was = {id(part): part.training if modes is None else modes[id(part)] for part in module.modules()}
    in_eval = [] if all(was.values()) else _find_kept_in_eval(module, was, _find_learning(module, learns), True, False)
    module.train()
    for part in in_eval:
        part.training = False


def _find_kept_in_eval(
    part: nn.Module, was: Mapping[int, bool], learning: Mapping[int, bool | None], around: bool, frozen: bool
) -> list[nn.Module]:
    """List the parts that stay in eval mode, see `train`.

    `around` is True if the part around this one was in training mode, and `frozen` if that part doesn't learn.
    """
    training = was[id(part)]
    learned = learning[id(part)]
    if not training and not learned and around:
        return [inner for inner in part.modules() if not was[id(inner)]]
    frozen = not learned and (frozen or learned is False)
    norm = [part] if not training and frozen and getattr(part, "running_mean", None) is not None else []
    return norm + [
        kept for child in part.children() for kept in _find_kept_in_eval(child, was, learning, training, frozen)
    ]


def _find_learning(module: nn.Module, learns: Container[int]) -> dict[int, bool | None]:
    """Return for each part, by its `id`, whether a parameter in it learns; None if it has no parameter."""
    learning: dict[int, bool | None] = {}

    def visit(part: nn.Module) -> bool | None:
        if id(part) not in learning:
            each = [id(p) in learns for p in part.parameters(recurse=False)]
            inner = [learned for child in part.children() if (learned := visit(child)) is not None]
            learning[id(part)] = any(each + inner) if each or inner else None
        return learning[id(part)]

    visit(module)
    return learning


class Modes:
    """The modes of a module's parts as the user has set them, since `fit` puts all parts into eval mode at its end."""

    def __init__(self) -> None:
        # The parts that the last `fit` has put into eval mode, by `id`, each with True if a parameter in it learned.
        self._put_to_eval: dict[int, tuple[nn.Module, bool]] = {}
        self._set: dict[int, bool] = {}

    def note(self, module: nn.Module, learns: Container[int]) -> None:
        """Note the current modes. A part that `fit` has put into eval mode counts as set to training.

        If the part was frozen since then, it counts as set to its current mode.
        """
        ours = set(self._put_to_eval)
        if ours:
            learning = _find_learning(module, learns)
            for part, learned in self._put_to_eval.values():
                if learned and not learning.get(id(part)):
                    ours -= {id(inner) for inner in part.modules()}
        self._set = {id(part): part.training or id(part) in ours for part in module.modules()}

    def train(self, module: nn.Module, learns: Container[int]) -> None:
        """Put a module into training mode, except parts that stay in eval mode, see `train`."""
        train(module, learns, {id(part): self._set.get(id(part), part.training) for part in module.modules()})

    def leave(self, module: nn.Module, learns: Container[int]) -> None:
        """Put a module into eval mode at the end of `fit`."""
        learning = _find_learning(module, learns)
        in_eval = set(map(id, _find_kept_in_eval(module, self._set, learning, True, False)))
        trained = [part for part in module.modules() if id(part) not in in_eval]
        self._put_to_eval = {id(part): (part, bool(learning[id(part)])) for part in trained}
        module.eval()
