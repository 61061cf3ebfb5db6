"""Accumulated and clipped gradients equal plain PyTorch's over the whole batch, on any number of cores."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import tpufit
from tpufit import runtime
from tpufit.errors import ArgumentError
from tpufit.optimizers import GradientConfig

pytestmark = pytest.mark.cores(1, 8, timeout=300)

GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(261, 6)).astype("float32")  # 16 batches of 16 rows and one of 5; 4 of 64 and one of 5
Y = GENERATOR.integers(0, 3, 261)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def with_tpufit(cores, rows, optimizer, epochs=2, model=tpufit.Model, **compiling):
    trained = model(net())
    trained.compile(optimizer, "cross_entropy", metrics=["accuracy"], scale_lr=None, jit_compile=True, **compiling)
    before = runtime.counts()
    history = trained.fit(X, Y, rows // cores, epochs, verbose=0, shuffle=False, cores=cores).history
    return trained.state_dict(), history, runtime.counts() - before


def on_the_host(rows, optimizer, clip=lambda parameters: None, epochs=2):
    module = net()
    own = optimizer(module.parameters())
    for _ in range(epochs):
        for first in range(0, 261, rows):
            x, y = torch.from_numpy(X[first : first + rows]), torch.from_numpy(Y[first : first + rows])
            own.zero_grad()
            F.cross_entropy(module(x), y).backward()
            clip(list(module.parameters()))
            own.step()
    return module.state_dict()


def assert_close(one, other, tolerance=1e-6):
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=0, atol=tolerance)


SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=1e-3)


def test_a_parameter_without_dimensions_is_accumulated_and_averaged(cores):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, x):
            return self.net(x) * self.scale

    model = tpufit.Model(Scaled())
    options = {"accumulate_steps": 2, "use_ema": True, "ema_momentum": 0.5}
    model.compile(SGD, "cross_entropy", scale_lr=None, **options)
    model.fit(X[:128], Y[:128], 32 // cores, verbose=0, shuffle=False, cores=cores)
    module = Scaled()
    own = SGD(module.parameters())
    averages = []
    for first in (0, 64):
        own.zero_grad()
        loss = F.cross_entropy(module(torch.from_numpy(X[first : first + 64])), torch.from_numpy(Y[first : first + 64]))
        loss.backward()
        own.step()
        weights = {name: value.clone() for name, value in module.state_dict().items()}
        averages.append(weights)
    assert_close({name: (value + averages[1][name]) / 2 for name, value in averages[0].items()}, model.state_dict())


def test_gradients_of_complex_weights_are_accumulated_whole(cores):
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([1.0 + 2.0j, 0.5 - 1.0j]))

        def forward(self, x):
            turned = (x * (1 - 1j) * self.weight).sum(1, keepdim=True)
            return torch.cat([turned.real, turned.imag], 1)

    x = torch.linspace(-1, 1, 128).view(64, 2)
    model = tpufit.Model(Turned())
    model.compile(SGD, "mse", scale_lr=None, accumulate_steps=2)
    model.fit(x, x, 16 // cores, epochs=2, verbose=0, shuffle=False, cores=cores)
    module = Turned()
    own = SGD(module.parameters())
    for rows in [*x.split(32)] * 2:
        own.zero_grad()
        nn.functional.mse_loss(module(rows), rows).backward()
        own.step()
    weight = model.to_cpu().state_dict()["weight"]
    torch.testing.assert_close(torch.view_as_real(weight), torch.view_as_real(module.weight.detach()))


@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=["sgd", "adamw"])
def test_four_batches_of_16_are_one_of_64(cores, optimizer):
    """The epoch's last 5 rows are a separate step in both cases."""
    many, history, counts = with_tpufit(cores, 16, optimizer, accumulate_steps=4)
    one, large, _ = with_tpufit(cores, 64, optimizer)
    assert_close(one, many)
    assert_close(on_the_host(64, optimizer), many)
    assert history.keys() == large.keys() and history["loss"][0] == pytest.approx(large["loss"][0], abs=0.02)
    assert counts.graphs["train"] <= 3  # a pending batch, a batch that steps, and the last batch
    assert counts.host_reads == 0 and not counts.fallbacks
    assert counts.waits["logs"] == 2 and set(counts.waits) <= {
        "logs",
        "capture",
        "audit",
        "throttle",
        "state",
    }  # one graph in each epoch


def test_an_epoch_ends_with_a_step_over_the_remaining_batches(cores):
    """17 batches, six at a time: 6, 6 and 5; the last has 5 rows and is weighted by them."""
    many, _, _ = with_tpufit(cores, 16, SGD, accumulate_steps=6)
    assert_close(on_the_host(96, SGD), many)


def test_joined_steps_accumulate_too(cores):
    one, _, _ = with_tpufit(cores, 16, SGD, accumulate_steps=4)
    several, _, counts = with_tpufit(cores, 16, SGD, accumulate_steps=4, steps_per_execution=8)
    assert_close(one, several)
    assert counts.graphs["train"] <= 3


def test_gradients_of_an_interrupted_epoch_are_dropped(cores):
    class Stop(tpufit.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 5:
                self.model.stop_training = True

    model = tpufit.Model(net())
    model.compile(partial(torch.optim.SGD, lr=0.0), "cross_entropy", scale_lr=None, accumulate_steps=4)
    model.fit(X, Y, 16 // cores, 1, verbose=0, shuffle=False, callbacks=[Stop()], cores=cores)
    model.learning_rate = 0.1
    model.fit(X, Y, 16 // cores, 1, verbose=0, shuffle=False)
    assert_close(on_the_host(64, partial(torch.optim.SGD, lr=0.1), epochs=1), model.state_dict())


def each(parameters, limit):
    for parameter in parameters:
        clip_grad_norm_(parameter, limit)


CLIPS = {
    "global_clip_norm": (0.05, clip_grad_norm_),
    "clip_norm": (0.02, each),
    "clip_value": (0.01, clip_grad_value_),
}


@pytest.mark.parametrize("name", CLIPS)
@pytest.mark.usefixtures("compiles_anew")
def test_clipping_equals_pytorchs_on_the_global_batch(cores, name):
    limit, clip = CLIPS[name]
    clipped, _, counts = with_tpufit(cores, 64, SGD, **{name: limit})
    assert_close(on_the_host(64, SGD, lambda parameters: clip(parameters, limit)), clipped)
    with pytest.raises(AssertionError):
        assert_close(on_the_host(64, SGD), clipped)  # clipping made a difference
    assert counts.graphs["train"] == 2 and counts.host_reads == 0 and not counts.fallbacks


def test_clipping_applies_to_the_mean_of_accumulated_gradients(cores):
    limit, clip = CLIPS["global_clip_norm"]
    clipped, _, _ = with_tpufit(cores, 16, SGD, accumulate_steps=4, global_clip_norm=limit)
    assert_close(on_the_host(64, SGD, lambda parameters: clip(parameters, limit)), clipped)


def test_eager_accumulation_gives_the_same_weights(cores):
    def run(**options):
        return with_tpufit(cores, 16, SGD, accumulate_steps=4, global_clip_norm=0.05, **options)[0]

    model = tpufit.Model(net())
    options = {"accumulate_steps": 4, "global_clip_norm": 0.05, "scale_lr": None}
    model.compile(SGD, "cross_entropy", run_eagerly=True, **options)
    model.fit(X, Y, 16 // cores, 2, verbose=0, shuffle=False)
    assert_close(run(), model.state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate_steps": 0}, "whole number of at least 1, got 0"),
        ({"accumulate_steps": 2.0}, "whole number of at least 1, got 2.0"),
        ({"clip_norm": 1.0, "clip_value": 1.0}, "only one of clip_norm, clip_value, global_clip_norm"),
        ({"global_clip_norm": -1.0}, "global_clip_norm must be a number above 0, got -1.0"),
        ({"clip_value": float("nan")}, "clip_value must be a number above 0, got nan"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(ArgumentError, match=message):
        GradientConfig(**options)
