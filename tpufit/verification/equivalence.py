"""Do different ways to train give the same results where they should?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..model import Model
from . import nets
from .check import Figure, Setting

_EPOCHS = 5
_BATCHES = 4
_EXACT = "highest"  # so that a TPU rounds no more than a CPU
_ROUNDING = 1e-4  # relative, for weights and losses after 20 steps in float32


def check_replay(setting: Setting) -> Iterator[Figure]:
    """Compare replayed steps with steps traced each time, and several steps in a program with one."""
    traced = _train(nets.gpt(), setting, jit_compile=False, matmul_precision=_EXACT)
    again = _train(nets.gpt(), setting, jit_compile=True, matmul_precision=_EXACT)
    yield from _compare_bits("replayed", again, traced)
    joined = _train(nets.gpt(), setting, steps_per_execution=_BATCHES, matmul_precision=_EXACT)
    # The compiler may fuse several steps' arithmetic differently.
    yield from _compare_nearly(f"{_BATCHES} steps in one program", joined, again)


def compute_alone(setting: Setting) -> Iterator[Figure]:
    """Save what one core computes, for `compare_cores`."""
    for task in (nets.conv(), nets.gpt(dropout=0.1)):
        losses, weights = _train(task, setting, matmul_precision=_EXACT)
        torch.save({"losses": losses, "weights": weights}, setting.folder / f"{task.name}.pt")
    torch.save(draw_dropout(setting), setting.folder / "dropped.pt")
    yield from ()


def compare_cores(setting: Setting) -> Iterator[Figure]:
    """Compute the same on all cores, and compare."""
    for task in (nets.conv(), nets.gpt(dropout=0.1)):
        losses, weights = _train(task, setting, matmul_precision=_EXACT)
        one = torch.load(setting.folder / f"{task.name}.pt", weights_only=True)
        yield Figure(f"losses, {task.name}", nets.difference(losses, one["losses"]), at_most=_ROUNDING)
        yield Figure(f"weights, {task.name}", nets.weights_difference(weights, one["weights"]), at_most=10 * _ROUNDING)
    ours = draw_dropout(setting)
    theirs = torch.load(setting.folder / "dropped.pt", weights_only=True)
    yield Figure("elements that dropout treats differently", int((ours != theirs).sum()), at_most=0)
    share = float((ours == 0).float().mean())
    yield Figure("share that dropout(0.25) drops", share, at_least=0.2, at_most=0.3)


class _Dropping(nn.Module):
    """Dropout that is always active."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.25, training=True)


def draw_dropout(setting: Setting) -> Tensor:
    """Return a tensor of ones, some of which dropout has dropped on the device."""
    torch.manual_seed(0)
    model = Model(_Dropping())
    model.compile(None, "mse")
    return torch.as_tensor(model.predict(torch.ones(nets.ROWS, 64), nets.batch_size(setting.cores), verbose=0))


def check_uneven_batch(setting: Setting) -> Iterator[Figure]:
    """Compare with PyTorch for a last batch that is smaller, and that no number of cores divides."""
    task = nets.conv()
    rows = nets.ROWS + 13
    net, x, y = task.build(rows)
    model = nets.compile_model(task, net, matmul_precision=_EXACT)
    size = nets.batch_size(setting.cores)
    model.fit(x, y, size, epochs=_EPOCHS, shuffle=False, verbose=0)
    ours = model.evaluate(x, y, size, verbose=0)
    plain, x, y = task.build(rows)
    batches = [*zip(x.split(size * setting.count), y.split(size * setting.count), strict=True)]
    nets.train_in_pytorch(task, plain, batches * _EPOCHS)
    with torch.no_grad():
        theirs = float(nets.compute_loss(plain.eval()(x), y))
    yield Figure("evaluated loss against PyTorch", nets.difference([ours], [theirs]), at_most=_ROUNDING)
    predicted = model.predict(x, size, verbose=0)
    if predicted is not None:  # on a pod, only the first host has predictions
        yield Figure("rows that predict returns too many", len(predicted) - rows, at_least=0, at_most=0)


def check_sharding(setting: Setting) -> Iterator[Figure]:
    """Compare weights split over the cores with whole weights."""
    whole = _train(nets.gpt(width=128), setting, matmul_precision=_EXACT)
    split = _train(nets.gpt(width=128), setting, matmul_precision=_EXACT, shard="fsdp")
    yield from _compare_nearly("shard='fsdp'", split, whole)


def check_recomputation(setting: Setting) -> Iterator[Figure]:
    """Compare activations recomputed in the backward pass with stored activations."""
    kept = _train(nets.gpt(blocks=2, dropout=0.1), setting, matmul_precision=_EXACT)
    again = _train(nets.gpt(blocks=2, dropout=0.1), setting, matmul_precision=_EXACT, remat=True)
    yield from _compare_nearly("remat=True", again, kept)


Trained = tuple[list[float], dict[str, Tensor]]


def _train(task: nets.Task, setting: Setting, **options: Any) -> Trained:
    """Train for several epochs of several batches; return each epoch's loss, and the weights."""
    net, x, y = task.build(_BATCHES * nets.ROWS)
    model = nets.compile_model(task, net, **options)
    size = nets.batch_size(setting.cores)
    history = model.fit(x, y, size, epochs=_EPOCHS, shuffle=False, verbose=0)
    return list(history.history["loss"]), model.state_dict()


def _compare_bits(name: str, ours: Trained, theirs: Trained) -> Iterator[Figure]:
    yield Figure(f"{name}: tensors that differ", nets.count_unequal(ours[1], theirs[1]), at_most=0)
    different = int(np.not_equal(ours[0], theirs[0]).sum())
    yield Figure(f"{name}: losses that differ", different, at_most=0)


def _compare_nearly(name: str, ours: Trained, theirs: Trained) -> Iterator[Figure]:
    yield Figure(f"{name}: losses", nets.difference(ours[0], theirs[0]), at_most=_ROUNDING)
    yield Figure(f"{name}: weights", nets.weights_difference(ours[1], theirs[1]), at_most=10 * _ROUNDING)
