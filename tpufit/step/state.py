"""`TrainState`: everything that training changes, listed once, so that it can be moved, reset, saved and restored.

New state belongs in `tensors` if it lives on the device, else in `TrainNumbers`. While graphs are replayed, a
`DeviceState` holds the tensors' values, and the user's own tensors are empty until `write_back`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..backend import HOST, DeviceState, Placement, Sharding, Slot
from ..backend.eager import HostState
from ..errors import CheckpointMismatchError, StateLostError, join_few
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
from ..runtime import copy_into, copy_to_host, make_state, move, reshard, swap_value, to_host
from ..utils.random import RNGState
from ..utils.replacing_attributes import replacing_attributes
from ..utils.user_code import warn
from .attribute_modules import find_kept_modules, find_kept_parameters
from .compile_config import CompileConfig
from .gradient_step import GradientStep
from .optimizer_state import OptimizerState, is_of_second_part
from .sharding import count_bytes_per_core
from .step_context import StepContext
from .weight_names import check_weights, named_tensors


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


# The prefixes of tensors outside the module's `state_dict` and the optimizers' states.
_OTHER_PREFIXES = ("buffer/", "loss/", "kept/", "params/")


class SavedState(NamedTuple):
    """The state of training, as a checkpoint keeps it."""

    weights: Mapping[str, Tensor]  # the names of a tied tensor share one object
    training: Mapping[str, Tensor]  # the other tensors, by tpufit's names
    numbers: Mapping[str, Any]  # as JSON
    optimizers: Mapping[str, Any]  # the options and numbers of each, as JSON


class TrainState:
    """Everything that training changes: weights, buffers, optimizer states, accumulated gradients, averages, numbers.

    The tensors of the state before this `compile`, if any, stay in place.
    """

    def __init__(self, owner: Any, config: CompileConfig, before: TrainState | None = None) -> None:
        self._owner = owner
        self._config = config
        self.placement: Placement = HOST if before is None else before.placement
        # The values of the tensors while graphs are replayed.
        self.device: DeviceState = HostState([]) if before is None else before.device
        self.optimizers: dict[Optimizer, OptimizerState] = {}  # of optimizers that steps have used
        self._gradient_steps: dict[OptimizerState, GradientStep] = {}  # of the running training step
        self.counters = HostCounters()  # the optimizers' counters that stay on the host
        self.group_numbers = GroupNumbers()  # numbers in the optimizers' groups that their steps change
        self.numbers = TrainNumbers()
        self._warned: list[str] = []  # the names of unused gradients in the last warning
        # The module's parameters at `compile`: later parameters are in no optimizer unless the user adds them.
        self._compiled: list[nn.Parameter] = list(owner.module.parameters())
        if before is not None:
            kept = before.numbers
            self.numbers = TrainNumbers(step=kept.step, seed=kept.seed, rows_seen=kept.rows_seen)

    # Its parts

    @property
    def modules(self) -> list[nn.Module]:
        """The module, the losses that are modules, and the modules that the model keeps."""
        return [self._owner.module, *self.other_modules().values()]

    def other_modules(self) -> dict[str, nn.Module]:
        """Return the modules of the loss and those kept by the model, by their names in checkpoints."""
        of_loss = self._config.loss_modules
        named = {f"loss/{i}": part for i, part in enumerate(of_loss)}
        kept = find_kept_modules(self._owner).items()
        return named | {f"kept/{name}": part for name, part in kept if not any(part is loss for loss in of_loss)}

    def list_every_tensor(self) -> dict[str, Tensor]:
        """Return the tensors of all modules, and the parameters of the optimizers and the model outside of modules.

        Each tensor comes once, by its first name.
        """
        every = dict(_tensors(self._owner.module))
        for name, part in self.other_modules().items():
            every |= {f"{name}/{key}": tensor for key, tensor in _tensors(part)}
        every |= {f"kept/{name}": parameter for name, parameter in find_kept_parameters(self._owner).items()}
        for name, optimizer in self.named_optimizers().items():
            every |= {f"params/{name}/{i}": parameter for i, parameter in enumerate(list_parameters(optimizer))}
        names: dict[int, str] = {}
        for name, tensor in every.items():
            names.setdefault(id(tensor), name)
        return {name: every[name] for name in names.values()}

    def trains_other_parameters(self) -> bool:
        """True if an optimizer has parameters that aren't the module's."""
        inside = {id(p) for p in self._owner.module.parameters()}
        return any(id(p) not in inside for optimizer in self._every_optimizer() for p in list_parameters(optimizer))

    def find_untrained(self) -> list[str]:
        """Return the names of the module's parameters that require a gradient, but are newer than every optimizer."""
        known = {id(p) for p in self._compiled} | {id(p) for o in self._every_optimizer() for p in list_parameters(o)}
        named = self._owner.module.named_parameters()
        return [name for name, p in named if p.requires_grad and id(p) not in known]

    def named_optimizers(self) -> dict[str, Optimizer]:
        """Return the optimizer of `compile` and the user's optimizers, by attribute name, as in checkpoints.

        Inner optimizers follow the outer optimizer, under names such as `optimizer.base_optimizer`.
        """
        return dict(find_optimizers(vars(self._owner)))

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
        module = self._owner.module
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
            self.note_unused_gradients()
            if all_cleared and not self.placement.eager:
                self.drop_unused_gradients()

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
        for optimizer in self._every_optimizer():
            tensors |= {id(t): t for t in self.state_of(optimizer).list_device_state()}
        tensors |= {id(t): t for state in self.optimizers.values() for part in state.kept for t in part.tensors}
        return tensors, names

    def _every_optimizer(self) -> list[Optimizer]:
        """Return the model's optimizers, and further optimizers that steps have used."""
        return list(dict.fromkeys([*self.named_optimizers().values(), *self.optimizers]))

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
        for i, optimizer in enumerate(self._every_optimizer()):
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
        split = self._config.shard.shardings(self._owner.module, placement)
        if not split:
            return split
        shardings = dict(split)
        for state in map(self.state_of, self._every_optimizer()):
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
        stay = {id(t) for o in self._every_optimizer() for t in step_counts(o)} if placement.eager else set()
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

    def drop_unused_gradients(self) -> None:
        """Drop the gradients of parameters that no optimizer has, inside a step: nothing else would clear them."""
        for parameter in self._find_unused().values():
            parameter.grad = None

    def note_unused_gradients(self) -> None:
        """Warn of parameters outside the module that get a gradient in a step, but are in no optimizer.

        The module's own parameters may be left out on purpose.
        """
        if not self.other_modules() and not find_kept_parameters(self._owner):
            return
        unused = [
            name for name, p in self._find_unused().items() if p.grad is not None and name.startswith(_OTHER_PREFIXES)
        ]
        if unused and unused != self._warned:
            self._warned = unused
            warn(
                f"no optimizer has {join_few([readable_name(name) for name in unused])}, for which the step computes a "
                "gradient: they don't learn. Give an optimizer these parameters too, as in compile(optimizer=lambda "
                "parameters: torch.optim.SGD([*parameters, *others], lr=0.1)), or freeze them with "
                "requires_grad_(False)"
            )

    def _find_unused(self) -> dict[str, Tensor]:
        """Return the parameters that no optimizer has, by name."""
        used = {id(p) for optimizer in self._every_optimizer() for p in list_parameters(optimizer)}
        return {name: t for name, t in self.list_every_tensor().items() if t.requires_grad and id(t) not in used}

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

    # To disk and back

    def state_dict(self) -> SavedState:
        """Return the state as a checkpoint keeps it, with the live tensors on their devices.

        Raises:
            WeightsError: The module's state has objects other than tensors.
        """
        self.write_back()  # before the tensors are listed, because held tensors are empty
        names = self._names()
        now = self.numbers
        named = self.named_optimizers()
        for optimizer in named.values():
            if not optimizer.state:  # before the first fit; `load` expects it
                self.state_of(optimizer).create(shares=not self.placement.eager)
        swapped = {n: ema.swapped for n, o in named.items() if (ema := self.state_of(o).ema) is not None}
        numbers = {name: value for name, value in asdict(now).items() if name != "rows_seen"}
        return SavedState(
            named_tensors(self._owner.module),
            self._training_tensors(),
            numbers | {"swapped": swapped},
            {name: self.state_of(optimizer).options(names) for name, optimizer in named.items()},
        )

    def load_state_dict(self, saved: SavedState) -> None:
        """Load the state of a checkpoint into the tensors on their devices.

        Raises:
            CheckpointMismatchError: The checkpoint is of another net or optimizer. Nothing has changed.
        """
        # All checks precede the first change.
        weights = named_tensors(self._owner.module)
        names = self._names()
        named = self.named_optimizers()
        left_out = dict.fromkeys(saved.numbers.get("left_out", []))
        unknown = [name for name in left_out if name not in weights]
        if unknown:
            raise CheckpointMismatchError(
                f"the checkpoint's net had frozen weights that this one lacks: {join_few(unknown)}. Build the net as "
                "it was when the checkpoint was saved"
            )
        weights = {name: tensor for name, tensor in weights.items() if name not in left_out}
        check_weights(weights, saved.weights)
        if named.keys() != saved.optimizers.keys():
            raise CheckpointMismatchError(
                f"the checkpoint has the optimizers {[*saved.optimizers]}, but the model has {[*named]}: compile with "
                "the same optimizers, or load only the weights, with load_weights"
            )
        for name, optimizer in named.items():
            self.state_of(optimizer).check_options(name, names, saved.optimizers[name])
        now = self._training_tensors()
        _check_training(
            {n: t for n, t in now.items() if n in saved.training or not is_of_second_part(n)}, saved.training
        )

        # Adopt before the training tensors are listed, so that the list includes the adopted tensors.
        parameters = {name: t for name, t in self.list_every_tensor().items() if isinstance(t, nn.Parameter)}
        for name, optimizer in named.items():
            self.state_of(optimizer).drop_parts()
            self.state_of(optimizer).adopt(name, parameters, saved.training, saved.optimizers[name])
        shardings = self.shardings(self.placement)
        on_device = [t for optimizer in named.values() for t in self.state_of(optimizer).list_device_state()]
        move(on_device, self.placement, shardings=shardings)
        training = self._training_tensors()
        values = [saved.weights[name] for name in weights] + [saved.training[name] for name in training]
        copy_into([*weights.values(), *training.values()], values, self.placement, shardings)
        for name, optimizer in named.items():
            self.state_of(optimizer).load_options(names, saved.optimizers[name])
        chosen = self.numbers.chosen_steps | saved.numbers["chosen_steps"]
        kept = {name: saved.numbers[name] for name in ("step", "seed", "updates", "batches_waiting", "passes")}
        self.numbers = replace(self.numbers, **kept, chosen_steps=chosen)
        for name, optimizer in named.items():
            ema = self.state_of(optimizer).ema
            if ema is not None:
                ema.swapped = saved.numbers["swapped"].get(name, False)

    def reset_to(self, saved: SavedState) -> None:
        """Return to the host with a checkpoint's weights, see `reset`; `load_state_dict` loads the rest.

        Raises:
            CheckpointMismatchError: The checkpoint is of another net.
        """
        tensors = named_tensors(self._owner.module)
        check_weights(tensors, saved.weights)
        values = {id(tensor): saved.weights[name] for name, tensor in tensors.items()}
        kept = {n: t for n, t in self._training_tensors().items() if n.startswith(_OTHER_PREFIXES)}
        values |= {id(t): saved.training[name] for name, t in kept.items() if name in saved.training}
        self.reset(values)

    def _names(self) -> dict[int, str]:
        return {id(tensor): name for name, tensor in self.list_every_tensor().items()}

    def _training_tensors(self) -> dict[str, Tensor]:
        """Return the live tensors outside the module's `state_dict`, by their names in checkpoints."""
        module = self._owner.module
        named = self.list_every_tensor()
        names = {id(tensor): name for name, tensor in named.items()}
        saved = {id(tensor) for tensor in named_tensors(module).values()}
        tensors = {f"buffer/{name}": b for name, b in module.named_buffers() if id(b) not in saved}
        known = saved | {id(tensor) for tensor in tensors.values()}
        tensors |= {name: t for name, t in named.items() if name.startswith(_OTHER_PREFIXES) and id(t) not in known}
        for name, optimizer in self.named_optimizers().items():
            tensors |= self.state_of(optimizer).tensors_by_name(name, names)
        return tensors

    # To undo a trial

    def snapshot(self) -> Snapshot:
        """Copy everything, to put it back after a trial. **This waits** for the device."""
        self.write_back()
        owner = self._owner
        optimizers = list(self.named_optimizers().values())
        modules = [part for module in self.modules for part in module.modules()]
        # All attributes of modules, not only modes: a flag may say that a layer has seen its first batch, and a buffer
        # may be replaced by another tensor. The model's attributes too, because the user's steps may change them.
        dicts = [_copy_items(vars(part)) for part in (owner, *modules)] + [
            _copy_items(part._buffers) for part in modules
        ]
        dicts += [_copy_items(group) for optimizer in optimizers for group in optimizer.param_groups]
        states = [_copy_items(optimizer.state) for optimizer in optimizers]
        states += [_copy_items(values) for optimizer in optimizers for values in optimizer.state.values()]
        tensors, _ = self.tensors()
        for _, state in states:
            tensors |= {id(value): value for value in state.values() if isinstance(value, Tensor)}
        return Snapshot(
            dicts=[*dicts, *states],
            swapped=[(state, state.ema.swapped) for state in self.optimizers.values() if state.ema is not None],
            tensors=list(tensors.values()),
            values=copy_to_host(list(tensors.values()), "state"),
            numbers=replace(self.numbers, chosen_steps=dict(self.numbers.chosen_steps)),
            random=RNGState.now(),
        )

    def put_back(self, before: Snapshot) -> None:
        """Restore the snapshot `before`. Graphs captured since then become invalid."""
        self.device.clear_lost()  # every lost value is replaced below
        self.write_back()
        for now, kept in before.dicts:
            for key in now.keys() - kept.keys():
                del now[key]
            now.update(kept)
        for state, swapped in before.swapped:
            if state.ema is not None:
                state.ema.swapped = swapped
        self.numbers = before.numbers
        copy_into(before.tensors, before.values, self.placement, self.device.shardings)
        before.random.restore()


class Snapshot(NamedTuple):
    """Everything that training changes, at one moment.

    The values are on the host, because on the device they would double the memory of the state, and a failed step
    could lose them too.
    """

    dicts: list[tuple[MutableMapping[Any, Any], dict[Any, Any]]]  # of Python objects, each with a copy of its items
    swapped: list[tuple[OptimizerState, bool]]  # each with averages, and True if the module has the averages
    tensors: list[Tensor]
    values: list[Tensor]  # of these tensors, on the host
    numbers: TrainNumbers
    random: RNGState


def _set_slot(slots: MutableMapping[Any, Any], name: Any, tensor: Tensor | None) -> None:
    if tensor is None:
        slots.pop(name, None)
    else:
        slots[name] = tensor


def _copy_items(values: MutableMapping[Any, Any]) -> tuple[MutableMapping[Any, Any], dict[Any, Any]]:
    return values, dict(values)


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the parameters and buffers of a module, with their names."""
    return [*module.named_parameters(), *module.named_buffers()]


def readable_name(name: str) -> str:
    """Return a tensor's name in the user's terms.

    Example:
        >>> readable_name("kept/teacher/0.weight"), readable_name("loss/0/centers"), readable_name("0.weight")
        ('teacher.0.weight', 'centers of the loss', '0.weight')
    """
    kind, _, rest = name.partition("/")
    if kind == "loss":
        return f"{rest.partition('/')[2]} of the loss"
    return rest.replace("/", ".") if f"{kind}/" in _OTHER_PREFIXES else name


def _check_training(expected: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    missing = [name for name in expected if name not in given]
    if missing:
        raise CheckpointMismatchError(
            f"the checkpoint lacks {join_few(missing)}: it was made with different arguments of compile, such as "
            "another loss, use_ema or accumulate_steps"
        )
    others = [
        f"{name}: {given[name].dtype} {tuple(given[name].shape)} then, {tensor.dtype} {tuple(tensor.shape)} now"
        for name, tensor in expected.items()
        if (given[name].shape, given[name].dtype) != (tensor.shape, tensor.dtype)
    ]
    if others:
        raise CheckpointMismatchError(f"the checkpoint's training state has other shapes or dtypes: {join_few(others)}")
