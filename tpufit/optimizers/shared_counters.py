"""`SharedStepCounters`: one step counter for the parameters that step together, instead of one for each.

PyTorch's Adam and similar optimizers count the steps of each parameter, and compute the same bias corrections from each
count. In a graph these are hundreds of operations on scalars, and as many inputs and outputs.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

# Functions that optimizers apply to counters, rates and numbers, by the names that a `TorchFunctionMode` sees.
_SCALAR_FUNCTIONS = {"add", "sub", "mul", "div", "neg", "pow", "sqrt", "gt", "__rsub__", "__rdiv__", "__rpow__"}


class SharedCounterMode(TorchFunctionMode):
    """Advances each shared counter once in an optimizer's step, and computes what depends on it once."""

    def __init__(self, counters: Collection[int] = ()) -> None:
        super().__init__()
        self._counters = counters  # by their `id`
        self._moved = set[int]()
        self._known: dict[Hashable, tuple[tuple[Any, ...], Tensor, int]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.__name__
        if name == "__get__":  # reads an attribute of a tensor; first, as the most frequent call
            return func(*args)
        if name in _SCALAR_FUNCTIONS:
            if not kwargs and all(_is_number(arg) for arg in args):
                return self._compute_once(func, args)
        elif name == "add_" and id(args[0]) in self._counters:
            if id(args[0]) in self._moved:
                return args[0]
            self._moved.add(id(args[0]))
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function of PyTorch."""
        return func(*args, **kwargs)

    def compute(self, func: Any, args: tuple[Any, ...]) -> Any:
        """Compute a function of scalars."""
        return self.run(func, args, {})

    def _compute_once(self, func: Any, args: tuple[Any, ...]) -> Any:
        key = func, *((id(a), a._version) if isinstance(a, Tensor) else (type(a), a) for a in args)
        if key in self._known:
            _, result, version = self._known[key]
            if result._version == version:  # else it was changed in place
                return result
        result = self.compute(func, args)
        self._known[key] = args, result, result._version  # the arguments keep tensors alive, so that no `id` is reused
        return result


class SharedStepCounters(Optimizer):
    """An optimizer of PyTorch whose parameters may share their step counters."""

    mode: type[SharedCounterMode] = SharedCounterMode  # the mode of its steps
    _spare: Tensor | None = None  # a second counter of the same value, until the first step
    _stepped = False
    saved_elsewhere = frozenset({"_spare"})  # it is one of `counters`

    @staticmethod
    def fits(optimizer: Optimizer) -> bool:
        """True if an optimizer has the step of a PyTorch optimizer, not wrapped as by a scheduler."""
        return type(optimizer).step.__module__.startswith("torch.optim") and "step" not in vars(optimizer)

    def share(self) -> None:
        """Let parameters with equal counters share one. Only counters on the host are compared, which needs no wait."""
        counters: dict[float, Tensor] = {}
        for state in self.state.values():
            counter = state.get("step")
            if isinstance(counter, Tensor) and counter.device.type == "cpu":
                state["step"] = counters.setdefault(counter.item(), counter)
        if counters or not self.state:
            self._spare = next(iter(counters.values())).clone() if len(counters) == 1 else None
            self._stepped = False

    def separate(self, steps: Callable[[Tensor], float | None]) -> None:
        """Give parameters whose new counts differ separate counters.

        `steps` returns the new count of a parameter, or None if it keeps its count.
        """
        for counter, parameters in self._by_counter().items():
            counts = {p: float(count) for p in parameters if (count := steps(p)) is not None}
            first = next(iter(counts.values()), 0.0)
            others = {count: torch.tensor(count, dtype=counter.dtype) for count in {*counts.values()} - {first}}
            for p, count in counts.items():
                if count != first:
                    self.state[p]["step"] = others[count]
        self._stepped = True

    def list_counters(self) -> list[Tensor]:
        """Return the counters, the spare one first, so that the order doesn't change once it is used."""
        return [*([] if self._spare is None else [self._spare]), *self._by_counter()]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters; see the optimizer's class."""
        loss = None
        if closure is not None:
            with torch.enable_grad():  # the closure computes gradients
                loss = closure()
        self._separate_idle()
        with self.mode({id(state["step"]) for state in self.state.values() if "step" in state}):
            super().step()
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # the base class runs the hooks; PyTorch would run them twice

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # PyTorch makes a class run hooks at the first `__init__`, which may have been in another process.
        kind: Any = type(self).__mro__[type(self).__mro__.index(SharedStepCounters) + 1]
        if not getattr(kind.step, "hooked", False):
            kind.step = self.profile_hook_step(kind.step)
            kind.step.hooked = True

    def state_dict(self) -> dict[str, Any]:
        """Return the state with a counter for each parameter, as PyTorch's optimizers expect."""
        saved = super().state_dict()
        saved["state"] = {
            key: state | {"step": state["step"].clone()} if isinstance(state.get("step"), Tensor) else state
            for key, state in saved["state"].items()
        }
        return saved

    def _by_counter(self) -> dict[Tensor, list[Tensor]]:
        """Return the parameters of each counter."""
        parameters: dict[Tensor, list[Tensor]] = defaultdict(list)
        for parameter, state in self.state.items():
            if isinstance(state.get("step"), Tensor):
                parameters[state["step"]].append(parameter)
        return dict(parameters)

    def _separate_idle(self) -> None:
        """Give parameters without a gradient, whose counts must not advance, a separate counter."""
        for counter, parameters in self._by_counter().items():
            idle = [p for p in parameters if p.grad is None]
            if 0 < len(idle) < len(parameters):
                unused = self._spare is not None and not self._stepped
                separate = self._spare if unused else counter.clone()  # a clone isn't an input of existing graphs
                for p in idle:
                    self.state[p]["step"] = separate
                self._stepped = True
            self._stepped |= not idle


def _is_number(arg: Any) -> bool:
    return not arg.dim() if isinstance(arg, Tensor) else isinstance(arg, (int, float))
