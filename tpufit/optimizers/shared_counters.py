"""`SharedStepCounters`: one step counter for the parameters that step together, instead of one for each.

PyTorch's Adam and its kin count the steps of each parameter, and compute the same bias corrections from each count. In
a graph these are hundreds of operations on single numbers, and as many inputs and outputs.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

# What optimizers compute from a counter, a rate and numbers, by the names that a `TorchFunctionMode` sees.
_OF_NUMBERS = {"add", "sub", "mul", "div", "neg", "pow", "sqrt", "gt", "__rsub__", "__rdiv__", "__rpow__"}


class SharedCounterMode(TorchFunctionMode):
    """Moves a counter on once, and computes what follows from it once, in the one step of an optimizer."""

    def __init__(self, counters: Collection[int] = ()) -> None:
        super().__init__()
        self._counters = counters  # by their `id`
        self._moved = set[int]()
        self._known: dict[Hashable, tuple[tuple[Any, ...], Tensor, int]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.__name__
        if name == "__get__":  # an attribute of a tensor, which optimizers ask for most
            return func(*args)
        if name in _OF_NUMBERS:
            if not kwargs and all(_is_number(arg) for arg in args):
                return self._known_or_new(func, args)
        elif name == "add_" and id(args[0]) in self._counters:
            if id(args[0]) in self._moved:
                return args[0]
            self._moved.add(id(args[0]))
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function of PyTorch that is due."""
        return func(*args, **kwargs)

    def _known_or_new(self, func: Any, args: tuple[Any, ...]) -> Any:
        key = func, *((id(a), a._version) if isinstance(a, Tensor) else (type(a), a) for a in args)
        if key in self._known:
            _, result, version = self._known[key]
            if result._version == version:  # else it was changed in place since
                return result
        result = self.run(func, args, {})
        self._known[key] = args, result, result._version  # the arguments too: a dead tensor's `id` is another's soon
        return result


class SharedStepCounters(Optimizer):
    """An optimizer of PyTorch whose parameters may share their step counters."""

    mode: type[SharedCounterMode] = SharedCounterMode  # in which it steps
    _spare: Tensor | None = None  # a second counter with the value of the first, until the first step
    _stepped = False

    @staticmethod
    def fits(optimizer: Optimizer) -> bool:
        """True if an optimizer steps as PyTorch's own do, and nobody has wrapped its step, as a scheduler does."""
        return type(optimizer).step.__module__.startswith("torch.optim") and "step" not in vars(optimizer)

    def share(self) -> None:
        """Let parameters with equal counters share one. Only counters on the host are compared: there it is free."""
        counters: dict[float, Tensor] = {}
        for state in self.state.values():
            own = state.get("step")
            if isinstance(own, Tensor) and own.device.type == "cpu":
                state["step"] = counters.setdefault(own.item(), own)
        if counters or not self.state:
            self._spare = next(iter(counters.values())).clone() if len(counters) == 1 else None
            self._stepped = False

    def separate(self, steps: Callable[[Tensor], float | None]) -> None:
        """Give parameters that are to have other counts than those they share a counter with one of their own.

        `steps` gives the count of a parameter, or None if it is to keep what it has.
        """
        for counter, parameters in self._by_counter().items():
            counts = {p: float(count) for p in parameters if (count := steps(p)) is not None}
            first = next(iter(counts.values()), 0.0)
            others = {count: torch.tensor(count, dtype=counter.dtype) for count in {*counts.values()} - {first}}
            for p, count in counts.items():
                if count != first:
                    self.state[p]["step"] = others[count]
        self._stepped = True

    def counters(self) -> list[Tensor]:
        """The counters; first the spare one, so that their order stays as it is when it comes into use."""
        return [*([] if self._spare is None else [self._spare]), *self._by_counter()]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters, see the class of the optimizer."""
        loss = None
        if closure is not None:
            with torch.enable_grad():  # here, as it is what makes the gradients
                loss = closure()
        self._leave_idle_behind()
        with self.mode({id(state["step"]) for state in self.state.values() if "step" in state}):
            super().step()
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # the class below runs the hooks, and PyTorch would again after a copy

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # PyTorch lets a class run hooks once it makes the first of its kind, which may have been in another process.
        kind: Any = type(self).__mro__[type(self).__mro__.index(SharedStepCounters) + 1]
        if not getattr(kind.step, "hooked", False):
            kind.step = self.profile_hook_step(kind.step)
            kind.step.hooked = True

    def state_dict(self) -> dict[str, Any]:
        """Return the state with a counter for each parameter: PyTorch's own optimizers move each of them on."""
        found = super().state_dict()
        found["state"] = {
            key: state | {"step": state["step"].clone()} if isinstance(state.get("step"), Tensor) else state
            for key, state in found["state"].items()
        }
        return found

    def _by_counter(self) -> dict[Tensor, list[Tensor]]:
        """The parameters of each counter."""
        found: dict[Tensor, list[Tensor]] = defaultdict(list)
        for parameter, state in self.state.items():
            if isinstance(state.get("step"), Tensor):
                found[state["step"]].append(parameter)
        return dict(found)

    def _leave_idle_behind(self) -> None:
        """Give parameters without a gradient, whose counts are not to move now, a counter of their own."""
        for counter, parameters in self._by_counter().items():
            idle = [p for p in parameters if p.grad is None]
            if 0 < len(idle) < len(parameters):
                unused = self._spare is not None and not self._stepped
                own = self._spare if unused else counter.clone()  # a clone is new to the graphs there are
                for p in idle:
                    self.state[p]["step"] = own
                self._stepped = True
            self._stepped |= not idle


def _is_number(arg: Any) -> bool:
    return not arg.dim() if isinstance(arg, Tensor) else isinstance(arg, (int, float))
