"""`LearningRateMonitor`: the actual learning rates among the logs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from .base import Callback, Logs
from .frequency import batches
from .step_count import StepCount


class LearningRateMonitor(Callback):
    """Adds the actual rates to the logs, where `History`, the progress bar and the callbacks after it find them.

    They are those of the step just taken, whoever set them: it makes no difference whether a scheduler stands before or
    after it. The rate of the first group is `learning_rate`, those of others `learning_rate_1`, ..., or
    `learning_rate_head` for a group with a `"name"`. Put it before callbacks that write logs, such as `CSVLogger` and
    `TensorBoard`.

    Args:
        update_freq: `"epoch"` (default): epoch logs get them; `"batch"`, or a number of batches after which those of
            the batch do as well. It waits for nothing.

    Raises:
        ArgumentError: Another `update_freq`.

    Example:
        >>> from types import SimpleNamespace
        >>> monitor, logs = LearningRateMonitor(), {"loss": 0.5}
        >>> optimizer = SimpleNamespace(param_groups=[{"lr": 0.1}, {"lr": 0.01, "name": "head"}])
        >>> monitor.set_model(SimpleNamespace(optimizer=optimizer))
        >>> monitor.on_train_batch_end(0, {"loss": 0.5})
        >>> monitor.on_epoch_end(0, logs)
        >>> logs
        {'loss': 0.5, 'learning_rate': 0.1, 'learning_rate_head': 0.01}
    """

    reads_weights = False

    def __init__(self, update_freq: str | int = "epoch") -> None:
        self.update_freq = update_freq
        self._count = StepCount(batches("update_freq", update_freq, {"epoch": 0, "batch": 1}))
        self._rates: dict[str, float] = {}

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Begin to count the batches of another training."""
        self._count.begin()

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Note the rates, before a schedule sets those of the next step."""
        optimizer = self.model.optimizer
        assert optimizer is not None
        self._rates = _rates(optimizer.param_groups)
        if self._count.advance(batch):
            _add(self._rates, logs)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Add the rates of the epoch's last step."""
        _add(self._rates, logs)

    def state_dict(self) -> dict[str, Any]:
        """How many steps there have been."""
        return self._count.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state.

        Args:
            state: What `state_dict` returned; after `on_train_begin`.
        """
        self._count.load_state_dict(state)


def _rates(groups: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    names = ["learning_rate", *(f"learning_rate_{group.get('name', i)}" for i, group in enumerate(groups[1:], 1))]
    return {name: float(group["lr"]) for name, group in zip(names, groups, strict=True)}


def _add(rates: Mapping[str, float], logs: Logs | None) -> None:
    if logs is not None:
        cast("dict[str, float]", logs).update(rates)
