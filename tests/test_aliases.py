"""Tensors that share memory: steps that copy, swap, view and restore them train as in plain PyTorch, on the host."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tpufit
from tpufit.runtime import counts

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
    """Backward passes at the weights and at worse ones, as FGM and AWP take."""
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
    """Buffers that are views of one another, and change in place."""

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
    """With a parameter that has no dimensions."""

    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 2), nn.Parameter(torch.tensor(0.0))

    def forward(self, x):
        return self.linear(x) * self.scale.exp()


def train(cores, model, optimizer=None, epochs=3, **compiling):
    """Train, and return the losses, the state and the reason why steps are traced."""
    model.compile(optimizer or "sgd", "mse", scale_lr=None, **compiling)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the train step is traced anew")
        losses = model.fit(X, Y, 8 // cores, epochs, shuffle=False, verbose=0, cores=cores).history["loss"]
    state = dict(model.state_dict())
    for i, kept in enumerate(model.optimizer.state.values()):
        state |= {
            f"{i} {name}": value.detach().cpu() for name, value in kept.items() if isinstance(value, torch.Tensor)
        }
    return losses, state, model.report().traced.get("train", "")


def compare(make, reason, cores, waits=5, **compiling):
    """Compare a training on the device with one in plain PyTorch. `make` gives a model, and maybe an optimizer.

    `waits` is the most for captures in 18 steps: one for each capture and each graph. A state may get its form in the
    second step only.
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

    compare(make, UPDATES[update], cores, **options)


@OPTIONS
@pytest.mark.parametrize("step", [adversarial, weight_kept_elsewhere])
def test_steps_that_share_memory_with_a_weight(cores, step, options):
    class Stepping(tpufit.Model):
        def train_step(self, batch):
            return {"loss": step(self, self.module[0].weight, *batch)}

    # To compute what a step leaves elsewhere, an audit of it is a capture.
    compare(lambda: (Stepping(small_net()),), REPLAYED, cores, waits=12, **options)


@OPTIONS
@pytest.mark.parametrize("net", [Views, ViewsOfWeight, BecomesTheWeight])
def test_buffers_that_share_memory(cores, net, options):
    compare(lambda: (tpufit.Model(net()), lambda p: torch.optim.SGD(p, 0.02, momentum=0.9)), REPLAYED, cores, **options)


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_a_parameter_without_dimensions(cores, kind):
    optimizers = {"sgd": lambda p: torch.optim.SGD(p, 0.02, momentum=0.9), "adam": torch.optim.Adam}
    compare(lambda: (tpufit.Model(ScaledByANumber()), optimizers[kind]), REPLAYED, cores)
