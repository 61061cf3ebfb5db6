"""`fit` may be told to take fewer batches, or less time."""

import time
from datetime import timedelta

import numpy as np
import pytest
from torch import nn

import tpufit
from tpufit.callbacks import Callback
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
def test_so_many_batches_of_each_epoch_and_validation(limit, batches):
    _, count = fit(limit=limit, epochs=2)
    assert count.train == count.test == [*range(batches)] * 2


def test_each_epoch_has_other_rows():
    data = tpufit.data.stream(X, Y, batch_size=16, shuffle=True)
    data.limit(2)
    first, second = (np.concatenate([x.numpy() for x, _ in data.epoch(epoch)]) for epoch in range(2))
    assert len(first) == len(second) == 32 and not np.array_equal(first, second)


@pytest.mark.parametrize("max_time", [0.5, timedelta(milliseconds=500)])
def test_it_ends_after_the_batch_under_way(max_time):
    model, count = fit(count=Count(0.1), max_time=max_time, epochs=100)
    assert model.out_of_time
    assert 1 <= len(count.train) < 10 and count.train == [*range(len(count.train))]
    model.fit(X, Y, 16, verbose=0, callbacks=[again := Count()])
    assert len(again.train) == 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit": 0}, "a number of batches from 1, or a share such as 0.1, got 0"),
        ({"limit": 1.5}, "a share such as 0.1, got 1.5"),
        ({"max_time": 0}, "a number of seconds above 0 or a timedelta, got 0"),
    ],
)
def test_wrong_limits(options, message):
    with pytest.raises(ArgumentError, match=message):
        fit(**options)


def test_a_share_of_data_of_unknown_length():
    with pytest.raises(ArgumentError, match="doesn't say how many batches it has"):
        fit(data=((batch for batch in [(X, Y)]),), limit=0.5)


@pytest.mark.filterwarnings("ignore:x ran out of data")
def test_an_epoch_of_so_many_steps_ends_with_the_data():
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


def test_an_empty_dict_of_class_weights_weighs_nothing():
    losses = []
    for weights in (None, {}):
        tpufit.set_random_seed(0)
        model, _ = fit(class_weight=weights)
        losses.append(model.history.history["loss"])
    assert losses[0] == losses[1]
