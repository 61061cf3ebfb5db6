"""`LRScheduler`: a schedule by name, or any of `torch.optim.lr_scheduler`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError, require_whole
from ..optimizers import begin_from_peak, note_scheduled
from ._support.monitor import Monitor
from ._support.schedules import NAMES, NamedSchedule
from .base import Logs, RateCallback

if TYPE_CHECKING:
    from torch.optim import Optimizer, lr_scheduler


class LRScheduler(RateCallback):
    """Lets a schedule set the rates: one by name over the whole training, or any of `torch.optim.lr_scheduler`.

    It begins when training does, and so starts from the rate that the cores have scaled. The rates that it sets are
    actual ones; those of several groups keep their proportions. Epoch logs get a `learning_rate`.

    A schedule by name gives each step of the optimizer its rate, and knows how many there will be. It rises to the
    rate of `compile`, and falls: `"linear"`ly or as half a `"cosine"` until the end, as the `"inverse_sqrt"` of the
    steps, in a last phase only (`"wsd"`: warm-up, stable, decay), or never (`"constant"`). Each `fit` begins a new one.

    Args:
        scheduler: `"linear"`, `"cosine"`, `"constant"`, `"inverse_sqrt"` or `"wsd"`. Or a function of the optimizer
            that makes a scheduler of PyTorch's, e.g. a `functools.partial` of its class; or one made already, of the
            very optimizer given to `compile`, whose rates the cores must not have scaled: `compile(scale_lr=None)`.
            Used for a second `fit`, a scheduler of PyTorch's goes on where it was.
        interval: When a scheduler of PyTorch's takes its step: `"epoch"` (default), after each epoch; or `"step"`: a
            rate for each step of the optimizer, also of steps that run as one graph. With `accumulate_steps=n` that
            is after n batches, and at the epoch's end.
        monitor: The log that `torch.optim.lr_scheduler.ReduceLROnPlateau` follows (default `"val_loss"`).
        warmup: Of a schedule by name: the steps in which the rate rises evenly from almost 0, or as a float their share
            of all (default 0: none).
        floor: Of a schedule by name: the share of the peak below which the rate doesn't fall (default 0).
        decay: Of `"wsd"`: the steps of the last phase, in which the rate falls evenly, or as a float their share of all
            (default 0.2).
        total_steps: Of a schedule by name: the number of the optimizer's steps (default: those of all epochs of this
            `fit`). It must be given where the number of batches isn't known before.

    Raises:
        UnknownNameError: There is no schedule of this name.
        ArgumentError: `scheduler` is none of these; or it is of another optimizer, or of rates before the cores have
            scaled them; a number out of range; or, as training begins, the number of steps isn't known.

    Example: a warm-up over a twentieth of the steps, and half a cosine; then one of 100 of 1000, of PyTorch's parts.
        >>> callback = LRScheduler("cosine", warmup=0.05, floor=0.1)
        >>> from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
        >>> def warm_up_and_cosine(optimizer):
        ...     phases = [LinearLR(optimizer, 0.01, total_iters=100), CosineAnnealingLR(optimizer, T_max=900)]
        ...     return SequentialLR(optimizer, phases, milestones=[100])
        >>> callback = LRScheduler(warm_up_and_cosine, interval="step")

    Source: `"wsd"` is of Hu et al., "MiniCPM", 2024; `"inverse_sqrt"` of Vaswani et al., "Attention is all you need",
    2017; the names are those of `transformers.get_scheduler` and Keras.
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
        self._make = scheduler
        self._monitor = Monitor(monitor)
        self._iterations: int | None = None  # before the step that the rate is for; None if any
        self._epoch: int | None = None  # the one under way; None between two

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Make the scheduler, if there is none of this optimizer."""
        optimizer = self.model.optimizer
        assert optimizer is not None
        if self._named is not None:
            self._lay_out(self._named, optimizer)
            return
        if self.scheduler is not None and self.scheduler.optimizer is optimizer:
            self._epoch = None
            return
        assert not isinstance(self._make, str)
        if callable(self._make):
            for group in optimizer.param_groups:
                group.pop("initial_lr", None)  # of an earlier scheduler, which PyTorch would begin with
            self.scheduler = self._make(optimizer)
        else:
            self.scheduler = _given(self._make, optimizer)
        if getattr(self.scheduler, "optimizer", None) is not optimizer:
            raise ArgumentError(f"scheduler must make a scheduler of the optimizer it is given, got {self.scheduler!r}")
        _never_warn(self.scheduler.optimizer)
        self._iterations = self._epoch = None

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Take the step after an epoch that `resume="next_epoch"` has left, unless it needs that epoch's logs."""
        left = self._epoch is not None and epoch > self._epoch
        if self.interval == "epoch" and left and _follower(self.scheduler) is None:
            self._step(None)
        self._epoch = epoch
        updates = self.params.get("updates")
        if self._named is not None and updates and self.params.get("max_steps") is None:
            # Its place in the whole: training may begin with a later epoch, or have left one before its end.
            assert self.scheduler is not None
            self.scheduler.last_epoch = epoch * updates - 1
            self._step(None)
            self._iterations = None

    def on_train_step_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Set the rate of the step, unless it has one: the very first, and one that waits for more gradients."""
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
        """The scheduler's own state, as far as it is numbers and texts; the rest comes with another scheduler."""
        assert self.scheduler is not None
        return {
            "scheduler": _as_json(self.scheduler.state_dict()),
            "iterations": self._iterations,
            "epoch": self._epoch,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state.

        Args:
            state: The dict that `state_dict` returned; after `on_train_begin`, which makes the scheduler.
        """
        assert self.scheduler is not None
        self.scheduler.load_state_dict(dict(state["scheduler"]))
        self._iterations = state["iterations"]
        self._epoch = state["epoch"]
        # When it was made it set the rates that training begins with.
        for group, rate in zip(self.scheduler.optimizer.param_groups, self.scheduler.get_last_lr(), strict=True):
            group["lr"] = rate

    def _lay_out(self, schedule: NamedSchedule, optimizer: Optimizer) -> None:
        """Make PyTorch's scheduler of a schedule by name, over the steps of this `fit`."""
        from torch.optim.lr_scheduler import LambdaLR

        total = self.total_steps or self.params.get("total_steps")
        if total is None and schedule.needs_total:
            raise ArgumentError(
                f"the schedule {schedule.name!r} must know how many steps there are, and these data don't say how many "
                "batches they have: pass LRScheduler(total_steps=...), fit(steps_per_epoch=...) or fit(max_steps=...)"
            )
        begin_from_peak(optimizer)
        self.scheduler = LambdaLR(optimizer, partial(schedule.factor, total=total))
        _never_warn(optimizer)
        note_scheduled(optimizer)
        self._iterations = self._epoch = None

    def _step(self, logs: Logs | None) -> None:
        assert self.scheduler is not None
        follower = _follower(self.scheduler)
        if follower is None:
            self.scheduler.step()
            if self._named is not None:
                note_scheduled(self.scheduler.optimizer)
        elif (value := self._monitor.read(logs, type(self).__name__, self.params)) is not None:
            follower.step(value)


def _never_warn(optimizer: Optimizer) -> None:
    # PyTorch warns where no optimizer.step() came before; in a step that is replayed there is none to be seen.
    setattr(optimizer, "_opt_called", True)  # noqa: B010 - no attribute that PyTorch declares


def _follower(scheduler: lr_scheduler.LRScheduler | None) -> lr_scheduler.ReduceLROnPlateau | None:
    """Return the scheduler if it is the one that follows a log."""
    from torch.optim.lr_scheduler import ReduceLROnPlateau

    return scheduler if isinstance(scheduler, ReduceLROnPlateau) else None


def _given(scheduler: lr_scheduler.LRScheduler, optimizer: Optimizer) -> lr_scheduler.LRScheduler:
    """Return a scheduler that was made before training, if it is of this optimizer and of its present rates."""
    cure = "Pass a function, which makes it when training begins: LRScheduler(lambda optimizer: "
    cure += f"{type(scheduler).__name__}(optimizer, ...))"
    if scheduler.optimizer is not optimizer:
        raise ArgumentError(f"the scheduler's optimizer isn't the one of compile. {cure}")
    now = [group["lr"] for group in optimizer.param_groups]
    if now != scheduler.get_last_lr():
        raise ArgumentError(
            f"the scheduler was made for the rates {scheduler.get_last_lr()}, and the cores have scaled them to {now}. "
            f"{cure}, or compile with scale_lr=None"
        )
    return scheduler


def _as_json(value: Any) -> Any:
    """A state without the parts that JSON can't hold, such as a table by step: the arguments give these again."""
    if isinstance(value, Mapping):
        if not all(isinstance(name, str) for name in value):
            return _DROPPED
        return {name: plain for name, part in value.items() if (plain := _as_json(part)) is not _DROPPED}
    if isinstance(value, (list, tuple)):
        parts = [_as_json(part) for part in value]
        return _DROPPED if any(part is _DROPPED for part in parts) else parts
    return value if value is None or isinstance(value, (bool, int, float, str)) else _DROPPED


_DROPPED = object()
