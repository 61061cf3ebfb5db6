"""Every optimizer of PyTorch's takes the steps that it takes on the host, with another rate at each, in one graph."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

import tpufit
from tpufit import runtime
from tpufit.callbacks import Callback

pytestmark = pytest.mark.cores(1, 8, timeout=600, quick=False)

X = np.random.default_rng(0).normal(size=(30 * 16 - 3, 6)).astype("float32")  # 30 batches, the last one of 13 rows
Y = (X.sum(1) > 0).astype("int64")

# The rate is an input of the graph of all of these: a new one at every step compiles, traces and reads nothing.
RATE_IS_AN_INPUT = {
    "sgd": optim.SGD,
    "sgd momentum": partial(optim.SGD, lr=0.01, momentum=0.9, weight_decay=0.01),
    "sgd nesterov": partial(optim.SGD, lr=0.01, momentum=0.9, nesterov=True),
    "sgd dampening": partial(optim.SGD, lr=0.01, momentum=0.9, dampening=0.5),
    "adam": optim.Adam,
    "adam amsgrad": partial(optim.Adam, amsgrad=True, weight_decay=0.01),
    "adamw": optim.AdamW,
    "adamax": optim.Adamax,
    "nadam": optim.NAdam,
    "radam": optim.RAdam,
    "asgd": optim.ASGD,
    "rprop": partial(optim.Rprop, lr=1e-3),
    "rmsprop": partial(optim.RMSprop, lr=1e-3),
    "rmsprop centered": partial(optim.RMSprop, lr=1e-3, centered=True, momentum=0.5),
    "adagrad": optim.Adagrad,
    "adadelta": optim.Adadelta,
}

# These read a value in their step, or keep it in Python, and so are traced at every call. They are right all the same.
TRACED = {
    "adafactor": (optim.Adafactor, "reads a value from the device"),
}


class Signs(optim.Optimizer):
    """Somebody's own optimizer, which makes its state in its first step."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                    mean.mul_(0.9).add_(p.grad)
                    p.sub_(mean.tanh() * group["lr"])


RATE_IS_AN_INPUT["somebody's own"] = Signs


def rate(base, step):
    return base * (1 + 0.5 * (step % 7))


class Changing(Callback):
    reads_weights = False

    def on_train_begin(self, logs=None):
        self.base = self.model.optimizer.param_groups[0]["lr"]

    def on_train_batch_begin(self, batch, logs=None):
        for group in self.model.optimizer.param_groups:
            group["lr"] = rate(self.base, batch)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def on_the_host(make):
    module = net()
    optimizer = make(module.parameters())
    base = optimizer.param_groups[0]["lr"]
    for step in range(30):
        rows = slice(step * 16, step * 16 + 16)
        optimizer.param_groups[0]["lr"] = rate(base, step)
        optimizer.zero_grad()
        F.cross_entropy(module(torch.from_numpy(X[rows])), torch.from_numpy(Y[rows])).backward()
        optimizer.step()
    return module.state_dict(), optimizer


def with_tpufit(make, cores, **compiling):
    model = tpufit.Model(net())
    model.compile(make, "cross_entropy", scale_lr=None, **compiling)
    before = runtime.counts()
    model.fit(X, Y, 16 // cores, 1, verbose=0, shuffle=False, callbacks=[Changing()], cores=cores)
    return model, runtime.counts() - before


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("sgd momentum", "adamw") else pytest.param(name, marks=pytest.mark.soak_on(8))
        for name in RATE_IS_AN_INPUT
    ],
)
def test_30_steps_with_another_rate_at_each(cores, name):
    make = RATE_IS_AN_INPUT[name]
    model, counts = with_tpufit(make, cores, jit_compile=True)
    weights, optimizer = on_the_host(make)
    for key, expected in weights.items():
        torch.testing.assert_close(model.state_dict()[key], expected, rtol=0, atol=1e-5)
    counted = [state["step"] for state in optimizer.state.values() if "step" in state]
    assert [float(state["step"]) for state in model.optimizer.state.values() if "step" in state] == counted
    # A whole batch and the last; one more where the first step makes state that only the second one has.
    assert counts.graphs["train"] <= (3 if name in ("sgd dampening", "somebody's own") else 2)
    assert counts.host_reads == 0 and not counts.fallbacks


@pytest.mark.soak_on(8)
@pytest.mark.parametrize("name", TRACED)
def test_the_others_are_traced_and_say_why(cores, name):
    make, cause = TRACED[name]

    with pytest.warns(UserWarning, match=f"the train step is traced anew on every call.*{cause}"):
        model, _ = with_tpufit(make, cores)
    for key, expected in on_the_host(make)[0].items():
        torch.testing.assert_close(model.state_dict()[key], expected, rtol=0, atol=1e-5)


@pytest.mark.soak_on(8)
@pytest.mark.skipif(not hasattr(optim, "Muon"), reason="of PyTorch 2.9")
def test_muon_is_replayed(cores):
    def matrices(parameters):  # all that it takes
        return optim.Muon([p for p in parameters if p.dim() == 2], lr=1e-3)

    model, counts = with_tpufit(matrices, cores, jit_compile=True)
    assert counts.graphs["train"] <= 2 and counts.host_reads == 0 and not counts.fallbacks
    for key, expected in on_the_host(matrices)[0].items():  # it computes in bfloat16
        torch.testing.assert_close(model.state_dict()[key], expected, rtol=0, atol=1e-3)


class MuonAndAdamW(tpufit.Model):
    def train_step(self, batch):
        x, y = batch
        loss = self.compute_loss(x, y, self(x))
        self.module.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.adamw.step()
        return {"loss": loss}


@pytest.mark.skipif(not hasattr(optim, "Muon"), reason="of PyTorch 2.9")
def test_muon_beside_an_optimizer_of_the_rest(cores):
    def both(module):
        named = [*module.named_parameters()]
        muon = optim.Muon([p for _, p in named if p.dim() == 2], lr=1e-3)
        return muon, optim.AdamW([p for _, p in named if p.dim() < 2])

    model, plain = MuonAndAdamW(net()), net()
    muon, model.adamw = both(model.module)
    model.compile(muon, "cross_entropy", scale_lr=None, jit_compile=True)
    model.fit(X, Y, 16 // cores, 1, verbose=0, shuffle=False, cores=cores)
    optimizers = both(plain)
    for x, y in zip(torch.tensor(X).split(16), torch.tensor(Y).split(16), strict=True):
        plain.zero_grad()
        F.cross_entropy(plain(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
    for key, expected in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], expected, rtol=0, atol=1e-3)


OPTIONS = [
    ("sgd momentum", "momentum", lambda value: value * 0.9),
    ("adamw", "betas", lambda value: (value[0] * 0.9, value[1])),
    ("adamw", "weight_decay", lambda value: value * 2),
]


@pytest.mark.parametrize(("name", "option", "change"), OPTIONS, ids=[option for _, option, _ in OPTIONS])
def test_another_option_is_another_graph_counted_and_right(cores, name, option, change):
    class Once(Callback):
        reads_weights = False

        def on_train_batch_begin(self, batch, logs=None):
            if batch == 15:
                group = self.model.optimizer.param_groups[0]
                group[option] = change(group[option])

    def host():
        module = net()
        optimizer = RATE_IS_AN_INPUT[name](module.parameters())
        for step in range(30):
            if step == 15:
                optimizer.param_groups[0][option] = change(optimizer.param_groups[0][option])
            rows = slice(step * 16, step * 16 + 16)
            optimizer.zero_grad()
            F.cross_entropy(module(torch.from_numpy(X[rows])), torch.from_numpy(Y[rows])).backward()
            optimizer.step()
        return module.state_dict()

    model = tpufit.Model(net())
    model.compile(RATE_IS_AN_INPUT[name], "cross_entropy", scale_lr=None)
    before = runtime.counts()
    model.fit(X, Y, 16 // cores, 1, verbose=0, shuffle=False, callbacks=[Once()], cores=cores)
    counts = runtime.counts() - before
    assert counts.captures == {f"{option} in the optimizer's param_groups": 1}
    assert counts.graphs["train"] <= 3
    for key, expected in host().items():
        torch.testing.assert_close(model.state_dict()[key], expected, rtol=0, atol=1e-5)


def test_an_option_that_keeps_changing_is_said(cores):
    class Always(Callback):
        def on_train_batch_begin(self, batch, logs=None):
            self.model.optimizer.param_groups[0]["momentum"] *= 0.99

    model = tpufit.Model(net())
    model.compile(RATE_IS_AN_INPUT["sgd momentum"], "cross_entropy", scale_lr=None)
    with pytest.warns(UserWarning, match="compiled 4 times because momentum in the optimizer's param_groups"):
        model.fit(X[:96], Y[:96], 16 // cores, 1, verbose=0, callbacks=[Always()], cores=cores)


class ClearedBefore(tpufit.Model):
    def train_step(self, batch):
        x, y = batch
        self.optimizer.zero_grad()
        loss = self.compute_loss(x, y, self(x))
        loss.backward()
        self.optimizer.step()
        return {"loss": loss}


class ClearedByTheModule(tpufit.Model):
    def train_step(self, batch):
        x, y = batch
        self.module.zero_grad()
        loss = self.compute_loss(x, y, self(x))
        loss.backward()
        self.optimizer.step()
        return {"loss": loss}


class ClearedAfter(tpufit.Model):
    def train_step(self, batch):
        x, y = batch
        loss = self.compute_loss(x, y, self(x))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"loss": loss}


def steps_by_hand(kind, make, cores, **compiling):
    model = kind(net())
    model.compile(make, "cross_entropy", scale_lr=None, **{"jit_compile": True} | compiling)
    before = runtime.counts()
    losses = model.fit(X, Y, 16 // cores, 2, verbose=0, shuffle=False, cores=cores).history["loss"]
    assert not any(parameter.grad is not None for parameter in model.module.parameters())
    return losses, model.state_dict(), runtime.counts() - before


@pytest.mark.parametrize(
    "name",
    [name if name in ("sgd", "adamw") else pytest.param(name, marks=pytest.mark.soak) for name in RATE_IS_AN_INPUT],
)
@pytest.mark.parametrize("kind", [ClearedBefore, ClearedByTheModule, ClearedAfter])
def test_a_step_written_by_hand_is_the_graph_of_apply_gradients(cores, kind, name):
    make = RATE_IS_AN_INPUT[name]
    losses, weights, _ = steps_by_hand(tpufit.Model, make, cores)
    own_losses, own_weights, counts = steps_by_hand(kind, make, cores)
    assert own_losses == losses and all(torch.equal(weights[key], own_weights[key]) for key in weights)
    assert not counts.graphs["train"] and not counts.host_reads and not counts.fallbacks


@pytest.mark.parametrize(
    "options", [{"accumulate_steps": 2}, {"clip_norm": 0.01}, {"use_ema": True}], ids=["accumulated", "clipped", "ema"]
)
def test_a_step_written_by_hand_keeps_what_compile_asks_for(cores, options):
    losses, weights, _ = steps_by_hand(tpufit.Model, optim.AdamW, cores, **options)
    own_losses, own_weights, _ = steps_by_hand(ClearedBefore, optim.AdamW, cores, **options)
    assert own_losses == losses and all(torch.equal(weights[key], own_weights[key]) for key in weights)


def test_gradients_of_weights_that_no_optimizer_has_are_dropped(cores):
    def make(parameters):
        return optim.SGD([*parameters][-2:], 0.1)

    model, plain = tpufit.Model(net()), net()
    model.compile(make, "cross_entropy", scale_lr=None, jit_compile=True)
    model.fit(X[:128], Y[:128], 16 // cores, 1, verbose=0, shuffle=False, cores=cores)
    assert not any(parameter.grad is not None for parameter in model.module.parameters())
    optimizer = make(plain.parameters())
    for x, y in zip(torch.tensor(X[:128]).split(16), torch.tensor(Y[:128]).split(16), strict=True):
        optimizer.zero_grad()
        F.cross_entropy(plain(x), y).backward()
        optimizer.step()
    for key, expected in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], expected, rtol=0, atol=1e-5)


def test_gradients_summed_over_steps_by_hand_are_kept(cores):
    """The step's Python counts, so it is traced; what the optimizer has not used yet must not be dropped."""

    class EverySecond(tpufit.Model):
        def train_step(self, batch):
            x, y = batch
            if self.batches % 2 == 0:
                self.optimizer.zero_grad()
            loss = self.compute_loss(x, y, self(x))
            loss.backward()
            if self.batches % 2 == 1:
                self.optimizer.step()
            self.batches += 1
            return {"loss": loss}

    model, plain = EverySecond(net()), net()
    model.batches = 0
    model.compile(partial(optim.SGD, lr=0.1), "cross_entropy", scale_lr=None)
    with pytest.warns(UserWarning, match="it leaves gradients to the next one.*accumulate_steps"):
        model.fit(X[:128], Y[:128], 16 // cores, 1, verbose=0, shuffle=False, cores=cores)
    optimizer = optim.SGD(plain.parameters(), 0.1)
    for i, (x, y) in enumerate(zip(torch.tensor(X[:128]).split(16), torch.tensor(Y[:128]).split(16), strict=True)):
        if i % 2 == 0:
            optimizer.zero_grad()
        F.cross_entropy(plain(x), y).backward()
        if i % 2 == 1:
            optimizer.step()
    for key, expected in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], expected, rtol=0, atol=1e-5)


def test_an_optimizer_that_needs_its_closure_calls_it(cores):
    class Twice(optim.SGD):
        def step(self, closure):
            closure()
            self.zero_grad()
            return super().step(closure)

    class Closed(tpufit.Model):
        def train_step(self, batch):
            x, y = batch

            def closure():
                self.optimizer.zero_grad()
                loss = self.compute_loss(x, y, self(x))
                loss.backward()
                return loss

            return {"loss": self.optimizer.step(closure)}

    expected, weights, _ = steps_by_hand(tpufit.Model, partial(optim.SGD, lr=0.01), cores)
    losses, own_weights, _ = steps_by_hand(Closed, partial(Twice, lr=0.01), cores)
    assert losses == pytest.approx(expected, abs=1e-6)
    for key in weights:
        torch.testing.assert_close(weights[key], own_weights[key], rtol=0, atol=1e-6)


class Lookahead(optim.Optimizer):
    """Moves the weights back to a slow average at every third step, which its Python counts where `place` says."""

    def __init__(self, params, place):
        super().__init__(params, {"lr": 0.1})
        self.place = place

    def count(self, group, state):
        counts = {"group": group, "state": state, "attribute": vars(self)}[self.place]
        counts["steps"] = counts.get("steps", 0) + 1
        return counts["steps"]

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            (p,) = group["params"]
            slow = self.state[p].setdefault("slow", p.detach().clone())
            p.sub_(p.grad * group["lr"])
            if self.count(group, self.state[p]) % 3 == 0:
                slow.lerp_(p, 0.5)
                p.mul_(0.0).add_(slow)


@pytest.mark.parametrize("place", ["attribute", "state", "group"])
def test_an_optimizer_that_decides_by_a_count_is_traced(cores, place):
    def losses(**how):
        torch.manual_seed(0)
        net = nn.Linear(6, 2, bias=False)
        model = tpufit.Model(net)
        model.compile(Lookahead(net.parameters(), place), "cross_entropy", scale_lr=None, **how)
        return [model.train_on_batch(X[:16], Y[:16], cores=cores) for _ in range(14)]

    with pytest.warns(UserWarning, match="traced anew on every call.*steps"):
        replayed = losses()
    assert replayed == pytest.approx(losses(run_eagerly=True))
