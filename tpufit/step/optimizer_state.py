"""`OptimizerState`: one optimizer, and everything that its steps change besides the weights."""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import CheckpointMismatchError
from ..optimizers import EMA, Accumulator, DeviceRates, create_state, device_state, parameters
from ..utils.json_codec import is_plain
from .config import CompileConfig
from .context import StepContext


class OptimizerState:
    """One optimizer, and everything that its steps change besides the weights.

    Args:
        optimizer: The optimizer.
        config: The arguments of `compile`.

    Attributes:
        optimizer: The optimizer.
        rates: The learning rates on the device; None on the host, and before the first step on the device.
        accumulator: The gradients summed so far, with `accumulate_steps`.
        ema: The moving averages of the weights, with `use_ema`.
    """

    def __init__(self, optimizer: Optimizer, config: CompileConfig) -> None:
        self.optimizer, self._config = optimizer, config
        self.rates: DeviceRates | None = None
        self.accumulator: Accumulator | None = None
        self.ema: EMA | None = None

    def create(self) -> None:
        """Create all tensors before the first step, so that the first two steps share one graph."""
        create_state(self.optimizer)
        if self._config.gradients.accumulate_steps > 1 and self.accumulator is None:
            self.accumulator = Accumulator(self.optimizer)
        if self._config.ema is not None and self.ema is None:
            self.ema = EMA(self.optimizer)

    @property
    def kept(self) -> list[Accumulator | EMA]:
        """The accumulator and the averages, if they exist."""
        return [part for part in (self.accumulator, self.ema) if part is not None]

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor that a step changes, weights among them."""
        return [
            *parameters(self.optimizer),
            *device_state(self.optimizer),
            *(tensor for part in self.kept for tensor in part.tensors),
        ]

    def step(self, context: StepContext) -> None:
        """Update the weights from the gradients, as the step's update plan says.

        Args:
            context: The running step.
        """
        plan, learned = context.update, parameters(self.optimizer)
        if self.accumulator is not None:
            self.accumulator.add(context.rows)
            if plan.takes_step:
                self.accumulator.release()
        if not plan.takes_step:
            return
        # Clipped after the release: the limits are for the mean gradient over all accumulated rows.
        self._config.gradients.clip(learned)
        with nullcontext() if self.rates is None else self.rates.stepping():
            self.optimizer.step()
        if self.ema is not None and self._config.ema is not None:
            self.ema.update(self._config.ema.momentum, plan.overwrites)

    def tensors_by_name(self, own: str, names: Mapping[int, str]) -> dict[str, Tensor]:
        """Return the live tensors, by their names in checkpoints.

        Args:
            own: The optimizer's name.
            names: The parameters' names by their `id`.
        """
        found = {
            f"{own}/{key}/{names[id(parameter)]}": value
            for parameter, state in self.optimizer.state.items()
            for key, value in state.items()
            if isinstance(value, Tensor)
        }
        for kind, part in (("accumulated", self.accumulator), ("average", self.ema)):
            if part is not None:
                found |= {f"{kind}/{own}/{key}": t for key, t in part.named(names).items()}
        return found

    def options(self, names: Mapping[int, str]) -> dict[str, Any]:
        """Return the optimizer's options and numbers, as JSON holds them.

        Args:
            names: The parameters' names by their `id`.
        """
        return {
            "class": type(self.optimizer).__name__,
            "groups": [
                {"params": [names[id(p)] for p in group["params"]]}
                | {key: plain for key, value in group.items() if key != "params" and is_plain(plain := _plain(value))}
                for group in self.optimizer.param_groups
            ],
            "numbers": {
                names[id(parameter)]: {key: value for key, value in state.items() if is_plain(value)}
                for parameter, state in self.optimizer.state.items()
            },
        }

    def check_options(self, own: str, names: Mapping[int, str], given: Mapping[str, Any]) -> None:
        """Check that saved options are of an optimizer of this class with these groups.

        Args:
            own: The optimizer's name.
            names: The parameters' names by their `id`.
            given: The options of a checkpoint.

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
        """Load saved options and numbers.

        Args:
            names: The parameters' names by their `id`.
            given: The options of a checkpoint, checked.
        """
        for group, options in zip(self.optimizer.param_groups, given["groups"], strict=True):
            for key, value in options.items():
                if key != "params":
                    group[key] = tuple(value) if isinstance(group.get(key), tuple) else value
        for parameter in parameters(self.optimizer):
            numbers = given["numbers"].get(names[id(parameter)])
            if numbers:
                self.optimizer.state[parameter].update(numbers)

    def adopt(self, own: str, named: Mapping[str, nn.Parameter], given: Mapping[str, Tensor]) -> None:
        """Load state that the optimizer creates only in its first step, and hasn't created yet.

        Args:
            own: The optimizer's name.
            named: The module's parameters by name.
            given: The tensors of a checkpoint.
        """
        for full, value in given.items():
            owner, _, rest = full.partition("/")
            key, _, name = rest.partition("/")
            if owner == own and name in named and key not in self.optimizer.state.get(named[name], {}):
                self.optimizer.state[named[name]][key] = value.clone()


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value.item() if isinstance(value, Tensor) and not value.dim() else value
