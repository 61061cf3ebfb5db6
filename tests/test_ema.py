"""Moving averages of the weights equal Keras's, and are computed in the step on any number of cores."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tpufit
from tpufit import runtime
from tpufit.callbacks import Callback, SwapEMAWeights
from tpufit.errors import ArgumentError, CallbackError

pytestmark = pytest.mark.cores(1, 8, timeout=300)

X = np.random.default_rng(0).normal(size=(133, 6)).astype("float32")
Y = np.random.default_rng(1).integers(0, 3, 133)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def on_the_host(momentum, every=None, epochs=2):
    """Return the weights and their averages after each epoch. The first average is the weights after the first step."""
    module, averages, steps, seen = net(), {}, 0, []
    optimizer = SGD(module.parameters())
    for _ in range(epochs):
        for first in range(0, 133, 16):
            optimizer.zero_grad()
            x, y = torch.from_numpy(X[first : first + 16]), torch.from_numpy(Y[first : first + 16])
            F.cross_entropy(module(x), y).backward()
            optimizer.step()
            steps += 1
            with torch.no_grad():
                for name, weight in module.named_parameters():
                    kept = momentum if averages.get(name) is not None else 0
                    averages[name] = kept * averages.get(name, 0) + (1 - kept) * weight
                    if every and steps % every == 0:
                        weight.copy_(averages[name])
        seen.append(({n: w.detach().clone() for n, w in module.named_parameters()}, dict(averages)))
    return seen


def fit(cores, callbacks=(), epochs=2, momentum=0.8, **compiling):
    model = tpufit.Model(net())
    model.compile(
        SGD, "cross_entropy", scale_lr=None, jit_compile=True, use_ema=True, ema_momentum=momentum, **compiling
    )
    before = runtime.counts()
    model.fit(
        X,
        Y,
        16 // cores,
        epochs,
        verbose=0,
        shuffle=False,
        callbacks=list(callbacks),
        validation_data=(X, Y),
        cores=cores,
    )
    return model, runtime.counts() - before


def assert_close(one, other):
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=0, atol=1e-6)


class Keep(Callback):
    def __init__(self, hook):
        self.kept = []
        setattr(self, hook, self._keep)

    def _keep(self, *args):
        self.kept.append(self.model.state_dict())


@pytest.mark.usefixtures("compiles_anew")
def test_fit_ends_with_the_averages(cores):
    keep = Keep("on_epoch_end")
    model, counts = fit(cores, [keep])
    (weights, _), (last, averages) = on_the_host(0.8)
    assert_close(averages, model.state_dict())
    assert_close(weights, keep.kept[0])
    assert_close(last, keep.kept[1])
    assert counts.graphs["train"] == 2 and counts.host_reads == 0 and not counts.fallbacks


def test_averages_overwrite_weights_periodically(cores):
    keep = Keep("on_epoch_end")
    _, counts = fit(cores, [keep], ema_overwrite_frequency=4)
    for (weights, _), kept in zip(on_the_host(0.8, every=4), keep.kept, strict=True):
        assert_close(weights, kept)
    assert counts.graphs["train"] <= 4  # a batch and the last batch, each with and without an overwrite


def test_validation_with_the_averages(cores):
    inside, after = Keep("on_test_batch_end"), Keep("on_epoch_end")
    model, _ = fit(cores, [SwapEMAWeights(), inside, after])
    expected = on_the_host(0.8)
    batches = len(inside.kept) // 2
    for (weights, averages), tested, left in zip(
        expected, (inside.kept[0], inside.kept[batches]), after.kept, strict=True
    ):
        assert_close(averages, tested)
        assert_close(weights, left)
    assert_close(expected[-1][1], model.state_dict())


def test_epochs_may_end_with_the_averages_in_place(cores):
    after = Keep("on_epoch_end")
    model, _ = fit(cores, [SwapEMAWeights(swap_on_epoch=True), after], epochs=3)
    expected = on_the_host(0.8, epochs=3)
    for (_, averages), left in zip(expected, after.kept, strict=True):
        assert_close(averages, left)
    assert_close(expected[-1][1], model.state_dict())


def test_a_second_fit_continues_the_averages(cores):
    model, _ = fit(cores, epochs=1)
    first = model.state_dict()
    model.fit(X, Y, 16 // cores, 1, verbose=0, shuffle=False)
    assert not torch.equal(first["0.weight"], model.state_dict()["0.weight"])
    model.fit(X, Y, 16 // cores, epochs=1, initial_epoch=1, verbose=0)  # no step at all
    assert torch.isfinite(model.state_dict()["0.weight"]).all()


def test_swapping_without_averages_is_an_error(cores):
    model = tpufit.Model(net())
    model.compile(SGD, "cross_entropy")
    with pytest.raises(CallbackError, match=r"no moving averages .*: call model.compile\(..., use_ema=True\)"):
        model.fit(X, Y, verbose=0, validation_data=(X, Y), callbacks=[SwapEMAWeights()], cores=cores)
    for wrong in ({"ema_momentum": 1.5}, {"ema_overwrite_frequency": 0}):
        with pytest.raises(ArgumentError, match=next(iter(wrong))):
            model.compile(SGD, "cross_entropy", use_ema=True, **wrong)
