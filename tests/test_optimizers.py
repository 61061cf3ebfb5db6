"""Optimizers: every form equals PyTorch's, including state that is created before the first step."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from tpufit import optimizers
from tpufit.backend import HOST
from tpufit.errors import ArgumentError, UnknownNameError


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def train(module, optimizer, steps, begin=lambda: None):
    x = torch.linspace(-1, 1, 24).reshape(6, 4)
    for _ in range(steps):
        optimizer.zero_grad()
        module(x).square().sum().backward()
        optimizer.step()
    return [p.detach().clone() for p in module.parameters()]


@pytest.mark.parametrize("form", ["sgd", torch.optim.SGD, partial(torch.optim.SGD), lambda p: torch.optim.SGD(p)])
def test_each_form_of_an_optimizer_is_accepted(form):
    module = net()
    built = optimizers.build(form, module)
    assert isinstance(built, torch.optim.SGD)
    assert [id(p) for p in built.param_groups[0]["params"]] == [id(p) for p in module.parameters()]


def test_an_optimizer_instance_is_used_as_it_is():
    module = net()
    given = torch.optim.AdamW(module.parameters())
    assert optimizers.build(given, module) is given


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (lambda module: 7, "must be a name"),
        (lambda module: lambda params: 7, "must return a torch.optim.Optimizer"),
        (lambda module: torch.optim.SGD(net().parameters()), "4 parameters other than the module's"),
        (lambda module: torch.optim.LBFGS(module.parameters()), "can't run inside one XLA graph"),
    ],
)
def test_an_invalid_optimizer(form, message):
    module = net()
    with pytest.raises(ArgumentError, match=message):
        optimizers.build(form(module), module)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="of PyTorch 2.9")
def test_muon_by_name_takes_only_matrices():
    with pytest.raises(ArgumentError, match=r"2 other parameters, e.g. one of shape \(8,\). Pass timm.optim.Muon"):
        optimizers.build("muon", net())
    optimizers.build("muon", nn.Linear(4, 2, bias=False))


def test_unknown_name():
    with pytest.raises(UnknownNameError, match="did you mean 'adamw'"):
        optimizers.build("adamww", net())


FORMS = [
    *(value for name, value in optimizers.NAMES.items() if name != "muon"),  # Muon takes only matrices
    partial(torch.optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.1),
    partial(torch.optim.SGD, momentum=0.9, dampening=0.5),
    partial(torch.optim.Adam, amsgrad=True, weight_decay=0.1),
    partial(torch.optim.RMSprop, centered=True, momentum=0.9),
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: str(getattr(form, "__name__", form))[:60])
def test_state_made_beforehand_changes_nothing(form):
    ours, theirs = net(), net()
    optimizer = form(ours.parameters())
    optimizers.create_state(optimizer)
    assert all(p.grad is None for p in ours.parameters())
    for a, b in zip(train(ours, optimizer, 3), train(theirs, form(theirs.parameters()), 3), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: str(getattr(form, "__name__", form))[:60])
def test_all_state_exists_before_the_first_step(form):
    module = net()
    optimizer = form(module.parameters())
    optimizers.create_state(optimizer)
    before = {id(p): sorted(s) for p, s in copy.copy(optimizer.state).items()}
    train(module, optimizer, 1)
    if getattr(form, "keywords", {}).get("dampening"):
        return  # the only optimizer whose first step differs: its buffer is the first gradient, undampened
    made = {id(p): sorted(k for k, v in s.items() if v is not None) for p, s in optimizer.state.items()}
    assert {k: v for k, v in made.items() if v} == {k: v for k, v in before.items() if v}


def test_an_optimizers_existing_state_is_kept():
    module = net()
    optimizer = torch.optim.Adam(module.parameters())
    train(module, optimizer, 2)
    before = [value.clone() for state in optimizer.state.values() for value in state.values()]
    optimizers.create_state(optimizer)
    after = [value for state in optimizer.state.values() for value in state.values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_rates_are_scaled_once():
    module = net()
    first, second = list(module[0].parameters()), list(module[2].parameters())
    optimizer = torch.optim.SGD([{"params": first, "lr": 0.1}, {"params": second, "lr": 0.01}])
    optimizers.scale_rates(optimizer, 8.0)
    optimizers.scale_rates(optimizer, 8.0)
    assert optimizers.list_rates(optimizer) == pytest.approx([0.8, 0.08])


# These compute with a tensor rate on any device; the others insist on a device that supports capture.
@pytest.mark.parametrize("form", [torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta])
def test_a_tensor_rate_equals_a_number(form, monkeypatch):
    # The CPU can't count in a graph.
    monkeypatch.setattr("tpufit.optimizers.device_rates.keeps_count", lambda optimizer: False)
    ours, theirs = net(), net()
    optimizer = form(ours.parameters(), lr=0.05)
    rates = optimizers.DeviceRates(optimizer, HOST)
    x = torch.linspace(-1, 1, 24).reshape(6, 4)
    for _ in range(3):
        optimizer.zero_grad()
        ours(x).square().sum().backward()
        with rates.in_step(), rates.stepping():
            rates.use(rates.send([[0.05]]))
            assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)
            optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    expected = train(theirs, form(theirs.parameters(), lr=0.05), 3)
    for a, b in zip(ours.parameters(), expected, strict=True):
        torch.testing.assert_close(a.detach(), b, rtol=1e-6, atol=1e-7)
