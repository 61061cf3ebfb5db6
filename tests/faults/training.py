"""The training into which faults are injected: tiny, with state that is hard to resume bit for bit.

It has dropout, batch norm, AdamW, a moving average of the weights, a rate that a callback changes, and noise that the
data draw on the host. In a child: `from training import *`.
"""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import tpufit
from tpufit.callbacks import Callback, ModelCheckpoint

ROWS, BATCH, EPOCHS = 120, 32, 4  # four batches an epoch, the last is short: 16 steps in total
SEED = 11
X = torch.from_numpy(np.random.default_rng(0).normal(size=(ROWS, 8)).astype(np.float32))
Y = (X.sum(1) > 0).long() + (X[:, 0] > 1).long()


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Rows with noise from NumPy's and PyTorch's global generators, as in an augmentation."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return X[i] + 0.1 * torch.randn(8) + float(np.random.random()), Y[i]


class Warm(Callback):
    """Increases the rate with each step."""

    seen = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen += 1
        self.model.learning_rate = 1e-3 * (1 + 0.1 * self.seen)

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


class Say(Callback):
    """Prints the start of steps and the committed saves, so that another process can time a fault."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        say("step", self.model.steps_taken)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        say("done", self.model.steps_taken)

    def on_save(self, step: int, logs: Any = None) -> None:
        say("saved", step)


class Hold(Callback):
    """Holds training at the beginning of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.model.steps_taken == self.step:
            hold()


def hold() -> None:
    """Wait until the file `go` exists, see `Child.terminate`; a killed process waits for its end."""
    while not os.path.exists("go"):
        time.sleep(0.001)


def say(*words: object) -> None:
    os.write(1, f"{' '.join(map(str, words))}\n".encode())  # in one call, because two threads print


def net(width: int = 16) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.3), nn.Linear(width, 3))


def compiled(**options: Any) -> tpufit.Model:
    tpufit.set_random_seed(SEED)
    model = tpufit.Model(net())
    chosen = {"optimizer": "adamw", "loss": "cross_entropy", "scale_lr": None, "use_ema": True} | options
    model.compile(**chosen)
    return model


def fit(model: tpufit.Model, cores: int, *callbacks: Callback, epochs: int = EPOCHS, **options: Any) -> Any:
    """Train with the callbacks, after the callback that sets the rate."""
    chosen = {"x": Noisy(), "batch_size": BATCH // cores, "verbose": 0} | options
    return model.fit(epochs=epochs, cores=cores, callbacks=[Warm(), *callbacks], **chosen).history


def digest(model: tpufit.Model, history: dict[str, list[float]]) -> str:
    """Return a hash of what must be equal bit for bit: weights, optimizer, last logs, and the next random numbers."""
    found = hashlib.sha256()
    for tensor in model.state_dict().values():
        found.update(tensor.numpy().tobytes())
    for state in model.optimizer.state.values():
        for value in state.values():
            found.update(torch.as_tensor(value).cpu().numpy().tobytes())
    last = {name: values[-1] for name, values in sorted(history.items())}
    found.update(
        repr((last, model.steps_taken, model.learning_rate, np.random.random(), torch.rand(2).tolist())).encode()
    )
    return found.hexdigest()


def run(
    cores: int, folder: str | None = None, *callbacks: Callback, resume: Any = False, every: int = 1, **options: Any
) -> str:
    """Run a whole training in a new model, or the rest of a training. Return its digest."""
    model = compiled()
    keeping = [] if folder is None else [ModelCheckpoint(folder, save_freq=every, keep_last=options.pop("keep", None))]
    return digest(model, fit(model, cores, *callbacks, *keeping, resume=resume, **options))


def prints(folder: Path) -> dict[str, str]:
    """Return a hash of each checkpoint's tensors, by its name; equal for equal trainings."""
    return {path.name: "".join(map(_print, sorted(path.glob("*.safetensors")))) for path in folder.glob("step-*")}


def _print(file: Path) -> str:
    """Return the hash of a file's tensors, without its header, in which safetensors orders the metadata randomly."""
    data = file.read_bytes()
    return hashlib.sha256(data[8 + int.from_bytes(data[:8], "little") :]).hexdigest()
