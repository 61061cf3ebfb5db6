"""`TensorBoard`: loss, metrics and learning rate as files that TensorBoard shows."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .base import Callback, Logs, duplicate
from .frequency import batches
from .scalars import scalars


class TensorBoard(Callback):
    """Writes logs for `tensorboard --logdir logs`, as Keras lays them out.

    The run `train` gets `epoch_loss`, the other logs likewise, `epoch_learning_rate`, `epoch_input_bound` (the share of
    the time in which data were waited for) and, if asked, `batch_*`; the run `validation` gets `epoch_*` without
    `val_`, so that both are in one chart, and `evaluation_*_vs_iterations` for each validation or `evaluate`. `epoch_*`
    are by epoch, from 0, the others by the training steps this object has seen.

    Args:
        log_dir: The folder (default `"logs"`); keep it to one training.
        write_steps_per_second: Whether to write the speed of training, without validations (default False).
        update_freq: `"epoch"` (default), `"batch"`, or a number of batches after which to write the running means of
            the epoch as well. Each time waits for the device.

    Raises:
        ArgumentError: Another `update_freq`.

    Example:
        >>> import os, tempfile
        >>> from types import SimpleNamespace
        >>> folder = tempfile.mkdtemp()
        >>> board = TensorBoard(folder)
        >>> board.set_model(SimpleNamespace(optimizer=None, input_bound=None))
        >>> board.on_epoch_end(0, {"loss": 0.5, "val_loss": 0.6})
        >>> board.on_train_end()
        >>> sorted(os.listdir(folder))
        ['train', 'validation']

    Source: `keras.callbacks.TensorBoard`.
    """

    reads_weights = False

    def __init__(
        self,
        log_dir: str | os.PathLike[str] = "logs",
        *,  # the arguments that come next in Keras will come later here
        write_steps_per_second: bool = False,
        update_freq: str | int = "epoch",
    ) -> None:
        self.log_dir, self.update_freq = os.fspath(log_dir), update_freq
        self.write_steps_per_second = write_steps_per_second
        self._every = batches("update_freq", update_freq, {"epoch": 0, "batch": 1})
        self._writers: dict[str, Any] = {}
        self._in_fit = False
        self._steps = 0
        # The steps and the time when the epoch began, and when a batch was last written; later by what was no training.
        self._epoch_began = self._written = (0, 0.0)
        self._test_began = 0.0

    def for_dry_run(self, folder: Path) -> Callback:
        """One that writes into the folder."""
        twin = duplicate(self)
        twin.log_dir = os.fspath(folder)
        return twin

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """From now on an evaluation is a validation."""
        self._in_fit = True

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Close the files."""
        self._in_fit = False
        self._close()

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Start the clock."""
        self._epoch_began = self._written = (self._steps, time.perf_counter())

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Write the running means, if it is time to."""
        self._steps += 1
        if self._every and self._steps % self._every == 0:  # 0: epochs only
            self._write("train", "batch_{}", scalars(logs), self._steps)
            if self.write_steps_per_second:
                now = (self._steps, time.perf_counter())
                self._write("train", "batch_{}", {"steps_per_second": _speed(self._written, now)}, self._steps)
                self._written = now

    def on_test_begin(self, logs: Logs | None = None) -> None:
        """Stop the clock: a validation is no training."""
        self._test_began = time.perf_counter()

    def on_test_end(self, logs: Logs | None = None) -> None:
        """Write the evaluation by training steps."""
        self._write("validation", "evaluation_{}_vs_iterations", scalars(logs), self._steps)
        took = time.perf_counter() - self._test_began
        self._epoch_began, self._written = _later(self._epoch_began, took), _later(self._written, took)
        if not self._in_fit:
            self._close()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Write the epoch."""
        now = (self._steps, time.perf_counter())
        values = scalars(logs)
        train = {name: value for name, value in values.items() if not name.startswith("val_")}
        validation = {name.removeprefix("val_"): value for name, value in values.items() if name.startswith("val_")}
        if self.model.optimizer is not None:
            train["learning_rate"] = float(self.model.optimizer.param_groups[0]["lr"])
        if self.model.input_bound is not None:
            train["input_bound"] = self.model.input_bound
        if self.write_steps_per_second:
            train["steps_per_second"] = _speed(self._epoch_began, now)
        self._write("train", "epoch_{}", train, epoch)
        self._write("validation", "epoch_{}", validation, epoch)
        for writer in self._writers.values():
            writer.flush()  # so that a TensorBoard that is open shows the epoch now

    def _write(self, run: str, tag: str, values: Mapping[str, float], step: int) -> None:
        if not values:
            return
        if run not in self._writers:
            # Imported here, and made only for a run that has something to show: it takes a second, and makes a file.
            from torch.utils.tensorboard import SummaryWriter

            self._writers[run] = SummaryWriter(os.path.join(self.log_dir, run))
        for name, value in values.items():
            self._writers[run].add_scalar(tag.format(name), value, step)

    def _close(self) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()


def _later(reading: tuple[int, float], seconds: float) -> tuple[int, float]:
    return reading[0], reading[1] + seconds


def _speed(start: tuple[int, float], end: tuple[int, float]) -> float:
    """Steps a second between two readings of (steps, seconds)."""
    return (end[0] - start[0]) / max(end[1] - start[1], 1e-9)
