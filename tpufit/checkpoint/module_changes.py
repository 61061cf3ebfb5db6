"""`ModuleChanges`: what changes in modules during a `fit`, apart from tensors and attributes."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import nn

from ..errors import join_few, say_count
from ..step import Engine
from ..utils.python_state import HOOKS
from ..utils.user_code import warn


class _Layer(NamedTuple):
    """What the check of a resumed training compares of a layer."""

    kind: str  # the name of its class
    hooks: int  # the number of its hooks


class ModuleChanges:
    """The changes of the model's modules after this object is made: `requires_grad`, replaced layers, and hooks.

    `requires_grad` is saved and restored, except of parameters that a callback such as `Freeze` sets in each epoch.
    Layers and hooks can't be saved: if a resumed training doesn't make their changes again, a warning says so.
    """

    def __init__(self, engine: Engine, callbacks: Iterable[Any]) -> None:
        self._engine = engine
        self._callbacks = callbacks
        self._learned = self._find_learning()
        self._layers = self._find_layers()
        # A lazy layer changes its class in its first step.
        self._lazy = {name for name, part in self._walk() if isinstance(part, nn.modules.lazy.LazyModuleMixin)}
        self._expected: Mapping[str, Any] = {}  # the layers that the resumed checkpoint's training had changed

    def state_dict(self) -> dict[str, Any]:
        """Return the changes since this object was made, as JSON values."""
        learns = self._find_learning()
        layers = self._find_layers()
        names = [name for name in {**self._layers, **layers} if name not in self._lazy]
        return {
            "requires_grad": {
                name: learns[name] for name, before in self._learned.items() if learns.get(name, before) != before
            },
            "layers": {name: layers.get(name) for name in names if layers.get(name) != self._layers.get(name)},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `requires_grad`, of other parameters as it was when this object was made."""
        for name, parameter in self._list_parameters().items():
            learns = state["requires_grad"].get(name, self._learned.get(name))
            if learns is not None and parameter.requires_grad is not learns:
                parameter.requires_grad_(learns)
        self._expected = state["layers"]

    def check(self, step: int) -> None:
        """Warn once if the resumed training lacks changes of layers that the checkpoint's training had made.

        Args:
            step: The checkpoint's step.
        """
        layers = self._find_layers()
        pairs = [(name, then and _Layer(*then), layers.get(name)) for name, then in self._expected.items()]
        lost = [f"{name} ({_describe(then, now)})" for name, then, now in pairs if then != now]
        self._expected = {}
        if lost:
            warn(
                f"before step {step} training had changed layers or their hooks, which checkpoints can't save, and "
                f"this fit continues without the changes: {join_few(lost)}. Make each change in on_epoch_begin from "
                f"its epoch on, with 'epoch >= 1' instead of 'epoch == 1', and resume from step {step} again"
            )

    def _list_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters by name, except those that a callback sets."""
        ours = {id(p) for callback in self._callbacks for p in getattr(callback, "sets_requires_grad_of", ())}
        every = self._engine.state.list_every_tensor().items()
        return {name: p for name, p in every if isinstance(p, nn.Parameter) and id(p) not in ours}

    def _find_learning(self) -> dict[str, bool]:
        return {name: parameter.requires_grad for name, parameter in self._list_parameters().items()}

    def _walk(self) -> Iterable[tuple[str, nn.Module]]:
        """Yield the layers of all modules, by name."""
        modules = {"": self._engine.model.module, **self._engine.state.other_modules()}
        for name, module in modules.items():
            for path, part in module.named_modules(remove_duplicate=False):
                yield "/".join(filter(None, (name, path))) or "the module", part

    def _find_layers(self) -> dict[str, _Layer]:
        return {name: _Layer(type(part).__qualname__, _count_hooks(part)) for name, part in self._walk()}


def _count_hooks(layer: nn.Module) -> int:
    """Count a layer's hooks, except tpufit's own."""
    hooks = [hook for kind in HOOKS for hook in (vars(layer).get(kind) or {}).values()]
    owners = [getattr(hook, "__module__", None) or "" for hook in hooks]
    return sum(not owner.startswith("tpufit.") for owner in owners)


def _describe(then: _Layer | None, now: _Layer | None) -> str:
    """Say how a layer differs, e.g. `ReLU then, Tanh now`."""
    if then is not None and now is not None and then.kind == now.kind:
        return f"{say_count(then.hooks, 'hook')} then, {now.hooks} now"
    return f"{then.kind if then else 'none'} then, {now.kind if now else 'none'} now"
