"""`OptimizerState`: one optimizer, and everything that its steps change besides the weights."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import ArgumentError, CheckpointMismatchError
from ..losses import Averages, Weight
from ..optimizers import (
    EMA,
    Accumulator,
    DeviceRates,
    SharedStepCounters,
    UpdatePlan,
    create_state,
    device_state,
    drop_gradients,
    parameters,
    share_counters,
)
from ..runtime import without_unsharding
from ..utils.compiling import compiling
from ..utils.json_codec import is_json
from ..utils.replaced import replaced
from .config import CompileConfig
from .context import StepContext


class OptimizerState:
    """One optimizer, and everything that its steps change besides the weights.

    `split` splits the gradients of parameters like these, if the parameters are split.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        config: CompileConfig,
        split: Callable[[list[nn.Parameter]], None] = lambda parameters: None,
    ) -> None:
        self.optimizer = optimizer
        self._config = config
        self._split = split
        self.rates: DeviceRates | None = None  # on the device; None on the host, and before the first step
        # With `accumulate_steps`: of the parts of a loss that are means over different weights, mostly one.
        self.accumulators: list[Accumulator] = []
        self.ema: EMA | None = None  # with `use_ema`
        self._own_step: Callable[..., Any] | None = None  # the optimizer's own step, while `taking_steps` hides it
        # In this step: the parameters that had a gradient so far, and True if `backward` has added the gradients.
        self._having: set[nn.Parameter] = set()
        self._added = False
        self._cleared = self._spent = False  # in this step: the gradients were cleared, and then used

    def create(self, shares: bool) -> None:
        """Create all tensors before the first step, so that the first two steps share one graph.

        On a device, parameters share step counters.
        """
        create_state(self.optimizer)
        if shares:
            share_counters(self.optimizer)
        for part in self.kept:
            part.extend()
        if self._accumulates and not self.accumulators:
            self.accumulators.append(Accumulator(self.optimizer))
        if self._config.ema is not None and self.ema is None:
            self.ema = EMA(self.optimizer)

    @property
    def _accumulates(self) -> bool:
        return self._config.gradients.accumulate_steps > 1

    @property
    def kept(self) -> list[Accumulator | EMA]:
        """The accumulators and the averages, if they exist."""
        return [*self.accumulators, *([] if self.ema is None else [self.ema])]

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor that a step changes, weights among them."""
        return [
            *parameters(self.optimizer),
            *device_state(self.optimizer),
            *(tensor for part in self.kept for tensor in part.tensors),
        ]

    def beside(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield what is kept of each parameter, with the parameter."""
        for parameter, state in self.optimizer.state.items():
            yield from ((parameter, value) for value in state.values() if isinstance(value, Tensor))
        for part in self.kept:
            yield from part.beside

    @contextmanager
    def taking_steps(self, context: StepContext, on_step: Callable[[], None]) -> Iterator[Callable[[bool], None]]:
        """A context in which the user's own `optimizer.step()` does what `apply_gradients` does, then calls `on_step`.

        It gives the function that clears the gradients, in place of the optimizer's own. Gradients that a step clears
        before it uses them are dropped at its end: no other step can see them, and they would be outputs of its graph,
        as large as the weights.
        """
        optimizer = self.optimizer
        own_step = optimizer.step
        zero_grad = optimizer.zero_grad

        @wraps(own_step)  # a scheduler looks for a mark of its own on it
        def step(closure: Callable[[], Any] | None = None) -> Any:
            loss = self.step(context, closure)
            on_step()
            return loss

        @wraps(zero_grad)
        def clear(set_to_none: bool = True) -> None:
            self._cleared = True
            zero_grad(set_to_none)

        self._own_step = own_step
        self._cleared = self._spent = self._added = False
        self._having = set()
        try:
            with replaced(optimizer, step=step, zero_grad=clear):
                yield clear
            if self._spent and self.rates is not None:
                drop_gradients(optimizer)
        finally:
            self._own_step = None

    def backward(self, loss: Tensor, averages: Averages) -> None:
        """Compute the gradients of a loss; with `accumulate_steps` add them to those of the batches before.

        The parts of a loss that are means over different weights are added up apart, each in a backward pass.
        """
        if not self._accumulates:
            loss.backward()
            return
        means = averages.of(loss)
        for slot, mean in enumerate(means):
            last = slot + 1 == len(means)
            mean.value.backward(retain_graph=not last)
            self._accumulate(slot, mean.weight)
            if not last:
                drop_gradients(self.optimizer)
        averages.pop_weight()  # a watch has seen these backward passes, too
        self._added = True

    def _accumulate(self, slot: int, weight: Weight | None) -> None:
        with without_unsharding():
            self._split(parameters(self.optimizer))
            while len(self.accumulators) <= slot:
                self.accumulators.append(Accumulator(self.optimizer))
            self._having |= self.accumulators[slot].add(None if isinstance(weight, str) else weight)

    def step(self, context: StepContext, closure: Callable[[], Any] | None = None) -> Any:
        """Update the weights from the gradients, as the step's update plan says, and return the closure's loss.

        Gradients that a closure computes, for an optimizer that calls one itself, are not clipped.

        Raises:
            ArgumentError: There is a closure, and `accumulate_steps` is above 1.
        """
        context.stepped = True
        with without_unsharding():
            return self._step(context, closure)

    def _step(self, context: StepContext, closure: Callable[[], Any] | None) -> Any:
        plan = context.update
        loss = None
        if self._accumulates:
            if closure is not None:
                raise ArgumentError(
                    "optimizer.step(closure) computes gradients by itself, which accumulate_steps can't sum: call "
                    "loss.backward() and optimizer.step(), or compile without accumulate_steps"
                )
            if not self._added:
                self._accumulate(0, context.averages.pop_weight())
            if plan.takes_step:
                drop_gradients(self.optimizer)
                for accumulator in self.accumulators:
                    accumulator.release(self._having)
            self._added, self._having = False, set()
        elif closure is None:
            self._split(parameters(self.optimizer))
        if plan.takes_step:
            loss = self._update(plan, closure)
        self._spent = self._cleared
        return loss

    def _update(self, plan: UpdatePlan, closure: Callable[[], Any] | None) -> Any:
        # Clipped after the release: the limits are for the mean gradient over all accumulated rows.
        if closure is None:
            self._config.gradients.clip(parameters(self.optimizer))
        # PyTorch's optimizers were measured as they are, not as they are compiled.
        with nullcontext() if self.rates is None else self.rates.stepping(), compiling(False):
            loss = (self._own_step or self.optimizer.step)(*([] if closure is None else [closure]))
        if self.ema is not None and self._config.ema is not None:
            self.ema.update(self._config.ema.momentum, plan.overwrites)
        return loss

    def tensors_by_name(self, own: str, names: Mapping[int, str]) -> dict[str, Tensor]:
        """Return the live tensors by their names in checkpoints, made of `own` and of the parameters' names by `id`."""
        found = {
            f"{own}/{key}/{names[id(parameter)]}": value
            for parameter, state in self.optimizer.state.items()
            for key, value in state.items()
            if isinstance(value, Tensor)
        }
        parts: list[tuple[str, Accumulator | EMA]] = [
            (_accumulated(slot), part) for slot, part in enumerate(self.accumulators)
        ]
        for kind, part in [*parts, *([] if self.ema is None else [("average", self.ema)])]:
            found |= {f"{kind}/{own}/{key}": t for key, t in part.named(names).items()}
        return found

    def options(self, names: Mapping[int, str]) -> dict[str, Any]:
        """Return the optimizer's options and numbers, as JSON holds them; the parameters' names come by their `id`."""
        return {
            "class": type(self.optimizer).__name__,
            "groups": [
                {"params": [names[id(p)] for p in group["params"]]}
                | {key: plain for key, value in group.items() if key != "params" and is_json(plain := _listed(value))}
                for group in self.optimizer.param_groups
            ],
            "numbers": {
                names[id(parameter)]: {key: value for key, value in state.items() if is_json(value)}
                for parameter, state in self.optimizer.state.items()
            },
        }

    def check_options(self, own: str, names: Mapping[int, str], given: Mapping[str, Any]) -> None:
        """Check that saved options are of an optimizer of this class with these groups.

        Raises:
            CheckpointMismatchError: The options are of another optimizer.
        """
        kind = type(self.optimizer).__name__
        if kind != given["class"]:
            raise CheckpointMismatchError(
                f"the checkpoint is of {given['class']}, and {own} is {kind}: compile with the same optimizer, or load "
                "the weights alone, with load_weights"
            )
        groups = [[names[id(p)] for p in group["params"]] for group in self.optimizer.param_groups]
        before = [group["params"] for group in given["groups"]]
        if groups != before:
            sizes = [[len(group) for group in which] for which in (before, groups)]
            raise CheckpointMismatchError(
                f"the parameter groups of {own} ({kind}) differ: {sizes[0]} parameters then, {sizes[1]} now, or "
                "different ones. Build the groups as before"
            )

    def load_options(self, names: Mapping[int, str], given: Mapping[str, Any]) -> None:
        """Load saved options and numbers, which `check_options` has checked."""
        for group, options in zip(self.optimizer.param_groups, given["groups"], strict=True):
            for key, value in options.items():
                if key != "params":
                    group[key] = tuple(value) if isinstance(group.get(key), tuple) else value
        for parameter in parameters(self.optimizer):
            numbers = given["numbers"].get(names[id(parameter)])
            if numbers:
                self.optimizer.state[parameter].update(numbers)

    def drop_parts(self) -> None:
        """Drop the accumulators of all parts of a loss but the first; `adopt` makes those of a checkpoint."""
        del self.accumulators[1:]

    def adopt(self, own: str, named: Mapping[str, nn.Parameter], given: Mapping[str, Tensor]) -> None:
        """Load state that the optimizer creates only in its first step, and hasn't yet; unshare step counters."""
        while self._accumulates and any(n.startswith(f"{_accumulated(len(self.accumulators))}/{own}/") for n in given):
            self.accumulators.append(Accumulator(self.optimizer))
        for full, value in given.items():  # optimizer/key/parameter
            owner, _, rest = full.partition("/")
            key, _, name = rest.partition("/")
            if owner == own and name in named and key not in self.optimizer.state.get(named[name], {}):
                self.optimizer.state[named[name]][key] = value.clone()
        if isinstance(self.optimizer, SharedStepCounters):
            counts = {id(p): given[key] for name, p in named.items() if (key := f"{own}/step/{name}") in given}
            self.optimizer.separate(lambda p: float(counts[id(p)]) if id(p) in counts else None)


def _accumulated(slot: int) -> str:
    """The kind of an accumulator's tensors in checkpoints."""
    return f"accumulated_{slot}" if slot else "accumulated"


def is_of_part(name: str) -> bool:
    """True for the name, in a checkpoint, of what only a loss of several parts has made, see `backward`."""
    return name.startswith("accumulated_")


def _listed(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_listed(item) for item in value]
    return value.item() if isinstance(value, Tensor) and not value.dim() else value
