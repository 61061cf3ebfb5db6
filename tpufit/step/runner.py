"""`StepRunner`: runs the steps of one pass over data, without waiting for the device.

A group of steps runs as one graph. Its first two calls capture the graph: their Python is traced, compiled and
compared. Later calls replay the graph: no Python of the step runs, and the weights' values are held apart from the
user's tensors.

The graph's inputs are one flat list of tensors: the tensors of the batches, see `DeviceGroup`; for each attached
optimizer its learning rates, a vector for each step; and the numbers of `GroupNumbers`. `StepRunner._inputs` writes
the list, and `StepRunner._body`, the traced Python, reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .. import optimizers
from ..diagnostics.summary import record_outputs
from ..errors import ArgumentError
from ..losses import Averages, LossWatch, ModuleLoss, count_targets
from ..metrics import LazyLogs, find_first_bad, find_metrics
from ..optimizers import Attached, GroupNumbers, UpdatePlan
from ..runtime import recomputing, to_host
from ..utils.random import step_seed
from ..utils.user_code import warn
from .batch import BatchSender, DeviceGroup
from .engine import Engine
from .step_context import StepContext
from .step_methods import uses_default
from .tally import Tally

# For steps_per_execution="auto": a graph should run for this many seconds, so that its start, about 0.4 ms on the host,
# is a small part. The number of steps is bounded because a longer graph takes longer to compile.
_WORTH_STARTING = 0.005
_MOST_JOINED = 16


class _Plan(NamedTuple):
    """The next steps, and what a program needs to run them."""

    group: DeviceGroup  # their batches
    updates: Sequence[UpdatePlan]  # one for each step; empty if every step is a whole update
    key: tuple[Any, ...]  # of their graph
    inputs: list[Tensor]
    seeds: list[int]  # one for each step
    body: Callable[..., Any]  # their Python
    sample: Callable[..., Any] | None  # the Python of one of several steps


class StepRunner:
    """Runs the steps of one pass: starts their graphs, without waiting for the device.

    Args:
        warm: True after the first pass over the data, when no step should need a new graph (default False).
        one_batch: True if each batch is a separate pass, see `trainer/on_batch.py` (default False).

    Attributes:
        step_in_progress: True while steps are being started. It stays True after an error, because a step may be half
            done.
        before_step: Called before each training step with the number of the optimizer's steps so far; may set rates.
    """

    def __init__(
        self,
        engine: Engine,
        role: str,
        transform: Callable[[Any], Any] | None = None,
        warm: bool = False,
        one_batch: bool = False,
    ) -> None:
        self._engine = engine
        self._role = engine.roles[role]
        self._transform = transform
        self.tally = Tally(role)
        self.one_batch = one_batch
        self.step_in_progress = False
        self.before_step: Callable[[int], None] | None = None
        state = engine.state
        self._group_numbers = state.group_numbers if self._role.learns else GroupNumbers()
        loss = engine.config.loss
        self._in_flight = state.placement.in_flight()
        label_range = loss.label_range if loss is not None and self._role.makes_logs else None
        self._sender = BatchSender(state.placement, self._role.keys, label_range)
        # Attach before the program is built, because optimizer state is an input of the first step's graph.
        if self._role.learns:
            state.drop_gradients()
            for optimizer in state.named_optimizers().values():
                state.attach(optimizer)
        tracked = find_metrics(vars(engine.model)) if self._role.makes_logs else {}
        self._program, self._metrics = self._role.prepare(engine.config, state, tracked)
        self._warm = warm
        self._begin_pass()
        self.reset_logs()
        if self._role.learns:
            engine.log.training = self.tally

    def _begin_pass(self) -> None:
        self._role.begin_pass(self, self._transform, self._engine.options.strict, self._warm)

    @property
    def learns(self) -> bool:
        """True if its steps change the weights."""
        return self._role.learns

    @property
    def eager(self) -> bool:
        """True if its steps run in plain PyTorch."""
        return self._engine.state.placement.eager

    @property
    def on_host(self) -> bool:
        """True if its steps run on the host, with the memory of the data."""
        return self._engine.state.placement.on_host

    def send(self, batches: Sequence[Any], labels: Any = None) -> list[DeviceGroup]:
        """Send batches to the device ahead of their steps; `group_size` batches run as one graph."""
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
            group: The batches of the steps, on the device, as `send` returned them.
            pause: Returns a context in which nothing else is sent to the device.
            last: True if these are the last batches of the pass.
            remaining: The number of groups that remain in the pass after this one, if known.

        Returns:
            For `"predict"` the outputs of each batch, on the device; else None.

        Raises:
            LabelError: A label of a batch is outside the module's classes.
        """
        if self._role.runner is not self:  # a callback has run another pass of this role during this pass
            self._begin_pass()
        plan = self._plan(group, last)
        outputs = self._execute(plan, pause, remaining)
        self._commit(group, outputs)
        return None if self._role.makes_logs else outputs

    def _plan(self, group: DeviceGroup, last: bool) -> _Plan:
        """Find the graph of the next steps and its inputs. Nothing that training changes is changed yet.

        Raises:
            LabelError: A label of a batch is outside the module's classes.
        """
        role = self._role
        state = self._engine.state
        steps = len(group.forms)
        updates = state.next_updates(steps, last) if role.learns else []
        attached = state.attached
        # First, because `before_step` may change options that are part of the key.
        inputs = self._inputs(group, updates, attached)
        seeds = self._seeds(steps)
        if self._program.captures:
            used = [optimizer for optimizer, _ in attached]
            if not role.keys.confirm(used, state.device.held):
                role.keys.refresh(state.modules, used, self._program.traced_keys, self._group_numbers.changed)
        key = role.keys.make_key(group.forms[0].signature, steps, group.stacked, updates)
        if role.learns:
            number_trace, added = self._group_numbers.find(key, attached, state.placement, steps)
            key = (*key, *number_trace)
            inputs = [*inputs, *added]
        body = partial(self._body, group, updates)
        return _Plan(group, updates, key, inputs, seeds, body, self._sample(group, updates))

    def _execute(self, plan: _Plan, pause: Callable[[], AbstractContextManager[object]], remaining: int | None) -> Any:
        """Start the planned steps: replay their graph, or capture it. An error may leave them half done."""
        role = self._role
        program = self._program
        state = self._engine.state
        key = plan.key
        self.step_in_progress = True
        role.group = plan.group
        self._engine.latest = role
        state.count_updates(plan.updates)
        replays = program.prepare_replay(key)
        if replays and program.audit_due(key, remaining):
            with state.counters.restoring_numbers(state.named_optimizers().values()):
                program.audit(key, plan.inputs, plan.seeds, plan.body, pause, plan.sample)
            replays = program.prepare_replay(key)
        if replays:
            outputs = program.replay(key, plan.inputs, plan.seeds)
            state.counters.note_replay((role.name, key))
            self._group_numbers.note_replay()
        elif program.captures:
            outputs = self._capture(plan, pause)
        else:
            outputs = program(key, plan.inputs, plan.seeds, plan.body, pause)
            self._note_trace()
        if role.learns and self._engine.observed.formats is None:
            self._engine.note_formats(program.products)
        self.step_in_progress = False
        return outputs

    def _capture(self, plan: _Plan, pause: Callable[[], AbstractContextManager[object]]) -> Any:
        """Run the steps while their Python is traced, for a graph that later calls replay."""
        role = self._role
        program = self._program
        state = self._engine.state
        group, _, key, inputs, seeds, body, sample = plan
        program.cause = role.keys.explain_capture(key, len(group.forms), program.traced_keys)
        with state.counters.tracing((role.name, key), state.named_optimizers().values()):
            outputs = program(key, inputs, seeds, body, pause)
        self._note_trace()
        self._engine.register_new_state()  # only a traced step runs Python that could create state
        if sample is not None and program.prepare_replay(key) and program.lacks_sample(key):
            with state.counters.restoring_numbers(state.named_optimizers().values()):
                program.trace_sample(key, inputs, seeds, sample, pause)
        self._warn_of_change(program.pop_change())
        return outputs

    def _note_trace(self) -> None:
        """Note that the steps' Python has run, which may have changed the optimizers' options."""
        keys = self._role.keys
        keys.note_hooks()
        if self._group_numbers.note_trace():
            keys.count_change("the outcome of a comparison of the optimizer's numbers")

    def _commit(self, group: DeviceGroup, outputs: Any) -> None:
        """Count a whole group of started steps, and limit the pending steps."""
        self._count(group)
        if self._role.makes_logs:
            self._metrics.count(group.rows, outputs)
            self._limit_pending(group.nbytes + sum(t.nbytes for _, batch in outputs for t in batch))

    def _count(self, group: DeviceGroup) -> None:
        """Count the steps of a group that has been started."""
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

    def _warn_of_change(self, change: tuple[str, int] | None) -> None:
        """Warn of replayed steps that may have missed a change in the user's Python, see `Program.pop_change`."""
        if change is None or not change[1]:
            return
        what, doubtful = change
        named = f": {what}" if what else ""
        now = self._engine.state.numbers.step if self._role.learns else self.tally.steps
        which = f"step {now}" if doubtful == 1 else f"some of the {doubtful} steps before step {now + 1}"
        warn(
            f"something that the {self._role.name} step's Python reads has changed while steps ran{named}. From now on "
            f"steps use the new value, but {which} may have used the old value, because their Python runs only now and "
            "then. Keep changing values in a buffer of the module, or change them between epochs"
        )

    def list_group_numbers(self) -> list[set[tuple[str, Any]]]:
        """Return the numbers in the optimizers' groups by name, such as rates and momenta: a set for each group."""
        return optimizers.list_numbers(optimizer for optimizer, _ in self._engine.state.attached)

    def note_hooks(self) -> None:
        """Note that callbacks have run, which may have changed the optimizer's options."""
        self._role.keys.note_hooks()

    @property
    def group_size(self) -> int:
        """The number of steps in the next group: that of `compile`, or for `"auto"` chosen by the current pace.

        `"auto"` chooses once, because each number needs its own graph.
        """
        engine = self._engine
        wanted = engine.config.steps_per_execution
        if wanted == 1 or engine.state.placement.eager:
            return 1
        if isinstance(wanted, int):
            return wanted
        if engine.state.placement.hosts > 1:  # hosts differ in pace, and all need the same graphs
            return 1
        chosen = engine.state.numbers.chosen_steps
        pace = self._in_flight.pace
        if pace is not None and self._program.captures:
            chosen.setdefault(self._role.name, choose_steps_to_join(pace))
        return chosen.get(self._role.name, 1)

    @property
    def batches_per_hook(self) -> int:
        """The number of batches between calls of the batch hooks, the same for eager steps."""
        wanted = self._engine.config.steps_per_execution
        return wanted if isinstance(wanted, int) else self.group_size

    # Logs

    def logs(self) -> LazyLogs:
        """Return the logs of the pass so far; they wait for the device only when they are read."""
        return self._metrics.make_lazy_logs()

    def results(self) -> dict[str, Any]:
        """Return the logs of the whole pass from the model's `get_metrics_result`. **This waits** for the device."""
        self._engine.latest = self._role
        return self._engine.model.get_metrics_result()

    def reset_logs(self) -> None:
        """Reset the logs."""
        self._metrics.reset()
        self._metrics.on_finite = partial(self._note_finite, self._engine.state.numbers.step)

    def first_bad_step(self) -> int | None:
        """Return the first step of this `fit` whose logs are not finite. **This waits** for the last step."""
        finite = self._metrics.finite
        if finite is not None:
            self._metrics.on_finite(to_host([finite], "finite")[0])
        return self._engine.log.first_bad_step

    def sums(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the sums of the pass so far for a checkpoint: numbers, and tensors by name."""
        return self._metrics.state_dict()

    def load_sums(self, state: dict[str, Any], tensors: dict[str, Tensor], batches: int) -> None:
        """Load the sums of a checkpoint, as `sums` returned them, before the first step."""
        self._metrics.load_state_dict(state, tensors)
        self._metrics.on_finite = partial(self._note_finite, self._engine.state.numbers.step - batches)

    def pop_sums(self) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], dict[str, float]]]:
        """Return the sums of the logs since the last call, see `PassMetrics.pop_sums`, and reset them."""
        return self._metrics.pop_sums()

    def _note_finite(self, steps_before: int, finite: Tensor) -> None:
        """Note the first step of this pass whose logs were not finite, see `PassMetrics.finite`."""
        bad = find_first_bad(finite)
        log = self._engine.log
        if bad is not None and log.first_bad_step is None:
            log.first_bad_step = steps_before + bad

    # One group of steps

    def _inputs(self, group: DeviceGroup, updates: Sequence[UpdatePlan], attached: Attached) -> list[Tensor]:
        """Return the inputs of a group's graph (see the top of this file), after checking the batches' labels."""
        loss = self._engine.config.loss
        # Rates come first: `before_step` sets the rate of the next step, and runs even if this step's labels are wrong.
        rates = self._send_rates(len(group.forms), updates, attached)
        for labels in group.labels:
            if labels is not None and loss is not None:
                loss.check_labels(labels)
        return [*group.tensors, *rates]

    def _send_rates(self, steps: int, updates: Sequence[UpdatePlan], attached: Attached) -> list[Tensor]:
        """Send the rates of the next steps to the device, see `DeviceRates.send`."""
        noted = self._group_numbers
        if self.before_step is None:
            if self._role.learns and self._role.keys.may_have_changed(self._engine.state.device.held):
                noted.note_step(attached, joined=False)
            return [sent.send([optimizers.group_rates(optimizer)] * steps) for optimizer, sent in attached]
        rates: list[list[list[float]]] = [[] for _ in attached]
        plans = updates or [UpdatePlan()] * steps
        numbers = self._engine.state.numbers
        iterations = numbers.updates if updates else numbers.step
        for i, plan in enumerate(plans):
            self.before_step(iterations)
            noted.note_step(attached, joined=i > 0)
            iterations += plan.takes_step
            for row, (optimizer, _) in zip(rates, attached, strict=True):
                row.append(optimizers.group_rates(optimizer))
        self._role.keys.note_hooks()
        return [sent.send(row) for row, (_, sent) in zip(rates, attached, strict=True)]

    def _seeds(self, steps: int) -> list[int]:
        """Return the seed of each step: from the run's seed and step for training, else from the pass's."""
        numbers = self._engine.state.numbers
        tally = self.tally
        seed, first = (numbers.seed, numbers.step) if self._role.learns else (tally.seed, tally.steps)
        return [step_seed(seed, first + i) for i in range(steps)]

    def _sample(self, group: DeviceGroup, updates: Sequence[UpdatePlan]) -> Callable[..., Any] | None:
        """Return the Python of one step of a group, preferably one that updates the weights; None for a single step."""
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
            seed: The function that seeds the random numbers of a step, given its number.
            only: The number of the only step to run (default: run all steps).

        Returns:
            For `"predict"` the outputs of each batch, else the batches that metrics keep.
        """
        engine = self._engine
        sent = len(group.tensors)
        outputs = []
        with ExitStack() as stack:
            first = not engine.observed.shapes
            if first:
                stack.enter_context(record_outputs(engine.model.module, engine.observed.shapes))
            attached = [rates for _, rates in engine.state.attached]
            for rates in attached:
                stack.enter_context(rates.in_step())
            use = stack.enter_context(self._group_numbers.in_steps(inputs))
            stack.enter_context(recomputing(engine.blocks if self._role.learns else {}, seed))
            for i, (batch, form, labels) in enumerate(group.unpack(inputs[:sent])):
                if only not in (None, i):
                    continue
                if group.stacked:
                    parts = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
                    for part, whole in zip(parts, inputs[:sent], strict=True):
                        self._metrics.parts[part] = whole, i
                seed(i)  # before the transform, which may draw random numbers
                if self._transform is not None:
                    batch = self._transform(batch)
                    if batch is None:
                        raise ArgumentError("device_transform must return the batch, got None: end it with return")
                # Class weights come after the transform, which may change the labels.
                if engine.options.class_weight is not None and self._role.learns:
                    batch = engine.options.class_weight.weigh(batch, engine.state.placement)
                for rates, vectors in zip(attached, inputs[sent : sent + len(attached)], strict=True):
                    rates.use(vectors if len(group.forms) == 1 else vectors[i])
                use(i)
                averages = Averages(count_targets(batch, form.rows))
                update = updates[i] if updates else UpdatePlan()
                context = StepContext(self._metrics, form.rows, averages, labels, update, compiles=not first)
                steps = engine.state.taking_steps(context) if self._role.learns else nullcontext()
                with engine.tracing(context), steps, self._watching(averages):
                    outputs.append(self._step(batch, context))
        return outputs if not self._role.makes_logs else self._metrics.kept

    def _step(self, batch: Any, context: StepContext) -> Any:
        """Run the Python of one step."""
        engine = self._engine
        metrics = self._metrics
        if self._role.learns:
            weights = [] if engine.observed.learns else engine.state.trainable
            versions = [weight._version for weight in weights]
            with metrics.tracking(vars(engine.model)):
                logs = self._require_logs(engine.model.train_step(batch))
            if engine.context.stepped or versions != [weight._version for weight in weights]:
                engine.observed.learns = True
            elif weights and all(weight.grad is None for weight in weights):  # else a later step may use the gradients
                warn(
                    f"{type(engine.model).__name__}.train_step calls no optimizer's step, so the weights don't change: "
                    "call self.apply_gradients(loss), or loss.backward() and optimizer.step()"
                )
            engine.observed.loss = getattr(logs.get("loss"), "dtype", None)
            metrics.add_means(logs, context.rows, context.averages)
            return None
        with torch.no_grad():
            if not self._role.makes_logs:
                outputs = engine.model.predict_step(batch)
                if outputs is None:
                    raise ArgumentError(
                        f"{type(engine.model).__name__}.predict_step must return outputs, got None: end it with return"
                    )
                return outputs
            with metrics.tracking(vars(engine.model)):
                logs = self._require_logs(engine.model.test_step(batch))
            metrics.add_means(logs, context.rows, context.averages)
            return None

    def _require_logs(self, returned: Any) -> Mapping[str, Any]:
        """Check that a step returned logs by name, and return them."""
        if isinstance(returned, Mapping):
            return returned
        step = f"{type(self._engine.model).__name__}.{self._role.method}"
        what = f"a tensor of shape {tuple(returned.shape)}" if isinstance(returned, Tensor) else repr(returned)
        raise ArgumentError(f'{step} must return a dict of scalars, got {what}: end it with return {{"loss": loss}}')

    def _watching(self, averages: Averages) -> AbstractContextManager[object]:
        """A context for the Python of a step, which notes the denominators of losses in the user's code."""
        usual = not self._role.makes_logs or uses_default(self._engine.model, self._role.method, "compute_loss")
        known = usual and not isinstance(self._engine.config.loss, ModuleLoss)
        return nullcontext() if known else LossWatch(averages)

    def _limit_pending(self, nbytes: int) -> None:
        """Limit the pending steps by their bytes, and note whether the logs were finite up to the step waited for."""
        metrics = self._metrics
        finite = metrics.finite
        if metrics.tensors:
            reached = self._in_flight.add(metrics.tensors[0] if finite is None else finite, nbytes)
            if reached is not None:
                metrics.fetch_kept()
            if finite is not None and reached is not None:
                metrics.on_finite(reached)


def choose_steps_to_join(seconds: float) -> int:
    """Choose the number of steps that should run as one graph, by the time of one step.

    Example:
        >>> [choose_steps_to_join(seconds) for seconds in (0.0001, 0.0005, 0.002, 0.01)]
        [16, 10, 2, 1]
    """
    return max(1, min(_MOST_JOINED, round(_WORTH_STARTING / seconds)))
