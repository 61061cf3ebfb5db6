"""`Model.gradients`: what the last batch would teach, without learning it."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tpufit
from tpufit import runtime
from tpufit.callbacks import Callback
from tpufit.errors import ArgumentError

pytestmark = pytest.mark.cores(1, 8, timeout=300, quick=False)

X = np.random.default_rng(0).normal(size=(77, 6)).astype("float32")  # the last batch is of 13 rows
Y = np.random.default_rng(1).integers(0, 3, 77)


class Net(nn.Sequential):
    """With batch norm, whose statistics a forward pass moves, dropout, a frozen and a tied weight."""

    def __init__(self, dropout=0.0):
        torch.manual_seed(0)
        middle = nn.Linear(8, 8, bias=False)
        super().__init__(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(dropout), middle, nn.Tanh(), nn.Linear(8, 3))
        self.append(nn.Linear(3, 3))
        self[6].weight.requires_grad_(False)


def fit(cores, net, callbacks=(), **options):
    model = tpufit.Model(net)
    model.compile("adamw", "cross_entropy", ["accuracy"], scale_lr=None, **options)
    history = model.fit(X, Y, 16 // cores, 3, verbose=0, shuffle=False, callbacks=list(callbacks), cores=cores)
    return model, history.history


class Looking(Callback):
    reads_weights = False

    def __init__(self):
        self.found = []

    def on_epoch_end(self, epoch, logs=None):
        self.found.append(self.model.gradients())


def test_they_are_those_of_plain_pytorch(cores):
    model, _ = fit(cores, Net(), jit_compile=True)
    found = model.gradients()
    host = copy.deepcopy(Net())
    host.load_state_dict(model.state_dict())
    F.cross_entropy(host.train()(torch.from_numpy(X[64:])), torch.from_numpy(Y[64:])).backward()
    expected = {name: p.grad for name, p in host.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys() and "6.weight" not in found
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)
    again = model.gradients()
    assert all(torch.equal(again[name], found[name]) for name in found)


def test_training_goes_on_to_the_bit(cores):
    looking = Looking()
    before = runtime.counts()
    model, history = fit(cores, Net(dropout=0.3), [looking], jit_compile=True)
    spent = runtime.counts() - before
    assert spent.graphs["gradients"] == 1 and spent.waits["gradients"] == 3
    other, its_history = fit(cores, Net(dropout=0.3))
    assert history == its_history and len(looking.found) == 3
    state, its_state = model.state_dict(), other.state_dict()
    assert all(torch.equal(state[name], its_state[name]) for name in state)  # batch norm's statistics too
    first, last = looking.found[0]["0.weight"], looking.found[-1]["0.weight"]
    assert not torch.equal(first, last)


def test_a_step_of_ones_own_with_two_optimizers(cores):
    class Two(tpufit.Model):
        def train_step(self, batch):
            x, y = batch
            loss = F.cross_entropy(self(x), y)
            self.apply_gradients(loss, self.first)
            other = F.cross_entropy(self(x), y)
            self.apply_gradients(other)
            return {"loss": loss}

    net = Net()
    model = Two(net)
    model.first = torch.optim.SGD(net[0].parameters(), lr=0.1)
    model.compile(lambda _: torch.optim.SGD(net[5].parameters(), lr=0.1), "cross_entropy", scale_lr=None)
    model.fit(X, Y, 16 // cores, 1, verbose=0, cores=cores)
    assert set(model.gradients()) == {"0.weight", "0.bias", "5.weight", "5.bias"}


def test_before_any_training_it_is_an_error(cores):
    with pytest.raises(ArgumentError, match="call fit or train_on_batch first"):
        tpufit.Model(Net()).gradients()
