"""Rows in memory are read without a thread, and fast data from the second pass on, with the same results."""

import threading
import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tpufit
from tpufit.data import inline_reader, stream
from tpufit.data.inline_reader import InlineReader, ReadTimes
from tpufit.data.sampling import permute_rows

pytestmark = pytest.mark.cores(1)

X = np.random.default_rng(0).normal(size=(256, 4)).astype("float32")
Y = np.random.default_rng(1).integers(0, 3, 256)


class Batches:
    """16 batches in each pass. Records the threads that read them."""

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
def quick(monkeypatch):
    """Make all data fast on any machine, or with `quick(False)` only the data that are."""

    def decide(all_are=True):
        monkeypatch.setattr(inline_reader, "_MOST_COMPUTED", 1e9 if all_are else 1.5)
        monkeypatch.setattr(inline_reader, "_MOST_WAITED", 1e9 if all_are else 1.0)

    decide()
    return decide


def test_fast_data_are_read_in_the_loop_from_the_second_pass(quick):
    data, slow = Batches(), Batches(0.03)
    assert fit(data) == fit(DataLoader(TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)), 16))
    assert data.threads == ["tpufit-prefetch", "MainThread", "MainThread"]
    quick(False)
    assert fit(slow) == fit(data)
    assert slow.threads == ["tpufit-prefetch"] * 3


def test_data_that_become_slow_are_read_in_a_thread_again(quick):
    data = Batches()

    class Slower(tpufit.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            data.seconds = 0.03 if epoch == 1 else 0
            quick(epoch != 1)

    fit(data, 5, callbacks=[Slower()])
    assert data.threads == ["tpufit-prefetch", "MainThread", "tpufit-prefetch", "tpufit-prefetch", "tpufit-prefetch"]


def test_an_error_in_quick_data_is_raised_where_it_happened(quick):
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
def test_some_data_are_always_read_in_a_thread(data):
    pace = stream(data).pace
    pace.note(ReadTimes(1000), 1.0)
    assert not pace.inline and pace.passed


def test_rows_in_memory_never_have_a_thread(tmp_path):
    X.tofile(tmp_path / "x")
    mapped = np.memmap(tmp_path / "x", "float32", "r", shape=X.shape)
    rows = {"x": stream(X, Y), "set": stream(TensorDataset(torch.from_numpy(X))), "on": stream(X, Y, steps=3)}
    for source in rows.values():
        source.pace.note(ReadTimes(1000, busy=9.0), 1.0)
    assert all(source.pace.inline for source in rows.values())
    assert not stream(mapped, Y).pace.inline


@pytest.mark.parametrize(
    ("times", "inline"),
    [
        (ReadTimes(20, busy=1.4, computed=1.4), True),
        (ReadTimes(20, busy=1.9, computed=1.0), True),  # it had to wait for the other thread
        (ReadTimes(20, busy=2.1, computed=1.0), False),  # for a disk
        (ReadTimes(20, busy=1.6, computed=1.6), False),
        (ReadTimes(3, busy=1.0, computed=1.0), False),
        (ReadTimes(), False),
    ],
)
def test_data_are_read_inline_if_they_take_little_of_the_loops_time(times, inline):
    pace = stream([(X, Y)]).pace
    pace.note(times, 1.0)
    assert pace.inline is inline


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64])
def test_shuffled_rows_follow_the_order(dtype):
    rows = (torch.arange(60).reshape(20, 3) % 7).to(dtype).T.contiguous().T  # not contiguous
    ((found,),) = stream(rows, batch_size=20, shuffle=True, seed=1).epoch(2)
    assert torch.equal(found, rows[permute_rows(20, seed=1, epoch=2)])


def test_an_inline_reader_closes_a_generator_and_counts_batches():
    closed = []

    def batches():
        try:
            yield from range(5)
        finally:
            closed.append(1)

    with InlineReader(batches(), str) as feed:
        assert [next(feed), next(feed)] == ["0", "1"]
        with feed.pausing():
            assert next(feed) == "2"
        times = feed.times
        assert times.batches == 3 and 0 <= times.waited <= times.busy and times.computed > 0
    assert closed == [1]
    assert list(feed) == []


def test_stop_iteration_in_prepare_is_an_error():
    with (
        InlineReader([1], lambda batch: next(iter(()))) as feed,
        pytest.raises(RuntimeError, match="prepare raised Stop"),
    ):
        list(feed)
