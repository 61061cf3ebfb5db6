"""State in each kind of object: a training that is interrupted and resumed in new objects is exact.

`CASES` is the table: a line creates everything that a script creates before `fit`, with one kind of state in it. Each
case is trained without interruption, then interrupted and resumed in new objects, and both must be equal bit for bit:
weights, optimizer, logs, rates, random numbers, and the state in the case's objects. Where a state can't be saved, the
line has the message of `fit` about it.
"""

from __future__ import annotations

import os
import random
import signal
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

import tpufit
from tpufit import callbacks
from tpufit.callbacks import Callback, LambdaCallback, LRScheduler, ModelCheckpoint
from tpufit.errors import WeightsError

pytestmark = pytest.mark.cores(1)

ROWS, BATCH, EPOCHS = 56, 16, 3  # four batches in each epoch, the last is short
X = torch.from_numpy(np.random.default_rng(0).normal(size=(ROWS, 6)).astype(np.float32))
Y = (X.sum(1) > 0).long() + (X[:, 0] > 1).long()
RNG = np.random.default_rng


@pytest.fixture(autouse=True)
def _one_thread():
    """One thread computes such small nets; several would wait for each other, on a busy machine for long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))


class Ends(Callback):
    """Sends SIGTERM to the process, as a cloud does: in a step, or at the end of an epoch."""

    reads_weights = False

    def __init__(self, step: int = 0, epoch: int = -1):
        self.left, self.epoch = step, epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == self.epoch:
            os.kill(os.getpid(), signal.SIGTERM)


def train(
    make: Callable[[], dict[str, Any]],
    *more: Callback,
    eager: bool = False,
    cores: int = 1,
    seed: int = 7,
    **fit: Any,
) -> Any:
    tpufit.set_random_seed(seed)
    made = {"module": net(), "model": tpufit.Model, "compile": {}, "fit": {}, "callbacks": [], "look": lambda: None}
    tpufit.set_random_seed(7)
    made |= make()
    if isinstance(made["module"], type):
        made["module"] = made["module"]()
    tpufit.set_random_seed(seed)
    model = made["model"](made["module"])
    options = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), "loss": "cross_entropy"}
    model.compile(**{**options, "scale_lr": None, "run_eagerly": eager, **made["compile"]})
    data = {"x": TensorDataset(X, Y), "batch_size": BATCH // cores, "epochs": EPOCHS, "verbose": 0, "cores": cores}
    if isinstance(made["fit"].get("x"), DataLoader) or not isinstance(made["fit"].get("x", X), (torch.Tensor, Dataset)):
        del data["batch_size"]
    history = model.fit(**{**data, **made["fit"], **fit}, callbacks=[*made["callbacks"], *more])
    found = {name: value.numpy() for name, value in model.state_dict().items()}
    for i, own in enumerate(model.optimizer.state.values()):
        found |= {f"optimizer {key} {i}": host(value) for key, value in own.items() if value is not None}
    found |= {f"log {name}": np.array(values) for name, values in history.history.items()}
    found |= {"rate": model.learning_rate, "steps": model.steps_taken, "looked": made["look"]()}
    found |= {"draws": (random.random(), float(np.random.random()), float(torch.rand(())))}
    return found


def host(value: Any) -> Any:
    return [host(item) for item in value] if isinstance(value, list) else torch.as_tensor(value).cpu().numpy()


def same_values(one: Any, other: Any) -> bool:
    return repr(one) == repr(other) if getattr(one, "dtype", None) is np.dtype(object) else np.array_equal(one, other)


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    names = [*one, *(name for name in other if name not in one)]
    same = {n for n in one.keys() & other.keys() if same_values(one[n], other[n])}
    return [name for name in names if name not in same]


# Modules


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls, self.history = nn.Linear(6, 3), 0, []
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.rng = RNG(3)

    def forward(self, x):
        return self.layer(x)


def module(forward: Callable[..., Any], **more: Any) -> Callable[[], dict[str, Any]]:
    def make() -> dict[str, Any]:
        kind = type("Custom", (Net,), {"forward": lambda self, x: forward(self, self.layer(x))})
        own = kind()
        return {"module": own, "look": lambda: (own.calls, len(own.history), float(own.seen)), **more}

    return make


def counts(net, h):
    net.calls += net.training
    return h * (1 + 0.1 * net.calls)


def buffers(net, h):
    if net.training:
        net.seen += 1
    return h * (1 + 0.01 * net.seen)


def lists(net, h):
    if net.training:
        net.history.append(1)
    return h * (1 + 0.1 * len(net.history))


def draws(net, h):
    return h * (1 + 0.1 * net.rng.normal()) if net.training else h


class Extra(Net):
    def forward(self, x):
        self.calls += self.training
        return self.layer(x) * (1 + 0.1 * self.calls)

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


class Named(Net):
    def forward(self, x):
        return {"a": self.layer(x)}


class Lazy(Net):
    def forward(self, x):
        if not hasattr(self, "late"):
            self.register_buffer("late", torch.zeros((), device=x.device))
        if self.training:
            self.late = self.late + 1
        return self.layer(x) * (1 + 0.01 * self.late)


class Own(Net):
    """A tensor that isn't a buffer."""

    def __init__(self):
        super().__init__()
        self.own = torch.zeros(())

    def forward(self, x):
        if self.training:
            self.own = self.own.to(x.device) + 1
        return self.layer(x) * (1 + 0.01 * self.own)


# Losses


class Warmed(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("step", torch.zeros(()))
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, pred, target):
        self.step += 1
        return F.cross_entropy(pred, target, weight=self.weight.detach()) * (1 + 0.01 * self.step)


class Counting(nn.Module):
    calls = 0

    def forward(self, pred, target):
        self.calls += 1
        return F.cross_entropy(pred, target) * (1 + 0.05 * self.calls)


class Plainly:
    """A loss that isn't a module."""

    def __init__(self):
        self.calls, self.rng = 0, random.Random(3)

    def __call__(self, pred, target):
        self.calls += 1
        return F.cross_entropy(pred, target) * (1 + 0.05 * self.calls + 0.1 * self.rng.random())


def closure_loss():
    calls = 0

    def loss(pred, target):
        nonlocal calls
        calls += 1
        return F.cross_entropy(pred, target) * (1 + 0.05 * calls)

    return loss


# Metrics


class CountingMetric:
    def __init__(self):
        self.calls = 0
        self.__name__ = "counting"

    def __call__(self, pred, target):
        self.calls += 1
        return (pred.argmax(1) == target).float() * self.calls


def metric(*made: Callable[[], Any]) -> Callable[[], dict[str, Any]]:
    return lambda: {"compile": {"metrics": [one() for one in made]}, "fit": {"validation_data": (X[:20], Y[:20])}}


def accuracy(**options):
    return torchmetrics.classification.MulticlassAccuracy(3, **options)


class Tracking(tpufit.Model):
    """A custom step, with a metric, a count and a generator in attributes."""

    def __init__(self, module):
        super().__init__(module)
        self.own = torchmetrics.MeanMetric(nan_strategy="disable")
        self.count, self.rng, self.replayed = 0, RNG(5), deque(maxlen=3)

    def train_step(self, batch):
        x, y = batch
        self.count += 1
        loss = F.cross_entropy(self(x), y) * (1 + 0.05 * self.count + 0.01 * self.rng.random())
        self.apply_gradients(loss)
        self.own.update(loss.detach())
        return {"loss": loss, "own": self.own.compute()}


class Scheduled(tpufit.Model):
    """A schedule that the user steps by hand, in a callback."""

    def train_step(self, batch):
        return super().train_step(batch)


def by_hand():
    class Steps(Callback):
        def on_train_begin(self, logs=None):
            self.schedule = lr_scheduler.StepLR(self.model.optimizer, 2)

        def on_train_batch_end(self, batch, logs=None):
            self.schedule.step()

    return {"callbacks": [Steps()]}


# Callbacks


class Counter(Callback):
    def __init__(self):
        self.seen = 0

    def on_train_batch_end(self, batch, logs=None):
        self.seen += 1
        self.model.learning_rate = 0.05 / self.seen


class Best(Callback):
    """A callback in the style of Keras's guides: a number and weights, and no state_dict."""

    def on_train_begin(self, logs=None):
        self.best, self.weights = np.inf, None

    def on_epoch_end(self, epoch, logs=None):
        if logs["loss"] < self.best:
            self.best, self.weights = logs["loss"], self.model.get_weights()


class Stopping(callbacks.EarlyStopping):
    """A callback of the package, with an additional count."""

    def __init__(self):
        super().__init__("loss", patience=9, restore_best_weights=True)
        self.seen = 0

    def on_train_batch_end(self, batch, logs=None):
        self.seen += 1


class Phase(Enum):
    COLD, WARM = 0, 1


class Stats(NamedTuple):
    steps: int = 0


@dataclass
class Progress:
    steps: int = 0


class Phases(Callback):
    """State that is replaced, not changed in place."""

    def __init__(self):
        self.phase, self.stats, self.progress = Phase.COLD, Stats(), Progress()

    def on_train_batch_end(self, batch, logs=None):
        self.phase = Phase.WARM
        self.stats, self.progress = Stats(self.stats.steps + 1), Progress(self.progress.steps + 1)

    @property
    def sum(self):
        return self.phase.value + self.stats.steps + self.progress.steps


class Plain:
    """Not a subclass of Callback."""

    def __init__(self):
        self.losses = []

    def on_epoch_end(self, epoch, logs):
        self.losses.append(logs["loss"])


def attribute(kind: Callable[[], Any], name: str) -> Callable[[], dict[str, Any]]:
    def make():
        own = kind()
        return {"callbacks": [own], "look": lambda: np.sum(getattr(own, name))}

    return make


def lambdas():
    seen = []
    return {"callbacks": [LambdaCallback(on_epoch_end=lambda e, logs: seen.append(e))], "look": lambda: len(seen)}


def callback(make: Callable[[], Callback], **more: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"callbacks": [make()], "fit": {"validation_data": (X[:20], Y[:20])}, **more}


# Data


class Rows(Dataset):
    def __init__(self, change=lambda self, row: row):
        self.rng, self.random, self.generator = RNG(1), random.Random(1), torch.Generator().manual_seed(1)
        self.legacy = np.random.RandomState(1)
        self.calls, self.kept, self.change, self.cache, self.late = 0, [], change, {}, None

    def __len__(self):
        return ROWS

    def __getitem__(self, i):
        return self.change(self, X[i]), Y[i]


class Stream(IterableDataset):
    def __init__(self, change=lambda self, row: row):
        Rows.__init__(self, change)

    def __iter__(self):
        for i in range(ROWS):
            yield self.change(self, X[i]), Y[i]


def of_numpy(data, row):
    return row + 0.1 * float(data.rng.normal())


def of_legacy(data, row):
    return row + 0.1 * float(data.legacy.normal())


def of_python(data, row):
    return row + 0.1 * data.random.random()


def of_torch(data, row):
    return row + 0.1 * torch.rand((), generator=data.generator)


def of_globals(data, row):
    return row + 0.1 * torch.rand(()) + 0.1 * random.random() + 0.1 * float(np.random.random())


def of_count(data, row):
    data.calls += 1
    return row * (1 + 0.001 * data.calls)


def of_list(data, row):
    data.kept.append(1)
    return row * (1 + 0.001 * len(data.kept))


def of_late(data, row):
    data.late = data.late or RNG(8)
    return row + 0.1 * float(data.late.normal())


def of_cache(data, row):
    key = float(row[0])
    data.cache[key] = data.cache.get(key, row * 2)
    return data.cache[key]


class Transform:
    def __init__(self):
        self.rng, self.calls = RNG(2), 0

    def __call__(self, row):
        self.calls += 1
        return row + 0.1 * float(self.rng.normal()) + 0.001 * self.calls


class Transformed(Rows):
    def __init__(self):
        super().__init__()
        self.transforms = [Transform()]

    def __getitem__(self, i):
        return self.transforms[0](X[i]), Y[i]


class BySeed(Sampler):
    """As `DistributedSampler`: the order depends on the epoch, which the user sets."""

    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return ROWS

    def __iter__(self):
        return iter(torch.randperm(ROWS, generator=torch.Generator().manual_seed(self.epoch)).tolist())


class Sets(Callback):
    def __init__(self, sampler):
        self.sampler = sampler

    def on_epoch_begin(self, epoch, logs=None):
        self.sampler.set_epoch(epoch)


class ByPass(BySeed):
    """A new order each time, by its own count."""

    def __iter__(self):
        self.epoch += 1
        return super().__iter__()


class ByRow(BySeed):
    """Draws for each row, from the global generators and its own."""

    def __init__(self):
        self.rng = RNG(4)

    def __iter__(self):
        for _ in range(ROWS):
            yield int(self.rng.integers(ROWS // 2)) + int(torch.randint(ROWS // 2, ()))


class ByRng(BySeed):
    def __init__(self):
        self.rng = RNG(4)

    def __iter__(self):
        return iter(self.rng.permutation(ROWS).tolist())


class Batches(Sampler):
    def __init__(self):
        self.rng, self.passes = RNG(4), 0

    def __len__(self):
        return 4

    def __iter__(self):
        self.passes += 1
        for part in np.array_split(np.roll(self.rng.permutation(ROWS), self.passes), 4):
            yield part.tolist()


class Stateful(Stream):
    def __init__(self):
        super().__init__()
        self.next = 0

    def __iter__(self):
        while self.next < ROWS:
            self.next += 1
            yield X[self.next - 1], Y[self.next - 1]
        self.next = 0

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


class Collate:
    def __init__(self):
        self.rng = RNG(6)

    def __call__(self, samples):
        x, y = torch.utils.data.default_collate(samples)
        return x * float(self.rng.normal(1, 0.1)), y


def data(make: Callable[[], Any], **more: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"fit": {"x": make(), **more}}


def loader(change: Any = None, make: Any = None, **options: Any) -> Callable[[], dict[str, Any]]:
    def made():
        rows = make() if make else Rows(change) if change else TensorDataset(X, Y)
        given = {"batch_size": BATCH, "shuffle": True} | {n: v() if n in _MADE else v for n, v in options.items()}
        if given.keys() & {"sampler", "batch_sampler"} or isinstance(rows, IterableDataset):
            del given["shuffle"]
        if "batch_sampler" in given:
            del given["batch_size"]
        return {"fit": {"x": DataLoader(rows, **given)}}

    return made


_MADE = ("sampler", "batch_sampler", "collate_fn", "generator")


def by_epoch():
    sampler = BySeed()
    return {"fit": {"x": DataLoader(TensorDataset(X, Y), BATCH, sampler=sampler)}, "callbacks": [Sets(sampler)]}


def validated(make: Callable[[], Any], **more: Any) -> Callable[[], dict[str, Any]]:
    def made():
        held_out = make()
        rows = {} if isinstance(held_out, DataLoader) else {"validation_batch_size": 16}
        return {"fit": {"validation_data": held_out, **rows, **more}}

    return made


def compiled(**options: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"compile": options}


class Host(torch.optim.SGD):
    """An optimizer with an additional count."""

    def __init__(self, params):
        super().__init__(params, lr=0.05)
        self.count = 0

    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            group["lr"] = 0.05 / self.count
        return super().step(closure)


class Grouped(torch.optim.SGD):
    """A tensor in the options of its groups, which it changes."""

    def __init__(self, params):
        super().__init__(params, lr=0.05)
        for group in self.param_groups:
            group["scales"] = torch.ones(3)

    def step(self, closure=None):
        for group in self.param_groups:
            group["scales"] *= 1.1
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(group["scales"][0])
        return super().step(closure)


class Lists(torch.optim.SGD):
    """State in a list of tensors, as in L-BFGS."""

    def __init__(self, params):
        super().__init__(params, lr=0.05)

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    past = self.state[p].setdefault("past", [])
                    past.append(p.grad.detach().clone())
                    del past[:-2]
                    p.grad = sum(past) / len(past)
        return super().step(closure)


def by_object():
    class Curve:
        def __init__(self):
            self.calls = 0

        def __call__(self, n):
            self.calls += 1
            return 1 / self.calls

    return {"callbacks": [LRScheduler(lambda o: lr_scheduler.LambdaLR(o, Curve()), "step")]}


def scheduled(make: Any, interval: str = "epoch", **more: Any) -> Callable[[], dict[str, Any]]:
    return callback(lambda: LRScheduler(make, interval, monitor="loss"), **more)


EXACT = ""
CASES = {
    "module: a count in forward": (module(counts), EXACT),
    "module: a buffer that isn't persistent": (module(buffers), EXACT),
    "module: a list": (module(lists), EXACT),
    "module: a generator": (module(draws), EXACT),
    "module: a buffer made late": (lambda: {"module": Lazy}, "the module has created late in its steps"),
    "module: a tensor": (lambda: {"module": Own}, EXACT),
    "module: spectral norm": (
        lambda: {"module": nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 3)))},
        EXACT,
    ),
    "module: spectral norm of old": (
        lambda: {"module": nn.Sequential(nn.utils.spectral_norm(nn.Linear(6, 3)))},
        EXACT,
    ),
    "module: weight norm": (
        lambda: {"module": nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 3)))},
        EXACT,
    ),
    "loss: buffers": (lambda: {"compile": {"loss": Warmed()}}, EXACT),
    "loss: a count": (lambda: {"compile": {"loss": Counting()}}, EXACT),
    "loss: no module": (lambda: {"compile": {"loss": Plainly()}}, EXACT),
    "loss: a closure": (lambda: {"compile": {"loss": closure_loss()}}, EXACT),
    "loss: by output": (
        lambda: {
            "compile": {"loss": {"a": Counting()}, "loss_weights": {"a": 0.5}},
            "module": Named,
            "fit": {"x": X, "y": {"a": Y}},
        },
        EXACT,
    ),
    "metric: names": (
        lambda: {"compile": {"metrics": ["accuracy", "auroc", "f1"], "weighted_metrics": ["accuracy"]}},
        EXACT,
    ),
    "metric: a count": (metric(CountingMetric), EXACT),
    "metric: running": (metric(lambda: torchmetrics.wrappers.Running(accuracy(), 2)), EXACT),
    "metric: min and max": (metric(lambda: torchmetrics.wrappers.MinMaxMetric(accuracy())), EXACT),
    "metric: bootstrap": (metric(lambda: torchmetrics.wrappers.BootStrapper(accuracy(), 4)), EXACT),
    "metric: by class": (
        metric(lambda: torchmetrics.wrappers.ClasswiseWrapper(accuracy(average=None))),
        EXACT,
    ),
    "metric: lists": (
        metric(
            lambda: torchmetrics.classification.MulticlassAUROC(3),
            lambda: torchmetrics.classification.MulticlassAveragePrecision(3),
        ),
        EXACT,
    ),
    "metric: binned": (metric(lambda: torchmetrics.classification.MulticlassAUROC(3, thresholds=5)), EXACT),
    "metric: confusion": (metric(lambda: torchmetrics.classification.MulticlassConfusionMatrix(3)), EXACT),
    "model: steps of its own": (lambda: {"model": Tracking}, EXACT),
    "callback: a count": (lambda: {"callbacks": [Counter()]}, EXACT),
    "callback: the best so far": (attribute(Best, "best"), EXACT),
    "callback: a subclass of one of the package's": (attribute(Stopping, "seen"), EXACT),
    "callback: replaced objects": (attribute(Phases, "sum"), EXACT),
    "callback: no Callback": (attribute(Plain, "losses"), EXACT),
    "callback: functions": (lambdas, EXACT),
    "callback: a schedule by hand": (by_hand, EXACT),
    "callback: early stopping": (
        callback(lambda: callbacks.EarlyStopping("loss", patience=1, restore_best_weights=True)),
        EXACT,
    ),
    "callback: plateau": (
        callback(lambda: callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=9, verbose=0)),
        EXACT,
    ),
    "callback: one cycle": (callback(lambda: callbacks.OneCycle(0.1)), EXACT),
    "callback: rate by epoch": (
        callback(lambda: callbacks.LearningRateScheduler(lambda epoch, lr: lr / (1 + epoch))),
        EXACT,
    ),
    "callback: averages": (
        callback(lambda: callbacks.SwapEMAWeights(swap_on_epoch=True), compile={"use_ema": True}),
        EXACT,
    ),
    "schedule: plateau": (scheduled(partial(lr_scheduler.ReduceLROnPlateau, patience=0, threshold=9)), EXACT),
    "schedule: cosine": (scheduled(partial(lr_scheduler.CosineAnnealingLR, T_max=3)), EXACT),
    "schedule: one cycle": (
        scheduled(partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=40), "step"),
        EXACT,
    ),
    "schedule: an object": (by_object, EXACT),
    "compile: averages": (compiled(use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3), EXACT),
    "compile: accumulation": (compiled(accumulate_steps=3), EXACT),
    "compile: clipping": (compiled(global_clip_norm=0.1), EXACT),
    "compile: bf16": (compiled(precision="bf16"), EXACT),
    "compile: remat": (compiled(remat=["0"]), EXACT),
    "compile: joined steps": (compiled(steps_per_execution=2), EXACT),
    "optimizer: adam": (compiled(optimizer="adam"), EXACT),
    "optimizer: nadam": (compiled(optimizer="nadam"), EXACT),
    "optimizer: rprop": (compiled(optimizer=torch.optim.Rprop), EXACT),
    "optimizer: asgd": (compiled(optimizer=torch.optim.ASGD), EXACT),
    "optimizer: adafactor": (compiled(optimizer=torch.optim.Adafactor), EXACT),
    "optimizer: a count of its own": (compiled(optimizer=Host), EXACT),
    "optimizer: tensors in its groups": (compiled(optimizer=Grouped), EXACT),
    "optimizer: lists of tensors": (
        compiled(optimizer=Lists),
        r"checkpoints can't save optimizer.state\[...\]\[.past.\]",
    ),
    "data: a class weight": (lambda: {"fit": {"class_weight": {0: 1.0, 1: 2.0, 2: 0.5}}}, EXACT),
    "data: weights": (
        lambda: {"fit": {"x": X, "y": Y, "sample_weight": np.linspace(0, 1, ROWS).astype("float32")}},
        EXACT,
    ),
    "data: global generators": (data(lambda: Rows(of_globals)), EXACT),
    "data: NumPy's generator": (data(lambda: Rows(of_numpy)), EXACT),
    "data: NumPy's old generator": (data(lambda: Rows(of_legacy)), EXACT),
    "data: Python's generator": (data(lambda: Rows(of_python)), EXACT),
    "data: PyTorch's generator": (data(lambda: Rows(of_torch)), EXACT),
    "data: a generator made late": (data(lambda: Rows(of_late)), EXACT),
    "data: a count": (data(lambda: Rows(of_count)), EXACT),
    "data: a list": (data(lambda: Rows(of_list)), EXACT),
    "data: a cache": (data(lambda: Rows(of_cache)), EXACT),
    "data: a transform": (data(Transformed), EXACT),
    "data: a subset": (data(lambda: Subset(Rows(of_numpy), range(ROWS))), EXACT),
    "data: several sets": (data(lambda: ConcatDataset([Rows(of_numpy), Rows(of_count)])), EXACT),
    "data: an iterable set": (data(lambda: Stream(of_numpy)), EXACT),
    "data: an iterable set that counts": (data(lambda: Stream(of_count)), EXACT),
    "data: an iterable set with a state": (data(Stateful), EXACT),
    "loader: shuffled": (loader(), EXACT),
    "loader: a generator": (loader(generator=lambda: torch.Generator().manual_seed(2)), EXACT),
    "loader: NumPy's generator": (loader(of_numpy), EXACT),
    "loader: a count": (loader(of_count), EXACT),
    "loader: a sampler by epoch": (by_epoch, EXACT),
    "loader: a sampler by pass": (loader(sampler=ByPass), EXACT),
    "loader: a sampler's generator": (loader(sampler=ByRng), EXACT),
    "loader: a weighted sampler": (
        loader(sampler=lambda: WeightedRandomSampler(torch.arange(1.0, ROWS + 1), ROWS)),
        EXACT,
    ),
    "loader: a random sampler": (
        loader(sampler=lambda: RandomSampler(range(ROWS), generator=torch.Generator().manual_seed(4))),
        EXACT,
    ),
    "loader: a batch sampler": (loader(batch_sampler=Batches), EXACT),
    "loader: a batch sampler of a sampler": (
        loader(batch_sampler=lambda: BatchSampler(ByRng(), BATCH, drop_last=False)),
        EXACT,
    ),
    "loader: collate": (loader(collate_fn=Collate), EXACT),
    "loader: workers": (loader(of_globals, num_workers=2), EXACT),
    "loader: workers and a sampler that draws each row": (loader(of_globals, sampler=ByRow, num_workers=2), EXACT),
    "loader: workers that stay": (loader(of_globals, num_workers=2, persistent_workers=True), EXACT),
    "loader: a generator in workers": (loader(of_numpy, num_workers=2), EXACT),
    "loader: a stream in workers": (loader(None, lambda: Stream(of_globals), num_workers=2), EXACT),
    "fit: steps per epoch": (data(lambda: Rows(of_numpy), steps_per_epoch=3, epochs=5), EXACT),
    "fit: a limit": (data(lambda: Rows(of_numpy), limit=3), EXACT),
    "fit: validation data that draw": (validated(lambda: Rows(of_globals)), EXACT),
    "fit: validation data with a generator": (validated(lambda: Rows(of_numpy)), EXACT),
    "fit: validation data that count": (validated(lambda: Rows(of_count), validation_step_freq=2), EXACT),
    "fit: a validation loader with a generator": (
        validated(lambda: DataLoader(Rows(), 16, shuffle=True, generator=torch.Generator().manual_seed(3))),
        EXACT,
    ),
    "fit: validation steps": (validated(lambda: Stream(of_numpy), validation_steps=2), EXACT),
}

# The other cases are exhaustive. A replayed step runs no Python: the cases on the device test what this can change.
QUICK = {
    "module: a count in forward",
    "loss: no module",
    "metric: a count",
    "model: steps of its own",
    "callback: a count",
    "optimizer: a count of its own",
    "data: global generators",
    "data: NumPy's generator",
    "data: a count",
    "loader: a sampler by pass",
    "fit: validation data that count",
}
ON_THE_DEVICE = {
    "module: a count in forward",
    "module: a buffer that isn't persistent",
    "module: spectral norm",
    "loss: buffers",
    "loss: a count",
    "metric: a count",
    "metric: bootstrap",
    "model: steps of its own",
    "optimizer: a count of its own",
    "optimizer: tensors in its groups",
    "compile: averages",
    "data: NumPy's generator",
}


def somewhere(name: str) -> dict[str, int]:
    """Return where a case is interrupted: at random, but the same place each time."""
    return random.Random(name).choice([*({"step": step} for step in range(1, 12)), {"epoch": 0}, {"epoch": 1}])


def cases(names: Iterable[str], quick: set[str]) -> list[Any]:
    return [pytest.param(name, id=name, marks=[pytest.mark.soak] * (name not in quick)) for name in names]


def run_both(name: str, folder: Path, **how: Any) -> None:
    """Train a case without interruption, and interrupted and resumed."""
    make, said = CASES[name]
    expected = train(make, **how)
    if said:
        with pytest.warns(UserWarning, match=said), pytest.raises(SystemExit):
            train(make, ModelCheckpoint(folder), Ends(**somewhere(name)), **how)
        return
    with pytest.raises(SystemExit):
        train(make, ModelCheckpoint(folder), Ends(**somewhere(name)), **how)
    # The new process's own random draws don't matter.
    assert differences(expected, train(make, ModelCheckpoint(folder), resume=True, seed=99, **how)) == []


quiet = pytest.mark.filterwarnings("ignore:the (train|eval|test) step is traced again", "ignore:x ran out of data")


@quiet
@pytest.mark.parametrize("name", cases(CASES, QUICK))
def test_an_objects_state_is_resumed(cores, name, tmp_path):
    run_both(name, tmp_path, eager=True)


@quiet
@pytest.mark.cores(1, 8)
@pytest.mark.soak_on(8)
@pytest.mark.parametrize("name", cases(sorted(ON_THE_DEVICE), {"loss: a count"}))
def test_an_objects_state_on_the_device_is_resumed(cores, name, tmp_path):
    run_both(name, tmp_path, cores=cores)


def test_a_module_without_savable_state_is_refused(cores, tmp_path):
    steps = []
    with pytest.raises(WeightsError, match="values other than tensors, which can't be saved, under .'_extra_state'"):
        count = LambdaCallback(on_train_batch_begin=lambda batch, logs: steps.append(batch))
        train(lambda: {"module": Extra}, ModelCheckpoint(tmp_path), count, eager=True)
    assert not steps


class Huge(Net):
    """State that no checkpoint can store: an endless list, an iterator, and a large tensor."""

    def __init__(self):
        super().__init__()
        self.rows, self.turn, self.big = [0] * 10_001, iter(range(1000)), torch.zeros(10_001)
        self.names = dict.fromkeys(range(20_000), "")

    def forward(self, x):
        if self.training:
            self.rows.append(next(self.turn))
            self.big += 1
            self.names[len(self.names)] = ""  # a cache, which isn't state
        return self.layer(x)


def test_unsavable_state_is_named_with_the_first_checkpoint(cores, tmp_path):
    with pytest.warns(UserWarning, match="checkpoints can't save") as said:
        train(lambda: {"module": Huge}, ModelCheckpoint(tmp_path), eager=True)
    assert [str(one.message).partition(", changed")[0] for one in said] == [
        "checkpoints can't save module.rows, module.turn, module.big"
    ]
    assert said[0].filename == __file__


def test_a_callback_with_a_state_dict_is_trusted(cores, tmp_path):
    class Own(Counter):
        def state_dict(self):
            return {}

    def make():
        return attribute(Own, "seen")()

    with pytest.raises(SystemExit):
        train(make, ModelCheckpoint(tmp_path), Ends(epoch=0), eager=True)
    assert train(make, ModelCheckpoint(tmp_path), eager=True, resume=True)["looked"] == 8
