"""Schedules by name: PyTorch's rates at each step of the optimizer, without new graphs, in checkpoints, per group."""

import warnings
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import tpufit
from tpufit import runtime
from tpufit.callbacks import Callback, LRScheduler, ModelCheckpoint, OneCycle
from tpufit.errors import ArgumentError, CallbackError, UnknownNameError

pytestmark = [pytest.mark.cores(1, 8), pytest.mark.soak_on(8)]

X = np.random.default_rng(0).normal(size=(157, 6)).astype("float32")  # ten batches of 16, the last of 13
Y = np.random.default_rng(1).integers(0, 3, 157)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Rates(Callback):
    """Records each step's rates, as the last callback."""

    reads_weights = False

    def __init__(self):
        self.rates = []

    def on_train_step_begin(self, batch, logs=None):
        self.rates.append([group["lr"] for group in self.model.optimizer.param_groups])


def made(optimizer=SGD, **options):
    torch.manual_seed(0)
    model = tpufit.Model(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)))
    model.compile(optimizer, "cross_entropy", **({"scale_lr": None, "jit_compile": True} | options))
    return model


def fit(cores, model, *callbacks, data=(X, Y), **options):
    rates = Rates()
    size = 16 // cores if len(data) == 2 else None
    model.fit(*data, size, verbose=0, shuffle=False, callbacks=[*callbacks, rates], cores=cores, **options)
    return [group[0] for group in rates.rates]


def in_phases(warmup, *after, steps=30):
    """Return the rates of consecutive PyTorch schedulers: a warm-up, and others with the steps at which they begin."""
    optimizer = SGD([torch.zeros(1)])
    phases = [lr_scheduler.LinearLR(optimizer, 1 / (warmup + 1), total_iters=warmup)] if warmup else []
    begins = [begin for begin, _ in after if begin]
    phases += [make(optimizer) for _, make in after]
    schedule = lr_scheduler.SequentialLR(optimizer, phases, begins) if begins else phases[0]
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The epoch parameter in")  # that torch 2.8's SequentialLR itself causes
            schedule.step()
    return pytest.approx(found, rel=1e-9, abs=1e-15)


CONSTANT = partial(lr_scheduler.ConstantLR, factor=1.0)
NAMED = {
    "linear": (
        LRScheduler("linear", warmup=5, floor=0.1),
        (5, (5, partial(lr_scheduler.LinearLR, start_factor=1.0, end_factor=0.1, total_iters=25))),
    ),
    "cosine": (
        LRScheduler("cosine", warmup=0.1, floor=0.2),
        (3, (3, partial(lr_scheduler.CosineAnnealingLR, T_max=27, eta_min=0.02))),
    ),
    "cosine alone": (LRScheduler("cosine"), (0, (0, partial(lr_scheduler.CosineAnnealingLR, T_max=30)))),
    "constant": (LRScheduler("constant", warmup=4), (4, (4, CONSTANT))),
    "inverse_sqrt": (
        LRScheduler("inverse_sqrt", warmup=6, floor=0.6),
        (6, (6, lambda o: lr_scheduler.LambdaLR(o, lambda step: max(0.6, (1 + step / 6) ** -0.5)))),
    ),
    "wsd": (
        LRScheduler("wsd", warmup=2, decay=0.3),
        (2, (2, CONSTANT), (21, partial(lr_scheduler.LinearLR, start_factor=1.0, end_factor=0.0, total_iters=9))),
    ),
}


@pytest.mark.soak_on(8)
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")  # PyTorch's SequentialLR passes it
@pytest.mark.parametrize("name", NAMED)
def test_rates_equal_pytorchs_schedulers(cores, name):
    callback, phases = NAMED[name]
    model = made(steps_per_execution=4 if name == "cosine" else 1)
    before = runtime.counts()
    assert fit(cores, model, callback, epochs=3) == in_phases(*phases)
    counts = runtime.counts() - before
    assert counts.graphs["train"] <= 3 and not counts.captures and counts.host_reads == 0
    # The next fit starts the schedule again, with the same peak. If the user sets a rate, that rate is the new peak.
    assert fit(cores, model, callback, epochs=3) == in_phases(*phases)
    model.learning_rate = 0.3
    assert max(fit(cores, model, callback, epochs=3)) == pytest.approx(0.3)


def test_the_rate_is_scaled_and_groups_keep_their_proportions(cores):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    groups = [{"params": net[0].parameters(), "lr": 0.1}, {"params": net[2].parameters(), "lr": 0.01}]
    model, rates = tpufit.Model(net), Rates()
    model.compile(torch.optim.AdamW(groups), "cross_entropy", jit_compile=True)
    how = {"verbose": 0, "cores": cores, "callbacks": [LRScheduler("linear", warmup=3), rates]}
    model.fit(X, Y, 16 // cores, 2, **how)
    first, second = zip(*rates.rates, strict=True)
    assert max(first) == pytest.approx(0.1 * cores) and first[0] == pytest.approx(0.1 * cores / 4)
    assert second == pytest.approx([rate / 10 for rate in first])


@pytest.mark.parametrize("k", [1, 3])
def test_schedules_count_optimizer_steps_and_resume(cores, tmp_path, k):
    """Ten batches in an epoch, four at a time: 4, 4 and 2 are three steps."""
    options = {"accumulate_steps": 4, "steps_per_execution": k}
    model = made(**options)
    rates = fit(cores, model, LRScheduler("cosine", warmup=1), ModelCheckpoint(tmp_path, save_freq=6), epochs=2)
    steps = in_phases(1, (1, partial(lr_scheduler.CosineAnnealingLR, T_max=5)), steps=6).expected
    assert rates == pytest.approx([steps[3 * epoch + i] for epoch in range(2) for i in [0] * 4 + [1] * 4 + [2] * 2])
    again = made(**options)
    saves = ModelCheckpoint(tmp_path, save_freq=6)
    rest = fit(cores, again, LRScheduler("cosine", warmup=1), saves, epochs=2, resume=tmp_path / "step-0000000006")
    assert rest == rates  # the first six came with the checkpoint, because the callback keeps them
    for name, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


def test_schedules_find_their_position_in_a_later_start(cores):
    whole = fit(cores, made(), LRScheduler("linear"), epochs=3)
    assert fit(cores, made(), LRScheduler("linear"), epochs=3, initial_epoch=1) == whole[10:]


def endless():
    while True:
        yield X[:16], Y[:16]


def test_an_unknown_length_is_an_error(cores):
    model = made()
    with pytest.raises(CallbackError, match=r"'cosine' needs the number of steps, .* or fit\(max_steps=...\)"):
        fit(cores, model, LRScheduler("cosine"), data=(endless(),))
    assert model.steps_taken == 0
    rates = fit(cores, model, LRScheduler("linear"), data=(endless(),), max_steps=5)
    assert rates == pytest.approx([0.1, 0.08, 0.06, 0.04, 0.02])
    assert fit(cores, model, LRScheduler("linear", total_steps=5), data=(endless(),), limit=7)[3:] == pytest.approx(
        [0.04, 0.02, 0.0, 0.0]
    )
    assert fit(cores, model, LRScheduler("constant", warmup=1), data=(endless(),), limit=2) == [0.05, 0.1]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: LRScheduler("cosin"), UnknownNameError, "unknown schedule 'cosin': did you mean 'cosine'"),
        (lambda: LRScheduler("cosine", "epoch"), ArgumentError, "gives each step its rate"),
        (lambda: LRScheduler("cosine", warmup=1.5), ArgumentError, "a share from 0.0 to 1.0, got 1.5"),
        (lambda: LRScheduler("wsd", decay=-1), ArgumentError, "decay must be a whole number of at least 0"),
        (lambda: LRScheduler("cosine", floor=2), ArgumentError, "floor must be a share of the rate from 0 to 1, got 2"),
        (lambda: LRScheduler("cosine", total_steps=0), ArgumentError, "total_steps must be a whole number of at least"),
        (lambda: LRScheduler(lr_scheduler.StepLR, warmup=5), ArgumentError, "go with a schedule by name"),
    ],
)
def test_wrong_arguments(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_two_schedules_of_every_step_are_an_error(cores):
    model, before = made(), runtime.counts()
    with pytest.raises(ArgumentError, match="LRScheduler and OneCycle each set the rate of every step"):
        fit(cores, model, LRScheduler("cosine"), OneCycle())
    assert not (runtime.counts() - before).graphs and model.learning_rate == 0.1
