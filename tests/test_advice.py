"""The share of time in which the device waits for data is measured, shown and explained."""

import sys
import threading
import time

import numpy as np
import pytest
from torch import nn

import tpufit
from tpufit.callbacks import Callback
from tpufit.data import inline_reader, prefetch
from tpufit.diagnostics import messages as advice
from tpufit.trainer import loop

pytestmark = pytest.mark.cores(1)


@pytest.fixture
def now(monkeypatch):
    """The time, in a list: it passes only when a test adds to it."""
    time = [0.0]
    for module in (inline_reader, loop, prefetch):
        monkeypatch.setattr(module, "perf_counter", lambda: time[0])
    return time


class Slow:
    """Batches that take some time, which begins when `fit` waits for them."""

    def __init__(self, now, seconds):
        self.now, self.seconds = now, seconds

    def __iter__(self):
        fit = threading.main_thread().ident
        for _ in range(4):
            while sys._current_frames()[fit].f_code is not prefetch.Prefetcher._get.__code__:
                time.sleep(0.001)
            self.now[0] += self.seconds
            yield np.zeros((8, 3), "float32"), np.zeros(8, "int64")


class Shares(Callback):
    def __init__(self):
        self.shares = []

    def on_epoch_end(self, epoch, logs=None):
        self.shares.append(self.model.input_bound)


def test_slow_data_are_measured_and_reported_once(cores, capsys, now):
    model = tpufit.Model(nn.Linear(3, 2))
    model.compile("sgd", "cross_entropy")
    assert model.input_bound is None
    shares = Shares()
    with pytest.warns(UserWarning, match="waited for data .*% of the epoch.*num_workers.*CachedDataset") as said:
        model.fit(Slow(now, 0.5), epochs=3, verbose=2, callbacks=[shares], cores=cores)
    assert len([w for w in said if "waited for data" in str(w.message)]) == 1
    assert shares.shares[2] == model.input_bound and all(share > 0.5 for share in shares.shares[1:])
    assert f"waited for data: {model.input_bound:.0%}" in capsys.readouterr().out


def test_data_that_are_ready_are_not_waited_for(cores, now):
    class Busy(Callback):
        def on_train_batch_begin(self, batch, logs=None):
            now[0] += 1.0

    model = tpufit.Model(nn.Linear(3, 2))
    model.compile("sgd", "cross_entropy")
    model.fit(np.zeros((32, 3), "float32"), np.zeros(32, "int64"), verbose=0, cores=cores, callbacks=Busy())
    assert model.input_bound == 0


def test_advice_needs_a_wait_of_a_fifth_of_the_time_and_one_second():
    assert advice.report_waiting(0.9, 1.0) is None and advice.report_waiting(1.1, 10.0) is None
    assert "30% of the epoch" in advice.report_waiting(3.0, 10.0)
