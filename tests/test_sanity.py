"""`fit(sanity_steps=...)`: a few batches of validation before training, without any effect on it."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import tpufit
from tpufit.callbacks import Callback, ModelCheckpoint
from tpufit.errors import ArgumentError

X = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
Y = np.arange(64) % 3


class Net(nn.Module):
    """Draws in evaluations, and counts them in a buffer and in an attribute."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.evaluations = 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if not self.training:
            self.evaluations += 1
            self.seen = self.seen + 1
        return self.layer(nn.functional.dropout(x, 0.3))


class Drawing(Dataset):
    """Rows that draw from every generator, and count."""

    def __init__(self, generator=None):
        self.generator = generator or torch.Generator().manual_seed(3)
        self.reads = 0

    def __len__(self):
        return 40

    def __getitem__(self, i):
        self.reads += 1
        noise = torch.rand(4) + torch.rand(4, generator=self.generator) + float(np.random.random())
        return noise * self.reads, i % 3


class Told(Callback):
    def __init__(self):
        self.hooks = []

    def on_train_begin(self, logs=None):
        self.hooks.append("train")

    def on_test_begin(self, logs=None):
        self.hooks.append("test")


def fit(cores, folder=None, epochs=2, **arguments):
    tpufit.set_random_seed(0)
    model, told = tpufit.Model(Net()), Told()
    model.compile("adam", "cross_entropy", metrics=["accuracy"], jit_compile=False)
    held_out = Drawing()
    callbacks = [told] if folder is None else [told, ModelCheckpoint(folder, save_freq=5)]
    given = {"validation_data": DataLoader(held_out, 8 // cores), "batch_size": 16 // cores, "cores": cores}
    history = model.fit(X, Y, epochs=epochs, verbose=0, callbacks=callbacks, **(given | arguments)).history
    left = (model.rows_seen, model.steps_taken, model.module.evaluations, held_out.reads, told.hooks)
    draws = [torch.rand(()).item(), np.random.random(), torch.rand((), generator=held_out.generator).item()]
    return history, model.state_dict(), left, draws


def equal(one, other):
    assert all(torch.equal(value, other[1][name]) for name, value in one[1].items())
    assert (one[0], one[2:]) == (other[0], other[2:])


@pytest.mark.cores(1, 8)
def test_the_sanity_check_leaves_no_trace(cores, tmp_path):
    expected = fit(cores)
    equal(fit(cores, sanity_steps=2), expected)
    fit(cores, tmp_path, max_steps=5, sanity_steps=2)
    resumed = fit(cores, tmp_path, resume=True, sanity_steps=2)
    equal((resumed[0], resumed[1], (), []), (expected[0], expected[1], (), []))


class Broken(tpufit.Model):
    def test_step(self, batch):
        raise ZeroDivisionError("in the validation")


@pytest.mark.cores(1)
def test_a_fault_of_the_validation_costs_no_training(cores, capsys):
    model, told = Broken(Net()), Told()
    model.compile("adam", "cross_entropy", run_eagerly=True)
    with pytest.raises(ZeroDivisionError, match="in the validation"):
        model.fit(X, Y, validation_split=0.2, sanity_steps=1, verbose=0, callbacks=[told], cores=cores)
    assert model.steps_taken == 0 and not told.hooks and not model.module.evaluations
    plain = tpufit.Model(nn.Linear(4, 3))
    plain.compile("adam", "cross_entropy", run_eagerly=True)
    plain.fit(X, Y, validation_split=0.5, batch_size=16, sanity_steps=9, verbose=2, cores=cores)
    assert "\nsanity check over 2 batches: val_loss " in capsys.readouterr().out  # all rows


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"sanity_steps": -1}, "sanity_steps must be a whole number of at least 0, got -1"),
        ({"sanity_steps": 2}, "sanity_steps needs validation_data or validation_split"),
        ({"sanity_steps": 2, "validation_data": iter([(X, Y)])}, "a list_iterator that can be read only once"),
    ],
)
def test_wrong_sanity_steps_are_errors(arguments, says):
    model = tpufit.Model(nn.Linear(4, 3))
    model.compile("sgd", "cross_entropy")
    with pytest.raises(ArgumentError, match=says):
        model.fit(X, Y, verbose=0, **arguments)
