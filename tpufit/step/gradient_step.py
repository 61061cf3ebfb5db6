"""`GradientStep`: what one training step does with the gradients of an optimizer, from the backward pass to the update.

`TrainState.taking_steps` makes an object for each optimizer, and drops them at the end of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import ArgumentError
from ..losses import Weight
from ..optimizers import Accumulator, drop_gradients, list_parameters
from ..runtime import without_unsharding
from ..utils.is_compiling import compiling
from ..utils.replacing_attributes import replacing_attributes
from .compile_config import CompileConfig
from .optimizer_state import OptimizerState
from .step_context import StepContext


class GradientStep:
    """What one training step does with the gradients of an optimizer.

    Args:
        state: The optimizer's state.
        context: The training step.
        config: The arguments of `compile`.
        split: Shards the gradients of sharded parameters like the parameters.
        outer: The gradient step of the outer optimizer, if this is an inner optimizer such as SAM's base optimizer. It
            prepares the gradients for both (default: none).

    Attributes:
        cleared: True once the gradients were cleared.
        updating: True while the optimizer's own `step` runs.
    """

    def __init__(
        self,
        state: OptimizerState,
        context: StepContext,
        config: CompileConfig,
        split: Callable[[list[nn.Parameter]], None],
        outer: GradientStep | None = None,
    ) -> None:
        self._state = state
        self._context = context
        self._config = config
        self._split = split
        self._outer = outer
        self._original_step: Callable[..., Any] | None = (
            None  # the optimizer's method, while `taking_steps` replaces it
        )
        # The parameters whose gradients `backward` has accumulated; None if it hasn't, or a step has used them.
        self._added: set[nn.Parameter] | None = None
        self.cleared = False
        self._spent = False  # True if a step has used the gradients after they were cleared
        self.updating = False

    @contextmanager
    def taking_steps(self, on_step: Callable[[], None]) -> Iterator[Callable[[bool], None]]:
        """A context in which the user's `optimizer.step()` does what `apply_gradients` does, then calls `on_step`.

        It yields the function that replaces `optimizer.zero_grad`. If a step clears the gradients before it computes
        and uses them, they are dropped at its end: no other step can see them, and they would be outputs of the
        graph, as large as the weights.
        """
        optimizer = self._optimizer
        original_step = optimizer.step
        zero_grad = optimizer.zero_grad

        @wraps(original_step)  # copies the attribute by which schedulers recognize the method that they have patched
        def step(closure: Callable[[], Any] | None = None) -> Any:
            loss = self.step(closure)
            on_step()
            return loss

        @wraps(zero_grad)
        def clear(set_to_none: bool = True) -> None:
            (self._outer or self).cleared = True
            zero_grad(set_to_none)

        self._original_step = original_step
        try:
            with replacing_attributes(optimizer, step=step, zero_grad=clear):
                yield clear
            if self._spent and self._state.rates is not None:
                drop_gradients(optimizer)
        finally:
            self._original_step = None

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of a loss; with `accumulate_steps` add them to the accumulated gradients.

        Each part of a loss with a different denominator has its own backward pass and accumulator.
        """
        if self._outer is not None:
            self._outer.backward(loss)
            return
        if not self._accumulates:
            loss.backward()
            return
        averages = self._context.averages
        means = averages.of(loss)
        added: set[nn.Parameter] = set()
        for slot, mean in enumerate(means):
            last = slot + 1 == len(means)
            mean.value.backward(retain_graph=not last)
            added |= self._accumulate(slot, mean.weight)
            if not last:
                drop_gradients(self._optimizer)
        averages.pop_weight()  # a `LossWatch` has noted these backward passes
        self._added = added

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the weights from the gradients, as the step's update plan says, and return the closure's loss.

        Gradients that a closure computes aren't clipped, because the optimizer calls the closure itself.

        Raises:
            ArgumentError: There is a closure, and `accumulate_steps` is above 1.
        """
        lead = self._outer or self
        if lead.updating:  # a part of the outer optimizer's step, which has prepared the gradients
            return self._take_step(closure)
        self._context.stepped = True
        with without_unsharding():
            return lead.step_by(closure, self._take_step)

    def step_by(self, closure: Callable[[], Any] | None, take_step: Callable[[Callable[[], Any] | None], Any]) -> Any:
        """Like `step`; `take_step` calls the step of this optimizer, or of an inner optimizer."""
        plan = self._context.update
        loss = None
        if self._accumulates:
            if closure is not None:
                raise ArgumentError(
                    "optimizer.step(closure) computes gradients by itself, which accumulate_steps can't sum: call "
                    "loss.backward() and optimizer.step(), or compile without accumulate_steps"
                )
            added = self._added
            self._added = None
            if added is None:
                added = self._accumulate(0, self._context.averages.pop_weight())
            if plan.takes_step:
                drop_gradients(self._optimizer)
                for accumulator in self._state.accumulators:
                    accumulator.release(added)
        elif closure is None:
            self._split(list_parameters(self._optimizer))
        if plan.takes_step:
            loss = self._update(closure, take_step)
        self._spent = self.cleared
        return loss

    @property
    def _optimizer(self) -> Optimizer:
        return self._state.optimizer

    @property
    def _accumulates(self) -> bool:
        return self._config.gradients.accumulate_steps > 1

    def _accumulate(self, slot: int, weight: Weight | None) -> set[nn.Parameter]:
        """Add the gradients to an accumulator, and return the parameters that have a gradient."""
        accumulators = self._state.accumulators
        with without_unsharding():
            self._split(list_parameters(self._optimizer))
            while len(accumulators) <= slot:
                accumulators.append(Accumulator(self._optimizer))
            return accumulators[slot].add(None if isinstance(weight, str) else weight)

    def _update(self, closure: Callable[[], Any] | None, take_step: Callable[[Callable[[], Any] | None], Any]) -> Any:
        # Clip after `step_by` has released the accumulated gradients: the limits are for the mean over all their rows.
        if closure is None:
            self._config.gradients.clip(list_parameters(self._optimizer))
        self.updating = True
        try:
            loss = take_step(closure)
        finally:
            self.updating = False
        ema = self._state.ema
        if ema is not None and self._config.ema is not None:
            ema.update(self._config.ema.momentum, self._context.update.overwrites)
        return loss

    def _take_step(self, closure: Callable[[], Any] | None) -> Any:
        rates = self._state.rates
        # `compiling(False)` keeps the eager form of PyTorch's optimizers, for which the benchmarks were run.
        with nullcontext() if rates is None else rates.stepping(), compiling(False):
            return (self._original_step or self._optimizer.step)(*([] if closure is None else [closure]))
