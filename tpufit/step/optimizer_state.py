"""`OptimizerState`: one optimizer, and everything that its steps change besides the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import CheckpointMismatchError
from ..optimizers import (
    EMA,
    Accumulator,
    DeviceRates,
    SharedStepCounters,
    create_state,
    list_device_state,
    list_parameters,
    share_counters,
)
from ..runtime import unguarding
from ..utils.json_codec import is_json
from .compile_config import CompileConfig


class OptimizerState:
    """One optimizer, and everything that its steps change besides the weights.

    Args:
        optimizer: The optimizer.
        config: The arguments of `compile`.
        outer: The state of the outer optimizer, if this is an inner optimizer such as SAM's base optimizer. Both use
            the accumulators and averages of `outer` (default: none).
    """

    def __init__(self, optimizer: Optimizer, config: CompileConfig, outer: OptimizerState | None = None) -> None:
        self.optimizer = optimizer
        self.outer = outer
        self.inner: list[Optimizer] = []
        if outer is not None:
            outer.inner.append(optimizer)
        self._config = config
        self.rates: DeviceRates | None = None  # on the device; None on the host and before the first step
        # With `accumulate_steps`: one for each part of a loss with a different denominator, usually a single one.
        self.accumulators: list[Accumulator] = []
        self.ema: EMA | None = None  # with `use_ema`
        self._counts_on_device: set[str] = set()  # the names of scalar state that was on the device

    def create(self, shares: bool) -> None:
        """Create all tensors before the first step, so that the first two steps share one graph.

        Args:
            shares: True lets parameters share step counters, as on a device.
        """
        create_state(self.optimizer)
        if shares:
            share_counters(self.optimizer)
        if self.outer is not None:
            return
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
    def sends_rates(self) -> bool:
        """True if its rates are inputs of steps: it has rates, and its inner optimizers don't have all its groups."""
        if not self.inner:
            return self.rates is not None
        if not any("lr" in group for group in self.optimizer.param_groups):
            return False
        elsewhere = {id(group) for optimizer in self.inner for group in optimizer.param_groups}
        return self.rates is not None and not elsewhere.issuperset(map(id, self.optimizer.param_groups))

    @property
    def kept(self) -> list[Accumulator | EMA]:
        """The accumulators and the averages, if they exist."""
        return [*self.accumulators, *([] if self.ema is None else [self.ema])]

    def list_device_state(self) -> list[Tensor]:
        """Return the optimizer's state that belongs on the device, including counts that its steps created there."""
        named = [(name, value) for state in self.optimizer.state.values() for name, value in state.items()]
        with unguarding():
            counts = [(name, value) for name, value in named if isinstance(value, Tensor) and not value.dim()]
            self._counts_on_device |= {name for name, value in counts if value.device.type != "cpu"}
            tensors = [
                *list_device_state(self.optimizer),
                *(value for name, value in counts if name in self._counts_on_device),
            ]
        return list({id(value): value for value in tensors}.values())

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor that a step changes, including the weights."""
        return [
            *list_parameters(self.optimizer),
            *self.list_device_state(),
            *(tensor for part in self.kept for tensor in part.tensors),
        ]

    def walk_parameters(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield pairs of a parameter and a tensor that is kept for it."""
        for parameter, state in self.optimizer.state.items():
            yield from ((parameter, value) for value in state.values() if isinstance(value, Tensor))
        for part in self.kept:
            yield from part.by_parameter

    def tensors_by_name(self, prefix: str, names: Mapping[int, str]) -> dict[str, Tensor]:
        """Return the live tensors by their names in checkpoints, made of `prefix` and the parameters' names by `id`."""
        tensors = {
            f"{prefix}/{key}/{names[id(parameter)]}": value
            for parameter, state in self.optimizer.state.items()
            for key, value in state.items()
            if isinstance(value, Tensor)
        }
        for kind, part in self._named_kept():
            tensors |= {f"{kind}/{prefix}/{key}": t for key, t in part.named(names).items()}
        return tensors

    def _named_kept(self) -> list[tuple[str, Accumulator | EMA]]:
        """Return the accumulators and the averages, each with the first part of its tensors' names in checkpoints."""
        parts: list[tuple[str, Accumulator | EMA]] = [
            (_accumulator_kind(slot), part) for slot, part in enumerate(self.accumulators)
        ]
        return [*parts, *([] if self.ema is None else [("average", self.ema)])]

    def options(self, names: Mapping[int, str]) -> dict[str, Any]:
        """Return the optimizer's options and numbers as JSON; `names` has the parameters' names by `id`."""
        self.list_device_state()
        return {
            "class": type(self.optimizer).__name__,
            "groups": [
                {"params": [names[id(p)] for p in group["params"]]}
                | {key: plain for key, value in group.items() if key != "params" and is_json(plain := _to_plain(value))}
                for group in self.optimizer.param_groups
            ],
            "numbers": {
                names[id(parameter)]: {key: value for key, value in state.items() if is_json(value)}
                for parameter, state in self.optimizer.state.items()
            },
            "counts_on_device": sorted(self._counts_on_device),
        }

    def check_options(self, name: str, names: Mapping[int, str], given: Mapping[str, Any]) -> None:
        """Check that saved options are of an optimizer of this class with these groups.

        Raises:
            CheckpointMismatchError: The options are of another optimizer.
        """
        kind = type(self.optimizer).__name__
        if kind != given["class"]:
            raise CheckpointMismatchError(
                f"the checkpoint has {given['class']}, but the model's {name} is {kind}: compile with the same "
                "optimizer, or load only the weights, with load_weights"
            )
        groups = [[names[id(p)] for p in group["params"]] for group in self.optimizer.param_groups]
        before = [group["params"] for group in given["groups"]]
        if groups != before:
            sizes = [[len(group) for group in which] for which in (before, groups)]
            raise CheckpointMismatchError(
                f"the parameter groups of {name} ({kind}) differ: {sizes[0]} parameters then, {sizes[1]} now, or "
                "different parameters. Build the groups as before"
            )

    def load_options(self, names: Mapping[int, str], given: Mapping[str, Any]) -> None:
        """Load saved options and numbers, which `check_options` has checked."""
        for group, options in zip(self.optimizer.param_groups, given["groups"], strict=True):
            for key, value in options.items():
                if key != "params":
                    group[key] = tuple(value) if isinstance(group.get(key), tuple) else value
        for parameter in list_parameters(self.optimizer):
            numbers = given["numbers"].get(names[id(parameter)])
            if numbers:
                self.optimizer.state[parameter].update(numbers)

    def drop_parts(self) -> None:
        """Drop all accumulators but the first; `adopt` creates the accumulators of a checkpoint."""
        del self.accumulators[1:]

    def adopt(
        self, prefix: str, named: Mapping[str, nn.Parameter], given: Mapping[str, Tensor], options: Mapping[str, Any]
    ) -> None:
        """Load state that the optimizer will create only in its first step; unshare step counters.

        `list_device_state` lists the state that was on the device, according to the saved options.
        """
        self._counts_on_device |= {*options.get("counts_on_device", ())}
        while self._accumulates and any(
            n.startswith(f"{_accumulator_kind(len(self.accumulators))}/{prefix}/") for n in given
        ):
            self.accumulators.append(Accumulator(self.optimizer))
        for kind, part in self._named_kept():
            part.extend({p for name, p in named.items() if f"{kind}/{prefix}/{name}" in given})
        for full, value in given.items():  # optimizer/key/parameter
            owner, _, rest = full.partition("/")
            key, _, name = rest.partition("/")
            if owner == prefix and name in named and key not in self.optimizer.state.get(named[name], {}):
                self.optimizer.state[named[name]][key] = value.clone()
        if isinstance(self.optimizer, SharedStepCounters):
            counts = {id(p): given[key] for name, p in named.items() if (key := f"{prefix}/step/{name}") in given}
            self.optimizer.separate(lambda p: float(counts[id(p)]) if id(p) in counts else None)


def _accumulator_kind(slot: int) -> str:
    """Return the first part of the names of an accumulator's tensors in checkpoints."""
    return f"accumulated_{slot}" if slot else "accumulated"


def is_of_second_part(name: str) -> bool:
    """True for the name of an accumulator that only a loss of several parts creates, see `GradientStep.backward`."""
    return name.startswith("accumulated_")


def _to_plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_to_plain(item) for item in value]
    return value.item() if isinstance(value, Tensor) and not value.dim() else value
