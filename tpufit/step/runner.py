"""`StepRunner`: runs the steps of one pass over data, and waits for none of them.

A group of steps runs as one graph. Its first two calls capture it: their Python is traced, compiled and compared. Later
calls replay it: no Python of the step runs, and the weights' values are held apart from the user's tensors.

The graph's inputs are one flat list of tensors: those of the batches, see `DeviceGroup`, and then for each attached
optimizer its learning rates, a vector a step; last the numbers of `GroupNumbers`.
`StepRunner._inputs` writes that list, and `StepRunner._body`, the Python that is traced, reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .. import optimizers
from ..diagnostics.summary import noting_outputs
from ..errors import ArgumentError
from ..losses import Averages, LossWatch, ModuleLoss, count_targets
from ..metrics import LazyLogs, first_bad, metrics_in
from ..optimizers import UpdatePlan
from ..runtime import recomputing, to_host
from ..utils.random import step_seed
from ..utils.users_code import warn
from .batch import BatchSender, DeviceGroup
from .context import StepContext
from .engine import Engine
from .methods import is_usual
from .tally import Tally

# For steps_per_execution="auto": starting a graph costs the host about 0.4 ms, little beside so many seconds of steps.
# The number of steps is bounded because a longer graph takes longer to compile.
_WORTH_STARTING = 0.005
_MOST_JOINED = 16


class StepRunner:
    """Runs the steps of one pass: starts their graphs, and waits for none of them.

    Args:
        warm: True if there was a pass over the data before, so that no step should need a new graph (default False).
        alone: True if each batch is a pass of its own, see `trainer/on_batch.py` (default False).

    Attributes:
        inside: True while steps are being started. It stays True after an error: a step may be half done.
        before_step: Called before each training step with the optimizer's steps so far; it may set rates.
    """

    def __init__(
        self,
        engine: Engine,
        role: str,
        transform: Callable[[Any], Any] | None = None,
        warm: bool = False,
        alone: bool = False,
    ) -> None:
        self._engine = engine
        self._role = engine.roles[role]
        self._transform = transform
        self.tally = Tally()
        self.alone = alone
        self.inside = False
        self.before_step: Callable[[int], None] | None = None
        state = engine.state
        loss = engine.config.loss
        self._in_flight = state.placement.in_flight()
        label_range = loss.label_range if loss is not None and self._role.logs else None
        self._sender = BatchSender(state.placement, self._role.keys, label_range)
        # Before the program is built: optimizer state is an input of the first step's graph.
        if self._role.learns:
            state.drop_gradients()
            for optimizer in state.named_optimizers().values():
                state.attach(optimizer)
        tracked = metrics_in(vars(engine.model)) if self._role.logs else {}
        self._program, self._metrics = self._role.prepare(engine.config, state, tracked)
        self._warm = warm
        self._borrow()
        self.restart()
        if self._role.learns:
            engine.log.training = self.tally

    def _borrow(self) -> None:
        self._role.lend(self, self._transform, self._engine.options.strict, self._warm)

    @property
    def on_host(self) -> bool:
        """True if its steps run in plain PyTorch."""
        return self._engine.state.placement.on_host

    def send(self, batches: Sequence[Any], labels: Any = None) -> list[DeviceGroup]:
        """Send batches to the device, ahead of their steps: `group_size` of them to run as one graph."""
        return self._sender(batches, 1 < self.group_size <= len(batches), labels)

    def __call__(
        self,
        group: DeviceGroup,
        pause: Callable[[], AbstractContextManager[object]] = nullcontext,
        last: bool = False,
        remaining: int | None = None,
    ) -> Any:
        """Run a step for each batch of a group, as one graph.

        Args:
            pause: Returns a context in which nothing else is sent to the device.
            last: True if no batch of the pass comes after these.
            remaining: The number of groups of the pass after this one, if it is known.

        Returns:
            For `"predict"` the outputs of each batch, on the device; else None.

        Raises:
            LabelError: A label of a batch is outside the module's classes.
        """
        engine = self._engine
        role = self._role
        program = self._program
        state = engine.state
        if role.borrower is not self:  # a callback has run another pass of this role in the middle of this one
            self._borrow()
        # First: `before_step` may change options that `refresh` looks at, and a bad label must raise before any change.
        steps = len(group.forms)
        updates = state.next_updates(steps, last) if role.learns else []
        inputs = self._inputs(group, updates)
        seeds = self._seeds(steps)
        if program.captures:
            used = [optimizer for optimizer, _ in state.attached]
            role.keys.refresh(state.modules, used, state.device.held, program.traced_keys)
        # From here on an error may leave the step half done, and nothing is saved: even `count_updates` already counts.
        self.inside = True
        role.group = group
        engine.latest = role
        state.count_updates(updates)
        key = role.keys.of(group.forms[0].signature, steps, group.stacked, updates)
        if role.learns:
            course, added = state.group_numbers.find(key, state.attached, state.placement)
            key = (*key, *course)
            inputs = [*inputs, *added]
        body = partial(self._body, group, updates)
        if program.audit_due(key, remaining):
            with state.counters.untouched(state.named_optimizers().values()):
                program.audit(key, inputs, seeds, body, pause, self._sample(group, updates))
        if program.replays(key):
            outputs = program.replay(key, inputs, seeds)
            state.counters.replayed((role.name, key))
            if role.learns:
                state.group_numbers.replayed()
        elif not program.captures:
            outputs = program(key, inputs, seeds, body, pause)
            if role.learns:
                state.group_numbers.traced()
        else:
            program.cause = role.keys.cause(key, steps, program.traced_keys)
            with state.counters.traced((role.name, key), state.named_optimizers().values()):
                outputs = program(key, inputs, seeds, body, pause)
            if role.learns:
                state.group_numbers.traced()
            engine.register_new_state()  # here only: a replayed step runs no Python that could create state
            sample = self._sample(group, updates)
            if sample is not None and program.lacks_sample(key):
                with state.counters.untouched(state.named_optimizers().values()):
                    program.trace_sample(key, inputs, seeds, sample, pause)
            self._tell_change(program.pop_change())
        if role.learns and engine.observed.formats is None:
            engine.note_formats(program.products)
        self.inside = False
        self._count(group)  # last: after an error the counts are those of the last whole group
        if not role.logs:
            return outputs
        self._metrics.count(group.rows, outputs)
        self._hold_back(group)
        return None

    def _count(self, group: DeviceGroup) -> None:
        """Count the steps of a group that have been started."""
        steps = len(group.forms)
        tally = self.tally
        tally.steps += steps
        tally.batches += steps
        tally.rows += group.rows
        tally.tokens += group.tokens
        tally.operations += self._program.operations
        numbers = self._engine.state.numbers
        numbers.rows_seen += group.rows
        if self._role.learns:
            numbers.step += steps

    def _tell_change(self, change: tuple[str, int] | None) -> None:
        """Warn of steps that may have run without a change of the user's Python, see `Program.change`."""
        if change is None or not change[1]:
            return
        what, doubtful = change
        named = f": {what}" if what else ""
        now = self._engine.state.numbers.step if self._role.learns else self.tally.steps
        which = f"step {now}" if doubtful == 1 else f"some of the {doubtful} steps before step {now + 1}"
        warn(
            f"something that the {self._role.name} step's Python reads has changed while steps ran{named}. From now on "
            f"steps run with it, but {which} may have run without, because their Python runs only now and then. Keep "
            "what changes in a buffer of the module, or change it between epochs"
        )

    def note_hooks(self) -> None:
        """Note that callbacks have run, which may have changed the optimizer's options."""
        self._role.keys.note_hooks()

    @property
    def group_size(self) -> int:
        """The number of steps of the next group: that of `compile`, or for `"auto"` the one that pays at this pace.

        It is chosen once, because each size needs a graph of its own.
        """
        engine = self._engine
        wanted = engine.config.steps_per_execution
        if wanted == 1 or engine.state.placement.on_host:
            return 1
        if isinstance(wanted, int):
            return wanted
        if engine.state.placement.hosts > 1:  # each has a pace of its own, and all need the same graphs
            return 1
        chosen = engine.state.numbers.chosen_steps
        pace = self._in_flight.pace
        if pace is not None and self._program.captures:
            chosen.setdefault(self._role.name, steps_worth_joining(pace))
        return chosen.get(self._role.name, 1)

    @property
    def batches_per_hook(self) -> int:
        """The number of batches from one call of the batch hooks to the next, which eager steps keep to as well."""
        wanted = self._engine.config.steps_per_execution
        return wanted if isinstance(wanted, int) else self.group_size

    # Logs

    def logs(self) -> LazyLogs:
        """Return the logs of the pass so far; they wait for the device only if one is read."""
        return self._metrics.lazy()

    def results(self) -> dict[str, Any]:
        """Return the logs of the whole pass as the model's `get_metrics_result` gives them: the pass's one wait."""
        self._engine.latest = self._role
        return self._engine.model.get_metrics_result()

    def restart(self) -> None:
        """Begin the logs anew."""
        self._metrics.reset()
        self._metrics.on_finite = partial(self._note_finite, self._engine.state.numbers.step)

    def first_bad_step(self) -> int | None:
        """Return the first step of the `fit` so far whose logs are not finite. **This waits** for the last step."""
        finite = self._metrics.finite
        if finite is not None:
            self._metrics.on_finite(to_host([finite], "finite")[0])
        return self._engine.log.first_bad_step

    def sums(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the sums of the pass so far, for a checkpoint: numbers, and tensors by name."""
        return self._metrics.state_dict()

    def load_sums(self, state: dict[str, Any], tensors: dict[str, Tensor], batches: int) -> None:
        """Continue with the sums of a checkpoint, as `sums` returned them, before the first step."""
        self._metrics.load_state_dict(state, tensors)
        self._metrics.on_finite = partial(self._note_finite, self._engine.state.numbers.step - batches)

    def pop_sums(self) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], dict[str, float]]]:
        """Return the sums of the logs since the last call, see `PassMetrics.pop_sums`; then begin new sums."""
        return self._metrics.pop_sums()

    def _note_finite(self, steps_before: int, finite: Tensor) -> None:
        """Note the first step of this pass whose logs were not finite, see `PassMetrics.finite`."""
        bad = first_bad(finite)
        log = self._engine.log
        if bad is not None and log.first_bad_step is None:
            log.first_bad_step = steps_before + bad

    # One group of steps

    def _inputs(self, group: DeviceGroup, updates: Sequence[UpdatePlan]) -> list[Tensor]:
        """Return the inputs of a group's graph (see the top of this file), after checking the batches' labels."""
        loss = self._engine.config.loss
        # Rates first: `before_step` may set the rate of the very step it is called for, and precedes its errors.
        rates = self._send_rates(len(group.forms), updates)
        for labels in group.labels:
            if labels is not None and loss is not None:
                loss.check_labels(labels)
        return [*group.tensors, *rates]

    def _send_rates(self, steps: int, updates: Sequence[UpdatePlan]) -> list[Tensor]:
        """Send the rates of the next steps to the device, see `DeviceRates.send`."""
        attached = self._engine.state.attached
        if self.before_step is None:
            return [sent.send([optimizers.rates(optimizer)] * steps) for optimizer, sent in attached]
        rates: list[list[list[float]]] = [[] for _ in attached]
        plans = updates or [UpdatePlan()] * steps
        numbers = self._engine.state.numbers
        iterations = numbers.updates if updates else numbers.step
        for plan in plans:
            self.before_step(iterations)
            iterations += plan.takes_step
            for row, (optimizer, _) in zip(rates, attached, strict=True):
                row.append(optimizers.rates(optimizer))
        self._role.keys.note_hooks()
        return [sent.send(row) for row, (_, sent) in zip(rates, attached, strict=True)]

    def _seeds(self, steps: int) -> list[int]:
        """Return the seed of each step: of the run and the training so far, else of the pass."""
        numbers = self._engine.state.numbers
        tally = self.tally
        seed, first = (numbers.seed, numbers.step) if self._role.learns else (tally.seed, tally.steps)
        return [step_seed(seed, first + i) for i in range(steps)]

    def _sample(self, group: DeviceGroup, updates: Sequence[UpdatePlan]) -> Callable[..., Any] | None:
        """The Python of one of the group's steps: one that updates the weights, if any does. None if it has but one."""
        if len(group.forms) == 1:
            return None
        only = next((i for i, plan in enumerate(updates) if plan.takes_step), 0)
        return partial(self._body, group, updates, only=only)

    def _body(
        self,
        group: DeviceGroup,
        updates: Sequence[UpdatePlan],
        inputs: list[Tensor],
        seed: Callable[[int], None],
        only: int | None = None,
    ) -> Any:
        """Run the Python of a group's steps. A program traces this method.

        Args:
            group: The batches, for their structure; their tensors are the first inputs.
            updates: The update plan of each step; empty if every step is a whole update.
            inputs: See the top of this file.
            seed: The function that seeds the random numbers of the step with this number.
            only: The number of the only step to run (default: all run).

        Returns:
            For `"predict"` the outputs of each batch, else the batches that metrics keep.
        """
        engine = self._engine
        sent = len(group.tensors)
        outputs = []
        with ExitStack() as stack:
            if not engine.observed.shapes:
                stack.enter_context(noting_outputs(engine.model.module, engine.observed.shapes))
            attached = [rates for _, rates in engine.state.attached]
            for rates in attached:
                stack.enter_context(rates.in_step())
            use = stack.enter_context(engine.state.group_numbers.in_steps(inputs)) if self._role.learns else None
            stack.enter_context(recomputing(engine.blocks if self._role.learns else {}, seed))
            for i, (batch, form, labels) in enumerate(group.unpack(inputs[:sent])):
                if only not in (None, i):
                    continue
                if group.stacked:
                    parts = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
                    self._metrics.parts = {id(p): (whole, i) for p, whole in zip(parts, inputs[:sent], strict=True)}
                seed(i)  # first, because the transform may draw random numbers
                if self._transform is not None:
                    batch = self._transform(batch)
                    if batch is None:
                        raise ArgumentError("device_transform must return the batch, got None")
                # After the transform, which may change the labels.
                if engine.options.class_weight is not None and self._role.learns:
                    batch = engine.options.class_weight.weigh(batch, engine.state.placement)
                for rates, vectors in zip(attached, inputs[sent : sent + len(attached)], strict=True):
                    rates.use(vectors if len(group.forms) == 1 else vectors[i])
                if use is not None:
                    use(i)
                averages = Averages(count_targets(batch, form.rows))
                plan = updates[i] if updates else UpdatePlan()
                context = StepContext(self._metrics, form.rows, averages, labels, plan)
                steps = engine.state.taking_steps(context) if self._role.learns else nullcontext()
                with engine.tracing(context), steps, self._watching(averages):
                    outputs.append(self._step(batch, context))
        return outputs if not self._role.logs else self._metrics.kept

    def _step(self, batch: Any, context: StepContext) -> Any:
        """Run the Python of one step."""
        engine = self._engine
        metrics = self._metrics
        if self._role.learns:
            weights = [] if engine.observed.learns else engine.state.trainable
            versions = [weight._version for weight in weights]
            with metrics.tracking(vars(engine.model)):
                logs = self._logs(engine.model.train_step(batch))
            if engine.context.stepped or versions != [weight._version for weight in weights]:
                engine.observed.learns = True
            elif weights and all(weight.grad is None for weight in weights):  # else a later step may use the gradients
                warn(
                    f"{type(engine.model).__name__}.train_step takes no step of an optimizer, so that the weights stay "
                    "as they are: call self.apply_gradients(loss), or loss.backward() and optimizer.step()"
                )
            engine.observed.loss = getattr(logs.get("loss"), "dtype", None)
            metrics.add_means(logs, context.rows, context.averages)
            return None
        with torch.no_grad():
            if not self._role.logs:
                outputs = engine.model.predict_step(batch)
                if outputs is None:
                    raise ArgumentError(f"{type(engine.model).__name__}.predict_step must return outputs, got None")
                return outputs
            with metrics.tracking(vars(engine.model)):
                logs = self._logs(engine.model.test_step(batch))
            metrics.add_means(logs, context.rows, context.averages)
            return None

    def _logs(self, returned: Any) -> Mapping[str, Any]:
        """Return what a step has returned, if it is logs by name."""
        if isinstance(returned, Mapping):
            return returned
        step = f"{type(self._engine.model).__name__}.{self._role.name}_step"
        what = f"a tensor of shape {tuple(returned.shape)}" if isinstance(returned, Tensor) else repr(returned)
        raise ArgumentError(f'{step} must return a dict of scalars, got {what}: end it with return {{"loss": loss}}')

    def _watching(self, averages: Averages) -> AbstractContextManager[object]:
        """A context for the Python of a step, which notes what the losses in code of the user's are means over."""
        step = {"train": "train_step", "eval": "test_step"}.get(self._role.name)
        usual = step is None or is_usual(self._engine.model, step, "compute_loss")
        known = usual and not isinstance(self._engine.config.loss, ModuleLoss)
        return nullcontext() if known else LossWatch(averages)

    def _hold_back(self, group: DeviceGroup) -> None:
        """Limit the steps under way, and note if the logs were finite up to the step that was waited for."""
        metrics = self._metrics
        finite = metrics.finite
        if metrics.tensors:
            reached = self._in_flight.add(metrics.tensors[0] if finite is None else finite, group.nbytes)
            if finite is not None and reached is not None:
                metrics.on_finite(reached)


def steps_worth_joining(seconds: float) -> int:
    """Choose the number of steps that should run as one graph, by the time of one step alone.

    Example:
        >>> [steps_worth_joining(seconds) for seconds in (0.0001, 0.0005, 0.002, 0.01)]
        [16, 10, 2, 1]
    """
    return max(1, min(_MOST_JOINED, round(_WORTH_STARTING / seconds)))
