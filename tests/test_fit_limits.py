"""`fit` can be limited to fewer batches, or less time."""

import time
from datetime import timedelta

import numpy as np
import pytest
import torch
from torch import nn

import tpufit
from tpufit.callbacks import Callback, ModelCheckpoint
from tpufit.errors import ArgumentError

pytestmark = pytest.mark.cores(1)

X = np.random.default_rng(0).normal(size=(160, 4)).astype("float32")
Y = np.random.default_rng(1).integers(0, 3, 160)


class Count(Callback):
    reads_weights = False

    def __init__(self, seconds=0.0):
        self.seconds, self.train, self.test = seconds, [], []

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(self.seconds)
        self.train.append(batch)

    def on_test_batch_end(self, batch, logs=None):
        self.test.append(batch)


def fit(*, data=(X, Y), count=None, **options):
    count = count or Count()
    model = tpufit.Model(nn.Linear(4, 3))
    model.compile("sgd", "cross_entropy")
    size = 16 if len(data) == 2 else None
    model.fit(*data, batch_size=size, verbose=0, callbacks=[count], validation_data=(X, Y), **options)
    return model, count


@pytest.mark.parametrize(("limit", "batches"), [(3, 3), (0.2, 2), (0.01, 1), (1.0, 10), (99, 10)])
def test_limits_on_batches_of_each_epoch_and_validation(limit, batches):
    _, count = fit(limit=limit, epochs=2)
    assert count.train == count.test == [*range(batches)] * 2


def test_each_limited_epoch_has_different_rows():
    data = tpufit.data.stream(X, Y, batch_size=16, shuffle=True)
    data.limit(2)
    first, second = (np.concatenate([x.numpy() for x, _ in data.epoch(epoch)]) for epoch in range(2))
    assert len(first) == len(second) == 32 and not np.array_equal(first, second)


def test_validation_can_have_its_own_limit():
    _, count = fit(validation_limit=2)
    assert (len(count.train), len(count.test)) == (10, 2)
    _, count = fit(limit=3, validation_limit=0.5)
    assert (len(count.train), len(count.test)) == (3, 5)


def made(**options):
    torch.manual_seed(0)
    model = tpufit.Model(nn.Linear(4, 3))
    model.compile("sgd", "cross_entropy", scale_lr=None, **options)
    return model


@pytest.mark.parametrize(
    ("options", "max_steps", "batches"),
    [
        ({}, 4, [4]),
        ({}, 23, [10, 10, 3]),
        ({"steps_per_execution": 3}, 14, [10, 4]),
        ({"accumulate_steps": 4}, 4, [10, 4]),  # an epoch has three steps, of 4, 4 and 2 batches
        ({"accumulate_steps": 4, "steps_per_execution": 3}, 6, [10, 10]),
    ],
)
def test_max_steps_counts_optimizer_steps(options, max_steps, batches):
    model, count = made(**options), Count()
    model.fit(X, Y, 16, verbose=0, max_steps=max_steps, callbacks=[count])
    assert len(model.history.epoch) == len(batches) and model.steps_taken == sum(batches)
    model.fit(X, Y, 16, verbose=0, max_steps=max_steps, epochs=1)
    assert model.steps_taken == sum(batches) + batches[0]  # epochs are a limit too
    assert not model.out_of_time


def test_max_steps_continues_inside_an_epoch(tmp_path):
    whole, parts = made(), made()
    whole.fit(X, Y, 16, verbose=0, max_steps=23)
    parts.fit(X, Y, 16, verbose=0, max_steps=14, callbacks=[ModelCheckpoint(tmp_path)])
    again, count = made(), Count()
    again.fit(X, Y, 16, verbose=0, max_steps=23, callbacks=[ModelCheckpoint(tmp_path), count], resume=True)
    assert again.steps_taken == 23 and all(map(np.array_equal, whole.get_weights(), again.get_weights()))
    again.fit(X, Y, 16, verbose=0, max_steps=23, callbacks=[ModelCheckpoint(tmp_path)], resume=True)
    assert again.steps_taken == 23


def test_max_steps_of_endless_data():
    def endless():
        while True:
            taken.append(0)
            yield X[:16], Y[:16]

    taken, count, model = [], Count(), made()
    model.fit(endless(), verbose=0, max_steps=7, callbacks=[count])
    assert model.steps_taken == len(taken) == 7
    # An epoch takes at least one step.
    assert (count.params["epochs"], count.params["total_steps"]) == (7, 7)


class Stop(Callback):
    reads_weights = False

    def __init__(self, batch=None, epochs=()):
        self.batch, self.epochs = batch, epochs

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.batch:
            self.model.stop_training = True

    def on_epoch_end(self, epoch, logs=None):
        if epoch in self.epochs:
            self.model.stop_training = True


@pytest.mark.parametrize(("stop", "steps"), [(Stop(3), 24), (Stop(epochs=[0]), 50), (Stop(epochs=[0, 1]), 20)])
def test_no_callback_ends_training_before_min_epochs(stop, steps):
    model = made()
    model.fit(X, Y, 16, 5, verbose=0, min_epochs=2, callbacks=[stop])
    assert model.steps_taken == steps


@pytest.mark.parametrize("max_time", [0.5, timedelta(milliseconds=500)])
def test_max_time_ends_after_the_current_batch(max_time):
    model, count = fit(count=Count(0.1), max_time=max_time, epochs=100)
    assert model.out_of_time
    assert 1 <= len(count.train) < 10 and count.train == [*range(len(count.train))]
    model.fit(X, Y, 16, verbose=0, callbacks=[again := Count()])
    assert len(again.train) == 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_steps": 0}, "max_steps must be a whole number of at least 1, got 0"),
        ({"min_epochs": -1}, "min_epochs must be a whole number of at least 0, got -1"),
        ({"validation_limit": 0}, "a whole number of batches of at least 1, or a share such as 0.1, got 0"),
        ({"limit": 0}, "a whole number of batches of at least 1, or a share such as 0.1, got 0"),
        ({"limit": 1.5}, "a share such as 0.1, got 1.5"),
        ({"max_time": 0}, "a number of seconds above 0 or a timedelta, got 0"),
    ],
)
def test_wrong_limits(options, message):
    with pytest.raises(ArgumentError, match=message):
        fit(**options)


def test_a_fraction_of_data_of_unknown_length():
    with pytest.raises(ArgumentError, match="doesn't say how many batches it has"):
        fit(data=((batch for batch in [(X, Y)]),), limit=0.5)


@pytest.mark.filterwarnings("ignore:x ran out of data")
def test_a_limited_epoch_ends_with_the_data():
    _, count = fit(steps_per_epoch=9, epochs=4)
    assert count.train == [*range(9), 0, *range(9), 0]
    with pytest.warns(UserWarning, match="x ran out of data after 1 of 9 steps"):
        fit(steps_per_epoch=9, epochs=2)


def test_no_epoch_at_all():
    class Calls(Callback):
        def on_train_begin(self, logs=None):
            calls.append("begin")

        def on_epoch_begin(self, epoch, logs=None):
            calls.append("epoch")

        def on_train_end(self, logs=None):
            calls.append(("end", logs))

    calls = []
    model, _ = fit(count=Calls(), epochs=0)
    assert calls == ["begin", ("end", {})]
    assert model.history.history == {} and model.steps_taken == 0


def test_an_empty_dict_of_class_weights_has_no_effect():
    losses = []
    for weights in (None, {}):
        tpufit.set_random_seed(0)
        model, _ = fit(class_weight=weights)
        losses.append(model.history.history["loss"])
    assert losses[0] == losses[1]
