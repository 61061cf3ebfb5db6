"""`EarlyStopping`: ends training when a log stops improving."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError
from ..step import explain_arguments
from ..utils.terminal import say
from .base import Logs
from .monitor_callback import MonitorCallback

if TYPE_CHECKING:
    from torch import Tensor


class EarlyStopping(MonitorCallback):
    """Ends training when a log has stopped improving.

    An object may be used for several calls of `fit`; each call starts afresh.

    Args:
        monitor: The log to monitor (default `"val_loss"`). If it is missing, a warning lists the available logs.
        min_delta: The least change that counts as better (default 0).
        patience: The number of epochs in a row without an improvement after which training ends (default 0, which
            means the same as 1: training ends at the first such epoch).
        verbose: 1 prints a line when it stops training and restores weights; 0 (default) prints nothing.
        mode: `"min"`, `"max"` or `"auto"` (default: decided by the metric, else by the log's name; if neither decides,
            `fit` raises an error).
        baseline: A value that must be beaten, too, to restart patience (default: none). Until it is beaten,
            improvements don't restart patience, and once patience has run out, training ends at the first epoch without
            an improvement.
        restore_best_weights: End `fit` with the best epoch's weights and buffers, however training ended (default
            False). They are copied to the host at each improvement. A buffer that isn't persistent, and has another
            shape or dtype than in the best epoch, keeps its value.
        start_from_epoch: The number of epochs at the start to ignore (default 0).

    Attributes:
        stopped_epoch: The epoch (from 0) after which this callback ended training; 0 if it didn't.
        best: The best value so far, or None.
        best_epoch: The best value's epoch, from 0.
        best_weights: The best epoch's weights and persistent buffers, with `restore_best_weights`.
        wait: Epochs since the last improvement; with a baseline, since the last improvement that beat it.

    Raises:
        ArgumentError: An unknown mode, or a negative number of epochs.

    Example:
        >>> from types import SimpleNamespace
        >>> stopping = EarlyStopping("loss", patience=2)
        >>> rule = {"higher_is_better": lambda name: None, "metrics_names": []}
        >>> stopping.set_model(SimpleNamespace(stop_training=False, **rule))
        >>> stopping.on_train_begin()
        >>> for epoch, loss in enumerate([0.9, 0.5, 0.6, 0.5]):
        ...     stopping.on_epoch_end(epoch, {"loss": loss})
        >>> stopping.model.stop_training, stopping.stopped_epoch, stopping.best_epoch
        (True, 3, 1)

    Source: `keras.callbacks.EarlyStopping`.
    """

    @explain_arguments
    def __init__(
        self,
        monitor: str = "val_loss",
        min_delta: float = 0,
        patience: int = 0,
        verbose: int = 0,
        mode: str = "auto",
        baseline: float | None = None,
        restore_best_weights: bool = False,
        start_from_epoch: int = 0,
    ) -> None:
        for name, epochs in (("patience", patience), ("start_from_epoch", start_from_epoch)):
            if epochs < 0:
                raise ArgumentError(f"{name} must be a number of epochs, 0 or more, got {epochs!r}")
        super().__init__(monitor, mode, min_delta=min_delta)
        self.baseline = baseline
        self.patience = patience
        self.verbose = verbose
        self.start_from_epoch = start_from_epoch
        self.restore_best_weights = restore_best_weights
        self.stopped_epoch = self.best_epoch = 0
        self.best_weights: dict[str, Tensor] | None = None
        self._best_buffers: dict[str, Tensor] = {}  # the best epoch's other buffers

    @property
    def baseline(self) -> float | None:
        """The value that must be beaten, too, or None."""
        return self._monitor.baseline

    @baseline.setter
    def baseline(self, value: float | None) -> None:
        self._monitor.baseline = value

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Forget the previous training."""
        self.stopped_epoch = self.best_epoch = 0
        self.best_weights = None
        self._best_buffers = {}
        self._monitor.reset()
        self._set_monitor_op()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Check the log, and end training if patience has run out."""
        value = self.get_monitor_value(logs)
        if value is None or epoch < self.start_from_epoch:
            return
        # The first epoch's weights are kept even if its value is NaN: there are no others to restore.
        better = self._monitor.observe(value)
        if better or (self.restore_best_weights and self.best_weights is None):
            self.best_epoch = epoch
            if self.restore_best_weights:
                self.best_weights = self.model.state_dict()
                buffers = self.model.module.named_buffers()
                others = {name: buffer for name, buffer in buffers if name not in self.best_weights}
                self._best_buffers = {name: buffer.detach().cpu().clone() for name, buffer in others.items()}
        out = not better and self.wait >= self.patience and epoch > 0
        self.stopped_epoch = epoch if out else 0  # with `min_epochs` training may continue
        if out:
            self.model.stop_training = True

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Restore the best weights, with `restore_best_weights`."""
        if self.stopped_epoch and self.verbose:
            say(f"Epoch {self.stopped_epoch + 1}: early stopping")
        if self.restore_best_weights and self.best_weights is not None:
            if self.verbose:
                say(f"Restoring the weights of the best epoch: {self.best_epoch + 1}")
            self.model.load_state_dict(self.best_weights)
            for name, buffer in self.model.module.named_buffers():
                best = self._best_buffers.get(name)
                if best is not None and (best.shape, best.dtype) == (buffer.shape, buffer.dtype):
                    buffer.detach().copy_(best)

    def state_dict(self) -> dict[str, Any]:
        """Return the best value and epoch so far, and the best epoch's host tensors by name.

        Under `"best_weights"` are the weights and persistent buffers, or None; under `"best_buffers"` other buffers.
        """
        return {
            **self._monitor.state_dict(),
            "best_epoch": self.best_epoch,
            "stopped_epoch": self.stopped_epoch,
            "best_weights": self.best_weights,
            "best_buffers": self._best_buffers,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state.

        Args:
            state: The dict that `state_dict` returned; call it after `on_train_begin`, which forgets everything.
        """
        self._monitor.load_state_dict(state)
        self.best_epoch = state["best_epoch"]
        self.stopped_epoch = state["stopped_epoch"]
        weights = state["best_weights"]
        self.best_weights = None if weights is None else dict(weights)
        self._best_buffers = dict(state.get("best_buffers", {}))
