"""`LRScheduler`: a schedule by name, or any scheduler of `torch.optim.lr_scheduler`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError, require_whole
from ..optimizers import begin_from_peak, find_rated, let_momentum_vary, note_scheduled
from ._support.monitor import Monitor
from ._support.schedules import NAMES, NamedSchedule
from .base import Logs, RateCallback

if TYPE_CHECKING:
    from torch.optim import Optimizer, lr_scheduler


class LRScheduler(RateCallback):
    """Sets the rates by a schedule: a name for the whole training, or any scheduler of `torch.optim.lr_scheduler`.

    It begins when training does, so it starts from the rate already scaled by the number of cores. It sets actual
    rates; several parameter groups keep their proportions. Epoch logs get a `learning_rate`.

    A named schedule sets the rate of each optimizer step, and knows the total number of steps. The rate rises to
    `compile`'s rate, then falls until the end: linearly (`"linear"`), as half a cosine (`"cosine"`), with the inverse
    square root of the step (`"inverse_sqrt"`), only in a last phase (`"wsd"`: warm-up, stable, decay), or not at all
    (`"constant"`). Each `fit` begins a new schedule.

    Args:
        scheduler: `"linear"`, `"cosine"`, `"constant"`, `"inverse_sqrt"` or `"wsd"`. Or a function that takes the
            optimizer and returns a PyTorch scheduler, e.g. a `functools.partial` of its class. Or a PyTorch scheduler
            of the very optimizer passed to `compile`, whose rates must not be scaled by the number of cores:
            `compile(scale_lr=None)`. In a second `fit`, a PyTorch scheduler continues from its last step.
        interval: When a PyTorch scheduler steps: `"epoch"` (default), after each epoch; or `"step"`, for each optimizer
            step, even of steps that run as one graph. With `accumulate_steps=n` that is after n batches, and at the
            epoch's end.
        monitor: The log that `torch.optim.lr_scheduler.ReduceLROnPlateau` monitors (default `"val_loss"`).
        warmup: For a named schedule: the number of steps in which the rate rises linearly from almost 0, or as a float
            their share of all steps (default 0: none).
        floor: For a named schedule: the lowest rate, as a share of the peak (default 0).
        decay: For `"wsd"`: the number of steps in the last phase, in which the rate falls linearly, or as a float their
            share of all steps (default 0.2).
        total_steps: For a named schedule: the number of optimizer steps (default: the steps of all epochs of this
            `fit`). Required if the number of batches is unknown.

    Raises:
        UnknownNameError: No schedule has this name.
        ArgumentError: `scheduler` has a wrong type, belongs to another optimizer, or was made for the rates before
            scaling; a number is out of range; or, when training begins, the number of steps is unknown.

    Example: a warm-up over a twentieth of the steps, then half a cosine; and the like from PyTorch's schedulers.
        >>> callback = LRScheduler("cosine", warmup=0.05, floor=0.1)
        >>> from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
        >>> def warm_up_and_cosine(optimizer):
        ...     phases = [LinearLR(optimizer, 0.01, total_iters=100), CosineAnnealingLR(optimizer, T_max=900)]
        ...     return SequentialLR(optimizer, phases, milestones=[100])
        >>> callback = LRScheduler(warm_up_and_cosine, interval="step")

    Source: `"wsd"` is from Hu et al., "MiniCPM", 2024; `"inverse_sqrt"` from Vaswani et al., "Attention is all you
    need", 2017; the names are from `transformers.get_scheduler` and Keras.
    """

    def __init__(
        self,
        scheduler: str | Callable[[Optimizer], lr_scheduler.LRScheduler] | lr_scheduler.LRScheduler,
        interval: str | None = None,
        monitor: str = "val_loss",
        *,
        warmup: int | float = 0,
        floor: float = 0.0,
        decay: int | float = 0.2,
        total_steps: int | None = None,
    ) -> None:
        if interval not in (None, "epoch", "step"):
            raise ArgumentError(f"interval must be 'epoch' or 'step', got {interval!r}")
        self._named: NamedSchedule | None = None
        if isinstance(scheduler, str):
            self._named = NamedSchedule(scheduler, warmup, floor, decay)
            if interval == "epoch":
                raise ArgumentError(f"the schedule {scheduler!r} gives each step its rate: leave out interval='epoch'")
            if total_steps is not None:
                require_whole("total_steps", total_steps)
        elif (warmup, floor, decay, total_steps) != (0, 0.0, 0.2, None):
            raise ArgumentError(
                f"warmup, floor, decay and total_steps go with a schedule by name ({', '.join(NAMES)}), got "
                f"{scheduler!r}"
            )
        elif not callable(scheduler) and not hasattr(scheduler, "optimizer"):
            raise ArgumentError(
                "scheduler must be a name, a function of the optimizer, such as lambda optimizer: "
                "CosineAnnealingLR(optimizer, T_max=10), or a scheduler of torch.optim.lr_scheduler, got "
                f"{scheduler!r}"
            )
        self.interval = interval or ("epoch" if self._named is None else "step")
        self.sets_each_step = self._named is not None
        self.total_steps = total_steps
        self.scheduler: lr_scheduler.LRScheduler | None = None
        self._scheduler_or_factory = scheduler
        self._monitor = Monitor(monitor)
        self._iterations: int | None = None  # before the step that the rate is for; None: any step
        self._epoch: int | None = None  # the current epoch; None between epochs

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Make the scheduler, if this optimizer has none yet."""
        assert self.model.optimizer is not None
        inner = find_rated(self.model.optimizer)
        candidates = [self.model.optimizer, *inner]
        chosen = getattr(self._scheduler_or_factory, "optimizer", None)
        optimizer = next((candidate for candidate in candidates if candidate is chosen), inner[0])
        if self._named is not None:
            self._make_named(self._named, optimizer)
            return
        if self.scheduler is not None and self.scheduler.optimizer is optimizer:
            self._epoch = None
            return
        assert not isinstance(self._scheduler_or_factory, str)
        if callable(self._scheduler_or_factory):
            for group in optimizer.param_groups:
                group.pop("initial_lr", None)  # an earlier scheduler's, from which PyTorch would start
            self.scheduler = self._scheduler_or_factory(optimizer)
        else:
            self.scheduler = _require_match(self._scheduler_or_factory, optimizer)
        if getattr(self.scheduler, "optimizer", None) is not optimizer:
            raise ArgumentError(f"scheduler must return a scheduler of the given optimizer, got {self.scheduler!r}")
        if getattr(self.scheduler, "cycle_momentum", False):  # of CyclicLR and OneCycleLR
            let_momentum_vary(self.scheduler.optimizer.param_groups)
        _silence_step_order_warning(self.scheduler.optimizer)
        self._iterations = self._epoch = None

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Take the step after an epoch that `resume="next_epoch"` skipped, unless it needs that epoch's logs."""
        skipped = self._epoch is not None and epoch > self._epoch
        if self.interval == "epoch" and skipped and _as_plateau(self.scheduler) is None:
            self._step(None)
        self._epoch = epoch
        updates = self.params.get("updates")
        if self._named is not None and updates and self.params.get("max_steps") is None:
            # Training may begin with a later epoch, or have left an epoch early.
            assert self.scheduler is not None
            self.scheduler.last_epoch = epoch * updates - 1
            self._step(None)
            self._iterations = None

    def on_train_step_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Set the step's rate, unless it is set already: for the very first step, and while gradients accumulate."""
        iterations = (logs or {})["iterations"]
        if self.interval == "step" and self._iterations not in (None, iterations):
            self._step(None)
        self._iterations = iterations

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Set the rate of the next epoch."""
        super().on_epoch_end(epoch, logs)
        if self.interval == "epoch":
            self._step(logs)
        self._epoch = None

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's numbers and strings; a new scheduler gets the rest from its arguments."""
        assert self.scheduler is not None
        return {
            "scheduler": _as_json(self.scheduler.state_dict()),
            "iterations": self._iterations,
            "epoch": self._epoch,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state.

        Args:
            state: The dict that `state_dict` returned; call it after `on_train_begin`, which makes the scheduler.
        """
        assert self.scheduler is not None
        self.scheduler.load_state_dict(dict(state["scheduler"]))
        self._iterations = state["iterations"]
        self._epoch = state["epoch"]
        # Making the scheduler has set the rates of training's start.
        for group, rate in zip(self.scheduler.optimizer.param_groups, self.scheduler.get_last_lr(), strict=True):
            group["lr"] = rate

    def _make_named(self, schedule: NamedSchedule, optimizer: Optimizer) -> None:
        """Make the PyTorch scheduler of a named schedule, over the steps of this `fit`."""
        from torch.optim.lr_scheduler import LambdaLR

        total = self.total_steps or self.params.get("total_steps")
        if total is None and schedule.needs_total:
            raise ArgumentError(
                f"the schedule {schedule.name!r} needs the number of steps, but these data have an unknown number of "
                "batches: pass LRScheduler(total_steps=...), fit(steps_per_epoch=...) or fit(max_steps=...)"
            )
        begin_from_peak(optimizer)
        self.scheduler = LambdaLR(optimizer, partial(schedule.factor, total=total))
        _silence_step_order_warning(optimizer)
        note_scheduled(optimizer)
        self._iterations = self._epoch = None

    def _step(self, logs: Logs | None) -> None:
        assert self.scheduler is not None
        follower = _as_plateau(self.scheduler)
        if follower is None:
            self.scheduler.step()
            if self._named is not None:
                note_scheduled(self.scheduler.optimizer)
        elif (value := self._monitor.read(logs, type(self).__name__, self.params)) is not None:
            follower.step(value)


def _silence_step_order_warning(optimizer: Optimizer) -> None:
    # PyTorch warns if optimizer.step() wasn't called before; a replayed step doesn't call it.
    setattr(optimizer, "_opt_called", True)  # noqa: B010 - no attribute that PyTorch declares


def _as_plateau(scheduler: lr_scheduler.LRScheduler | None) -> lr_scheduler.ReduceLROnPlateau | None:
    """Return the scheduler if it is the one that monitors a log."""
    from torch.optim.lr_scheduler import ReduceLROnPlateau

    return scheduler if isinstance(scheduler, ReduceLROnPlateau) else None


def _require_match(scheduler: lr_scheduler.LRScheduler, optimizer: Optimizer) -> lr_scheduler.LRScheduler:
    """Return a scheduler made before training, if it belongs to this optimizer and its current rates."""
    cure = "Pass a function, which makes it when training begins: LRScheduler(lambda optimizer: "
    cure += f"{type(scheduler).__name__}(optimizer, ...))"
    if scheduler.optimizer is not optimizer:
        raise ArgumentError(f"the scheduler's optimizer isn't compile's optimizer. {cure}")
    now = [group["lr"] for group in optimizer.param_groups]
    if now != scheduler.get_last_lr():
        raise ArgumentError(
            f"the scheduler was made for the rates {scheduler.get_last_lr()}, and the cores have scaled them to {now}. "
            f"{cure}, or compile with scale_lr=None"
        )
    return scheduler


def _as_json(value: Any) -> Any:
    """Drop the parts of a state that JSON can't represent, such as a table by step: the arguments restore them."""
    if isinstance(value, Mapping):
        if not all(isinstance(name, str) for name in value):
            return _DROPPED
        return {name: plain for name, part in value.items() if (plain := _as_json(part)) is not _DROPPED}
    if isinstance(value, (list, tuple)):
        parts = [_as_json(part) for part in value]
        return _DROPPED if any(part is _DROPPED for part in parts) else parts
    return value if value is None or isinstance(value, (bool, int, float, str)) else _DROPPED


_DROPPED = object()
