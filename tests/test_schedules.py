"""Learning rates set by callbacks are exact, take effect at their own step, and need no new graphs."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

import tpufit
from tpufit import runtime
from tpufit.callbacks import (
    Callback,
    CSVLogger,
    LearningRateScheduler,
    LRScheduler,
    ModelCheckpoint,
    OneCycle,
    TensorBoard,
)
from tpufit.errors import ArgumentError, CallbackError

pytestmark = [pytest.mark.cores(1, 8, timeout=300), pytest.mark.soak_on(8)]

X = np.random.default_rng(0).normal(size=(157, 6)).astype("float32")  # ten batches of 16, the last of 13
Y = np.random.default_rng(1).integers(0, 3, 157)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


class Rates(Callback):
    """Records the rate and the momentum of each step, as the last callback."""

    reads_weights = False

    def __init__(self):
        self.rates, self.momenta = [], []

    def on_train_step_begin(self, batch, logs=None):
        group = self.model.optimizer.param_groups[0]
        self.rates.append(group["lr"])
        self.momenta.append(group.get("momentum") or group["betas"][0])


def fit(cores, callback, epochs=3, optimizer=SGD, resume=False, **options):
    model, rates = tpufit.Model(net()), Rates()
    options = {"scale_lr": None, "jit_compile": True} | options
    model.compile(optimizer, "cross_entropy", **options)
    before = runtime.counts()
    how = {"verbose": 0, "shuffle": False, "callbacks": [callback, rates], "cores": cores, "resume": resume}
    history = model.fit(X, Y, 16 // cores, epochs, **how)
    return model, rates, history.history, runtime.counts() - before


def on_the_host(schedule, epochs=3, rows=16):
    """Train in plain PyTorch, with a schedule per step, created from the optimizer."""
    module = net()
    optimizer = SGD(module.parameters())
    steps = schedule(optimizer)
    seen = []
    for _ in range(epochs):
        for first in range(0, 157, rows):
            seen.append(optimizer.param_groups[0]["lr"])
            optimizer.zero_grad()
            x, y = torch.from_numpy(X[first : first + rows]), torch.from_numpy(Y[first : first + rows])
            F.cross_entropy(module(x), y).backward()
            optimizer.step()
            steps.step()
    return module.state_dict(), seen


def assert_close(one, other):
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=0, atol=1e-6)


def warm_up_and_cosine(optimizer):
    phases = [
        lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5),
        lr_scheduler.CosineAnnealingLR(optimizer, T_max=25),
    ]
    return lr_scheduler.SequentialLR(optimizer, phases, milestones=[5])


SCHEDULES = [partial(lr_scheduler.ExponentialLR, gamma=0.95), warm_up_and_cosine]


@pytest.mark.soak_on(8)
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")  # PyTorch's SequentialLR passes it
@pytest.mark.parametrize("schedule", SCHEDULES, ids=["exponential", "warm-up"])
@pytest.mark.parametrize("k", [1, 4])
def test_a_pytorch_scheduler_per_step(cores, schedule, k):
    callback = LRScheduler(schedule, interval="step")
    model, rates, history, counts = fit(cores, callback, steps_per_execution=k)
    weights, expected = on_the_host(schedule)
    assert rates.rates == pytest.approx(expected, rel=1e-12)
    assert_close(weights, model.state_dict())
    assert history["learning_rate"] == pytest.approx(expected[9::10], rel=1e-12)
    assert counts.graphs["train"] <= (3 if k > 1 else 2) and not counts.captures
    assert counts.host_reads == 0 and not counts.fallbacks


@pytest.mark.soak_on(8)
@pytest.mark.parametrize("k", [1, 3])
def test_schedules_step_with_the_optimizer(cores, tmp_path, k):
    """Ten batches in an epoch, four at a time: 4, 4 and 2 are three steps, as three batches of four times the rows."""
    options = {"accumulate_steps": 4, "steps_per_execution": k}
    model, rates, _, counts = fit(cores, LRScheduler(SCHEDULES[0], "step"), epochs=2, **options)
    weights, expected = on_the_host(SCHEDULES[0], epochs=2, rows=64)
    groups = [3 * epoch + step for epoch in range(2) for step in [0] * 4 + [1] * 4 + [2] * 2]
    assert rates.rates == pytest.approx([expected[group] for group in groups], rel=1e-12)
    assert_close(weights, model.state_dict())
    assert not counts.captures and counts.host_reads == 0 and not counts.fallbacks

    # A checkpoint after six batches, of which two are pending.
    keep = [ModelCheckpoint(tmp_path, save_freq=6, keep_last=None), LRScheduler(SCHEDULES[0], "step")]
    fit(cores, keep, epochs=2, **options)
    keep = [ModelCheckpoint(tmp_path / "again"), LRScheduler(SCHEDULES[0], "step")]
    again = fit(cores, keep, epochs=2, resume=tmp_path / "step-0000000006", **options)
    assert again[1].rates == rates.rates  # the first six came with the checkpoint, because the callback keeps them
    assert_close(model.state_dict(), again[0].state_dict())


def test_dropped_gradients_dont_advance_the_schedule(cores):
    class Stop(Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 5

    schedule, later = LRScheduler(SCHEDULES[0], "step"), Rates()
    model, rates, _, _ = fit(cores, [schedule, Stop()], accumulate_steps=4)
    assert rates.rates == pytest.approx([0.1] * 4 + [0.095] * 2)
    model.fit(X, Y, 16 // cores, 1, verbose=0, callbacks=[schedule, later])
    assert later.rates == pytest.approx([0.095] * 4 + [0.095 * 0.95] * 4 + [0.095 * 0.95**2] * 2)


def test_a_pytorch_scheduler_starts_from_the_scaled_rate_and_resumes(cores):
    callback = LRScheduler(partial(lr_scheduler.StepLR, step_size=1, gamma=0.5))
    model, rates, history, _ = fit(cores, callback, epochs=2, scale_lr="linear")
    assert history["learning_rate"] == pytest.approx([0.1 * cores, 0.05 * cores])
    history = model.fit(X, Y, 16 // cores, 4, verbose=0, initial_epoch=2, callbacks=[callback]).history
    assert history["learning_rate"] == pytest.approx([0.025 * cores, 0.0125 * cores])


def test_pytorchs_plateau_follows_a_log(cores):
    plateau = partial(lr_scheduler.ReduceLROnPlateau, patience=0, factor=0.5, threshold=10.0)  # nothing is good enough
    _, _, history, _ = fit(cores, LRScheduler(plateau, monitor="loss"))
    assert history["learning_rate"] == pytest.approx([0.1, 0.05, 0.025])


def test_a_function_of_the_epoch(cores):
    _, rates, history, counts = fit(cores, LearningRateScheduler(lambda epoch, rate: rate / 2))
    assert history["learning_rate"] == [0.05, 0.025, 0.0125] and rates.rates[::10] == history["learning_rate"]
    assert fit(cores, LearningRateScheduler(lambda epoch: 1 / (epoch + 1)))[2]["learning_rate"] == [1, 1 / 2, 1 / 3]
    assert counts.graphs["train"] <= 2 and not counts.captures
    with pytest.raises(CallbackError, match="schedule must return a number, got None for epoch 0"):
        fit(cores, LearningRateScheduler(lambda epoch: None))


def test_one_cycle_has_the_true_length_and_pytorchs_rates(cores):
    callback = OneCycle(max_lr=0.5, cycle_momentum=False)
    model, rates, history, counts = fit(cores, callback)
    twin = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    cycle = lr_scheduler.OneCycleLR(twin, 0.5, total_steps=30, cycle_momentum=False)
    expected = []
    for _ in range(30):
        expected.append(twin.param_groups[0]["lr"])
        twin.step()
        if len(expected) < 30:
            cycle.step()
    assert rates.rates == pytest.approx(expected, rel=1e-12) and max(rates.rates) == pytest.approx(0.5)
    assert counts.graphs["train"] <= 2 and not counts.captures
    assert history["learning_rate"][-1] == pytest.approx(0.5 / 25 / 1e4)


@pytest.mark.parametrize("optimizer", [SGD, partial(torch.optim.AdamW, lr=1e-3)], ids=["sgd", "adamw"])
def test_the_momentum_cycles_against_the_rate(cores, optimizer):
    _, rates, _, _ = fit(cores, OneCycle(max_lr=0.01), optimizer=optimizer)
    assert rates.momenta[0] == pytest.approx(0.95) and rates.momenta[-1] == pytest.approx(0.95)
    assert min(rates.momenta) == rates.momenta[np.argmax(rates.rates)] == pytest.approx(0.85, abs=1e-3)


def test_the_peak_defaults_to_the_rate_of_compile(cores):
    model, rates, _, _ = fit(cores, OneCycle(), epochs=1, scale_lr="linear")
    again = Rates()
    model.fit(X, Y, 16 // cores, 1, verbose=0, callbacks=[OneCycle(), again])
    for seen in (rates, again):
        assert max(seen.rates) == pytest.approx(0.1 * cores) and seen.rates[0] == pytest.approx(0.1 * cores / 25)


def test_a_single_peak_keeps_the_proportions_of_groups(cores):
    class Groups(Callback):
        reads_weights = False

        def on_train_step_begin(self, batch, logs=None):
            seen.append([group["lr"] for group in self.model.optimizer.param_groups])

    seen = []
    model = tpufit.Model(nn.Sequential(*(nn.Sequential(nn.Linear(6, 6)) for _ in range(2)), nn.Linear(6, 3)))
    model.compile("sgd", "cross_entropy", layer_decay=0.5)
    model.fit(X, Y, 16 // cores, verbose=0, callbacks=[OneCycle(0.4, cycle_momentum=False), Groups()], cores=cores)
    ratios = np.array(seen) / np.array(seen)[:, :1]
    assert np.max(seen) == pytest.approx(0.4) and ratios == pytest.approx(np.tile([1, 0.5, 0.25], (len(seen), 1)))
    seen = []
    model.fit(X, Y, 16 // cores, verbose=0, callbacks=[OneCycle([0.4] * 3, cycle_momentum=False), Groups()])
    assert (np.array(seen) == np.array(seen)[:, :1]).all()


def test_one_cycle_finds_its_position_in_a_later_start(cores):
    _, whole, _, _ = fit(cores, OneCycle(max_lr=0.5))
    model, later = tpufit.Model(net()), Rates()
    model.compile(SGD, "cross_entropy", scale_lr=None)
    model.fit(X, Y, 16 // cores, 3, verbose=0, initial_epoch=1, callbacks=[OneCycle(max_lr=0.5), later], cores=cores)
    assert later.rates == whole.rates[10:]


def test_one_cycle_must_know_its_length(cores):
    def endless():
        while True:
            yield X[:16], Y[:16]

    model = tpufit.Model(net())
    model.compile(SGD, "cross_entropy")
    data = (batch for batch in endless())
    with pytest.raises(CallbackError, match=r"OneCycle\(total_steps=...\), or fit\(steps_per_epoch=...\)"):
        model.fit(data, verbose=0, callbacks=[OneCycle()], cores=cores)
    rates = Rates()
    model.fit(data, verbose=0, epochs=2, steps_per_epoch=8, callbacks=[OneCycle(0.5), rates])
    assert len(rates.rates) == 16 and max(rates.rates) > 0.4


@pytest.mark.parametrize("board_first", [True, False])
@pytest.mark.parametrize("interval", ["epoch", "step"])
def test_rates_are_in_the_history_the_table_and_tensorboard(cores, tmp_path, board_first, interval):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    schedule, board = LRScheduler(SCHEDULES[0], interval), TensorBoard(tmp_path, update_freq=2)
    both = [board, schedule] if board_first else [schedule, board]
    rates, log = Rates(), CSVLogger(tmp_path / "log.csv")
    model = tpufit.Model(net())
    model.compile(SGD, "cross_entropy", scale_lr=None)
    history = model.fit(X, Y, 16 // cores, 2, verbose=0, callbacks=[*both, rates, log], cores=cores).history
    assert history["learning_rate"] == rates.rates[9::10]
    assert (tmp_path / "log.csv").read_text().startswith("epoch,learning_rate,loss\n")
    events = EventAccumulator(str(tmp_path / "train")).Reload()
    for tag, expected in (("epoch_learning_rate", rates.rates[9::10]), ("batch_learning_rate", rates.rates[1::2])):
        assert [event.value for event in events.Scalars(tag)] == pytest.approx(expected)


def test_the_rate_has_keras_names_and_groups_keep_their_proportions(cores):
    module = net()
    groups = [{"params": module[0].parameters(), "lr": 0.2}, {"params": module[2].parameters(), "lr": 0.02}]
    model = tpufit.Model(module)
    model.compile(torch.optim.AdamW(groups), "cross_entropy", scale_lr=None)
    assert isinstance(model.optimizer, torch.optim.AdamW) and type(model.optimizer).__name__ == "AdamW"
    model.fit(X, Y, 16 // cores, 1, verbose=0, cores=cores)
    model.optimizer.learning_rate = 0.1
    assert model.learning_rate == model.optimizer.learning_rate == 0.1
    assert [group["lr"] for group in model.optimizer.param_groups] == [0.1, pytest.approx(0.01)]
    model.learning_rate = 0
    model.learning_rate = 0.5
    assert [group["lr"] for group in model.optimizer.param_groups] == [0.5, pytest.approx(0.05)]
    torch.optim.AdamW(module.parameters()).load_state_dict(torch.optim.AdamW(module.parameters()).state_dict())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LearningRateScheduler(0.1), r"function of \(epoch, lr\), got 0.1"),
        (lambda: LRScheduler(lr_scheduler.StepLR, interval="batch"), "'epoch' or 'step', got 'batch'"),
        (lambda: LRScheduler(0.1), "a function of the optimizer"),
    ],
)
def test_wrong_arguments(make, message):
    with pytest.raises(ArgumentError, match=message):
        make()


@pytest.mark.parametrize("kind", [lr_scheduler.OneCycleLR, lr_scheduler.CosineAnnealingLR], ids=["one", "cosine"])
def test_an_existing_schedulers_rates_equal_pytorchs(cores, kind):
    def made(optimizer):
        return (
            kind(optimizer, 0.2, 31, cycle_momentum=False) if kind is lr_scheduler.OneCycleLR else kind(optimizer, 30)
        )

    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5)
    model, callback = tpufit.Model(module), LRScheduler(made(optimizer), interval="step")
    model.compile(optimizer, "cross_entropy", scale_lr=None)
    history = model.fit(X, Y, 16 // cores, 2, verbose=0, cores=cores, callbacks=[callback]).history
    other = torch.optim.SGD(net().parameters(), lr=0.1, momentum=0.5)
    schedule, expected = made(other), []
    for _ in range(2 * -(-len(X) // 16)):
        expected.append(other.param_groups[0]["lr"])
        other.step()
        schedule.step()
    assert history["learning_rate"] == pytest.approx([expected[len(expected) // 2 - 1], expected[-1]])


def test_a_scheduler_for_other_rates_is_refused(cores):
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model, schedule = tpufit.Model(module), lr_scheduler.StepLR(optimizer, 1)
    model.compile(optimizer, "cross_entropy", scale_lr="linear")
    if cores > 1:
        with pytest.raises(CallbackError, match=r"made for the rates \[0.1\], .* scaled them to .*scale_lr=None"):
            model.fit(X, Y, 16 // cores, verbose=0, cores=cores, callbacks=[LRScheduler(schedule)])
    model.compile("sgd", "cross_entropy")
    with pytest.raises(CallbackError, match="the scheduler's optimizer isn't compile's optimizer"):
        model.fit(X, Y, 16 // cores, verbose=0, cores=cores, callbacks=[LRScheduler(schedule)])


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("eagerly", [False, True])
def test_a_rate_of_0_keeps_weights_without_gradients(cores, optimizer, eagerly):
    # Words in no text: PyTorch's formula for a tensor rate computes 0 / 0 for them.
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(20, 4), nn.Flatten(), nn.Linear(8, 3))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    model = tpufit.Model(module)
    model.compile(partial(optimizer, lr=0.1), "cross_entropy", scale_lr=None, run_eagerly=eagerly)
    x, y = torch.randint(0, 10, (16, 2)), torch.randint(0, 3, (16,))
    rates = LearningRateScheduler(lambda epoch: [0.0, 0.1][epoch])  # as in a warm-up that starts at 0
    model.fit(x, y, 16 // cores, 1, verbose=0, callbacks=[rates], cores=cores)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.fit(x, y, 16 // cores, 2, verbose=0, callbacks=[rates], cores=cores, initial_epoch=1)
    plain = nn.Sequential(nn.Embedding(20, 4), nn.Flatten(), nn.Linear(8, 3))
    plain.load_state_dict(before)
    steps = optimizer(plain.parameters(), lr=0.0)
    for rate in (0.0, 0.1):
        steps.param_groups[0]["lr"] = rate
        steps.zero_grad()
        F.cross_entropy(plain(x), y).backward()
        steps.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], atol=1e-5, rtol=1e-4)
