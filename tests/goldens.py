"""Trainings whose results were recorded bit for bit, for `tests/test_goldens.py`.

    python tests/goldens.py --record [NAME...]             # runs all or some, and writes tests/goldens/; where
                                                           # TorchTPU is installed, only its checkpoint
    python tests/goldens.py --cores 8 --into FILE NAME...  # runs some here, and writes a line of JSON for each

Bits depend on XLA's code generation and on the number of threads that share a sum. So the trainings run in separate
processes, one for each number of cores, in the recorded environment (`ENVIRONMENT`). A process counts the graphs that
it compiles, and compiles none twice. Each small net has a unique width, so that no count depends on earlier items; the
items in `KEEPING` run in a fixed order instead.

Only tpufit's public names are used, because other names may change.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import processes
import torch
import torch.nn.functional as F
from architectures import ARCHITECTURES, BATCH, LABELS, VALUES, VECTORS
from torch import Tensor, nn, optim
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, Dataset

import tpufit
from tpufit.callbacks import (
    Callback,
    EarlyStopping,
    LearningRateScheduler,
    ModelCheckpoint,
    ReduceLROnPlateau,
    SwapEMAWeights,
)
from tpufit.runtime import counts

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(__file__).with_suffix("")
CROSSING = DATA / "torch_tpu"
CORES = (1, 8)

ENVIRONMENT = {
    # Quick compilation, one thread for each core's work, and only instructions that all current machines have.
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_multi_thread_eigen=false --xla_cpu_max_isa=AVX2",
    # PyTorch's kernels initialize the weights, and run eager steps and fallbacks.
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_CBWR": "COMPATIBLE",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


def computer() -> str:
    """Describe what bits depend on: the release of torch, which determines XLA's, and the features of the CPU."""
    match = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), flags=re.MULTILINE)
    flags = sorted(flag for flag in (match[1].split() if match else []) if re.match(r"avx|amx|fma|f16c", flag))
    return f"torch {torch.__version__.partition('+')[0]}, {' '.join(flags)}"


def recorded(cores: int) -> dict[str, Any]:
    """Return the record: the `"environment"`, and the `"items"` by name, each with its `"computer"`."""
    return json.loads((DATA / f"cores{cores}.json").read_text())


def run(cores: int, names: Container[str], environment: Mapping[str, str]) -> tuple[dict[str, Any], str]:
    """Run items in a separate process.

    Returns:
        The results by item: `{"error": ...}` for an item that raised, and no entry for an item that didn't run because
        the process died or hung; and the process's standard error.
    """
    changed = {**os.environ, "PYTHONPATH": str(ROOT), "PJRT_DEVICE": "CPU", "TF_CPP_MIN_LOG_LEVEL": "2", **environment}
    changed.pop("CPU_NUM_DEVICES", None)
    due = [_WRITING] if _WRITING in names else in_order(names)
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder, "found")
        into.touch()
        command = [sys.executable, "-X", "faulthandler", __file__, "--cores", str(cores), "--into", str(into), *due]
        try:
            output = processes.run(command, timeout=120 + 60 * len(due), cwd=folder, env=changed).stderr
        except subprocess.TimeoutExpired as expired:
            output = str(expired.stderr)
        found = dict(json.loads(line) for line in into.read_text().splitlines())
    return found, output


def losses(found: Mapping[str, Any]) -> dict[str, float]:
    """Return the losses of an item's steps and epochs as numbers, by name and position."""
    return {
        f"{part} {name} {i}": float.fromhex(value)
        for part in ("steps", "epochs")
        for name, values in found.get(part, {}).items()
        for i, value in enumerate(values)
        if "loss" in name
    }


class Losses(Callback):
    """Keeps the logs of each batch, which wait for the device only when they are read."""

    reads_weights = False

    def __init__(self) -> None:
        self.logs: list[Any] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.logs.append(logs)


class Record:
    """The results of an item, in a form that JSON can store.

    Attributes:
        found: The results: `"counts"` for each part of the item, and the item's own entries.
    """

    def __init__(self) -> None:
        self.found: dict[str, Any] = {"counts": {}}

    def counted(self, name: str, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call a method, and record its graphs, waits and operations on the host."""
        before = counts()
        result = method(*args, **options)
        made = counts() - before
        # Without waits whose number depends on the clock, such as the limit on how far the host runs ahead.
        waits = {reason: n for reason, n in made.waits.items() if reason not in ("throttle", "audit", "kept rows")}
        self.found["counts"][name] = {
            "graphs": dict(sorted(made.graphs.items())),
            "waits": dict(sorted(waits.items())),
            "fallbacks": dict(sorted(made.fallbacks.items())),
            "host_reads": made.host_reads,
        }
        return result

    def fit(self, model: tpufit.Model, *args: Any, callbacks: Sequence[Any] = (), **options: Any) -> None:
        """Train, and record the logs of each step and epoch."""
        losses = Losses()
        history = self.counted("fit", model.fit, *args, callbacks=[*callbacks, losses], verbose=0, **options).history
        self.found["steps"] = by_name(losses.logs)
        self.found["epochs"] = {name: exact(values) for name, values in sorted(history.items())}

    def state(self, model: tpufit.Model) -> None:
        """Record the weights, the optimizer's state and the rate at the end."""
        self.found["rate"] = exact(model.learning_rate)
        self.found["weights"] = digest(model.state_dict())
        model.to_cpu()
        parameters = [parameter for group in model.optimizer.param_groups for parameter in group["params"]]
        states = [model.optimizer.state.get(parameter, {}) for parameter in parameters]
        self.found["optimizer"] = digest([[state[key] for key in sorted(state)] for state in states])


def exact(value: Any) -> Any:
    """Convert the numbers in nested lists and dicts to exact hexadecimal texts."""
    if isinstance(value, Mapping):
        return {name: exact(own) for name, own in sorted(value.items())}
    if isinstance(value, (list, tuple)):
        return [exact(own) for own in value]
    return None if value is None else float(value).hex()


def by_name(logs: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Convert a sequence of logs to a list for each name."""
    return {name: [exact(own[name]) for own in logs] for name in sorted(logs[0])}


def digest(nest: Any) -> str:
    """Return a hash of all arrays and tensors in a nest: their dtypes, shapes and bits."""
    found = hashlib.sha256()
    for leaf in tree_leaves(nest):
        array = torch.as_tensor(leaf).detach().cpu().contiguous() if not isinstance(leaf, np.ndarray) else leaf
        found.update(f"{array.dtype} {tuple(array.shape)}".encode())
        found.update(array.tobytes() if isinstance(array, np.ndarray) else array.reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()


@dataclass(frozen=True)
class Training:
    """A training of two epochs.

    Attributes:
        net: Creates the net.
        optimizer: Creates an optimizer for the net.
        data: `(x,)` or `(x, y)`, or a function from the batch size per core to arguments of `fit`.
        compile: Further arguments of `compile`.
        fit: Further arguments of `fit`.
        callbacks: Creates the callbacks.
        model: The model's class.
        validates: True if the model can evaluate and predict.
    """

    net: Callable[[], nn.Module]
    optimizer: Callable[[Any], Any]
    data: Any = (VECTORS, LABELS)
    compile: Mapping[str, Any] = field(default_factory=dict)
    fit: Mapping[str, Any] = field(default_factory=dict)
    callbacks: Callable[[], list[Any]] = list
    model: type[tpufit.Model] = tpufit.Model
    validates: bool = True

    def __call__(self, cores: int) -> dict[str, Any]:
        tpufit.set_random_seed(0)
        net = self.net()
        model = self.model(net)
        model.compile(self.optimizer(net), **{"scale_lr": None, **self.compile})
        size = {"batch_size": BATCH // cores}
        data, known = (self.data, self.data) if isinstance(self.data, tuple) else ((), (VECTORS, LABELS))
        held_out = tree_map(lambda rows: rows[: 2 * BATCH], known)
        options = {"epochs": 2, "cores": cores, **(size if data else self.data(BATCH // cores)), **self.fit}
        if self.validates:
            options["validation_data"] = held_out if len(held_out) > 1 else (*held_out, None)
        record = Record()
        record.fit(model, *data, callbacks=self.callbacks(), **options)
        if self.validates:
            outputs = record.counted("predict", model.predict, held_out[0], **size, verbose=0, cores=cores)
            record.found["predictions"] = digest(outputs)
        record.state(model)
        return record.found


def of(name: str) -> Training:
    """Return an architecture's training. Only architectures with the default step have a `forward` to evaluate."""
    architecture = ARCHITECTURES[name]
    return Training(
        architecture.net,
        architecture.optimizer,
        architecture.data,
        {"loss": architecture.loss, "metrics": architecture.metrics},
        model=_copying(architecture.model) if name in ("WaveNet", "VAE") else architecture.model,
        validates=architecture.model.train_step is tpufit.Model.train_step,
    )


def _copying(model: type[tpufit.Model]) -> type[tpufit.Model]:
    """Return a class of models that copies its predictions, because `predict` can't return views of other tensors."""

    class Copying(model):
        def predict_step(self, batch):
            return tree_map(torch.clone, super().predict_step(batch))

    return Copying


def small(width: int, bias: bool = False) -> nn.Sequential:
    """Return a net with dropout and batch norm. A bias before batch norm would have a gradient of only rounding."""
    first = nn.Linear(12, width, bias)
    return nn.Sequential(first, nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.3), nn.Linear(width, 4))


def with_bias(width: int) -> nn.Sequential:
    """Return the net of the checkpoints, whose first layer has a bias. The bias is frozen: see `small`."""
    net = small(width, bias=True)
    net[0].bias.requires_grad_(False)
    return net


def adamw(net: nn.Module) -> optim.Optimizer:
    return optim.AdamW(net.parameters(), 0.01)


def momentum(net: nn.Module) -> optim.Optimizer:
    return optim.SGD(net.parameters(), 0.05, momentum=0.9)


class Rivals(tpufit.Model):
    """A model with two optimizers; the generator's is the optimizer of `compile`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.critics_optimizer = optim.SGD(module["critic"].parameters(), 0.02, momentum=0.5)

    def train_step(self, batch):
        x, _ = batch
        critic = self.module["critic"]
        fake = self.module["generator"](torch.randn(len(x), 4, device=x.device))
        critics_loss = F.softplus(critic(fake.detach())).mean() + F.softplus(-critic(x)).mean()
        self.apply_gradients(critics_loss, self.critics_optimizer)
        loss = F.softplus(-critic(fake)).mean()
        self.apply_gradients(loss)
        return {"loss": loss, "critics_loss": critics_loss}


def rivals(width: int) -> nn.Module:
    return nn.ModuleDict(
        {
            "generator": nn.Sequential(
                nn.Linear(4, width, bias=False), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 12)
            ),
            "critic": nn.Sequential(nn.Linear(12, width), nn.LeakyReLU(0.2), nn.Linear(width, 1)),
        }
    )


def _of_generator(net: nn.Module) -> optim.Optimizer:
    return adamw(net["generator"])


class Heads(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, width), nn.ReLU())
        self.label, self.value = nn.Linear(width, 4), nn.Linear(width, 1)

    def forward(self, x):
        h = self.body(x)
        return {"label": self.label(h), "value": self.value(h)}


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Rows with noise from NumPy's and PyTorch's global generators, as in an augmentation."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        x = torch.from_numpy(VECTORS[i]) + 0.1 * torch.randn(12) + float(np.random.random())
        return x, torch.tensor(LABELS[i])


def trained(width: int, *, optimizer: Callable[[Any], Any] = adamw, **options: Any) -> Training:
    """Return a training of the small net. Options that aren't fields of `Training` are arguments of `compile`."""
    fields = {key: options.pop(key) for key in ("data", "fit", "callbacks") if key in options}
    compiled = {"loss": "cross_entropy", "metrics": ["accuracy"], **options}
    return Training(partial(small, width), optimizer, compile=compiled, **fields)


def lr_found(cores: int) -> dict[str, Any]:
    """Run `lr_find`, and a training afterwards, which it must not change."""
    tpufit.set_random_seed(0)
    net = small(50)
    model, record = tpufit.Model(net), Record()
    model.compile(adamw(net), "cross_entropy", scale_lr=None)
    data = {"x": VECTORS, "y": LABELS, "batch_size": BATCH // cores, "cores": cores}
    curve = record.counted("lr_find", model.lr_find, **data, start_lr=1e-4, end_lr=3.0, steps=24)
    for name in ("lrs", "losses", "smoothed", "suggestion"):
        record.found[name] = exact(getattr(curve, name))
    record.fit(model, **data)
    record.state(model)
    return record.found


def on_batches(cores: int) -> dict[str, Any]:
    """Call the methods for one batch, and `evaluate` and `predict` with a short last batch."""
    tpufit.set_random_seed(0)
    net = small(51)
    model, record = tpufit.Model(net), Record()
    model.compile(adamw(net), "cross_entropy", metrics=["accuracy", "auroc"], scale_lr=None)
    batches = [(VECTORS[i : i + BATCH], LABELS[i : i + BATCH]) for i in range(0, 3 * BATCH, BATCH)]
    on = {"cores": cores}
    rows = {**on, "batch_size": BATCH // cores, "verbose": 0}
    found = record.found
    found["train_on_batch"] = [
        exact(record.counted(f"train_on_batch {i}", model.train_on_batch, *batch, **on))
        for i, batch in enumerate(batches)
    ]
    found["test_on_batch"] = exact(record.counted("test_on_batch", model.test_on_batch, *batches[0], **on))
    found["evaluate"] = exact(
        record.counted("evaluate", model.evaluate, VECTORS[:43], LABELS[:43], **rows, return_dict=True)
    )
    found["predict"] = digest(record.counted("predict", model.predict, VECTORS[:43], **rows))
    found["predict_on_batch"] = digest(record.counted("predict_on_batch", model.predict_on_batch, VECTORS[:16], **on))
    record.state(model)
    return found


# Trainings that resume from a checkpoint

SAVED_AT, EPOCHS = 8, 4  # the third of an epoch's five batches, and the first of two accumulated batches


class Warm(Callback):
    """Increases the rate with each batch. May end training after a number of batches."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.seen, self.stop_after = 0, stop_after

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen += 1
        self.model.learning_rate = 1e-3 * (1 + 0.1 * self.seen)
        self.model.stop_training = self.seen == self.stop_after

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.seen = state["seen"]


def compiled(width: int, seed: int = 11) -> tpufit.Model:
    tpufit.set_random_seed(seed)
    model = tpufit.Model(with_bias(width))
    model.compile(
        "adamw",
        "cross_entropy",
        metrics=["accuracy", "auroc"],
        scale_lr=None,
        use_ema=True,
        ema_momentum=0.9,
        ema_overwrite_frequency=5,
        accumulate_steps=2,
        global_clip_norm=1.0,
    )
    return model


def train_or_resume(cores: int, folder: Path, seed: int, **resume: Any) -> dict[str, Any]:
    """Train from the beginning, or from the checkpoint in the folder. Return the results after the checkpoint."""
    model, record = compiled(52, seed), Record()
    early = EarlyStopping(monitor="val_loss", patience=4, restore_best_weights=True)
    callbacks = [Warm(), early, ModelCheckpoint(folder, save_freq=SAVED_AT, keep_last=None)]
    held_out = (VECTORS[:20], LABELS[:20])
    options = {"batch_size": BATCH // cores, "epochs": EPOCHS, "cores": cores, "validation_data": held_out}
    record.fit(model, Noisy(75), callbacks=callbacks, **options, **resume)
    found = record.found
    found["steps"] = {name: values[SAVED_AT - 20 :] for name, values in found["steps"].items()}
    found["epochs"] = {name: values[1 - EPOCHS :] for name, values in found["epochs"].items()}
    found["drawn next"] = exact([np.random.random(), torch.rand(())])
    found["early"] = exact([early.best, callbacks[0].seen])
    record.state(model)
    return found


def checkpointed(cores: int) -> dict[str, Any]:
    """Resume from the `ModelCheckpoint` in the middle of an epoch."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.unpack_archive(DATA / f"checkpoint-cores{cores}.zip", folder)
        return train_or_resume(cores, Path(folder), seed=99, resume=True)


def write_crossed(cores: int) -> dict[str, Any]:
    """Write a checkpoint with TorchTPU, and the results of its training."""
    with tempfile.TemporaryDirectory() as folder:
        found = train_or_resume(cores, Path(folder), seed=11)
        shutil.make_archive(str(CROSSING), "zip", folder, f"step-{SAVED_AT:010d}")
    CROSSING.with_suffix(".json").write_text(json.dumps({part: found[part] for part in ("steps", "epochs")}) + "\n")
    return found


def crossed(cores: int) -> dict[str, Any]:
    """Resume from the checkpoint that torch_tpu has written."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.unpack_archive(CROSSING.with_suffix(".zip"), folder)
        return train_or_resume(cores, Path(folder), seed=99, resume=True)


def fit_once_more(cores: int, model: tpufit.Model) -> dict[str, Any]:
    record = Record()
    size = {"batch_size": BATCH // cores, "cores": cores}
    record.found["evaluate"] = exact(model.evaluate(VECTORS, LABELS, **size, verbose=0))
    tpufit.set_random_seed(5)
    record.fit(model, VECTORS[:75], LABELS[:75], **size)
    record.state(model)
    return record.found


def loaded(cores: int) -> dict[str, Any]:
    """Train a model that was saved by `Model.save` after a callback had ended training in the middle of an epoch."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.unpack_archive(DATA / f"saved-cores{cores}.zip", folder)
        tpufit.set_random_seed(98)
        return fit_once_more(cores, tpufit.load(Path(folder), with_bias(53)))


def write_checkpoints(cores: int) -> dict[str, Any]:
    """Write both checkpoints. Return the results of their trainings, which continued without interruption."""
    with tempfile.TemporaryDirectory() as folder:
        found = {"checkpoint": train_or_resume(cores, Path(folder), seed=11)}
        # The folder also has a later checkpoint, of step 16.
        written = f"step-{SAVED_AT:010d}"
        shutil.make_archive(str(DATA / f"checkpoint-cores{cores}"), "zip", folder, written)
    model = compiled(53)
    size = {"batch_size": BATCH // cores, "cores": cores}
    model.fit(VECTORS[:75], LABELS[:75], **size, epochs=2, callbacks=Warm(stop_after=SAVED_AT), verbose=0)
    with tempfile.TemporaryDirectory() as folder:
        model.save(Path(folder, "saved"))
        shutil.make_archive(str(DATA / f"saved-cores{cores}"), "zip", Path(folder, "saved"))
    return found | {"saved": fit_once_more(cores, model)}


def _weights(rows: int) -> np.ndarray[Any, Any]:
    return np.linspace(0.2, 2.0, rows, dtype="float32")


ITEMS: dict[str, Callable[[int], dict[str, Any]]] = {
    "checkpoint": checkpointed,
    "saved": loaded,
    "several outputs": Training(
        partial(Heads, 33),
        adamw,
        (VECTORS, {"label": LABELS, "value": VALUES}),
        {
            "loss": {"label": "cross_entropy", "value": "mse"},
            "loss_weights": {"label": 1.0, "value": 0.3},
            "metrics": {"label": ["accuracy", "auroc"], "value": "mae"},
        },
    ),
    "short last batch": trained(
        37, data=(VECTORS[:75], LABELS[:75]), metrics={"accuracy": "accuracy", "auroc": "auroc", "f1": "f1_micro"}
    ),
    "on batches": on_batches,
    **{name: of(name) for name in ARCHITECTURES},
    "two optimizers": Training(partial(rivals, 20), _of_generator, model=Rivals, validates=False),
    "two optimizers, accumulated, clipped, averaged": Training(
        partial(rivals, 21),
        _of_generator,
        compile={"accumulate_steps": 2, "global_clip_norm": 0.5, "use_ema": True, "ema_overwrite_frequency": 3},
        model=Rivals,
        validates=False,
    ),
    "moving average": trained(22, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3),
    "accumulated": trained(23, optimizer=momentum, accumulate_steps=2),
    "clip_norm": trained(24, optimizer=momentum, clip_norm=0.1),
    "clip_value": trained(25, optimizer=momentum, clip_value=0.01),
    "global_clip_norm": trained(26, optimizer=momentum, global_clip_norm=0.2),
    "accumulated, clipped, averaged": trained(
        27,
        accumulate_steps=3,
        global_clip_norm=0.2,
        use_ema=True,
        ema_momentum=0.8,
        ema_overwrite_frequency=2,
        callbacks=lambda: [SwapEMAWeights()],
    ),
    "three steps as one": trained(28, steps_per_execution=3),
    "bf16": trained(29, precision="bf16"),
    "bf16-true": trained(30, precision="bf16-true"),
    "class_weight": trained(31, weighted_metrics=["accuracy"], fit={"class_weight": {0: 0.5, 2: 3.0}}),
    "sample_weight": trained(32, weighted_metrics=["accuracy"], fit={"sample_weight": _weights(len(LABELS))}),
    "validation inside an epoch": trained(34, fit={"validation_step_freq": 2}),
    "eager": trained(35, run_eagerly=True),
    "traced": trained(36, jit_compile=False),
    "steps_per_execution=3 and a short last batch": trained(
        38, data=(VECTORS[:75], LABELS[:75]), optimizer=momentum, steps_per_execution=3, accumulate_steps=2
    ),
    "scaled rate": trained(39, optimizer=momentum, scale_lr="linear"),
    "rates by callbacks": trained(
        40,
        optimizer=momentum,
        callbacks=lambda: [
            LearningRateScheduler(lambda epoch, rate: rate * 0.7),
            ReduceLROnPlateau(patience=0, min_delta=10.0),
            EarlyStopping(patience=3, restore_best_weights=True),
        ],
        fit={"epochs": 3},
    ),
    "optimizer that counts on the host": trained(41, optimizer=lambda net: optim.Adadelta(net.parameters(), 0.5)),
    "loader": trained(42, data=lambda size: {"x": DataLoader(Noisy(75), size, shuffle=True)}),
    "dataset, some steps an epoch": trained(
        43, data=lambda size: {"x": Noisy(75), "batch_size": size}, fit={"steps_per_epoch": 3}
    ),
    "frozen layer": Training(
        lambda: _frozen(small(44)), adamw, compile={"loss": "cross_entropy", "metrics": ["accuracy"]}
    ),
    "lr_find": lr_found,
}

# From one engine to the other, compared up to rounding.
CROSSED = {"checkpoint by torch_tpu": crossed, "write the checkpoint of torch_tpu": write_crossed}

# These items have a metric that keeps batches, for which torch_xla compiles graphs that depend only on the batch's
# shape. The first item counts these graphs. So these items run first in a process, each after all items before it.
KEEPING = ("checkpoint", "saved", "several outputs", "short last batch", "on batches")


def in_order(names: Container[str]) -> list[str]:
    """Return the items with these names and the items that must run before them, in order."""
    last = max((i for i, name in enumerate(KEEPING) if name in names), default=-1)
    return [name for i, name in enumerate([*ITEMS, *CROSSED]) if name in names or i <= last]


def _frozen(net: nn.Module) -> nn.Module:
    net[0].requires_grad_(False)
    return net


def _run_here(cores: int, into: Path, names: Sequence[str]) -> None:
    """Run items in this process, and write the results of each in one line."""
    warnings.simplefilter("ignore")  # e.g. that a net can't be replayed, or that the data are slow
    torch.set_num_threads(1)
    tpufit.init(cores=cores)
    gc.freeze()  # each capture of a step lists all objects; it needn't list the libraries' objects
    with into.open("w", buffering=1) as file:
        for name in names:
            try:
                found = write_checkpoints(cores) if name == _WRITING else (ITEMS | CROSSED)[name](cores)
            except Exception:
                found = {"error": traceback.format_exc()}
            file.write(json.dumps([name, found]) + "\n")
            gc.collect()


_WRITING = "write the checkpoints"


def _record(names: Container[str]) -> None:
    """Run items here, and write their results to `tests/goldens/`; checkpoints only if they don't exist."""
    DATA.mkdir(exist_ok=True)
    for cores in CORES:
        uninterrupted: dict[str, Any] = {}
        if not (DATA / f"checkpoint-cores{cores}.zip").exists():
            uninterrupted = _run_all(cores, [_WRITING])[_WRITING]
        found = {name: {**own, "computer": computer()} for name, own in _run_all(cores, in_order(names)).items()}
        for name, expected in uninterrupted.items():
            for key in expected.keys() - {"counts"}:  # earlier trainings have already compiled the graphs
                if found[name][key] != expected[key]:
                    sys.exit(f"{name} on {cores} cores: {key} differ after resuming")
        path = DATA / f"cores{cores}.json"
        if path.exists():
            before = recorded(cores)
            if before["environment"] != ENVIRONMENT and len(found) < len(ITEMS):
                sys.exit(f"{path} was recorded with other flags: record all items")
            found = before["items"] | {name: found[name] for name in found if name in names}
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(found[name], sort_keys=True)}" for name in ITEMS)
        head = f'"environment": {json.dumps(ENVIRONMENT)}'
        path.write_text(f'{{\n{head},\n"items": {{\n{lines}\n}}\n}}\n')


def _run_all(cores: int, names: Sequence[str]) -> dict[str, Any]:
    found, output = run(cores, names, ENVIRONMENT)
    for name in names:
        if "error" in found.get(name, {"error": output}):
            sys.exit(f"{name} on {cores} cores failed: {found.get(name, {}).get('error', output)}")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--cores", type=int)
    parser.add_argument("--into", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME")
    given = parser.parse_args()
    if given.record and find_spec("torch_xla") is None:
        _run_all(1, ["write the checkpoint of torch_tpu"])
    elif given.record:
        _record(given.names or ITEMS)
    else:
        _run_here(given.cores, given.into, given.names)
