"""`LRScheduler`: any schedule of `torch.optim.lr_scheduler`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError
from ._support.monitor import Monitor
from .base import Logs, RateCallback

if TYPE_CHECKING:
    from torch.optim import Optimizer, lr_scheduler


class LRScheduler(RateCallback):
    """Lets a scheduler of `torch.optim.lr_scheduler` set the rates, after each epoch or each step of the optimizer.

    It is made when training begins, and so starts from the rate that the cores have scaled. The rates that it sets are
    actual ones. Epoch logs get a `learning_rate`. Used for a second `fit`, it goes on where it was.

    Args:
        scheduler: A function of the optimizer that makes the scheduler, e.g. a `functools.partial` of its class; or a
            scheduler made already, of the very optimizer given to `compile`, whose rates the cores must not have
            scaled: `compile(scale_lr=None)`.
        interval: `"epoch"` (default) or `"step"`: a rate for each step of the optimizer, also of steps that run as one
            graph. With `accumulate_steps=n` it takes its step after n batches, and at the epoch's end.
        monitor: The log that `torch.optim.lr_scheduler.ReduceLROnPlateau` follows (default `"val_loss"`).

    Raises:
        ArgumentError: `scheduler` is neither; or it is of another optimizer, or of rates before the cores have scaled
            them; another interval.

    Example: a warm-up over 100 steps, and then half a cosine over 900.
        >>> from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
        >>> def warm_up_and_cosine(optimizer):
        ...     phases = [LinearLR(optimizer, 0.01, total_iters=100), CosineAnnealingLR(optimizer, T_max=900)]
        ...     return SequentialLR(optimizer, phases, milestones=[100])
        >>> callback = LRScheduler(warm_up_and_cosine, interval="step")
    """

    def __init__(
        self,
        scheduler: Callable[[Optimizer], lr_scheduler.LRScheduler] | lr_scheduler.LRScheduler,
        interval: str = "epoch",
        monitor: str = "val_loss",
    ) -> None:
        if not callable(scheduler) and not hasattr(scheduler, "optimizer"):
            raise ArgumentError(
                "scheduler must be a function of the optimizer, such as lambda optimizer: CosineAnnealingLR(optimizer, "
                f"T_max=10), or a scheduler of torch.optim.lr_scheduler, got {scheduler!r}"
            )
        if interval not in ("epoch", "step"):
            raise ArgumentError(f"interval must be 'epoch' or 'step', got {interval!r}")
        self.interval = interval
        self.scheduler: lr_scheduler.LRScheduler | None = None
        self._make = scheduler
        self._monitor = Monitor(monitor)
        self._iterations: int | None = None  # before the step that the rate is for; None if any
        self._epoch: int | None = None  # the one under way; None between two

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Make the scheduler, if there is none of this optimizer."""
        optimizer = self.model.optimizer
        if self.scheduler is not None and self.scheduler.optimizer is optimizer:
            self._epoch = None
            return
        assert optimizer is not None
        if callable(self._make):
            for group in optimizer.param_groups:
                group.pop("initial_lr", None)  # of an earlier scheduler, which PyTorch would begin with
            self.scheduler = self._make(optimizer)
        else:
            self.scheduler = _given(self._make, optimizer)
        if getattr(self.scheduler, "optimizer", None) is not optimizer:
            raise ArgumentError(f"scheduler must make a scheduler of the optimizer it is given, got {self.scheduler!r}")
        # PyTorch warns where no optimizer.step() came before; in a step that is replayed there is none to be seen.
        setattr(optimizer, "_opt_called", True)  # noqa: B010 - no attribute that PyTorch declares
        self._iterations = self._epoch = None

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Take the step after an epoch that `resume="next_epoch"` has left, unless it needs that epoch's logs."""
        left = self._epoch is not None and epoch > self._epoch
        if self.interval == "epoch" and left and _follower(self.scheduler) is None:
            self._step(None)
        self._epoch = epoch

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

    def _step(self, logs: Logs | None) -> None:
        assert self.scheduler is not None
        follower = _follower(self.scheduler)
        if follower is None:
            self.scheduler.step()
        elif (value := self._monitor.read(logs, type(self).__name__)) is not None:
            follower.step(value)


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
