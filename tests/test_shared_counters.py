"""Parameters that step together share a step counter on the device, and each counts as in PyTorch."""

import copy
from functools import partial

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

import tpufit
from tpufit.callbacks import Callback, LRScheduler
from tpufit.runtime import counts

pytestmark = [pytest.mark.cores(1, 8), pytest.mark.soak_on(8)]

X = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
Y = X[:, :2].sum(1).gt(0).long()
COUNTING = {
    "adam": partial(optim.Adam, lr=0.01),
    "amsgrad": partial(optim.AdamW, lr=0.01, amsgrad=True),
    "nadam": partial(optim.NAdam, lr=0.01),
    "radam": partial(optim.RAdam, lr=0.01),
    "adamax": partial(optim.Adamax, lr=0.01),
    "asgd": partial(optim.ASGD, lr=0.01),
    "rprop": partial(optim.Rprop, lr=0.001),
}


class Heads(nn.Module):
    """A trunk, two heads and an unused layer."""

    def __init__(self):
        super().__init__()
        self.unused, self.trunk = nn.Linear(3, 3), nn.Linear(4, 8)
        self.first, self.second = nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, x):
        return self.first(torch.tanh(self.trunk(x)))


class BothHeads(tpufit.Model):
    """Steps for one head and then for the other, with the trunk and the same optimizer each time."""

    heads = 2

    def train_step(self, data):
        x, y = data
        for head in (self.module.first, self.module.second)[: self.heads]:
            self.module.zero_grad()
            loss = F.cross_entropy(head(torch.tanh(self.module.trunk(x))), y)
            loss.backward()
            self.optimizer.step()
        return {"loss": loss}


class OneHead(BothHeads):
    heads = 1


class Freezing(Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.model.module.trunk.requires_grad_(epoch != 1)


def steps_of(optimizer, net):
    return {n: int(optimizer.state[p].get("step", 0)) for n, p in net.named_parameters() if p in optimizer.state}


def by_hand(net, optimizer, losses, epochs=3):
    for epoch in range(epochs):
        for i in range(0, len(X), 16):
            for loss in losses:
                optimizer.zero_grad()
                loss(net, X[i : i + 16], Y[i : i + 16], epoch).backward()
                optimizer.step()


def first(net, x, y, epoch):
    return F.cross_entropy(net(x), y)


def second(net, x, y, epoch):
    return F.cross_entropy(net.second(torch.tanh(net.trunk(x))), y)


def fitted(kind, optimizer, cores, *callbacks, net=None, epochs=3):
    model = kind(net if net is not None else Heads())
    model.compile(optimizer, "cross_entropy", scale_lr=None)
    model.fit(X, Y, batch_size=16 // cores, epochs=epochs, verbose=0, cores=cores, shuffle=False, callbacks=callbacks)
    return model


def compare(model, optimizer, net):
    counters = {n: count for n, count in steps_of(model.optimizer, model.module).items() if count}
    assert counters == {n: count for n, count in steps_of(optimizer, net).items() if count}
    for name, weight in net.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], weight, rtol=1e-4, atol=2e-5)


@pytest.mark.soak_on(8)
@pytest.mark.parametrize("name", COUNTING)
@pytest.mark.usefixtures("compiles_anew")
def test_parameters_without_gradients_dont_count(cores, name):
    net = Heads()
    ours = copy.deepcopy(net)
    before = counts()
    model = fitted(tpufit.Model, COUNTING[name], cores, net=ours)
    made = counts() - before
    assert sum(made.graphs.values()) == 1
    assert len({id(state["step"]) for state in model.optimizer.state.values()}) == 2
    optimizer = COUNTING[name](net.parameters())
    by_hand(net, optimizer, [first])
    compare(model, optimizer, net)


def test_a_trunk_that_steps_with_each_of_two_heads(cores):
    net = Heads()
    model = fitted(BothHeads, COUNTING["adam"], cores, net=copy.deepcopy(net))
    assert not model.report().traced["train"]
    optimizer = COUNTING["adam"](net.parameters())
    by_hand(net, optimizer, [first, second])
    assert steps_of(optimizer, net)["trunk.bias"] == 2 * steps_of(optimizer, net)["first.bias"]
    compare(model, optimizer, net)


def test_parameters_frozen_later_dont_count(cores):
    net = Heads()
    model = fitted(tpufit.Model, COUNTING["adam"], cores, Freezing(), net=copy.deepcopy(net))
    optimizer = COUNTING["adam"](net.parameters())

    def freezing(net, x, y, epoch):
        net.trunk.requires_grad_(epoch != 1)
        return first(net, x, y, epoch)

    by_hand(net, optimizer, [freezing])
    assert steps_of(optimizer, net)["trunk.bias"] < steps_of(optimizer, net)["first.bias"]
    compare(model, optimizer, net)


def test_the_state_continues_in_pytorch(cores):
    model = fitted(tpufit.Model, COUNTING["adam"], cores)
    net = Heads()
    net.load_state_dict(model.state_dict())
    optimizer = COUNTING["adam"](net.parameters())
    state = model.optimizer.state_dict()
    assert len({id(one["step"]) for one in state["state"].values()}) == len(state["state"])
    on_the_host = {
        i: {k: v.cpu() if torch.is_tensor(v) else v for k, v in one.items()} for i, one in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": on_the_host})
    before = steps_of(optimizer, net)
    by_hand(net, optimizer, [first], epochs=1)
    moved = {name: count - before[name] for name, count in steps_of(optimizer, net).items()}
    assert moved == {n: 6 if n.startswith(("trunk", "first")) else 0 for n in moved}


def test_a_manual_step_increments_each_counter_once(cores):
    model = fitted(tpufit.Model, COUNTING["adam"], cores)
    before = steps_of(model.optimizer, model.module)
    model.to_cpu()
    loss = model.optimizer.step(lambda: _backward(model.module))
    assert loss.item() > 0
    moved = {name: count - before[name] for name, count in steps_of(model.optimizer, model.module).items()}
    assert moved == {n: int(n.startswith(("trunk", "first"))) for n in moved}


def test_an_existing_scheduler_has_wrapped_the_step(cores):
    net = Heads()
    ours = copy.deepcopy(net)
    given = COUNTING["adam"](ours.parameters())
    scheduler = optim.lr_scheduler.ConstantLR(given, 1.0)
    model = fitted(tpufit.Model, given, cores, LRScheduler(scheduler), net=ours)
    optimizer = COUNTING["adam"](net.parameters())
    by_hand(net, optimizer, [first])
    compare(model, optimizer, net)


def test_a_copy_runs_hooks_where_no_other_optimizer_was_made(monkeypatch):
    model = tpufit.Model(Heads())
    model.compile(COUNTING["adam"], first)
    # As it is in another process: PyTorch marks a class when the first of its kind is made.
    monkeypatch.setattr(optim.Adam, "step", optim.Adam.step.__wrapped__)
    twin, called = copy.deepcopy(model.optimizer), []
    twin.register_step_pre_hook(lambda *_: called.append("before"))
    twin.register_step_post_hook(lambda *_: called.append("after"))
    twin.step()
    assert called == ["before", "after"]


def _backward(net):
    loss = first(net, X[:16], Y[:16], 0)
    loss.backward()
    return loss


def test_a_checkpoint_of_other_counts_is_loaded(cores, tmp_path):
    whole = fitted(BothHeads, COUNTING["adam"], cores, net=_seeded(), epochs=2)
    part = fitted(BothHeads, COUNTING["adam"], cores, net=_seeded(), epochs=1)
    part.save(tmp_path / "part")
    resumed = fitted(OneHead, COUNTING["adam"], cores, epochs=1)  # its counters are on the device, and shared
    resumed.heads = 2
    arguments = {"batch_size": 16 // cores, "verbose": 0, "cores": cores, "shuffle": False}
    resumed.fit(X, Y, epochs=1, resume=tmp_path / "part", **arguments)
    assert steps_of(resumed.optimizer, resumed.module) == steps_of(whole.optimizer, whole.module)
    for name, weight in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], weight), name


def _seeded():
    torch.manual_seed(3)
    return Heads()
