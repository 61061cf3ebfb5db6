"""Replaying a step gives the same bits as tracing it; a step that can't be replayed is traced, and says so."""

import copy
import functools
import random
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
from engines import engine_of
from plain_steps import plain_steps
from torch import nn
from torch.nn import functional as F

import tpufit
from tpufit import runtime
from tpufit.callbacks import Callback
from tpufit.errors import OutOfMemoryError, ReplayError, StateLostError
from tpufit.runtime.driver import driver

pytestmark = pytest.mark.cores(1, 8, timeout=600)

GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(261, 12)).astype("float32")
Y = GENERATOR.integers(0, 4, 261)


class Net(nn.Module):
    def __init__(self, extra=None):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(1, 8, 3, padding=1), nn.BatchNorm1d(8)
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(8 * 12, 4)
        self.extra = extra

    def forward(self, x):
        h = F.relu(self.norm(self.conv(x[:, None])))
        if self.extra is not None:
            h = self.extra(self, h)
        return self.head(self.drop(h).flatten(1))


class Decay(Callback):
    """Sets another rate for every step, without reading the weights."""

    reads_weights = False

    def __init__(self, by=0.97):
        self.by = by

    def on_train_batch_begin(self, batch, logs=None):
        self.model.optimizer.param_groups[0]["lr"] *= self.by


def train(cores, *, extra=None, callbacks=(), epochs=6, rows=32, optimizer=None, model=tpufit.Model, **compiling):
    """Train on 261 rows, 32 at a time: 8 even steps and one of 5 rows in each epoch. Return all results."""
    torch.manual_seed(0)
    net = Net(extra)
    torch.manual_seed(1)
    trained = model(net)
    make = optimizer or (lambda p: torch.optim.AdamW(p, 1e-3, weight_decay=0.01))
    trained.compile(make, "cross_entropy", metrics=["accuracy"], scale_lr=None, **compiling)
    before = runtime.counts()
    history = trained.fit(
        X, Y, rows // cores, epochs, verbose=0, callbacks=list(callbacks), validation_data=(X[:50], Y[:50]), cores=cores
    )
    counts = runtime.counts() - before
    state = dict(trained.state_dict())
    moments = [v for s in trained.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    state |= {f"optimizer {i}": v for i, v in enumerate(runtime.to_host(moments, "test"))}
    return trained, history.history, state, counts


plain = functools.cache(train)  # the reference of several tests


def why_traced(model, role="train"):
    return model.report().traced.get(role, "")  # except for a step that runs eagerly


def assert_equal(one, other):
    _, history_one, state_one, _ = one
    _, history_other, state_other, _ = other
    assert history_one == history_other
    assert state_one.keys() == state_other.keys()
    for name, value in state_one.items():
        assert torch.equal(value, state_other[name]), name


@pytest.mark.parametrize(
    "optimizer",
    [
        None,
        pytest.param(lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True), marks=pytest.mark.soak_on(8)),
        pytest.param(lambda p: torch.optim.RMSprop(p, 1e-3), marks=pytest.mark.soak),
    ],
    ids=["adamw", "sgd", "rmsprop"],
)
@pytest.mark.usefixtures("compiles_anew")
def test_54_replayed_steps_equal_54_traced_steps_bit_for_bit(cores, optimizer):
    replayed = train(cores, callbacks=[Decay()], optimizer=optimizer, jit_compile=True)
    traced = train(cores, callbacks=[Decay()], optimizer=optimizer, jit_compile=False)
    assert_equal(replayed, traced)
    assert not why_traced(replayed[0]) and why_traced(traced[0])
    # One for each shape of a batch, and none if the process has compiled the same graph before.
    assert max(replayed[3].graphs.values()) <= 2 and set(replayed[3].graphs) <= {"train", "eval"}
    assert replayed[3].host_reads == 0 and not replayed[3].fallbacks


@pytest.mark.soak_on(8)
def test_a_replayed_step_runs_none_of_its_python(cores):
    calls = []

    class Counting(tpufit.Model):
        def train_step(self, batch):
            calls.append(1)
            return super().train_step(batch)

    _, _, _, counts = train(cores, model=Counting, epochs=10)
    captures = 4  # two for each shape
    at_least = 9 + 8  # one in each pass for each shape, once it is replayed
    assert captures + at_least <= len(calls) <= captures + counts.waits["audit"] < 90  # steps


class PerEpoch(Callback):
    reads_weights = False

    def on_epoch_begin(self, epoch, logs=None):
        self.model.optimizer.param_groups[0]["lr"] *= 0.8


# With the tests' flags, LLVM optimizes nothing, and torch_xla 2.8's CPU compiler rounds an update with momentum
# differently in one step and in several. With users' flags it doesn't.
as_users_have_it = pytest.mark.cores(1, 8, timeout=600, alone=True)


@as_users_have_it
@pytest.mark.parametrize("k", [3, pytest.param(10, marks=pytest.mark.soak)])
@pytest.mark.soak_on(1)
def test_joined_steps_are_equal_bit_for_bit(cores, k):
    def run(k):
        torch.manual_seed(0)
        tpufit.set_random_seed(0)
        net = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 4))
        model = tpufit.Model(net)
        sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
        model.compile(
            sgd, "cross_entropy", metrics=["accuracy"], scale_lr=None, steps_per_execution=k, jit_compile=True
        )
        # 17 steps in an epoch, the last of 5 rows: groups of k, and the rest singly
        history = model.fit(X, Y, 16 // cores, 3, verbose=0, callbacks=[PerEpoch()], cores=cores)
        return history.history, model.state_dict()

    (history, state), (history_k, state_k) = run(1), run(k)
    assert history == history_k
    assert all(torch.equal(state[name], state_k[name]) for name in state)


@pytest.mark.parametrize("k", [3, pytest.param(10, marks=pytest.mark.soak_on(8))])
def test_joined_steps_are_equal_up_to_rounding(cores, k):
    """XLA:CPU may fuse the arithmetic of k steps differently from one step, and so round the last digit differently."""

    def run(k):
        sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
        return train(cores, rows=16, epochs=3, callbacks=[PerEpoch()], optimizer=sgd, steps_per_execution=k)

    one, several = run(1), run(k)
    assert not why_traced(several[0])
    for name, values in one[1].items():
        assert several[1][name] == pytest.approx(values, abs=1e-6)
    for name, value in one[2].items():  # 16 steps and a tail: groups of k, and the rest singly
        torch.testing.assert_close(several[2][name], value, rtol=0, atol=2e-6)
    assert several[3].graphs["train"] <= 3  # k steps, one step, the tail


@as_users_have_it
@pytest.mark.soak
def test_auto_joins_short_steps(cores, monkeypatch):
    class Hooks(Callback):
        reads_weights = False

        def on_train_batch_end(self, batch, logs=None):
            ends.append(batch)

    def run(steps_per_execution):
        torch.manual_seed(0)
        model = tpufit.Model(nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4)))
        sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
        model.compile(
            sgd, "cross_entropy", metrics=["accuracy"], steps_per_execution=steps_per_execution, jit_compile=True
        )
        torch.manual_seed(1)
        before = runtime.counts()
        history = model.fit(X, Y, 8 // cores, 6, verbose=0, callbacks=[Hooks()], cores=cores)
        return history.history, (runtime.counts() - before).graphs["train"]

    monkeypatch.setattr("tpufit.runtime.in_flight._LONG_RUN", 2)
    monkeypatch.setattr("tpufit.step.runner._WORTH_STARTING", 1000.0)  # however busy this machine is
    ends = []
    history, graphs = run("auto")
    assert ends[:3] == [0, 1, 2] and ends[-3:] == [15, 31, 32]
    assert graphs <= 3  # one step, the tail, 16 steps
    assert history == run(1)[0]
    monkeypatch.setattr("tpufit.step.runner._WORTH_STARTING", 0.0)
    ends = []
    run("auto")
    assert ends == [*range(33)] * 6


@pytest.mark.soak_on(8)
def test_batch_hooks_are_called_once_for_k_steps(cores):
    class Hooks(Callback):
        def on_train_batch_begin(self, batch, logs=None):
            seen.append(("begin", batch))

        def on_train_batch_end(self, batch, logs=None):
            seen.append(("end", batch))

    seen = []
    train(cores, rows=64, epochs=1, steps_per_execution=2, callbacks=[Hooks()])
    assert seen == [("begin", 0), ("end", 1), ("begin", 2), ("end", 3), ("begin", 4), ("end", 4)]


@pytest.mark.soak_on(8)
@pytest.mark.parametrize("how", [{}, {"run_eagerly": True}], ids=["joined", "eager"])
def test_batch_hooks_are_called_once_for_remaining_steps(cores, how):
    class Hooks(Callback):
        def on_train_batch_begin(self, batch, logs=None):
            seen.append(("begin", batch))

        def on_train_step_begin(self, batch, logs=None):
            seen.append(batch)

        def on_train_batch_end(self, batch, logs=None):
            seen.append(("end", batch))

    seen = []
    model, *_ = train(cores, rows=64, epochs=1, steps_per_execution=3, callbacks=[Hooks()], **how)  # the last is short
    assert model.steps_taken == 5
    assert seen == [("begin", 0), 0, 1, 2, ("end", 2), ("begin", 3), 3, 4, ("end", 4)]


@pytest.mark.soak_on(8)
def test_changed_options_apply_to_the_next_pass(cores):
    class Hooks(Callback):
        def on_train_batch_end(self, batch, logs=None):
            ends.append(batch)

    def fit():
        before = runtime.counts()
        model.fit(X, Y, 64 // cores, verbose=0, callbacks=[Hooks()], cores=cores)
        return {name: value.numpy() for name, value in model.state_dict().items()}, runtime.counts() - before

    ends, model = [], None
    weights = {}
    for name, value in (
        ("jit_compile", False),
        ("jit_compile", True),
        ("steps_per_execution", 3),
        ("run_eagerly", True),
    ):
        torch.manual_seed(0)
        model = tpufit.Model(nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4)))
        model.compile(partial(torch.optim.SGD, lr=0.1), "cross_entropy", scale_lr=None)
        fit()
        assert not why_traced(model)
        setattr(model, name, value)
        ends.clear()
        weights[name, value], counts = fit()
        assert ends == ([2, 4] if name == "steps_per_execution" else [*range(5)])
        assert bool(why_traced(model)) == (value is False)
        assert engine_of(model).state.placement.on_host == (name == "run_eagerly")
    expected = weights["jit_compile", True]
    for own in weights.values():
        for name, array in expected.items():
            np.testing.assert_allclose(own[name], array, atol=1e-5)


@pytest.mark.soak_on(8)
def test_a_constant_that_is_not_a_number_is_one_constant(cores):
    def with_nan(net, h):
        return torch.where(torch.isnan(h), torch.tensor([float("nan"), 1.0], device=h.device)[0], h)

    replayed = train(cores, extra=with_nan, epochs=2, jit_compile=True)
    assert_equal(replayed, train(cores, extra=with_nan, epochs=2, jit_compile=False))


@pytest.mark.soak_on(8)
def test_modules_that_build_a_cache_in_their_first_forward(cores):
    def cached(net, h):
        if not hasattr(net, "scale"):
            net.scale = torch.linspace(0.5, 1.5, 12).to(h.device)
        return h * net.scale

    replayed, traced = train(cores, extra=cached), train(cores, extra=cached, jit_compile=False)
    assert_equal(replayed, traced)
    assert not why_traced(replayed[0])
    assert torch.equal(replayed[0].module.scale.cpu(), torch.linspace(0.5, 1.5, 12))


@pytest.mark.soak_on(8)
def test_modules_that_store_results(cores):
    class Means(Callback):
        def __init__(self):
            self.means = []

        def on_train_batch_end(self, batch, logs=None):
            self.means.append(self.model.module.last[-1].mean().item())

    def storing(net, h):
        net.last = [h * 2, h]  # a new tensor each time, and for each shape of a batch
        return h

    def run(jit_compile):
        means = Means()
        return train(cores, extra=storing, epochs=3, callbacks=[means], jit_compile=jit_compile), means.means

    (replayed, means), (traced, others) = run("auto"), run(False)
    assert not why_traced(replayed[0]) and means == others
    assert_equal(replayed, traced)


def part_of_a_constant(net, h):
    scale = torch.tensor([1.0, 1.0, 1.0]).to(h.device)
    scale[0] = h.detach().mean()
    scale[1:] += 1
    return h * scale.sum()


def counted(net, h):
    net.count = (net.count if hasattr(net, "count") else torch.zeros(1)).to(h.device)
    net.count += 1
    return h * net.count


def part_of_an_attribute(net, h):
    if not hasattr(net, "means"):
        net.means = torch.zeros(3).to(h.device)
    net.means[0] = h.detach().mean()
    net.means[1] += 1
    return h * net.means.sum()


def view_that_is_kept(net, h):
    if not hasattr(net, "means"):
        net.means = torch.zeros(3).to(h.device)
        net.part = net.means[1:]
    net.part += h.detach().mean()
    return h * (1 + net.means.sum())


def queue(net, h):
    if not hasattr(net, "queue"):
        net.queue = torch.zeros(4, h.shape[1]).to(h.device)
        net.first = torch.zeros(1, dtype=torch.long).to(h.device)
    net.queue.index_copy_(0, net.first, h.detach()[:1])
    net.first.copy_((net.first + 1) % 4)
    return h + net.queue.sum(0)


@pytest.mark.soak_on(8)
@pytest.mark.filterwarnings("ignore:the train step is traced again")
@pytest.mark.parametrize("extra", [part_of_a_constant, counted, part_of_an_attribute, view_that_is_kept, queue])
def test_tensors_that_a_step_changes_in_place(cores, extra):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(12, 4)

        def forward(self, x):
            return extra(self, self.layer(x))

    def make():
        torch.manual_seed(0)
        net = Net()
        return net, torch.optim.SGD(net.parameters(), 0.01)

    net, optimizer = make()
    batches = [*zip(*(torch.tensor(data[:192]).split(32) for data in (X, Y)), strict=True)]
    losses = plain_steps(net, optimizer, F.cross_entropy, batches * 3)
    net, optimizer = make()
    model = tpufit.Model(net)
    model.compile(optimizer, "cross_entropy", scale_lr=None)
    history = model.fit(X[:192], Y[:192], 32 // cores, 3, verbose=0, shuffle=False, cores=cores).history
    np.testing.assert_allclose(history["loss"], np.reshape(losses, (3, 6)).mean(1), rtol=1e-5)


@pytest.mark.soak_on(8)
@pytest.mark.filterwarnings("ignore:the (train|eval) step is traced again")
def test_a_list_that_grows_with_each_step_is_not_replayed(cores):
    everything = []

    def storing(net, h):
        if h.device.type != "cpu" and net.training:  # validation data were inspected without a device before
            everything.append(h.mean())
        return h

    traced, *_ = train(cores, extra=storing, epochs=3)
    assert "everything (from 2 to 3)" in why_traced(traced)
    assert len(everything) == 27 and all(torch.isfinite(value.cpu()) for value in everything)


@pytest.mark.soak_on(8)
def test_the_users_pending_work_survives(cores):
    trained, *_ = train(cores, epochs=1)
    mine = trained.module.head.bias.detach() * 0 + 3  # still pending
    later = mine.exp()
    trained.fit(X, Y, 32 // cores, 2, verbose=0)
    trained.evaluate(X, Y, verbose=0)
    assert mine.cpu().tolist() == [3.0] * 4
    torch.testing.assert_close(later.cpu(), torch.full((4,), 3.0).exp())


def way_of(reads):
    """Return how a step runs that can't be replayed. TorchTPU doesn't trace a step that reads a value."""
    return "runs operation by operation" if reads and not driver().is_lazy else "is traced again on every call"


@pytest.mark.soak_on(8)
@pytest.mark.parametrize(
    ("extra", "cause"),
    [
        (lambda net, h: h * random.random(), r"its Python draws random numbers at test_program\.py:\d+"),
        # scipy's functions draw in this way.
        (
            lambda net, h: h * np.random.mtrand._rand.rand(),
            r"two traces.*, and NumPy's global generator drew",
        ),
        (lambda net, h: h * float(h.abs().mean() > 0), r"reads a value from the device at test_program\.py:\d+"),
        (lambda net, h: h if h.mean() > 100 else h + 1, r"reads a value from the device at test_program\.py:\d+"),
    ],
    ids=["random", "scipy", "float", "if"],
)
@pytest.mark.filterwarnings("ignore:the eval step (is traced again|runs operation by operation)")
def test_a_step_that_cant_be_replayed_is_traced_and_says_why(cores, extra, cause):
    random.seed(0)
    way = way_of(reads="reads" in cause)
    with pytest.warns(UserWarning, match=f"the train step {way}, which is slow, because.*{cause}"):
        traced, history, _, _ = train(cores, extra=extra, epochs=2)
    assert why_traced(traced) and np.isfinite(history["loss"]).all()
    with pytest.raises(ReplayError, match=f"the train step can't be replayed: .*{cause}"):
        train(cores, extra=extra, epochs=2, jit_compile=True)


class ReadingTrain(tpufit.Model):
    def train_step(self, batch):
        logs = super().train_step(batch)
        if logs["loss"] > 100:
            raise ValueError
        return logs


class ReadingLoss(tpufit.Model):
    def compute_loss(self, x, y, y_pred, sample_weight=None):
        loss = super().compute_loss(x, y, y_pred, sample_weight)
        return loss * (loss.item() < 100)


class ReadingMetrics(tpufit.Model):
    def update_metrics(self, x, y, y_pred, sample_weight=None):
        if y_pred.abs().max() > 0:
            super().update_metrics(x, y, y_pred, sample_weight)


class ReadingTest(tpufit.Model):
    def test_step(self, batch):
        logs = super().test_step(batch)
        return logs | {"rounded": torch.tensor(round(float(logs["loss"]), 1), device=batch[0].device)}


@pytest.mark.soak_on(8)
@pytest.mark.parametrize(
    ("model", "roles"),
    [
        (ReadingTrain, ["train"]),
        (ReadingLoss, ["train", "eval"]),
        (ReadingMetrics, ["train", "eval"]),
        (ReadingTest, ["eval"]),
    ],
)
def test_a_value_read_in_a_step_is_reported_with_its_line(cores, model, roles):
    with pytest.warns(UserWarning) as caught:
        trained, history, _, _ = train(cores, model=model, epochs=1)
    way = way_of(reads=True)
    said = [str(warning.message) for warning in caught if way in str(warning.message)]
    assert len(said) == len(roles) and np.isfinite(history["loss"]).all()  # once each, in one sentence
    cause = r"it reads a value from the device at test_program\.py:\d+"
    for role, sentence in zip(roles, said, strict=True):
        assert re.fullmatch(rf"the {role} step {way}, which is slow, because {cause}\. .+", sentence)
    assert [role for role in ("train", "eval") if why_traced(trained, role)] == roles
    with pytest.raises(ReplayError, match=f"the {roles[0]} step can't be replayed: {cause}"):
        train(cores, model=model, epochs=1, jit_compile=True)


@pytest.mark.soak_on(8)
@pytest.mark.filterwarnings("ignore:the train step is traced again")
@pytest.mark.filterwarnings("ignore:the eval step is traced again")
def test_python_that_counts_is_detected(cores):
    """Two traces can be equal, and the third different: only its changing attribute shows."""

    def counting(net, h):
        net.calls = getattr(net, "calls", 0) + 1
        return h * 2 if net.calls % 10 == 0 else h

    replayed, traced = train(cores, extra=counting), train(cores, extra=counting, jit_compile=False)
    assert "its Python changes Net.calls" in why_traced(replayed[0])
    assert_equal(replayed, traced)


@pytest.mark.soak_on(8)
def test_a_rate_read_in_a_step_is_current(cores):
    class Penalized(tpufit.Model):
        def train_step(self, batch):
            x, y = batch
            y_pred = self(x)
            loss = self.compute_loss(x, y, y_pred) * self.optimizer.param_groups[0]["lr"]
            self.apply_gradients(loss)
            return {"loss": loss}

    replayed = train(cores, model=Penalized, callbacks=[Decay()])
    assert_equal(replayed, train(cores, model=Penalized, callbacks=[Decay()], jit_compile=False))
    assert not why_traced(replayed[0])
    assert replayed[0].optimizer.param_groups[0]["lr"] == pytest.approx(1e-3 * 0.97**54)  # a number again


@pytest.mark.soak_on(8)
def test_a_metric_whose_sums_change_their_shape_is_replayed(cores):
    def run(jit_compile):
        torch.manual_seed(0)
        model = tpufit.Model(nn.Linear(12, 1))
        model.compile("sgd", "mse", metrics=["mae", "r2_score"], jit_compile=jit_compile)
        y = X[:, :1] + 0.1
        torch.manual_seed(1)
        return model.fit(X, y, 32 // cores, 4, verbose=0, validation_data=(X, y), cores=cores).history

    assert run(True) == run(False)


@pytest.mark.soak_on(8)
def test_a_metric_that_keeps_whole_batches_is_replayed(cores):
    def run(jit_compile):
        torch.manual_seed(0)
        model = tpufit.Model(nn.Linear(12, 4))
        model.compile("sgd", "cross_entropy", metrics=["auroc", "accuracy"], jit_compile=jit_compile)
        torch.manual_seed(1)
        return model.fit(X, Y, 32 // cores, 3, verbose=0, validation_data=(X, Y), cores=cores).history

    assert run(True) == run(False)


@pytest.mark.soak_on(8)
def test_a_step_that_doesnt_update_metrics(cores):
    """Then its sums aren't outputs of the graph, and must not be confused with other outputs."""

    class Sometimes(tpufit.Model):
        def test_step(self, batch):
            x, y = batch
            y_pred = self(x)
            if len(x) > 5:  # not in the tail
                self.update_metrics(x, y, y_pred)
            return {"loss": self.compute_loss(x, y, y_pred)}

    replayed, traced = (train(cores, model=Sometimes, jit_compile=jit, epochs=3)[1] for jit in (True, False))
    assert replayed == traced


class Change(Callback):
    """Changes the model in the middle of training."""

    def __init__(self, what):
        self.what = what

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 3:
            self.what(self.model)


def freeze(model):
    model.module.conv.requires_grad_(False)


def momentum(model):
    model.optimizer.param_groups[0]["betas"] = (0.5, 0.9)


def halve(model):
    with torch.no_grad():
        model.module.head.weight.mul_(0.5)


def average(model):
    model.module.norm.momentum = 0.3


@pytest.mark.slow
@pytest.mark.parametrize(
    "what",
    [
        pytest.param(freeze, marks=pytest.mark.soak_on(8)),
        *(pytest.param(what, marks=pytest.mark.soak) for what in (momentum, average)),
        halve,
    ],
)
def test_changes_by_a_callback_take_effect(cores, what):
    replayed = train(cores, callbacks=[Change(what)], jit_compile=True)
    traced = train(cores, callbacks=[Change(what)], jit_compile=False)
    assert_equal(replayed, traced)
    with pytest.raises(AssertionError):
        assert_equal(replayed, plain(cores))  # the change had an effect


def test_the_module_may_leave_parts_in_eval_mode(cores):
    class Frozen(Net):
        def train(self, mode=True):
            super().train(mode)
            self.norm.eval()
            return self

    model = tpufit.Model(Frozen())
    model.compile("sgd", "cross_entropy")
    model.fit(X, Y, 32 // cores, 2, verbose=0, cores=cores)
    assert model.state_dict()["norm.num_batches_tracked"] == 0


@pytest.mark.soak_on(8)
def test_weights_read_in_a_hook_are_current(cores):
    class Reader(Callback):
        def __init__(self, net):
            self.net = net

        def on_train_batch_end(self, batch, logs=None):
            mine, theirs = self.net().head.weight, self.model.module.head.weight
            assert mine is theirs
            seen.append(mine.detach().cpu().clone())

    seen = []
    reader = Reader(lambda: reader.model.module)
    watched = train(cores, epochs=2, callbacks=[reader])
    assert len({value.sum().item() for value in seen}) == 18
    assert torch.equal(seen[-1], watched[2]["head.weight"])
    seen_replayed, seen = seen, []
    assert_equal(watched, train(cores, epochs=2, callbacks=[reader], jit_compile=False))
    assert all(torch.equal(a, b) for a, b in zip(seen_replayed, seen, strict=True))
    assert_equal(watched, train(cores, epochs=2))  # reading changes nothing


def test_restoring_weights_each_step_keeps_no_history(cores):
    """A functional tensor records each exchange, and each took longer than the one before: up to 9 ms per step."""

    class Watched(Callback):
        def on_train_batch_end(self, batch, logs=None): ...

    class Quiet(Callback):
        reads_weights = False

        def on_train_batch_end(self, batch, logs=None):
            weight = self.model.module.head.weight
            seen.add((weight.is_meta, torch._is_functional_tensor(weight)))

    seen = set()
    model, *_ = train(cores, callbacks=[Watched()], epochs=2)
    model.fit(X, Y, 32 // cores, verbose=0, callbacks=Quiet())
    assert seen == {(True, False)}


@pytest.mark.soak
def test_a_read_from_another_thread_is_safe(cores):
    """Never the end of the process, nor another training: this training continues as without a read."""

    class Go(Callback):
        reads_weights = False

        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:  # all graphs exist, and the weights are held
                go.set()
            while epoch == 11 and not answers:
                time.sleep(0.001)

    go, answers, losses = threading.Event(), [], []

    def look(net):
        go.wait(60)
        while training.is_set():
            for read in (
                lambda: net.head.weight.detach().cpu().sum().item(),
                lambda: repr(net.conv.bias),
                lambda: net.state_dict(),
            ):
                try:
                    answers.append(read())
                except Exception as error:
                    answers.append(error)

    training = threading.Event()
    for watched in (True, False):
        torch.manual_seed(0)
        net = Net()
        model = tpufit.Model(net)
        model.compile("adamw", "cross_entropy")
        training.set()
        thread = threading.Thread(target=look, args=(net,), daemon=True)
        if watched:
            thread.start()
        try:
            history = model.fit(X, Y, 8 // cores, 12, shuffle=False, verbose=0, cores=cores, callbacks=Go()).history
        finally:
            training.clear()
        if watched:
            thread.join(60)
        losses.append(history["loss"])
    assert answers and losses[0] == losses[1]


@pytest.mark.runtime("torch_xla")  # TorchTPU records nothing in threads of the step
def test_a_step_may_use_its_weights_in_its_threads(cores):
    """An audit keeps its tensors from other threads, but not from threads that the step itself waits for."""

    class Threaded(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, x):
            with ThreadPoolExecutor(2) as pool:
                first, second = pool.map(lambda layer: layer(x), (self.first, self.second))
            return first + second

    losses = []
    for eager in (True, False):
        torch.manual_seed(0)
        model = tpufit.Model(Threaded())
        model.compile("adamw", "cross_entropy", run_eagerly=eager)
        x, y = torch.arange(256.0).reshape(32, 8) / 256, torch.arange(32) % 4
        losses.append(model.fit(x, y, 8 // cores, 3, shuffle=False, verbose=0, cores=cores).history["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.soak_on(8)
def test_a_step_may_make_parameters_of_its_weights(cores):
    """PyTorch makes none of a tensor of a class of its own, which weights have in an audit."""

    class Copies(Net):
        def forward(self, x):
            return super().forward(x) * nn.Parameter(self.head.weight).sum() * copy.deepcopy(self.head.bias).norm()

    losses = []
    for eager in (True, False):
        torch.manual_seed(0)
        model = tpufit.Model(Copies())
        model.module.drop.p = 0.0
        model.compile("sgd", "cross_entropy", run_eagerly=eager)
        losses.append(model.fit(X[:64], Y[:64], 8 // cores, 4, shuffle=False, verbose=0, cores=cores).history["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert not any(model.report().traced.values())


def test_parameters_keep_their_hooks(cores):
    def doubled(hook):
        torch.manual_seed(0)
        net = nn.Linear(12, 4)
        if hook:
            net.weight.register_hook(lambda gradient: gradient * 2)
        model = tpufit.Model(net)
        model.compile(lambda p: torch.optim.SGD(p, 0.1), "cross_entropy", scale_lr=None)
        model.fit(X, Y, 32 // cores, 3, verbose=0, shuffle=False, cores=cores)
        return model.state_dict()["weight"]

    torch.manual_seed(0)
    plain = nn.Linear(12, 4)
    optimizer = torch.optim.SGD([{"params": [plain.weight], "lr": 0.2}, {"params": [plain.bias], "lr": 0.1}])
    for _ in range(3):
        for i in range(0, 261, 32):
            optimizer.zero_grad()
            F.cross_entropy(plain(torch.from_numpy(X[i : i + 32])), torch.from_numpy(Y[i : i + 32])).backward()
            optimizer.step()
    torch.testing.assert_close(doubled(True), plain.weight.detach(), atol=1e-5, rtol=0)
    assert not torch.equal(doubled(True), doubled(False))


def failing(monkeypatch, at):
    """Let a graph fail on the device after it has consumed its inputs, as when it runs out of memory."""
    import torch_xla

    real, calls = torch_xla._XLAC._run_cached_graph, []

    def fail(graph, inputs):
        calls.append(1)
        if len(calls) == at:
            real(graph, inputs)
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1099511627776 bytes")
        return real(graph, inputs)

    monkeypatch.setattr(torch_xla._XLAC, "_run_cached_graph", fail)


@pytest.mark.soak_on(8)
@pytest.mark.runtime("torch_xla")
def test_a_failed_step_loses_its_state_and_fit_says_so(cores, tmp_path, monkeypatch):
    def large():  # with its momentum 17 MB, enough that its memory is donated to each step
        net = nn.Sequential(nn.Linear(12, 4096), nn.ReLU(), nn.Linear(4096, 512), nn.Linear(512, 4))
        model = tpufit.Model(net)
        model.compile(partial(torch.optim.SGD, lr=0.01, momentum=0.9), "cross_entropy")
        return model

    model = large()
    model.fit(X, Y, 32 // cores, 1, verbose=0, cores=cores)
    model.save_weights(tmp_path / "good.safetensors")
    failing(monkeypatch, at=5)
    with pytest.raises(StateLostError, match=r"(?s)step \d+ failed.*good\.safetensors.*RESOURCE_EXHAUSTED") as error:
        model.fit(X, Y, 32 // cores, 2, verbose=0)
    assert "Out of memory" in str(error.value.__cause__)
    with pytest.raises(StateLostError):
        model.save_weights(tmp_path / "bad.safetensors")
    assert not (tmp_path / "bad.safetensors").exists()
    fresh = large()
    fresh.load_weights(tmp_path / "good.safetensors")
    assert np.isfinite(fresh.fit(X, Y, 32 // cores, 2, verbose=0).history["loss"]).all()  # in the same process


@pytest.mark.runtime("torch_xla")
@pytest.mark.soak_on(8)
def test_a_small_state_survives_a_failed_step(cores, monkeypatch):
    """Where donation costs time, and saves little memory, state isn't donated: so nothing is lost."""
    trained, *_ = train(cores, epochs=2)
    failing(monkeypatch, at=5)
    with pytest.raises(OutOfMemoryError, match="RESOURCE_EXHAUSTED"):
        trained.fit(X, Y, 32 // cores, 2, verbose=0)
    assert all(torch.isfinite(value).all() for value in trained.state_dict().values())
    assert np.isfinite(trained.fit(X, Y, 32 // cores, 2, verbose=0).history["loss"]).all()


@pytest.mark.soak_on(8)
def test_run_eagerly_runs_python_on_the_host(cores):
    seen = []

    def looking(net, h):
        seen.append((h.device.type, h.mean().item()))
        return h

    eager = train(cores, extra=looking, epochs=2, run_eagerly=True)
    assert len(seen) == 2 * (9 + 2) and {device for device, _ in seen} == {"cpu"}
    assert eager[3].graphs == {} and not eager[3].waits
    compiled = train(cores, epochs=2)
    for name, value in compiled[2].items():
        if (
            not name.startswith("optimizer") and name != "conv.bias"
        ):  # before a batch norm its gradient is only rounding
            torch.testing.assert_close(eager[2][name].to(value.dtype), value, atol=0.02, rtol=0.02)


@pytest.mark.soak_on(8)
@pytest.mark.slow
def test_custom_steps_are_replayed(cores):
    class Twice(tpufit.Model):
        def train_step(self, batch):
            x, y = batch
            for _ in range(2):
                loss = self.compute_loss(x, y, self(x + 0.1 * torch.randn_like(x)))
                self.apply_gradients(loss)
            return {"loss": loss, "norm": sum(p.detach().square().sum() for p in self.module.parameters()).sqrt()}

    replayed = train(cores, model=Twice, jit_compile=True)
    assert_equal(replayed, train(cores, model=Twice, jit_compile=False))
    assert set(replayed[1]) == {"loss", "norm", "val_loss", "val_accuracy"}


def test_an_error_in_the_step_leaves_the_model_usable(cores):
    def sometimes(net, h):
        if fail:
            raise ValueError("in the middle of a step")
        return h

    fail = False
    trained, *_ = train(cores, extra=sometimes, epochs=1)
    fail = True
    with pytest.raises(ValueError, match="in the middle of a step"):
        trained.fit(X[:100], Y[:100], 64 // cores, 1, verbose=0)  # a new shape, and so a new trace
    fail = False
    assert np.isfinite(trained.fit(X, Y, 32 // cores, 1, verbose=0).history["loss"]).all()


def test_deep_copies_of_a_trained_module_are_ordinary(cores):
    trained, *_ = train(cores, epochs=1)
    twin = copy.deepcopy(trained.to_cpu())
    assert torch.isfinite(twin(torch.from_numpy(X[:4]))).all()


class Views(nn.Module):
    """Returns views of one tensor, and keeps one, as attention heads and poolers do."""

    def __init__(self):
        super().__init__()
        self.layer, self.kept = nn.Linear(6, 4), None

    def forward(self, x):
        h = self.layer(x)
        self.kept = h[:, 3]
        return h[:, 0], *h.chunk(2, 1)


def test_views_are_predicted_and_kept(cores):
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    model = tpufit.Model(Views())
    first, left, right = model.predict(x, 16 // cores, verbose=0, cores=cores)
    module = model.to_cpu()
    with torch.no_grad():
        expected = module(x)
    for found, wanted in zip((first, left, right), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)


@pytest.mark.soak_on(8)
def test_the_next_fit_tries_again(cores):
    looks = [True]

    def looking(net, h):
        return h if not looks or h.mean() > 100 else h + 1

    with pytest.warns(UserWarning, match="reads a value"):
        trained, *_ = train(cores, extra=looking, epochs=1)
    assert why_traced(trained) and why_traced(trained, "eval")
    looks.clear()
    trained.fit(X, Y, 32 // cores, 1, verbose=0)
    assert not why_traced(trained)


@pytest.mark.soak_on(8)
def test_each_model_warns_once_of_each_cause(cores, recwarn):
    """Also on the same line, with the same text, with Python's default filters."""
    import warnings

    warnings.simplefilter("default")
    for _ in range(2):
        train(cores, extra=lambda net, h: h if h.mean() > 100 else h + 1, epochs=1)[0].fit(
            X, Y, 32 // cores, 1, verbose=0
        )
    roles = [str(w.message).split()[1] for w in recwarn if way_of(reads=True) in str(w.message)]
    assert sorted(roles) == ["eval", "eval", "train", "train"]


@pytest.mark.soak_on(8)
def test_a_library_that_reads_is_named_with_a_cure(cores):
    import torchmetrics.functional as metrics

    def asking(net, h):
        return h + torch.nan_to_num(metrics.pearson_corrcoef(h[:, 0, 0], h[:, 0, 1]))  # which looks for zeros

    with pytest.warns(UserWarning) as caught:
        train(cores, extra=asking, epochs=1)
    said = next(str(w.message) for w in caught if "the train step" in str(w.message))
    assert re.search(r"at torchmetrics/functional/\S+\.py:\d+, called at test_program\.py:\d+\. \w", said), said


def test_libraries_can_ask_whether_a_step_is_traced(cores):
    """It returns False again during the optimizer's step, which was compared with plain PyTorch."""
    answers = set()

    class Asking(torch.optim.SGD):
        def step(self, closure=None):
            answers.add(("optimizer", torch.compiler.is_compiling()))
            return super().step(closure)

    def asking(net, h):
        answers.add(("forward", torch.compiler.is_compiling()))
        return h

    train(cores, extra=asking, epochs=1, optimizer=lambda p: Asking(p, 0.01), jit_compile=True)
    assert answers == {("forward", True), ("optimizer", False)} and not torch.compiler.is_compiling()
