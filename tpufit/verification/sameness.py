"""Do ways to train that should make no difference make none?"""

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
_EXACT = "highest"  # so that a TPU rounds no more than a CPU does
_ROUNDING = 1e-4  # relative; of weights and losses after 20 steps in float32


def replayed(setting: Setting) -> Iterator[Figure]:
    """A step's compiled graph started directly, and its Python traced each time; one step in a program, and several."""
    traced = _trained(nets.gpt(), setting, jit_compile=False, matmul_precision=_EXACT)
    again = _trained(nets.gpt(), setting, jit_compile=True, matmul_precision=_EXACT)
    yield from _to_the_bit("replayed", again, traced)
    joined = _trained(nets.gpt(), setting, steps_per_execution=_BATCHES, matmul_precision=_EXACT)
    # The compiler may fuse the arithmetic of several steps otherwise than that of one.
    yield from _nearly(f"{_BATCHES} steps in one program", joined, again)


def alone(setting: Setting) -> Iterator[Figure]:
    """What one core computes, for `together` to compare."""
    for task in (nets.conv(), nets.gpt(dropout=0.1)):
        losses, weights = _trained(task, setting, matmul_precision=_EXACT)
        torch.save({"losses": losses, "weights": weights}, setting.folder / f"{task.name}.pt")
    torch.save(dropped(setting), setting.folder / "dropped.pt")
    yield from ()


def together(setting: Setting) -> Iterator[Figure]:
    """The same on all cores."""
    for task in (nets.conv(), nets.gpt(dropout=0.1)):
        losses, weights = _trained(task, setting, matmul_precision=_EXACT)
        one = torch.load(setting.folder / f"{task.name}.pt", weights_only=True)
        yield Figure(f"losses, {task.name}", nets.difference(losses, one["losses"]), at_most=_ROUNDING)
        yield Figure(f"weights, {task.name}", nets.weights_difference(weights, one["weights"]), at_most=10 * _ROUNDING)
    ours = dropped(setting)
    theirs = torch.load(setting.folder / "dropped.pt", weights_only=True)
    yield Figure("elements that dropout treats differently", int((ours != theirs).sum()), at_most=0)
    share = float((ours == 0).float().mean())
    yield Figure("share that dropout(0.25) drops", share, at_least=0.2, at_most=0.3)


class _Dropping(nn.Module):
    """Dropout that stays active."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.25, training=True)


def dropped(setting: Setting) -> Tensor:
    """Ones, of which dropout has dropped some on the device."""
    torch.manual_seed(0)
    model = Model(_Dropping())
    model.compile(None, "mse")
    return torch.as_tensor(model.predict(torch.ones(nets.ROWS, 64), nets.batch_size(setting.cores), verbose=0))


def uneven(setting: Setting) -> Iterator[Figure]:
    """A last batch that is smaller, and divides into no number of cores."""
    task = nets.conv()
    rows = nets.ROWS + 13
    net, x, y = task.made(rows)
    model = nets.compiled(task, net, matmul_precision=_EXACT)
    size = nets.batch_size(setting.cores)
    model.fit(x, y, size, epochs=_EPOCHS, shuffle=False, verbose=0)
    ours = model.evaluate(x, y, size, verbose=0)
    plain, x, y = task.made(rows)
    batches = [*zip(x.split(size * setting.count), y.split(size * setting.count), strict=True)]
    nets.plain(task, plain, batches * _EPOCHS)
    with torch.no_grad():
        theirs = float(nets.loss_of(plain.eval()(x), y))
    yield Figure("evaluated loss against PyTorch", nets.difference([ours], [theirs]), at_most=_ROUNDING)
    predicted = model.predict(x, size, verbose=0)
    if predicted is not None:  # of a pod the first host has them
        yield Figure("rows that predict returns too many", len(predicted) - rows, at_least=0, at_most=0)


def sharded(setting: Setting) -> Iterator[Figure]:
    """Weights split over the cores, and whole ones."""
    whole = _trained(nets.gpt(width=128), setting, matmul_precision=_EXACT)
    split = _trained(nets.gpt(width=128), setting, matmul_precision=_EXACT, shard="fsdp")
    yield from _nearly("shard='fsdp'", split, whole)


def recomputed(setting: Setting) -> Iterator[Figure]:
    """Activations that are computed again in the backward pass, and kept ones."""
    kept = _trained(nets.gpt(blocks=2, dropout=0.1), setting, matmul_precision=_EXACT)
    again = _trained(nets.gpt(blocks=2, dropout=0.1), setting, matmul_precision=_EXACT, remat=True)
    yield from _nearly("remat=True", again, kept)


Trained = tuple[list[float], dict[str, Tensor]]


def _trained(task: nets.Task, setting: Setting, **options: Any) -> Trained:
    """The losses of each epoch and the weights after some, of several batches."""
    net, x, y = task.made(_BATCHES * nets.ROWS)
    model = nets.compiled(task, net, **options)
    size = nets.batch_size(setting.cores)
    history = model.fit(x, y, size, epochs=_EPOCHS, shuffle=False, verbose=0)
    return list(history.history["loss"]), model.state_dict()


def _to_the_bit(name: str, ours: Trained, theirs: Trained) -> Iterator[Figure]:
    yield Figure(f"{name}: tensors that differ", nets.unequal(ours[1], theirs[1]), at_most=0)
    different = int(np.not_equal(ours[0], theirs[0]).sum())
    yield Figure(f"{name}: losses that differ", different, at_most=0)


def _nearly(name: str, ours: Trained, theirs: Trained) -> Iterator[Figure]:
    yield Figure(f"{name}: losses", nets.difference(ours[0], theirs[0]), at_most=_ROUNDING)
    yield Figure(f"{name}: weights", nets.weights_difference(ours[1], theirs[1]), at_most=10 * _ROUNDING)
