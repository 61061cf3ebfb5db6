"""`TrainState`: everything that training changes, in one place: to move, reset, save, load and put back.

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
from ..errors import CheckpointMismatchError, StateLostError, few
from ..optimizers import DeviceRates, GroupNumbers, HostCounters, UpdatePlan, clear_state, device_state, parameters
from ..runtime import copies, copy_into, move, reshard, state_at, swap_value, to_host
from ..utils.random import RNGState
from ..utils.replaced import replaced
from ..utils.users_code import warn
from .config import CompileConfig
from .context import StepContext
from .kept_modules import kept_modules, kept_parameters
from .named_tensors import check_weights, named_tensors
from .optimizer_state import OptimizerState, is_of_part
from .sharding import bytes_of_a_core


@dataclass
class TrainNumbers:
    """The numbers that training changes, on the host."""

    step: int = 0  # since the model was made; with the seed it sets a step's random numbers
    seed: int = 0
    updates: int = 0  # optimizer steps since `compile`
    batches_waiting: int = 0  # since the last optimizer step, with `accumulate_steps`
    rows_seen: int = 0  # in steps of any role
    passes: int = 0  # evaluations and predictions inside `fit`; with the seed it sets their random numbers
    # The `steps_per_execution` that "auto" has chosen, by role.
    chosen_steps: dict[str, int] = field(default_factory=dict)


# How the names of tensors begin that are neither the module's nor an optimizer's own.
_BESIDE = ("buffer/", "loss/", "kept/", "params/")


class SavedState(NamedTuple):
    """The state of training, as a checkpoint keeps it."""

    weights: Mapping[str, Tensor]  # the names of a tied tensor share one object
    training: Mapping[str, Tensor]  # the other tensors, by names of tpufit's own
    numbers: Mapping[str, Any]  # as JSON holds them
    optimizers: Mapping[str, Any]  # the options and numbers of each, as JSON holds them


class TrainState:
    """Everything that training changes: weights, buffers, optimizer states, accumulated gradients, averages, numbers.

    The tensors of the state before this `compile`, if there is one, stay in place.
    """

    def __init__(self, owner: Any, config: CompileConfig, before: TrainState | None = None) -> None:
        self._owner = owner
        self._config = config
        self.placement: Placement = HOST if before is None else before.placement
        # The values of the tensors while graphs are replayed.
        self.device: DeviceState = HostState([]) if before is None else before.device
        self.optimizers: dict[Optimizer, OptimizerState] = {}  # of those that steps have used so far
        self.counters = HostCounters()  # the optimizers' counts that stay on the host
        self.group_numbers = GroupNumbers()  # those that the optimizers' steps change in their groups
        self.numbers = TrainNumbers()
        self._told: list[str] = []  # the names of unused gradients that a warning has named
        # Those of the module when it was compiled: later ones are in no optimizer unless the user sees to it.
        self._compiled: list[nn.Parameter] = list(owner.module.parameters())
        if before is not None:
            kept = before.numbers
            self.numbers = TrainNumbers(step=kept.step, seed=kept.seed, rows_seen=kept.rows_seen)

    # Its parts

    @property
    def modules(self) -> list[nn.Module]:
        """The module, those of the loss, and those that the model keeps."""
        return [self._owner.module, *self.beside().values()]

    def beside(self) -> dict[str, nn.Module]:
        """Return the modules beside the module, by their names in checkpoints: of the loss, and kept by the model."""
        own = self._config.loss_modules
        found = {f"loss/{i}": part for i, part in enumerate(own)}
        kept = kept_modules(self._owner).items()
        return found | {f"kept/{name}": part for name, part in kept if not any(part is one for one in own)}

    def named_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of all modules, and the parameters of optimizers and of the model that no module has.

        Each comes once, by its first name.
        """
        every = dict(_tensors(self._owner.module))
        for name, part in self.beside().items():
            every |= {f"{name}/{key}": tensor for key, tensor in _tensors(part)}
        every |= {f"kept/{name}": parameter for name, parameter in kept_parameters(self._owner).items()}
        for name, optimizer in self.named_optimizers().items():
            every |= {f"params/{name}/{i}": parameter for i, parameter in enumerate(parameters(optimizer))}
        names: dict[int, str] = {}
        for name, tensor in every.items():
            names.setdefault(id(tensor), name)
        return {name: every[name] for name in names.values()}

    def trains_beside(self) -> bool:
        """True if an optimizer has parameters that aren't the module's."""
        own = {id(p) for p in self._owner.module.parameters()}
        return any(id(p) not in own for optimizer in self._every_optimizer() for p in parameters(optimizer))

    def untrained(self) -> list[str]:
        """Return the names of the module's parameters that came after `compile`, are to learn, and can't.

        No optimizer has them.
        """
        known = {id(p) for p in self._compiled} | {id(p) for o in self._every_optimizer() for p in parameters(o)}
        named = self._owner.module.named_parameters()
        return [name for name, p in named if p.requires_grad and id(p) not in known]

    def named_optimizers(self) -> dict[str, Optimizer]:
        """Return the optimizer of `compile` and the user's own, by attribute name, as in checkpoints."""
        return dict(_optimizers_in(vars(self._owner)))

    def of(self, optimizer: Optimizer) -> OptimizerState:
        """Return the state of an optimizer."""
        if optimizer not in self.optimizers:
            self.optimizers[optimizer] = OptimizerState(optimizer, self._config, self._split_gradients)
        return self.optimizers[optimizer]

    def attach(self, optimizer: Optimizer) -> OptimizerState:
        """Return the state of an optimizer, ready to step; at the first call it is moved to the cores."""
        own = self.of(optimizer)
        if own.rates is None and not self.placement.on_host:
            own.create(shares=True)
            self.device.shardings |= self.shardings(self.placement)
            move(device_state(optimizer), self.placement, shardings=self.device.shardings)
            own.rates = DeviceRates(optimizer, self.placement)  # last: rates mark it as attached
        return own

    def pin(self, own: OptimizerState) -> None:
        """Keep the sharding of what a step of an optimizer has changed: else XLA may split the next step's inputs."""
        if self.placement.has_mesh:
            self.device.pin(own.tensors, self.placement)

    def _split_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Split gradients like their parameters, inside a step."""
        for parameter in parameters:
            sharding = self.device.shardings.get(id(parameter))
            if sharding is not None and parameter.grad is not None:
                parameter.grad = self.placement.laid_out(parameter.grad, sharding)

    @contextmanager
    def taking_steps(self, context: StepContext) -> Iterator[None]:
        """A context for a training step's Python, see `OptimizerState.taking_steps`."""
        module = self._owner.module
        with ExitStack() as stack:
            cleared = [
                stack.enter_context(own.taking_steps(context, partial(self.pin, own)))
                for own in self.optimizers.values()
            ]

            all_cleared = False

            def zero_grad(set_to_none: bool = True) -> None:
                nonlocal all_cleared
                all_cleared = True
                for clear in cleared:
                    clear(set_to_none)
                type(module).zero_grad(module, set_to_none)

            stack.enter_context(replaced(module, zero_grad=zero_grad))
            yield
            self.note_unused_gradients()
            if all_cleared and not self.placement.on_host:
                self.drop_unused_gradients()

    @property
    def trainable(self) -> list[nn.Parameter]:
        """The parameters that learn, of all modules."""
        return [p for module in self.modules for p in module.parameters() if p.requires_grad]

    @property
    def attached(self) -> list[tuple[Optimizer, DeviceRates]]:
        """The optimizers with rates on the device. Each step takes a vector of rates for each, in this order."""
        return [(optimizer, own.rates) for optimizer, own in self.optimizers.items() if own.rates is not None]

    def tensors(self) -> tuple[dict[int, Tensor], dict[int, str]]:
        """Return every tensor that training changes, and the names of the modules' tensors, both by `id`."""
        # Always in the same order: graphs take and return the state as a flat list.
        named = self.named_tensors()
        names = {id(tensor): readable(name) for name, tensor in named.items()}
        tensors = {id(tensor): tensor for tensor in named.values()}
        for optimizer in self._every_optimizer():
            tensors |= {id(t): t for t in device_state(optimizer)}
        tensors |= {id(t): t for own in self.optimizers.values() for part in own.kept for t in part.tensors}
        return tensors, names

    def _every_optimizer(self) -> list[Optimizer]:
        """The model's optimizers, and further ones that steps have used."""
        return list(dict.fromkeys([*self.named_optimizers().values(), *self.optimizers]))

    def _slots(self) -> list[Slot]:
        """List the slots of modules and optimizers that the tensors are in; a step may put others there."""
        found: list[Slot] = []
        for i, module in enumerate(self.modules):
            for path, part in module.named_modules():
                for tensors in (part._parameters, part._buffers):
                    found += [
                        Slot((i, path, name), tensor, partial(_put, tensors, name))
                        for name, tensor in tensors.items()
                        if tensor is not None
                    ]
        for i, optimizer in enumerate(self._every_optimizer()):
            there = set(map(id, device_state(optimizer)))
            for j, (parameter, values) in enumerate(optimizer.state.items()):
                found += [
                    Slot((i, j, name), value, partial(_put, optimizer.state[parameter], name))
                    for name, value in values.items()
                    if id(value) in there
                ]
        return found

    # Where it is

    def of_a_core(self, tensors: Iterable[Tensor]) -> int:
        """Return the bytes that each core holds of some tensors."""
        return bytes_of_a_core(tensors, self.device.shardings, self.placement.count)

    def shardings(self, placement: Placement) -> dict[int, Sharding]:
        """Return the shardings of the tensors that are split over the cores, by their `id`.

        What an optimizer, an accumulator or an average keeps of a parameter, of its shape, is split like it.
        """
        split = self._config.shard.shardings(self._owner.module, placement)
        if not split:
            return split
        found = dict(split)
        for own in map(self.of, self._every_optimizer()):
            for parameter, tensor in own.beside():
                if id(parameter) in split and tensor.shape == parameter.shape:
                    found[id(tensor)] = split[id(parameter)]
        return found

    def move_to(self, placement: Placement) -> bool:
        """Move every tensor in place, without compiling anything.

        Returns:
            True if the tensors or their place changed: captured graphs are void then.
        """
        # Before the tensors are listed: held values would stay behind, and empty tensors would be moved.
        self.write_back()
        for optimizer in self.named_optimizers().values():
            self.of(optimizer).create(shares=not placement.on_host)
        tensors, names = self.tensors()
        shardings = self.shardings(placement)
        moved = placement != self.placement
        # A second compile creates state where the weights are, which may be on the device.
        for tensor in tensors.values():
            if id(tensor) in shardings and tensor.device.type != "cpu":
                placement.pin(tensor, shardings[id(tensor)])
        placement.launch("init")
        reshard(tensors.values(), placement, shardings)
        move(tensors.values(), placement, names, shardings)
        if not moved and self.device.shardings == shardings and [id(t) for t in self.device.tensors] == list(tensors):
            return False
        if moved:
            self._forget_rates()
        self.placement = placement
        self.device = state_at(placement, tensors.values(), shardings, self._slots)
        return True

    def write_back(self) -> None:
        """Put the current values into the user's own tensors and the optimizers' counts.

        Raises:
            StateLostError: A step failed on the device, and the weights are lost with it.
        """
        self.device.write_back()
        self.counters.catch_up()

    def register_new(self) -> bool:
        """Adopt the state that a traced step has created, as the first step of some optimizers does, or set apart.

        Returns:
            True if there was any: the graphs captured so far lack it.
        """
        tensors, _ = self.tensors()
        if [*tensors] == [id(tensor) for tensor in self.device.tensors]:
            return False
        self.write_back()
        self.device.replace(tensors.values(), self.shardings(self.placement))
        return True

    def reset(self, weights: Mapping[int, Tensor]) -> None:
        """Return to the host as before the first step, with other weights, after a failed step lost the old ones.

        The module and the loss keep their tensor objects. Optimizer states, gradients and averages are dropped.

        Args:
            weights: Host tensors of the right shape and dtype, by the `id` of the module's or the loss's tensor. One
                that isn't lost may be left out, and keeps its value.

        Raises:
            StateLostError: A lost tensor was left out. Nothing has changed.
        """
        owned = {id(tensor): (name, tensor) for name, tensor in self.named_tensors().items()}
        lost = {id(self.device.tensors[index]) for index in self.device.lost}
        missing = [name for key, (name, _) in owned.items() if key in lost - weights.keys()]
        if missing:
            raise StateLostError(
                f"{few(missing)} can't be brought back: lost with a step that failed on the device, and not among the "
                "given weights. Start with a new module"
            )
        self.device.clear_lost()  # only now: every lost value is sure to be replaced below
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

    def renew(self) -> None:
        """Forget the held tensors: `compile` has replaced their values, e.g. by another dtype."""
        self.device = state_at(self.placement, [], slots=self._slots)

    def _forget_rates(self) -> None:
        for own in self.optimizers.values():
            own.rates = None

    # Steps

    def next_updates(self, steps: int, last: bool) -> list[UpdatePlan]:
        """Plan the use of the next steps' gradients, one plan a step; none if all steps do the same.

        The `last` step ends its epoch, which leaves no gradient over. Nothing changes before `count_updates`.
        """
        if not self._plans:
            return []
        every = self._config.gradients.accumulate_steps
        ema = self._config.ema
        now = self.numbers
        overwrite = ema.overwrite_frequency if ema is not None else None
        plans = []
        waiting = now.batches_waiting
        updates = now.updates
        for i in range(steps):
            takes_step = waiting + 1 == every or (last and i == steps - 1)
            waiting, updates = (0, updates + 1) if takes_step else (waiting + 1, updates)
            overwrites = takes_step and overwrite is not None and updates % overwrite == 0
            plans.append(UpdatePlan(takes_step, overwrites))
        return plans

    @property
    def _plans(self) -> bool:
        """True if steps differ in what they do with their gradients."""
        ema = self._config.ema
        return self._config.gradients.accumulate_steps > 1 or (ema is not None and ema.overwrite_frequency is not None)

    @property
    def optimizer_steps(self) -> int:
        """The number of steps that the optimizer has taken, since some beginning."""
        return self.numbers.updates if self._plans else self.numbers.step

    def batches_of(self, updates: int) -> int:
        """Return the number of batches that the next steps of the optimizer take, inside an epoch."""
        return updates * self._config.gradients.accumulate_steps - self.numbers.batches_waiting

    def count_updates(self, plans: Iterable[UpdatePlan]) -> None:
        """Count planned steps as done."""
        for plan in plans:
            self.numbers.updates += plan.takes_step
            self.numbers.batches_waiting = 0 if plan.takes_step else self.numbers.batches_waiting + 1

    def drop_gradients(self) -> None:
        """Drop the gradients left over from an epoch that was broken off."""
        if not self.numbers.batches_waiting:
            return
        self.numbers.batches_waiting = 0
        self.write_back()
        for own in self.optimizers.values():
            tensors = [tensor for accumulator in own.accumulators for tensor in accumulator.tensors]
            zeros = [torch.zeros(t.shape, dtype=t.dtype) for t in tensors]
            copy_into(tensors, zeros, self.placement, self.device.shardings)

    def drop_unused_gradients(self) -> None:
        """Drop the gradients of parameters that no optimizer has, inside a step: nothing would ever clear them."""
        for parameter in self._unused().values():
            parameter.grad = None

    def note_unused_gradients(self) -> None:
        """Warn of parameters beside the module that a step has computed a gradient for, and that no optimizer has.

        In the module itself some may be left out on purpose.
        """
        if not self.beside() and not kept_parameters(self._owner):
            return
        unused = [name for name, p in self._unused().items() if p.grad is not None and name.startswith(_BESIDE)]
        if unused and unused != self._told:
            self._told = unused
            warn(
                f"no optimizer has {few([readable(name) for name in unused])}, for which the step computes a gradient: "
                "nothing of it is trained. Give an optimizer these parameters too, as in compile(optimizer=lambda "
                "parameters: torch.optim.SGD([*parameters, *others], lr=0.1)), or freeze them by requires_grad_(False)"
            )

    def _unused(self) -> dict[str, Tensor]:
        """The parameters that no optimizer has, by name."""
        used = {id(p) for optimizer in self._every_optimizer() for p in parameters(optimizer)}
        return {name: t for name, t in self.named_tensors().items() if t.requires_grad and id(t) not in used}

    def swap_ema(self, to: bool | None = None) -> None:
        """Swap the weights and their moving averages. Nothing is copied.

        True puts the averages into the module, False the weights, None whichever it doesn't have.
        """
        for own in self.optimizers.values():
            if own.ema is not None and own.ema.swapped != to:
                self.write_back()
                own.ema.swap()

    def finish_ema(self) -> None:
        """Make the moving averages the weights, as `fit` does at its end."""
        averages = [own.ema for own in self.optimizers.values() if own.ema is not None]
        if averages:
            self.write_back()
            for ema in averages:
                ema.overwrite()
            self.placement.launch("ema")

    # To disk and back

    def state_dict(self) -> SavedState:
        """Return the state as a checkpoint keeps it, with the live tensors, wherever they are.

        Raises:
            WeightsError: The module keeps something in its state that isn't a tensor.
        """
        self.write_back()  # before the tensors are listed: held ones are empty
        names = self._names()
        now = self.numbers
        named = self.named_optimizers()
        for optimizer in named.values():
            if not optimizer.state:  # before the first fit; `load` expects it
                self.of(optimizer).create(shares=not self.placement.on_host)
        swapped = {n: ema.swapped for n, o in named.items() if (ema := self.of(o).ema) is not None}
        numbers = {name: value for name, value in asdict(now).items() if name != "rows_seen"}
        return SavedState(
            named_tensors(self._owner.module),
            self._training_tensors(),
            numbers | {"swapped": swapped},
            {name: self.of(optimizer).options(names) for name, optimizer in named.items()},
        )

    def load_state_dict(self, saved: SavedState) -> None:
        """Load the state of a checkpoint, of a model over the same net, into the tensors, wherever they are.

        Raises:
            CheckpointMismatchError: The checkpoint is of another net or optimizer. Nothing has changed.
        """
        # All checks come before the first change.
        weights = named_tensors(self._owner.module)
        names = self._names()
        named = self.named_optimizers()
        left_out = dict.fromkeys(saved.numbers.get("left_out", []))
        unknown = [name for name in left_out if name not in weights]
        if unknown:
            raise CheckpointMismatchError(
                f"the checkpoint's net had frozen weights that this one lacks: {few(unknown)}"
            )
        weights = {name: tensor for name, tensor in weights.items() if name not in left_out}
        check_weights(weights, saved.weights)
        if named.keys() != saved.optimizers.keys():
            raise CheckpointMismatchError(
                f"the checkpoint is of the optimizers {[*saved.optimizers]}, and the model has {[*named]}"
            )
        for name, optimizer in named.items():
            self.of(optimizer).check_options(name, names, saved.optimizers[name])
        own = self._training_tensors()
        _check_training({n: t for n, t in own.items() if n in saved.training or not is_of_part(n)}, saved.training)

        # Before the training tensors are listed, so that the adopted ones are among them.
        parameters = {name: t for name, t in self.named_tensors().items() if isinstance(t, nn.Parameter)}
        for name, optimizer in named.items():
            self.of(optimizer).drop_parts()
            self.of(optimizer).adopt(name, parameters, saved.training)
        shardings = self.shardings(self.placement)
        move((t for optimizer in named.values() for t in device_state(optimizer)), self.placement, shardings=shardings)
        training = self._training_tensors()
        values = [saved.weights[name] for name in weights] + [saved.training[name] for name in training]
        copy_into([*weights.values(), *training.values()], values, self.placement, shardings)
        for name, optimizer in named.items():
            self.of(optimizer).load_options(names, saved.optimizers[name])
        chosen = self.numbers.chosen_steps | saved.numbers["chosen_steps"]
        kept = {name: saved.numbers[name] for name in ("step", "seed", "updates", "batches_waiting", "passes")}
        self.numbers = replace(self.numbers, **kept, chosen_steps=chosen)
        for name, optimizer in named.items():
            ema = self.of(optimizer).ema
            if ema is not None:
                ema.swapped = saved.numbers["swapped"].get(name, False)

    def reset_to(self, saved: SavedState) -> None:
        """Return to the host with a checkpoint's weights, as `reset` does; `load_state_dict` loads the rest.

        Raises:
            CheckpointMismatchError: The checkpoint is of another net.
        """
        own = named_tensors(self._owner.module)
        check_weights(own, saved.weights)
        values = {id(tensor): saved.weights[name] for name, tensor in own.items()}
        kept = {n: t for n, t in self._training_tensors().items() if n.startswith(_BESIDE)}
        values |= {id(t): saved.training[name] for name, t in kept.items() if name in saved.training}
        self.reset(values)

    def _names(self) -> dict[int, str]:
        return {id(tensor): name for name, tensor in self.named_tensors().items()}

    def _training_tensors(self) -> dict[str, Tensor]:
        """Return the live tensors outside the module's `state_dict`, by their names in checkpoints."""
        module = self._owner.module
        named = self.named_tensors()
        names = {id(tensor): name for name, tensor in named.items()}
        saved = {id(tensor) for tensor in named_tensors(module).values()}
        found = {f"buffer/{name}": b for name, b in module.named_buffers() if id(b) not in saved}
        known = saved | {id(tensor) for tensor in found.values()}
        found |= {name: t for name, t in named.items() if name.startswith(_BESIDE) and id(t) not in known}
        for name, optimizer in self.named_optimizers().items():
            found |= self.of(optimizer).tensors_by_name(name, names)
        return found

    # To undo a trial

    def snapshot(self) -> Snapshot:
        """Copy everything, to put it back after a trial. **This waits** for the device, once."""
        self.write_back()
        owner = self._owner
        optimizers = list(self.named_optimizers().values())
        modules = [part for module in self.modules for part in module.modules()]
        # All attributes of modules, not only modes: a flag may say that a layer has seen its first batch, and a buffer
        # may be replaced by another tensor. Those of the model too: the user's own steps may change them.
        dicts = [_copied(vars(part)) for part in (owner, *modules)] + [_copied(part._buffers) for part in modules]
        dicts += [_copied(group) for optimizer in optimizers for group in optimizer.param_groups]
        states = [_copied(optimizer.state) for optimizer in optimizers]
        states += [_copied(own) for optimizer in optimizers for own in optimizer.state.values()]
        tensors, _ = self.tensors()
        for _, state in states:
            tensors |= {id(value): value for value in state.values() if isinstance(value, Tensor)}
        return Snapshot(
            dicts=[*dicts, *states],
            swapped=[(own, own.ema.swapped) for own in self.optimizers.values() if own.ema is not None],
            tensors=list(tensors.values()),
            values=copies(list(tensors.values()), "state"),
            numbers=replace(self.numbers, chosen_steps=dict(self.numbers.chosen_steps)),
            random=RNGState.now(),
        )

    def put_back(self, before: Snapshot) -> None:
        """Restore everything, whatever has happened since. Graphs captured since are void."""
        self.device.clear_lost()  # no lost value is read any more: all of them are replaced below
        self.write_back()
        for now, kept in before.dicts:
            for key in now.keys() - kept.keys():
                del now[key]
            now.update(kept)
        for own, swapped in before.swapped:
            if own.ema is not None:
                own.ema.swapped = swapped
        self.numbers = before.numbers
        copy_into(before.tensors, before.values, self.placement, self.device.shardings)
        before.random.restore()


class Snapshot(NamedTuple):
    """Everything that training changes, at one moment.

    The values are on the host: on the device they would double the memory of the state, which a net that just fits
    can't spare, and a failed step might lose them along with the state.
    """

    dicts: list[tuple[MutableMapping[Any, Any], dict[Any, Any]]]  # of Python objects, each with a copy of its items
    swapped: list[tuple[OptimizerState, bool]]  # each with averages, and True if these are in the weights' place
    tensors: list[Tensor]
    values: list[Tensor]  # of these tensors, on the host
    numbers: TrainNumbers
    random: RNGState


def _put(slots: MutableMapping[Any, Any], name: Any, tensor: Tensor | None) -> None:
    if tensor is None:
        slots.pop(name, None)
    else:
        slots[name] = tensor


def _copied(values: MutableMapping[Any, Any]) -> tuple[MutableMapping[Any, Any], dict[Any, Any]]:
    return values, dict(values)


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the parameters and buffers of a module, with their names."""
    return [*module.named_parameters(), *module.named_buffers()]


def readable(name: str) -> str:
    """Return a tensor's name as users know it.

    Example:
        >>> readable("kept/teacher/0.weight"), readable("loss/0/centers"), readable("0.weight")
        ('teacher.0.weight', 'centers of the loss', '0.weight')
    """
    kind, _, rest = name.partition("/")
    if kind == "loss":
        return f"{rest.partition('/')[2]} of the loss"
    return rest.replace("/", ".") if f"{kind}/" in _BESIDE else name


def _optimizers_in(attributes: Mapping[str, Any]) -> Iterator[tuple[str, Optimizer]]:
    """Yield the optimizers among a model's attributes, and in lists, tuples and dicts there, by name."""
    for name, value in attributes.items():
        if isinstance(value, Optimizer):
            yield name, value
        elif isinstance(value, (list, tuple)):
            yield from ((f"{name}.{i}", item) for i, item in enumerate(value) if isinstance(item, Optimizer))
        elif isinstance(value, dict):
            yield from ((f"{name}.{key}", item) for key, item in value.items() if isinstance(item, Optimizer))


def _check_training(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    missing = [name for name in own if name not in given]
    if missing:
        raise CheckpointMismatchError(
            f"the checkpoint lacks {few(missing)}: it was made with other arguments of compile, such as another loss, "
            "use_ema or accumulate_steps"
        )
    others = [
        f"{name}: {given[name].dtype} {tuple(given[name].shape)} then, {tensor.dtype} {tuple(tensor.shape)} now"
        for name, tensor in own.items()
        if (given[name].shape, given[name].dtype) != (tensor.shape, tensor.dtype)
    ]
    if others:
        raise CheckpointMismatchError(f"the checkpoint's training state has other shapes or dtypes: {few(others)}")
