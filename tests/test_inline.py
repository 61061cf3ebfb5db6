"""Quick data are read without a thread, from the second pass on: the same batches, errors and results."""

import threading
import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tpufit
from tpufit.data import inline, stream
from tpufit.data.inline import InlineReader, ReadTimes

pytestmark = pytest.mark.cores(1)

X = np.random.default_rng(0).normal(size=(256, 4)).astype("float32")
Y = np.random.default_rng(1).integers(0, 3, 256)


class Batches:
    """16 batches a pass. Notes which threads have read them."""

    def __init__(self, seconds=0.0):
        self.seconds = seconds
        self.threads = []

    def __iter__(self):
        self.threads.append(threading.current_thread().name)
        for i in range(0, 256, 16):
            time.sleep(self.seconds)
            yield X[i : i + 16], Y[i : i + 16]


def fit(data, epochs=3, **options):
    torch.manual_seed(0)
    model = tpufit.Model(nn.Linear(4, 3))
    model.compile("sgd", "cross_entropy", metrics=["accuracy"])
    return model.fit(data, epochs=epochs, verbose=0, **options).history


@pytest.fixture
def generous(monkeypatch):
    """A machine that is busy with other things may take a millisecond for what is quick."""
    monkeypatch.setattr(inline, "_QUICK", 0.02)
    monkeypatch.setattr(inline, "_WAITS", 0.02)


def test_quick_data_are_read_by_the_loop_itself_from_the_second_pass_on(generous):
    quick, slow = Batches(), Batches(0.03)
    assert fit(quick) == fit(slow) == fit(DataLoader(TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)), 16))
    assert quick.threads == ["tpufit-prefetch", "MainThread", "MainThread"]
    assert slow.threads == ["tpufit-prefetch"] * 3


def test_data_that_have_become_slow_get_their_thread_back_for_good(generous):
    data = Batches()

    class Slower(tpufit.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            data.seconds = 0.03 if epoch == 1 else 0

    fit(data, 5, callbacks=[Slower()])
    assert data.threads == ["tpufit-prefetch", "MainThread", "tpufit-prefetch", "tpufit-prefetch", "tpufit-prefetch"]


def test_an_error_in_quick_data_is_raised_where_it_happened(generous):
    class Broken(Batches):
        def __iter__(self):
            yield from super().__iter__()
            if len(self.threads) == 2:
                raise ZeroDivisionError("row 256")

    with pytest.raises(ZeroDivisionError, match="row 256") as caught:
        fit(Broken())
    assert caught.traceback[-1].name == "__iter__"


@pytest.mark.parametrize(
    "data",
    [
        DataLoader(TensorDataset(torch.from_numpy(X)), 16, num_workers=1),
        (batch for batch in Batches()),
    ],
    ids=["workers", "iterator"],
)
def test_some_data_always_have_their_thread(data):
    source = stream(data)
    source.pace.note(ReadTimes(1000))
    assert not source.pace.quick
    goes_on = stream(X, Y, steps=3)
    goes_on.pace.note(ReadTimes(1000))
    assert not goes_on.pace.quick


def test_quick_is_measured_by_enough_batches():
    paces = [
        (1e-4, 1e-4, 20, True),
        (1e-3, 1e-4, 20, True),  # it had to wait for the other thread
        (1e-2, 1e-4, 20, False),  # for a disk
        (1e-3, 1e-3, 20, False),
        (1e-4, 1e-4, 3, False),
        (0, 0, 0, False),
    ]
    for busy, computed, batches, quick in paces:
        source = stream(X, Y)
        source.pace.note(ReadTimes(batches, busy=busy * batches, computed=computed * batches))
        assert source.pace.quick is quick


def test_it_closes_a_generator_and_counts():
    closed = []

    def batches():
        try:
            yield from range(5)
        finally:
            closed.append(1)

    with InlineReader(batches(), str) as feed:
        assert [next(feed), next(feed)] == ["0", "1"]
        with feed.paused():
            assert next(feed) == "2"
        times = feed.times
        assert times.batches == 3 and 0 <= times.waited <= times.busy == times.computed
    assert closed == [1]
    assert list(feed) == []


def test_a_stop_in_prepare_is_an_error():
    with (
        InlineReader([1], lambda batch: next(iter(()))) as feed,
        pytest.raises(RuntimeError, match="prepare raised Stop"),
    ):
        list(feed)
