"""Is a training that was killed, terminated or interrupted resumed exactly?"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import torch
from torch import Tensor, nn

from ..callbacks import Callback, ModelCheckpoint
from ..model import Model
from . import nets
from .check import Figure, Setting

_BATCHES = 6
_EPOCHS = 3
_LAST = 9  # the batch after which the training ends, in the middle of the second epoch
# 128 MiB of weights.
_WIDTH = 2048
_LAYERS = 8
_RUN_FOLDER = "run"
_PATIENCE = 30.0  # seconds


class _CountsBatches(Callback):
    """Counts batches. Given a signal, sends it to this process after batch `_LAST`, once there is a checkpoint."""

    def __init__(self, run: Path, number: int | None) -> None:
        self._run = run
        self._signal = number
        self.batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches += 1
        if self.batches != _LAST or self._signal is None:
            return
        began = perf_counter()
        while not any(self._run.glob("step-*")) and perf_counter() - began < _PATIENCE:
            sleep(0.05)  # the checkpoint is written in the background
        os.kill(os.getpid(), self._signal)


def train_until_kill(setting: Setting) -> Iterator[Figure]:
    """Train until `kill -9`."""
    yield from ()
    _train(setting, ends_by=signal.SIGKILL)


def train_until_sigterm(setting: Setting) -> Iterator[Figure]:
    """Train until SIGTERM, which ends the process with status 143."""
    yield from ()
    _train(setting, ends_by=signal.SIGTERM)


def check_resume(setting: Setting) -> Iterator[Figure]:
    """Resume, and compare with an uninterrupted training."""
    remaining, steps, weights = _train(setting)
    # Another run directory, so that both trainings write checkpoints.
    all_batches, whole_steps, whole = _train(setting, folder="whole")
    yield Figure("remaining batches", remaining, at_least=1, at_most=all_batches - 1)
    yield Figure("steps more than uninterrupted", steps - whole_steps, at_least=0, at_most=0)
    yield Figure("tensors that differ", nets.count_unequal(weights, whole), at_most=0)


def check_interrupt(setting: Setting) -> Iterator[Figure]:
    """Interrupt by Ctrl-C as in a notebook: the cell ends, the process continues, and the next cell resumes."""
    raised = 0
    try:
        _train(setting, ends_by=signal.SIGINT)
    except KeyboardInterrupt:
        raised = 1
    yield Figure("KeyboardInterrupt raised", raised, at_least=1)
    yield from check_resume(setting)


def measure_checkpoint(setting: Setting) -> Iterator[Figure]:
    """Compare the time of a checkpoint with the time of copying its files."""
    torch.manual_seed(0)
    model = Model(nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS))))
    model.compile("sgd", "mse", scale_lr=None)
    x = torch.randn(nets.ROWS, _WIDTH)
    model.fit(x, x, nets.batch_size(setting.cores), epochs=2, verbose=0)
    model.save(setting.folder / "warm")
    began = perf_counter()
    model.save(setting.folder / "saved")
    saving = perf_counter() - began
    began = perf_counter()
    copied = shutil.copytree(setting.folder / "saved", setting.folder / "copy")
    for path in copied.rglob("*"):
        if path.is_file():
            with path.open("rb+") as file:
                os.fsync(file.fileno())
    copying = perf_counter() - began
    size = sum(path.stat().st_size for path in copied.rglob("*") if path.is_file())
    for folder in ("warm", "saved", "copy"):
        shutil.rmtree(setting.folder / folder)
    yield Figure("size", size / 2**20, unit="MiB")
    yield Figure("checkpoint", saving, unit="s")
    yield Figure("copy of its files", copying, unit="s")
    yield Figure("checkpoint / copy", saving / copying, at_most=10.0, on_tpu=True)


def _train(
    setting: Setting, ends_by: signal.Signals | None = None, folder: str = _RUN_FOLDER
) -> tuple[int, int, dict[str, Tensor]]:
    """Train, resuming from a checkpoint if there is one; return the batches trained, all steps, and the weights."""
    task = nets.gpt(dropout=0.1)
    net, x, y = task.build(_BATCHES * nets.ROWS)
    model = nets.compile_model(task, net)
    # Also save within each epoch, so that a training resumes in the middle of an epoch.
    run = setting.folder / folder
    size = nets.batch_size(setting.cores)
    counts = _CountsBatches(run, ends_by)
    callbacks: list[Callback] = [ModelCheckpoint(run, save_freq=4), counts]
    model.fit(x, y, size, epochs=_EPOCHS, callbacks=callbacks, resume=True, verbose=0)
    return counts.batches, model.steps_taken, model.state_dict()
