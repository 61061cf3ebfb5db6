"""`OneCycle`: the learning rate rises to a peak and falls again, once in the whole training."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError
from ..optimizers import find_rated_groups, let_momentum_vary, read_scaled_rates, set_momentum
from .base import Logs, RateCallback

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import OneCycleLR


class OneCycle(RateCallback):
    """One cycle of the learning rate, and the opposite cycle of the momentum, with a new rate for every step.

    Its length is the actual number of global steps: the batches of all epochs, on any number of cores. Epoch logs get a
    `learning_rate`.

    Args:
        max_lr: The actual rate of the first parameter group at the peak, to which the other groups keep their
            proportions; or a rate for each group. Default: `compile`'s rate, scaled by the number of cores.
        total_steps: The length of the cycle in steps (default: all steps of this `fit`). Required if the number of
            batches is unknown.
        pct_start: The share of the steps in which the rate rises (default 0.3).
        anneal_strategy: `"cos"` (default) or `"linear"`.
        div_factor: The first rate is `max_lr / div_factor` (default 25).
        final_div_factor: The last rate is the first rate divided by this number (default 10,000).
        three_phase: Add a third phase, in which the rate falls from the first rate to the last (default False).
        cycle_momentum: Let the momentum fall as the rate rises (default True): SGD's and RMSprop's `momentum`, if any,
            else the first of Adam's `betas`.
        base_momentum: The momentum at the peak (default 0.85).
        max_momentum: The momentum at both ends (default 0.95).

    Raises:
        ArgumentError: The length is unknown. PyTorch checks the other arguments.

    Example:
        >>> OneCycle(max_lr=0.1, pct_start=0.25).max_lr
        0.1

    Source: Smith and Topin, "Super-convergence: very fast training of neural networks using large learning rates",
    2018, as `torch.optim.lr_scheduler.OneCycleLR` computes it.
    """

    sets_each_step = True

    def __init__(
        self,
        max_lr: float | Sequence[float] | None = None,
        total_steps: int | None = None,
        pct_start: float = 0.3,
        anneal_strategy: str = "cos",
        div_factor: float = 25.0,
        final_div_factor: float = 1e4,
        three_phase: bool = False,
        cycle_momentum: bool = True,
        base_momentum: float = 0.85,
        max_momentum: float = 0.95,
    ) -> None:
        self.max_lr = max_lr
        self.total_steps = total_steps
        self.cycle_momentum = cycle_momentum
        self._options: dict[str, Any] = {
            "pct_start": float(pct_start),
            "anneal_strategy": anneal_strategy,
            "div_factor": div_factor,
            "final_div_factor": final_div_factor,
            "three_phase": three_phase,
            "base_momentum": base_momentum,
            "max_momentum": max_momentum,
        }
        self._cycle: OneCycleLR | None = None
        self._position = 0  # the next step's, in the cycle
        self._epoch_begin: int | None = None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Make the cycle."""
        import torch
        from torch.optim.lr_scheduler import OneCycleLR

        steps = self.params["steps"]
        total = self.total_steps or (steps and steps * self.params["epochs"])
        if not total:
            raise ArgumentError(
                "OneCycle needs the number of steps, but these data have an unknown number of batches. Pass "
                "OneCycle(total_steps=...), or fit(steps_per_epoch=...)"
            )
        assert self.model.optimizer is not None
        groups = find_rated_groups(self.model.optimizer)
        rates = read_scaled_rates(self.model.optimizer)
        peaks: Any = self.max_lr
        if peaks is None:
            peaks = rates
        elif isinstance(peaks, (int, float)):
            peaks = [peaks * (rate / rates[0]) if rates[0] else peaks for rate in rates]
        if self.cycle_momentum:
            let_momentum_vary(groups)
        # PyTorch's schedule gets a separate optimizer, because it would modify the model's.
        scheduled = torch.optim.SGD([{"params": [torch.zeros(1)]} for _ in groups], lr=0.1, momentum=0.9)
        self._cycle = OneCycleLR(scheduled, peaks, total_steps=total, **self._options)
        scheduled.step()  # the schedule warns if the optimizer hasn't stepped before
        self._position = 0

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Find the position in the cycle: a resumed training doesn't begin at 0."""
        steps = self.params["steps"]
        self._epoch_begin = epoch * steps if steps else None

    def on_train_step_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Set the rate of the step, and the momentum."""
        assert self._cycle is not None and self.model.optimizer is not None
        cycle = self._cycle
        if self._epoch_begin is not None:
            self._position = self._epoch_begin + batch
        cycle.last_epoch = min(self._position, cycle.total_steps - 1) - 1
        cycle.step()
        self._position += 1
        for group, scheduled in zip(find_rated_groups(self.model.optimizer), cycle.optimizer.param_groups, strict=True):
            group["lr"] = float(scheduled["lr"])
            if self.cycle_momentum:
                set_momentum(group, float(scheduled["momentum"]))

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the cycle, for data with an unknown number of batches."""
        return {"position": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state.

        Args:
            state: The dict that `state_dict` returned; call it after `on_train_begin`, which resets the position to 0.
        """
        self._position = state["position"]
