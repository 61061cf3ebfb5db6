"""Every PyTorch optimizer takes the same steps as on the host, with a new rate at each step, in one graph."""

from decimal import Decimal
from functools import partial

import numpy as np
import pytest
import torch
from plain_steps import plain_steps
from torch import nn, optim
from torch.nn import functional as F

import tpufit
from tpufit import runtime
from tpufit.callbacks import Callback, LRScheduler, ModelCheckpoint
from tpufit.errors import ArgumentError
from tpufit.optimizers.beta_powers import BetaPowers
from tpufit.runtime.driver import driver

pytestmark = pytest.mark.cores(1, 8, timeout=600, quick=False)

X = np.random.default_rng(0).normal(size=(30 * 16 - 3, 6)).astype("float32")  # 30 batches, the last of 13 rows
Y = (X.sum(1) > 0).astype("int64")


def batches_of(rows=None):
    """Return the first rows, or all, as batches of 16."""
    return zip(torch.tensor(X[:rows]).split(16), torch.tensor(Y[:rows]).split(16), strict=True)


# The rate is an input of the graph for these optimizers: a new rate compiles, traces and reads nothing.
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

# These optimizers read a value in their step, or keep it in Python, so they are traced at every call, and correct.
TRACED = {
    "adafactor": (optim.Adafactor, "reads a value from the device"),
}


class Signs(optim.Optimizer):
    """A custom optimizer, which creates its state in its first step."""

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
def test_30_steps_with_a_new_rate_each(cores, name):
    make = RATE_IS_AN_INPUT[name]
    model, counts = with_tpufit(make, cores, jit_compile=True)
    weights, optimizer = on_the_host(make)
    for key, expected in weights.items():
        torch.testing.assert_close(model.state_dict()[key], expected, rtol=0, atol=1e-5)
    counted = [state["step"] for state in optimizer.state.values() if "step" in state]
    assert [float(state["step"]) for state in model.optimizer.state.values() if "step" in state] == counted
    # A whole batch and the last; one more if the first step creates state that only the second step has.
    assert counts.graphs["train"] <= (3 if name in ("sgd dampening", "somebody's own") else 2)
    assert counts.host_reads == 0 and not counts.fallbacks


@pytest.mark.soak_on(8)
@pytest.mark.parametrize("name", TRACED)
def test_other_optimizers_are_traced_and_say_why(cores, name):
    make, cause = TRACED[name]
    how = {"torch_xla": "is traced again on every call", "torch_tpu": "runs operation by operation"}[driver().name]
    with pytest.warns(UserWarning, match=f"the train step {how}.*{cause}"):
        model, _ = with_tpufit(make, cores)
    for key, expected in on_the_host(make)[0].items():
        torch.testing.assert_close(model.state_dict()[key], expected, rtol=0, atol=1e-5)


@pytest.mark.soak_on(8)
@pytest.mark.skipif(not hasattr(optim, "Muon"), reason="of PyTorch 2.9")
def test_muon_is_replayed(cores):
    def matrices(parameters):  # all that it accepts
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
def test_muon_with_an_optimizer_for_other_weights(cores):
    def both(module):
        named = [*module.named_parameters()]
        muon = optim.Muon([p for _, p in named if p.dim() == 2], lr=1e-3)
        return muon, optim.AdamW([p for _, p in named if p.dim() < 2])

    model, plain = MuonAndAdamW(net()), net()
    muon, model.adamw = both(model.module)
    model.compile(muon, "cross_entropy", scale_lr=None, jit_compile=True)
    model.fit(X, Y, 16 // cores, 1, verbose=0, shuffle=False, cores=cores)
    optimizers = both(plain)
    for x, y in batches_of():
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
@pytest.mark.soak_on(8)
def test_an_option_that_changes_once_compiles_one_graph_more(cores, name, option, change):
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


class NewMomentum(Callback):
    """Changes the first beta before each step."""

    def on_train_batch_begin(self, batch, logs=None):
        group = self.model.optimizer.param_groups[0]
        group["betas"] = 0.9 - batch / 1000, group["betas"][1]


@pytest.mark.parametrize("varies", [False, True])
@pytest.mark.parametrize("kind", [optim.RAdam, optim.Adam, optim.NAdam])
@pytest.mark.soak_on(8)
def test_a_beta_near_1_is_as_exact_as_in_pytorch(cores, kind, varies):
    make = partial(kind, lr=0.01, betas=(0.9, 0.99999))
    plain = net()
    before = {name: weight.clone() for name, weight in plain.state_dict().items()}
    optimizer = make(plain.parameters())
    for step, (x, y) in enumerate(batches_of(160)):
        if varies:
            optimizer.param_groups[0]["betas"] = 0.9 - step / 1000, 0.99999
        optimizer.zero_grad()
        F.cross_entropy(plain(x), y).backward()
        optimizer.step()
    model = tpufit.Model(net())
    model.compile(make, "cross_entropy", scale_lr=None)
    changes = [NewMomentum()] if varies else []
    model.fit(X[:160], Y[:160], 16 // cores, verbose=0, shuffle=False, callbacks=changes, cores=cores)
    for name, expected in plain.state_dict().items():
        moved = expected - before[name]
        off = (model.state_dict()[name] - expected).abs().max() / moved.abs().max()
        assert off < 1e-4, (name, off)


@pytest.mark.parametrize("base", [0.9, 0.999, 0.9999, 0.9999999])
def test_radams_average_has_the_length_of_exact_numbers(cores, base):
    for steps in (1, 2, 5, 6, 100, 999, 1001, 20_000, 10_000_000):
        decays, counter = BetaPowers(), torch.tensor(float(steps))

        def noted(name, left, right, decays=decays):
            result = getattr(torch.Tensor, name)(left, right)
            decays.note(result, name, (left, right))
            return result

        power = noted("__rpow__", counter, base)
        product = noted("mul", noted("mul", counter, 2), power)
        quotient = noted("div", product, noted("__rsub__", power, 1))
        found = decays.compute("__rsub__", (quotient, 2 / (1 - base) - 1))
        exact = Decimal(base)  # 28 digits
        length = 2 / (1 - exact) - 1 - 2 * steps * exact**steps / (1 - exact**steps)
        assert float(found) == pytest.approx(float(length), rel=1e-5)


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
    [
        pytest.param(name, marks={"sgd": (), "adamw": pytest.mark.soak_on(8)}.get(name, pytest.mark.soak))
        for name in RATE_IS_AN_INPUT
    ],
)
@pytest.mark.parametrize("kind", [ClearedBefore, ClearedByTheModule, ClearedAfter])
def test_a_manual_step_has_the_graph_of_apply_gradients(cores, kind, name):
    make = RATE_IS_AN_INPUT[name]
    losses, weights, _ = steps_by_hand(tpufit.Model, make, cores)
    own_losses, own_weights, counts = steps_by_hand(kind, make, cores)
    assert own_losses == losses and all(torch.equal(weights[key], own_weights[key]) for key in weights)
    assert not counts.graphs["train"] and not counts.host_reads and not counts.fallbacks


@pytest.mark.parametrize(
    "options", [{"accumulate_steps": 2}, {"clip_norm": 0.01}, {"use_ema": True}], ids=["accumulated", "clipped", "ema"]
)
@pytest.mark.soak_on(8)
def test_a_manual_step_keeps_compiles_options(cores, options):
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
    plain_steps(plain, optimizer, F.cross_entropy, batches_of(128))
    for key, expected in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], expected, rtol=0, atol=1e-5)


@pytest.mark.soak_on(8)
def test_gradients_summed_over_steps_by_hand_are_kept(cores):
    """The step's Python counts, so it is traced; gradients that the optimizer hasn't used must be kept."""

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
    with pytest.warns(UserWarning, match="it leaves gradients to the next step.*accumulate_steps"):
        model.fit(X[:128], Y[:128], 16 // cores, 1, verbose=0, shuffle=False, cores=cores)
    optimizer = optim.SGD(plain.parameters(), 0.1)
    for i, (x, y) in enumerate(batches_of(128)):
        if i % 2 == 0:
            optimizer.zero_grad()
        F.cross_entropy(plain(x), y).backward()
        if i % 2 == 1:
            optimizer.step()
    for key, expected in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], expected, rtol=0, atol=1e-5)


@pytest.mark.soak_on(8)
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
    """Moves the weights back to a slow average in every third step, counted in Python where `place` says."""

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
@pytest.mark.soak_on(8)
def test_an_optimizer_that_decides_by_a_count(cores, place):
    def losses(**how):
        torch.manual_seed(0)
        net = nn.Linear(6, 2, bias=False)
        model = tpufit.Model(net)
        model.compile(Lookahead(net.parameters(), place), "cross_entropy", scale_lr=None, **how)
        return [model.train_on_batch(X[:16], Y[:16], cores=cores) for _ in range(14)]

    if place == "group":  # a number of the optimizer: each outcome of the comparison has a graph
        replayed = losses()
    else:
        with pytest.warns(UserWarning, match="traced again on every call.*steps"):
            replayed = losses()
    assert replayed == pytest.approx(losses(run_eagerly=True))


class SAM(optim.Optimizer):
    """Sharpness-aware minimization in its common form: an inner optimizer takes the step."""

    def __init__(self, params, base, rho=0.05, **options):
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    def _having(self):
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    @torch.no_grad()
    def first_step(self):
        norm = torch.stack([p.grad.norm() for p in self._having()]).norm()
        for p in self._having():
            self.state[p]["old_p"] = p.data.clone()
            p.add_(p.grad * self.param_groups[0]["rho"] / (norm + 1e-12))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for p in self._having():
            p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        self.zero_grad()

    def step(self, closure):
        self.first_step()
        torch.enable_grad()(closure)()
        self.second_step()


class TwoPasses(tpufit.Model):
    with_closure = False

    def train_step(self, batch):
        x, y = batch

        def closure():
            loss = F.cross_entropy(self(x), y)
            loss.backward()
            return loss

        self.optimizer.zero_grad()
        loss = closure()
        if self.with_closure:
            self.optimizer.step(closure)
        else:
            self.optimizer.first_step()
            closure()
            self.optimizer.second_step()
        return {"loss": loss}


BASES = {"sgd": partial(SAM, base=optim.SGD, lr=0.05, momentum=0.9), "adam": partial(SAM, base=optim.Adam, lr=0.01)}


@pytest.mark.parametrize(
    ("base", "options"),
    [
        pytest.param("sgd", {"with_closure": True}, marks=pytest.mark.soak_on(8)),
        pytest.param("adam", {}, marks=pytest.mark.soak_on(1)),
        pytest.param("adam", {"steps_per_execution": 3}, marks=pytest.mark.soak_on(8)),
        ("sgd", {"accumulate_steps": 2}),
        pytest.param("sgd", {"run_eagerly": True, "accumulate_steps": 2}, marks=pytest.mark.soak_on(8)),
    ],
    ids=["closure", "alone", "joined", "accumulated", "eagerly"],
)
def test_an_inner_optimizer(cores, base, options):
    options = dict(options)
    x, y, plain = torch.tensor(X[: 12 * 16]), torch.tensor(Y[: 12 * 16]), net()
    model = TwoPasses(net())
    model.with_closure = options.pop("with_closure", False)
    every = options.get("accumulate_steps", 1)
    model.compile(BASES[base], scale_lr=None, **options)
    model.fit(x, y, 16 // cores, 1, verbose=0, shuffle=False, cores=cores)
    assert model.report().traced.get("train", "") == ""
    optimizer = BASES[base](plain.parameters())
    for rows, labels in zip(x.split(16 * every), y.split(16 * every), strict=True):
        gradients = []
        for part in zip(rows.split(16), labels.split(16), strict=True):  # each batch has its worst point nearby
            F.cross_entropy(plain(part[0]), part[1]).backward()
            optimizer.first_step()
            F.cross_entropy(plain(part[0]), part[1]).backward()
            gradients.append([p.grad for p in plain.parameters()])
            for p in plain.parameters():
                p.data, p.grad = optimizer.state[p]["old_p"], None
        for p, *each in zip(plain.parameters(), *gradients, strict=True):
            p.grad = torch.stack(each).mean(0)
        optimizer.second_step()
    for key, expected in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], expected, rtol=0, atol=1e-5)


@pytest.mark.soak_on(8)
def test_an_inner_optimizer_is_in_checkpoints(cores, tmp_path):
    fit = {"x": X[:192], "y": Y[:192], "batch_size": 16 // cores, "cores": cores, "verbose": 0}

    def made():
        model = TwoPasses(net())
        model.compile(BASES["adam"], use_ema=True)
        return model

    expected, model = made(), made()
    expected.fit(**fit, epochs=3)
    made().fit(**fit, epochs=2, callbacks=[ModelCheckpoint(tmp_path)])
    model.fit(**fit, epochs=3, callbacks=[ModelCheckpoint(tmp_path)], resume=True)
    assert all(map(torch.equal, expected.state_dict().values(), model.state_dict().values()))
    step = model.optimizer.base_optimizer.state[model.module[0].weight]["step"]
    assert float(step) == 36 and model.optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * cores)


class Around(optim.Optimizer):
    """Wraps two optimizers with their own groups. They update all parameters except the last `aside`."""

    def __init__(self, params, lr=None, aside=0):
        params = list(params)
        super().__init__(params, {"rho": 0.05} if lr is None else {"lr": lr})
        self.inside = [optim.SGD(params[:1], 0.01), optim.Adam(params[1 : len(params) - aside], 0.02)]
        self.alone = params[len(params) - aside :]

    @torch.no_grad()
    def step(self, closure=None):
        for optimizer in self.inside:
            optimizer.step()
        for p in self.alone:
            p.sub_(p.grad * self.param_groups[0]["lr"])

    def rates(self):
        return [group["lr"] for one in (self, *self.inside) for group in one.param_groups if "lr" in group]


AROUND = {
    "without a rate": (Around, [0.01, 0.02], [True, True]),
    "with a rate that doesn't count": (partial(Around, lr=1.0), [1.0, 0.01, 0.02], [False, True, True]),
    "with parameters of its own": (partial(Around, lr=0.1, aside=1), [0.1, 0.01, 0.02], [True, True, True]),
}


@pytest.mark.parametrize("name", AROUND)
def test_rates_of_inner_optimizers_are_scaled_with_cores(cores, name, tmp_path):
    make, rates, scaled = AROUND[name]
    model, plain = tpufit.Model(net()), net()
    model.compile(make, "cross_entropy")
    fit = {"batch_size": 16 // cores, "verbose": 0, "shuffle": False, "cores": cores}
    model.fit(X[:96], Y[:96], **fit)
    assert model.optimizer.rates() == [
        pytest.approx(rate * (cores if grows else 1)) for rate, grows in zip(rates, scaled, strict=True)
    ]
    optimizer = make(plain.parameters())
    for one in (optimizer, *optimizer.inside):
        for group in one.param_groups:
            if "lr" in group and (one is not optimizer or scaled[0]):
                group["lr"] *= cores
    plain_steps(plain, optimizer, F.cross_entropy, batches_of(96))
    for key, expected in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], expected, rtol=0, atol=1e-5)
    first = next(rate for rate, grows in zip(rates, scaled, strict=True) if grows) * cores
    assert model.learning_rate == model.optimizer.learning_rate == pytest.approx(first)
    before = model.optimizer.rates()
    model.learning_rate = first / 2
    assert model.optimizer.rates() == [
        pytest.approx(rate / 2 if grows else rate) for rate, grows in zip(before, scaled, strict=True)
    ]
    model.fit(X[:96], Y[:96], **fit, epochs=2, callbacks=[LRScheduler("linear"), ModelCheckpoint(tmp_path)])
    assert model.learning_rate == pytest.approx(first / 2 / 12) and model.report().traced.get("train", "") == ""


def test_an_optimizer_without_a_learning_rate_is_reported():
    class Nameless(optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"rate": 0.1})

    with pytest.raises(ArgumentError, match=r"no 'lr', only \['rate'\]: name the learning rate 'lr'"):
        tpufit.Model(net()).compile(Nameless, "mse")


def test_an_optimizer_that_computes_its_rate_itself_is_refused():
    def relative(parameters):
        optimizer = optim.SGD(parameters, 0.1)
        optimizer.param_groups[0]["lr"] = None
        return optimizer

    with pytest.raises(ArgumentError, match=r"SGD has lr=None and computes its rate itself.*relative_step=False"):
        tpufit.Model(net()).compile(relative, "mse")
