"""`TrainState`: everything that training changes, listed once, so that it can be moved, reset, saved and restored.

`saved_state.py` saves and restores it, and `snapshot.py` undoes a trial.

New state belongs in `tensors` if it lives on the device, else in `TrainNumbers`. While graphs are replayed, a
`DeviceState` holds the tensors' values, and the user's own tensors are empty until `write_back`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..backend import HOST, DeviceState, Placement, Sharding, Slot
from ..backend.eager import HostState
from ..errors import StateLostError, join_few
from ..optimizers import (
    DeviceRates,
    GroupNumbers,
    HostCounters,
    UpdatePlan,
    clear_state,
    find_optimizers,
    list_parameters,
    plan_updates,
    step_counts,
)
from ..runtime import copy_into, make_state, move, reshard, swap_value, to_host
from ..utils.replacing_attributes import replacing_attributes
from .attribute_modules import find_kept_modules, find_kept_parameters
from .compile_config import CompileConfig
from .gradient_step import GradientStep
from .optimizer_state import OptimizerState
from .sharding import count_bytes_per_core
from .step_context import StepContext
from .untrained_parameters import UntrainedParameters
from .weight_names import readable_name


@dataclass
class TrainNumbers:
    """The numbers that training changes, on the host."""

    step: int = 0  # since the model was created; with the seed it determines a step's random numbers
    seed: int = 0
    updates: int = 0  # optimizer steps since `compile`
    batches_waiting: int = 0  # since the last optimizer step, with `accumulate_steps`
    rows_seen: int = 0  # in steps of any role
    passes: int = 0  # evaluations and predictions inside `fit`; with the seed it determines their random numbers
    # The `steps_per_execution` that "auto" has chosen, by role.
    chosen_steps: dict[str, int] = field(default_factory=dict)


class TrainState:
    """Everything that training changes: weights, buffers, optimizer states, accumulated gradients, averages, numbers.

    The tensors of the state before this `compile`, if any, stay in place.

    Attributes:
        owner: The model.
        untrained: The parameters that no optimizer has.
    """

    def __init__(self, owner: Any, config: CompileConfig, before: TrainState | None = None) -> None:
        self.owner = owner
        self._config = config
        self.placement: Placement = HOST if before is None else before.placement
        # The values of the tensors while graphs are replayed.
        self.device: DeviceState = HostState([]) if before is None else before.device
        self.optimizers: dict[Optimizer, OptimizerState] = {}  # of optimizers that steps have used
        self._gradient_steps: dict[OptimizerState, GradientStep] = {}  # of the running training step
        self.counters = HostCounters()  # the optimizers' counters that stay on the host
        self.group_numbers = GroupNumbers()  # numbers in the optimizers' groups that their steps change
        self.numbers = TrainNumbers()
        self.untrained = UntrainedParameters(owner)
        if before is not None:
            kept = before.numbers
            self.numbers = TrainNumbers(step=kept.step, seed=kept.seed, rows_seen=kept.rows_seen)

    # Its parts

    @property
    def modules(self) -> list[nn.Module]:
        """The module, the losses that are modules, and the modules that the model keeps."""
        return [self.owner.module, *self.other_modules().values()]

    def other_modules(self) -> dict[str, nn.Module]:
        """Return the modules of the loss and those kept by the model, by their names in checkpoints."""
        of_loss = self._config.loss_modules
        named = {f"loss/{i}": part for i, part in enumerate(of_loss)}
        kept = find_kept_modules(self.owner).items()
        return named | {f"kept/{name}": part for name, part in kept if not any(part is loss for loss in of_loss)}

    def list_every_tensor(self) -> dict[str, Tensor]:
        """Return the tensors of all modules, and the parameters of the optimizers and the model outside of modules.

        Each tensor comes once, by its first name.
        """
        every = dict(_tensors(self.owner.module))
        for name, part in self.other_modules().items():
            every |= {f"{name}/{key}": tensor for key, tensor in _tensors(part)}
        every |= {f"kept/{name}": parameter for name, parameter in find_kept_parameters(self.owner).items()}
        for name, optimizer in self.named_optimizers().items():
            every |= {f"params/{name}/{i}": parameter for i, parameter in enumerate(list_parameters(optimizer))}
        names: dict[int, str] = {}
        for name, tensor in every.items():
            names.setdefault(id(tensor), name)
        return {name: every[name] for name in names.values()}

    def named_optimizers(self) -> dict[str, Optimizer]:
        """Return the optimizer of `compile` and the user's optimizers, by attribute name, as in checkpoints.

        Inner optimizers follow the outer optimizer, under names such as `optimizer.base_optimizer`.
        """
        return dict(find_optimizers(vars(self.owner)))

    def list_every_optimizer(self) -> list[Optimizer]:
        """Return the model's optimizers, and further optimizers that steps have used."""
        return list(dict.fromkeys([*self.named_optimizers().values(), *self.optimizers]))

    def state_of(self, optimizer: Optimizer) -> OptimizerState:
        """Return the state of an optimizer."""
        if optimizer not in self.optimizers:
            outer = self._outer(optimizer)
            state = OptimizerState(optimizer, self._config, None if outer is None else self.state_of(outer))
            self.optimizers[optimizer] = state  # after the state of the outer optimizer
        return self.optimizers[optimizer]

    def _outer(self, optimizer: Optimizer) -> Optimizer | None:
        """Return the outermost optimizer that contains this optimizer and has all of its parameters."""
        inner = set(map(id, list_parameters(optimizer)))
        for outer in self.named_optimizers().values():
            inside = dict(find_optimizers(vars(outer))).values()
            if optimizer in inside and outer not in inside and inner.issubset(map(id, list_parameters(outer))):
                return outer
        return None

    def attach(self, optimizer: Optimizer) -> OptimizerState:
        """Return the state of an optimizer, ready for a step; the first call moves it to the cores."""
        state = self.state_of(optimizer)
        if state.rates is None and not self.placement.eager:
            state.create(shares=True)
            self.device.shardings |= self.shardings(self.placement)
            move(state.list_device_state(), self.placement, shardings=self.device.shardings)
            state.rates = DeviceRates(optimizer, self.placement)  # last, because rates mark the state as attached
        return state

    def pin(self, state: OptimizerState) -> None:
        """Keep the sharding of the tensors that an optimizer's step has changed; else XLA may split the next inputs."""
        if self.placement.has_mesh:
            self.device.pin(state.tensors, self.placement)

    def _split_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Split gradients like their parameters, inside a step."""
        for parameter in parameters:
            sharding = self.device.shardings.get(id(parameter))
            if sharding is not None and parameter.grad is not None:
                parameter.grad = self.placement.lay_out(parameter.grad, sharding)

    @contextmanager
    def taking_steps(self, context: StepContext) -> Iterator[None]:
        """A context for a training step's Python, see `GradientStep.taking_steps`."""
        module = self.owner.module
        with ExitStack() as stack:
            stack.callback(self._gradient_steps.clear)
            for state in self.optimizers.values():  # the state of an outer optimizer comes first
                self._gradient_steps[state] = self.gradient_step(state, context)
            cleared = [
                stack.enter_context(step.taking_steps(partial(self.pin, state)))
                for state, step in self._gradient_steps.items()
            ]

            all_cleared = False

            def zero_grad(set_to_none: bool = True) -> None:
                nonlocal all_cleared
                all_cleared = True
                for clear in cleared:
                    clear(set_to_none)
                type(module).zero_grad(module, set_to_none)

            stack.enter_context(replacing_attributes(module, zero_grad=zero_grad))
            yield
            tensors, optimizers = self.list_every_tensor(), self.list_every_optimizer()
            self.untrained.warn_of_gradients(tensors, optimizers)
            if all_cleared and not self.placement.eager:
                self.untrained.drop_gradients(tensors, optimizers)

    def gradient_step(self, state: OptimizerState, context: StepContext) -> GradientStep:
        """Return the gradient step of an optimizer: inside `taking_steps` that of the training step, else a new one."""
        if state in self._gradient_steps:
            return self._gradient_steps[state]
        outer = None if state.outer is None else self.gradient_step(state.outer, context)
        return GradientStep(state, context, self._config, self._split_gradients, outer)

    @property
    def trainable(self) -> list[nn.Parameter]:
        """The parameters that learn, of all modules."""
        return [p for module in self.modules for p in module.parameters() if p.requires_grad]

    @property
    def attached(self) -> list[tuple[Optimizer, DeviceRates]]:
        """The optimizers with rates on the device. Each step takes a vector of rates for each, in this order."""
        return [(o, s.rates) for o, s in self.optimizers.items() if s.rates is not None and s.sends_rates]

    def tensors(self) -> tuple[dict[int, Tensor], dict[int, str]]:
        """Return every tensor that training changes, and the names of the modules' tensors, both by `id`."""
        # The order never changes, because graphs take and return the state as a flat list.
        named = self.list_every_tensor()
        names = {id(tensor): readable_name(name) for name, tensor in named.items()}
        tensors = {id(tensor): tensor for tensor in named.values()}
        for optimizer in self.list_every_optimizer():
            tensors |= {id(t): t for t in self.state_of(optimizer).list_device_state()}
        tensors |= {id(t): t for state in self.optimizers.values() for part in state.kept for t in part.tensors}
        return tensors, names

    def _slots(self) -> list[Slot]:
        """List the slots of modules and optimizers that hold the tensors; a step may put other tensors there."""
        slots: list[Slot] = []
        for i, module in enumerate(self.modules):
            for path, part in module.named_modules():
                for tensors in (part._parameters, part._buffers):
                    slots += [
                        Slot((i, path, name), tensor, partial(_set_slot, tensors, name))
                        for name, tensor in tensors.items()
                        if tensor is not None
                    ]
        for i, optimizer in enumerate(self.list_every_optimizer()):
            on_device = set(map(id, self.state_of(optimizer).list_device_state()))
            for j, (parameter, values) in enumerate(optimizer.state.items()):
                slots += [
                    Slot((i, j, name), value, partial(_set_slot, optimizer.state[parameter], name))
                    for name, value in values.items()
                    if id(value) in on_device
                ]
        return slots

    # Placement

    def bytes_per_core(self, tensors: Iterable[Tensor]) -> int:
        """Count the bytes of some tensors on each core."""
        return count_bytes_per_core(tensors, self.device.shardings, self.placement.count)

    def shardings(self, placement: Placement) -> dict[int, Sharding]:
        """Return the shardings of the tensors that are split over the cores, by `id`.

        Optimizer state, accumulators and averages of a parameter's shape are split like the parameter.
        """
        split = self._config.shard.shardings(self.owner.module, placement)
        if not split:
            return split
        shardings = dict(split)
        for state in map(self.state_of, self.list_every_optimizer()):
            for parameter, tensor in state.walk_parameters():
                if id(parameter) in split and tensor.shape == parameter.shape:
                    shardings[id(tensor)] = split[id(parameter)]
        return shardings

    def move_to(self, placement: Placement) -> bool:
        """Move every tensor in place, without compiling anything.

        Returns:
            True if the tensors or their placement changed, so that captured graphs are invalid.
        """
        # Write back before the tensors are listed; else empty tensors would be moved without their held values.
        self.write_back()
        for optimizer in self.named_optimizers().values():
            self.state_of(optimizer).create(shares=not placement.eager)
        tensors, names = self.tensors()
        shardings = self.shardings(placement)
        moved = placement != self.placement
        # A second compile creates state on the weights' device, which may not be the host.
        for tensor in tensors.values():
            if id(tensor) in shardings and tensor.device.type != "cpu":
                placement.pin(tensor, shardings[id(tensor)])
        placement.launch("init")
        reshard(tensors.values(), placement, shardings)
        stay = {id(t) for o in self.list_every_optimizer() for t in step_counts(o)} if placement.eager else set()
        move([tensor for key, tensor in tensors.items() if key not in stay], placement, names, shardings)
        if not moved and self.device.shardings == shardings and [id(t) for t in self.device.tensors] == list(tensors):
            return False
        if moved:
            self._forget_rates()
        self.placement = placement
        self.device = make_state(placement, tensors.values(), shardings, self._slots)
        return True

    def write_back(self) -> None:
        """Put the current values into the user's tensors and the optimizers' counters.

        Raises:
            StateLostError: A step failed on the device, and the weights are lost with it.
        """
        self.device.write_back()
        self.counters.catch_up()

    def register_new(self) -> bool:
        """Adopt the state that a traced step has created or replaced, as the first step of some optimizers does.

        Returns:
            True if there was any, which the graphs captured so far lack.
        """
        tensors, _ = self.tensors()
        if [*tensors] == [id(tensor) for tensor in self.device.tensors]:
            return False
        self.write_back()
        self.device.replace(tensors.values(), self.shardings(self.placement))
        return True

    def reset(self, weights: Mapping[int, Tensor]) -> None:
        """Return to the host as before the first step, with new weights, after a failed step lost the old weights.

        The module and the loss keep their tensor objects. Optimizer states, gradients and averages are dropped.

        Args:
            weights: Host tensors of the right shape and dtype, by the `id` of the module's or the loss's tensor. A
                tensor that isn't lost may be left out and keeps its value.

        Raises:
            StateLostError: A lost tensor was left out. Nothing has changed.
        """
        owned = {id(tensor): (name, tensor) for name, tensor in self.list_every_tensor().items()}
        lost = {id(self.device.tensors[index]) for index in self.device.lost}
        missing = [name for key, (name, _) in owned.items() if key in lost - weights.keys()]
        if missing:
            raise StateLostError(
                f"{join_few(missing)} can't be restored: lost with a step that failed on the device, and missing in "
                "the given weights. Start with a new module"
            )
        self.device.clear_lost()  # every lost value is replaced below
        kept = [tensor for key, (_, tensor) in owned.items() if key not in weights]
        values = dict(zip(map(id, kept), to_host(kept, "state", collective=True), strict=True)) | dict(weights)
        for key, (_, tensor) in owned.items():
            tensor.grad = None
            swap_value(tensor, values[key].detach().clone())
        for optimizer in self.named_optimizers().values():
            clear_state(optimizer)
        self.optimizers.clear()
        self.counters = HostCounters()
        self.numbers.batches_waiting = 0
        self.placement = HOST
        self.device = HostState([])

    def forget_held(self) -> None:
        """Forget the held values, because `compile` has replaced the tensors, e.g. by tensors of another dtype."""
        self.device = make_state(self.placement, [], slots=self._slots)

    def _forget_rates(self) -> None:
        for state in self.optimizers.values():
            state.rates = None

    # Steps

    def next_updates(self, steps: int, last: bool) -> list[UpdatePlan]:
        """Plan how the next steps use their gradients, a plan for each step; no plans if all steps are alike.

        With `last`, the last step ends the epoch and so uses all gradients. Nothing changes before `count_updates`.
        """
        if not self._needs_update_plans:
            return []
        ema = self._config.ema
        return plan_updates(
            steps,
            last,
            self._config.gradients.accumulate_steps,
            None if ema is None else ema.overwrite_frequency,
            self.numbers.batches_waiting,
            self.numbers.updates,
        )

    @property
    def _needs_update_plans(self) -> bool:
        """True if not all steps use their gradients in the same way."""
        ema = self._config.ema
        return self._config.gradients.accumulate_steps > 1 or (ema is not None and ema.overwrite_frequency is not None)

    @property
    def optimizer_steps(self) -> int:
        """The number of steps that the optimizer has taken, since `compile` or since the model was created."""
        return self.numbers.updates if self._needs_update_plans else self.numbers.step

    def count_batches_until(self, updates: int) -> int:
        """Return the number of batches until the optimizer has taken `updates` more steps, within an epoch."""
        return updates * self._config.gradients.accumulate_steps - self.numbers.batches_waiting

    def count_updates(self, plans: Iterable[UpdatePlan]) -> None:
        """Count planned steps as done."""
        for plan in plans:
            self.numbers.updates += plan.takes_step
            self.numbers.batches_waiting = 0 if plan.takes_step else self.numbers.batches_waiting + 1

    def drop_gradients(self) -> None:
        """Drop the accumulated gradients of an interrupted epoch."""
        if not self.numbers.batches_waiting:
            return
        self.numbers.batches_waiting = 0
        self.write_back()
        for state in self.optimizers.values():
            tensors = [tensor for accumulator in state.accumulators for tensor in accumulator.tensors]
            zeros = [torch.zeros(t.shape, dtype=t.dtype) for t in tensors]
            copy_into(tensors, zeros, self.placement, self.device.shardings)

    def swap_ema(self, averages: bool | None = None) -> None:
        """Swap the weights and their moving averages. Nothing is copied.

        Args:
            averages: True puts the averages into the module, False the weights (default None: swap them).
        """
        for state in self.optimizers.values():
            if state.ema is not None and state.ema.swapped != averages:
                self.write_back()
                state.ema.swap()

    def finish_ema(self) -> None:
        """Overwrite the weights with their moving averages, at the end of `fit`."""
        averages = [state.ema for state in self.optimizers.values() if state.ema is not None]
        if averages:
            self.write_back()
            for ema in averages:
                ema.overwrite()
            self.placement.launch("ema")


def _set_slot(slots: MutableMapping[Any, Any], name: Any, tensor: Tensor | None) -> None:
    if tensor is None:
        slots.pop(name, None)
    else:
        slots[name] = tensor


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the parameters and buffers of a module, with their names."""
    return [*module.named_parameters(), *module.named_buffers()]
