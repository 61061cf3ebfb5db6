"""Tensors that share memory: steps that copy, swap, view and restore them train as in plain PyTorch."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tpufit
from tpufit.callbacks import Callback
from tpufit.errors import ReplayError
from tpufit.runtime import counts, find_cure
from tpufit.runtime.driver import driver

pytestmark = pytest.mark.cores(1, 8, quick=False)

X = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
Y = torch.stack([X.sum(1), X[:, 0] * X[:, 1]], 1)
PARTS = "two tensors of its state share a part of their memory"
REPLAYED = ""


class Optimizer(torch.optim.Optimizer):
    """Takes a step for each parameter, by a function of the parameter, its state and the rate."""

    def __init__(self, parameters, update):
        super().__init__(parameters, {"lr": 0.05})
        self.update = update

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.update(parameter, self.state[parameter], group["lr"])


def gives_a_copy_back(p, state, lr):
    state["old"] = p.data.clone()
    p.add_(1.0)
    p.data = state["old"]
    momentum = state.setdefault("momentum", torch.zeros_like(p))
    p.add_(momentum.mul_(0.9).add_(p.grad), alpha=-lr)


def lookahead(p, state, lr):
    slow = state.setdefault("slow", p.data.clone())
    p.add_(p.grad, alpha=-lr)
    slow.lerp_(p, 0.5)
    p.data = slow


def copies_the_last(p, state, lr):
    last = state.setdefault("last", torch.zeros_like(p))
    moved = p - last
    last.copy_(p)
    p.add_(p.grad, alpha=-lr).add_(moved, alpha=0.1)


def rotates_three(p, state, lr):
    others = [state.setdefault(name, p.data + shift) for name, shift in (("a", 0.1), ("b", -0.1))]
    others[0].add_(p.grad, alpha=-lr)
    p.data, others[0].data, others[1].data = others[0].data, others[1].data, p.data


def changes_places(p, state, lr):
    state.setdefault("a", torch.zeros_like(p)).add_(p.grad, alpha=0.1)
    state["a"], state["b"] = state.setdefault("b", torch.ones_like(p)), state["a"]
    p.add_(p.grad + 0.1 * state["a"], alpha=-lr)


def swaps_tensors(p, state, lr):
    other = state.setdefault("other", nn.Parameter(p.data + 0.1))
    p.add_(p.grad, alpha=-lr)
    gradient, p.grad = p.grad, None
    torch.utils.swap_tensors(p, other)
    p.grad = gradient


def sets(p, state, lr):
    state["old"] = p.data.clone()
    p.add_(p.grad, alpha=-lr)
    state["mean"] = p * 0.5 + state["old"] * 0.5
    p.set_(state["mean"])


def keeps_views(p, state, lr):
    flat = state.setdefault("flat", p.data.view(-1))
    row = state.setdefault("row", p.data[0])
    p.add_(p.grad, alpha=-lr)
    flat.mul_(0.99)
    row.add_(0.01)


def keeps_the_weight(p, state, lr):
    weight = state.setdefault("weight", p.detach())
    momentum = state.setdefault("momentum", torch.zeros_like(p))
    momentum.mul_(0.5).add_(weight, alpha=0.1)
    p.add_(p.grad + momentum, alpha=-lr)


def keeps_overlapping_parts(p, state, lr):
    if "a" not in state:
        both = torch.zeros(6, device=p.device) + p.data.reshape(-1)[0]
        state["a"], state["b"] = both[:4], both[2:]
    state["a"].add_(0.01)
    state["b"].mul_(1.1)
    p.add_(p.grad * (1 + state["a"].sum() - state["b"].mean()), alpha=-lr)


def counts_on_the_device(p, state, lr):
    if not state:
        state |= {"slow": p.detach().clone(), "step": torch.zeros((), device=p.device)}
    p.add_(p.grad, alpha=-lr)
    state["step"] += 1
    now = state["step"] % 3 == 0
    state["slow"].lerp_(p, 0.5 * now.float())
    p.copy_(torch.where(now, state["slow"], p))


UPDATES = {
    gives_a_copy_back: REPLAYED,
    lookahead: REPLAYED,
    copies_the_last: REPLAYED,
    rotates_three: REPLAYED,
    changes_places: REPLAYED,
    swaps_tensors: REPLAYED,
    sets: REPLAYED,
    keeps_views: REPLAYED,
    keeps_the_weight: REPLAYED,
    counts_on_the_device: REPLAYED,
    keeps_overlapping_parts: PARTS,
}


def adversarial(model, weight, x, y):
    """Backward passes at the weights and at perturbed weights, as in FGM and AWP."""
    loss = F.mse_loss(model(x), y)
    model.optimizer.zero_grad()
    loss.backward()
    backup = weight.data.clone()
    weight.data.add_(0.5 * weight.grad / weight.grad.norm())
    F.mse_loss(model(x), y).backward()
    weight.data = backup
    model.optimizer.step()
    return loss


def weight_kept_elsewhere(model, weight, x, y):
    if not hasattr(model, "same"):
        model.same = weight.data
    loss = F.mse_loss(model(x), y)
    model.optimizer.zero_grad()
    loss.backward()
    model.optimizer.step()
    model.same.mul_(0.9)
    return loss


class Views(nn.Module):
    """Buffers that are views of each other, and change in place."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)
        numbers = torch.ones(8)
        for name, part in {"all": numbers, "a": numbers[:4], "b": numbers[4:], "rows": numbers.view(2, 4)}.items():
            self.register_buffer(name, part)

    def forward(self, x):
        self.a.add_(0.1)
        self.rows[1].mul_(0.9)
        return self.linear(x * self.a + self.b + self.all.mean())


class ViewsOfWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.register_buffer("row", self.linear.weight.detach()[0])
        self.register_buffer("turned", self.linear.weight.detach().t())

    def forward(self, x):
        return self.linear(x) + self.row.sum() + self.turned.pow(2).sum()


class BecomesTheWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.register_buffer("old", torch.zeros(2, 4))

    def forward(self, x):
        self.old = self.linear.weight.detach()
        return self.linear(x) + self.old.sum()


class ScaledByANumber(nn.Module):
    """A net with a 0-dimensional parameter."""

    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 2), nn.Parameter(torch.tensor(0.0))

    def forward(self, x):
        return self.linear(x) * self.scale.exp()


def train(cores, model, optimizer=None, epochs=3, **compiling):
    """Train, and return the losses, the state and the reason why steps are traced."""
    model.compile(optimizer or "sgd", "mse", scale_lr=None, **compiling)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the train step (is traced again|runs operation by operation)")
        losses = model.fit(X, Y, 8 // cores, epochs, shuffle=False, verbose=0, cores=cores).history["loss"]
    state = dict(model.state_dict())
    for i, kept in enumerate(model.optimizer.state.values()):
        state |= {
            f"{i} {name}": value.detach().cpu() for name, value in kept.items() if isinstance(value, torch.Tensor)
        }
    return losses, state, model.report().traced.get("train", "")


def compare(make, reason, cores, waits=5, **compiling):
    """Compare a training on the device with plain PyTorch. `make` returns a model, and optionally an optimizer.

    `waits` is the most waits for captures in 18 steps: one for each capture and each graph. A state may take its final
    form only in the second step.
    """

    def run(**how):
        torch.manual_seed(0)
        return train(cores, *make(), **compiling, **how)

    losses, state, _ = run(run_eagerly=True)
    before = counts()
    here, state_here, traced = run()
    if reason or not compiling:
        assert traced == reason
    if not compiling and not reason:
        assert 2 <= (counts() - before).waits["capture"] <= waits
    assert here == pytest.approx(losses, rel=2e-5)
    assert state.keys() == state_here.keys()
    for name, value in state.items():
        torch.testing.assert_close(state_here[name], value, rtol=1e-4, atol=1e-4)


def small_net():
    return nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 2))


OPTIONS = pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"steps_per_execution": 3}, marks=pytest.mark.soak),
        pytest.param({"accumulate_steps": 2}, marks=pytest.mark.soak),
    ],
    ids=["alone", "joined", "accumulated"],
)


@OPTIONS
@pytest.mark.parametrize("update", UPDATES, ids=lambda update: update.__name__)
def test_optimizers_whose_state_shares_memory(cores, update, options):
    def make():
        return tpufit.Model(small_net()), lambda parameters: Optimizer(parameters, update)

    if UPDATES[update] is PARTS and cores > 1 and driver().name == "torch_tpu":
        with pytest.raises(ReplayError, match=f"one graph: {PARTS}"):
            compare(make, PARTS, cores, **options)
    else:
        compare(make, UPDATES[update], cores, **options)


@OPTIONS
@pytest.mark.parametrize("step", [adversarial, weight_kept_elsewhere])
def test_steps_that_share_memory_with_a_weight(cores, step, options):
    class Stepping(tpufit.Model):
        def train_step(self, batch):
            return {"loss": step(self, self.module[0].weight, *batch)}

    # An audit computes tensors that a step stores elsewhere, and so becomes a capture.
    compare(lambda: (Stepping(small_net()),), REPLAYED, cores, waits=12, **options)


@OPTIONS
@pytest.mark.parametrize("net", [Views, ViewsOfWeight, BecomesTheWeight])
def test_buffers_that_share_memory(cores, net, options):
    compare(lambda: (tpufit.Model(net()), lambda p: torch.optim.SGD(p, 0.02, momentum=0.9)), REPLAYED, cores, **options)


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_a_parameter_without_dimensions(cores, kind):
    optimizers = {"sgd": lambda p: torch.optim.SGD(p, 0.02, momentum=0.9), "adam": torch.optim.Adam}
    compare(lambda: (tpufit.Model(ScaledByANumber()), optimizers[kind]), REPLAYED, cores)


def kept_outside(model, kind):
    """Ways in which a callback keeps weights, to read them or to restore them later."""
    parameters = list(model.module.parameters())
    if kind == "deepcopy":
        return list(copy.deepcopy(model.module).parameters())
    if kind == "written":
        return [torch.zeros_like(p).copy_(p.detach()) for p in parameters]
    if kind == "computed":
        return [p.detach() * 0.9 for p in parameters]
    if kind == "state_dict":  # the weights themselves
        return list(model.module.state_dict().values())
    if kind == "rows":
        return [p.detach()[0] for p in parameters]
    return [p.detach().clone() for p in parameters]


class Keeps(Callback):
    """Saves the weights in some way after the first epoch, restores them after later epochs, and records their sums."""

    def __init__(self, kind, gives_back):
        self.kind, self.gives_back, self.sums, self.last = kind, gives_back, [], 4

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 0:
            self.kept = kept_outside(self.model, self.kind)
        if self.gives_back and epoch in (1, 2):
            for parameter, kept in zip(self.model.module.parameters(), self.kept, strict=True):
                parameter.data = kept.data
        if epoch == self.last:
            self.sums = [float(kept.detach().sum()) for kept in self.kept]


@pytest.mark.parametrize(
    ("kind", "gives_back"),
    [
        ("clone", True),
        ("written", True),
        ("deepcopy", True),
        ("deepcopy", False),
        pytest.param("computed", True, marks=pytest.mark.soak),
        pytest.param("clone", False, marks=pytest.mark.soak),
        ("state_dict", False),
        ("rows", False),
    ],
)
def test_a_callback_keeps_and_restores_weights(cores, kind, gives_back, monkeypatch):
    # The memory of weights is donated, as on a TPU.
    monkeypatch.setattr("tpufit.runtime.placement.CorePlacement.donates_from", 0)

    def run(**how):
        torch.manual_seed(0)
        model, keeps = tpufit.Model(small_net()), Keeps(kind, gives_back)
        model.compile(torch.optim.SGD(model.module.parameters(), 0.05, momentum=0.9), "mse", scale_lr=None, **how)
        losses = model.fit(X, Y, 8 // cores, 5, shuffle=False, verbose=0, cores=cores, callbacks=[keeps])
        return [*losses.history["loss"], *keeps.sums], model.report().traced.get("train", "")

    here, traced = run()
    assert traced == ""
    assert here == pytest.approx(run(run_eagerly=True)[0], rel=1e-4, abs=1e-5)


class UsesKept(tpufit.Model):
    def train_step(self, batch):
        x, y = batch
        loss = self.compute_loss(x, y, self(x)) + (self.kept * self.module.weight).sum()
        self.apply_gradients(loss)
        return {"loss": loss}


class KeepsTheWeight(Callback):
    def on_train_begin(self, logs=None):
        self.model.kept = self.model.module.weight.detach()


@pytest.mark.parametrize("rows", [1, 2])
def test_a_detached_alias_has_the_weights_current_values_in_a_step(cores, rows):
    def run(**how):
        torch.manual_seed(0)
        model = UsesKept(nn.Linear(4, rows))
        model.compile(torch.optim.SGD(model.module.parameters(), 0.01), "mse", scale_lr=None, **how)
        fit = {"shuffle": False, "verbose": 0, "cores": cores, "callbacks": [KeepsTheWeight()]}
        losses = model.fit(X, Y[:, :rows], 8 // cores, 3, **fit).history["loss"]
        assert torch.equal(model.kept, model.module.weight)
        return losses

    assert run() == pytest.approx(run(run_eagerly=True), rel=1e-5)


class Remembers(nn.Module):
    """A recurrent net whose state is an attribute, not a buffer, that each step changes."""

    def __init__(self, change):
        super().__init__()
        self.linear, self.change, self.hidden = nn.Linear(6, 2), change, torch.zeros(2)

    def forward(self, x):
        if self.hidden.device != x.device:
            self.hidden = self.hidden.to(x.device)
        y = torch.tanh(self.linear(torch.cat([x, self.hidden.expand(len(x), 2)], 1)))
        mean = y.detach().mean(0)
        if self.change == "replaced":
            self.hidden = mean
        elif self.change == "data":
            self.hidden.data = mean
        else:
            self.hidden.lerp_(mean, 0.5)
        return y


class Averages(tpufit.Model):
    """Keeps averages of the weights in a list of tensors."""

    ema: list[torch.Tensor] | None = None

    def train_step(self, batch):
        self.ema = self.ema or [p.detach().clone() for p in self.module.parameters()]
        logs = super().train_step(batch)
        for average, parameter in zip(self.ema, self.module.parameters(), strict=True):
            average.mul_(0.9).add_(parameter.detach(), alpha=0.1)
        return logs


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((kind, "Remembers.hidden") for kind in ("in place", "replaced", "data")),
        ("averages", "Averages.ema[0]"),
    ],
)
@pytest.mark.soak_on(8)
def test_state_in_attributes_is_traced_and_named(cores, kind, name, monkeypatch):
    monkeypatch.setattr("tpufit.runtime.placement.CorePlacement.donates_from", 0)

    def run(**how):
        torch.manual_seed(0)
        model = Averages(small_net()) if kind == "averages" else tpufit.Model(Remembers(kind))
        losses, _, traced = train(cores, model, **how)
        kept = model.ema if kind == "averages" else [model.module.hidden]
        return [*losses, *(float(tensor.sum()) for tensor in kept)], traced

    (here, traced), (there, _) = run(), run(run_eagerly=True)
    assert here == pytest.approx(there, rel=1e-4, abs=1e-5)
    assert traced == f"{name}, a tensor that isn't a buffer, changed between two traces"
    assert "register_buffer" in find_cure(traced)


class Doubles(nn.Module):
    """Changes its input, and adds to a tensor that existed before the step, and that the step doesn't read."""

    def __init__(self, in_place):
        super().__init__()
        self.linear, self.in_place, self.last = nn.Linear(4, 2), in_place, torch.zeros(())

    def forward(self, x):
        if self.last.device != x.device:
            self.last = self.last.to(x.device)
        self.last.copy_(x.sum())
        return self.linear(x.mul_(2) if self.in_place else x * 2)


def test_a_step_may_change_its_batch_and_an_unread_tensor(cores, monkeypatch):
    # An audit is made if enough time has passed since the last one: with this clock only a pass's first.
    monkeypatch.setattr("tpufit.runtime.replay_audits.perf_counter", lambda: 0.0)

    def run(in_place, **how):
        torch.manual_seed(0)
        model = tpufit.Model(Doubles(in_place))
        losses, _, traced = train(cores, model, **how)
        return [*losses, float(model.module.last)], traced

    before = counts()
    here, traced = run(in_place=True)
    assert traced == ""
    assert (counts() - before).waits[
        "capture"
    ] < 12  # of 18 steps; an audit is a capture, because it would change the batch
    assert here == pytest.approx(run(in_place=False, run_eagerly=True)[0], rel=1e-4)


@pytest.mark.soak_on(8)
def test_weights_kept_in_an_attribute_announce_no_change(cores):
    class Looks(Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch % 3 == 1:
                self.model.module.backup = self.model.module.state_dict()

    model = tpufit.Model(small_net())
    model.compile("sgd", "mse", scale_lr=None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "the device waited for data")  # on a busy machine
        model.fit(X.repeat(8, 1), Y.repeat(8, 1), 8 // cores, 4, verbose=0, cores=cores, callbacks=[Looks()])
