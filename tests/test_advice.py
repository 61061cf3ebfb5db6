"""The share of time in which the device waits for data is measured, shown and explained."""

import time

import numpy as np
import pytest
from torch import nn

import tpufit
from tpufit.callbacks import Callback
from tpufit.diagnostics import messages as advice

pytestmark = pytest.mark.cores(1)


def slow(seconds, count=4):
    for _ in range(count):
        time.sleep(seconds)
        yield np.zeros((8, 3), "float32"), np.zeros(8, "int64")


class Slow:
    def __init__(self, seconds):
        self.seconds = seconds

    def __iter__(self):
        return slow(self.seconds)


class Shares(Callback):
    def __init__(self):
        self.shares = []

    def on_epoch_end(self, epoch, logs=None):
        self.shares.append(self.model.input_bound)


def test_slow_data_are_measured_and_reported_once(cores, capsys):
    model = tpufit.Model(nn.Linear(3, 2))
    model.compile("sgd", "cross_entropy")
    assert model.input_bound is None
    shares = Shares()
    with pytest.warns(UserWarning, match="waited for data .*% of the epoch.*num_workers.*CachedDataset") as said:
        model.fit(Slow(0.5), epochs=3, verbose=2, callbacks=[shares], cores=cores)
    assert len([w for w in said if "waited for data" in str(w.message)]) == 1
    assert shares.shares[2] == model.input_bound and all(share > 0.5 for share in shares.shares[1:])
    assert f"waited for data: {model.input_bound:.0%}" in capsys.readouterr().out


def test_data_that_are_ready_are_not_waited_for(cores):
    x, y = np.zeros((4000, 3), "float32"), np.zeros(4000, "int64")
    model = tpufit.Model(nn.Sequential(nn.Linear(3, 800), nn.Linear(800, 800), nn.Linear(800, 2)))
    model.compile("sgd", "cross_entropy")
    model.fit(x, y, batch_size=400, epochs=3, verbose=0, cores=cores)  # large steps over small batches
    assert model.input_bound < 0.5


def test_advice_begins_at_a_fifth_and_a_second():
    assert advice.report_waiting(0.9, 1.0) is None and advice.report_waiting(1.1, 10.0) is None
    assert "30% of the epoch" in advice.report_waiting(3.0, 10.0)
