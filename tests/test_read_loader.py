"""Loader workers beside the runtime's threads: they start, return all rows, and their faults are named."""

import importlib.util
import multiprocessing.resource_sharer
import os
import signal
import time
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import tpufit
from tpufit.callbacks import Callback
from tpufit.errors import DataError

pytestmark = [
    pytest.mark.soak_on(8),
    pytest.mark.cores(1, 8, timeout=600, quick=False),
    # This message is right: each of these short epochs waits for workers to start; test_advice.py tests it.
    pytest.mark.filterwarnings("ignore:the device waited for data"),
]


class Points(Dataset):
    """Points in two classes; `fault` is called with the number of each sample, in the worker."""

    def __init__(self, fault=None):
        self.fault = fault

    def __len__(self):
        return 70

    def __getitem__(self, i):
        if self.fault is not None:
            self.fault(i)
        return np.array([i % 2, i / 70], dtype="float32"), i % 2


def killed(i):
    if i == 40:
        os.kill(os.getpid(), signal.SIGKILL)


def hanging(i):
    if i == 40:
        time.sleep(600)


def raising(i):
    if i == 40:
        raise ValueError("sample 40 is broken")


def interrupted(i):
    os.kill(os.getpid(), signal.SIGINT)


def compiled():
    torch.manual_seed(0)
    model = tpufit.Model(nn.Linear(2, 2))
    model.compile("sgd", "cross_entropy", metrics=["accuracy"], scale_lr=None)
    return model


def train(cores, epochs=2, fault=None, model=None, **loading):
    model = compiled() if model is None else model
    loader = DataLoader(Points(fault), batch_size=16 // cores, **loading)
    history = model.fit(loader, validation_data=loader, epochs=epochs, verbose=0, cores=cores)
    return model, history.history


@pytest.mark.parametrize("context", [None, pytest.param("forkserver", marks=pytest.mark.soak)])
@pytest.mark.parametrize("persistent", [False, True])
def test_two_workers(cores, context, persistent):
    expected = train(cores)[1]
    how = {"num_workers": 2, "multiprocessing_context": context, "persistent_workers": persistent}
    assert train(cores, **how)[1] == expected


@pytest.mark.soak_on(8)
def test_ctrl_c_is_left_to_the_parent(cores):
    expected = train(cores, epochs=1)[1]
    assert train(cores, epochs=1, fault=interrupted, num_workers=1)[1] == expected
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


@pytest.mark.soak
def test_workers_are_forked_repeatedly_during_computation(cores):
    _, history = train(cores, epochs=12, num_workers=2)
    assert len(history["loss"]) == 12


def test_forking_gives_no_warning(cores):
    if importlib.util.find_spec("jax"):
        import jax

        jax.config.update("jax_platforms", "cpu")
        jax.devices()  # from here on it warns of forks
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "the device waited for data")
        train(cores, epochs=1, num_workers=1)  # PyTorch warns of more workers on a machine with one core


@pytest.mark.soak_on(8)
def test_a_killed_worker_is_named(cores):
    model = compiled()
    with pytest.raises(DataError, match=r"worker \d \(pid \d+, killed by signal 9\) of the DataLoader ended.*memory"):
        train(cores, fault=killed, model=model, num_workers=2)
    assert np.isfinite(model.get_weights()[0]).all()  # the device still answers
    assert len(train(cores)[1]["loss"]) == 2  # the process continues


@pytest.mark.soak_on(8)
def test_a_worker_that_dies_while_its_batch_is_fetched_is_named(cores, monkeypatch):
    def fetched_too_late(file):
        for worker in multiprocessing.active_children():
            worker.kill()
        raise ConnectionResetError("Connection reset by peer")

    monkeypatch.setattr(multiprocessing.resource_sharer.DupFd, "detach", fetched_too_late)
    with pytest.raises(DataError, match=r"worker 0 \(pid \d+, killed by signal 9\) of the DataLoader ended"):
        train(cores, num_workers=1)


class DeathInABatch(Callback):
    """Lets the only worker die in the middle of its hook, and PyTorch's handler of SIGCHLD run there."""

    def __init__(self, allowed):
        self.allowed = allowed

    def on_train_batch_end(self, batch, logs=None):
        self.allowed.touch()
        while os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            time.sleep(0.001)  # the worker is seen before the loader checks for it, every 5 s
        signal.raise_signal(signal.SIGCHLD)


@pytest.mark.soak
def test_a_dead_worker_doesnt_interrupt_a_callback(cores, tmp_path):
    list(DataLoader(Points(), num_workers=1))  # in the main thread, where PyTorch sets its handler
    handler, allowed = signal.getsignal(signal.SIGCHLD), tmp_path / "allowed"
    assert "signal_handling" in handler.__module__

    def killed_when_allowed(i):
        while i == 40 and not allowed.exists():
            time.sleep(0.001)
        killed(i)

    model = tpufit.Model(nn.Linear(2, 2))
    model.compile("sgd", "cross_entropy")
    loader = DataLoader(Points(killed_when_allowed), batch_size=16 // cores, num_workers=1)
    with pytest.raises(DataError, match="killed by signal 9"):
        model.fit(loader, callbacks=[DeathInABatch(allowed)], verbose=0, cores=cores)
    assert signal.getsignal(signal.SIGCHLD) is handler


def test_an_error_ends_its_workers(cores):
    with pytest.raises(ValueError, match="sample 40 is broken"):
        train(cores, fault=raising, num_workers=2)
    assert not multiprocessing.active_children()  # while pytest references the error, and with it the loader's iterator


def test_checking_validation_data_reads_one_batch(cores, tmp_path):
    def noted(i):
        (tmp_path / str(i)).touch()

    model = tpufit.Model(nn.Linear(2, 2))
    model.compile("sgd", "cross_entropy")
    held_out = DataLoader(Points(noted), batch_size=4, num_workers=2)
    model.fit(DataLoader(Points(), batch_size=4), validation_data=held_out, validation_freq=2, verbose=0, cores=cores)
    assert {int(file.name) for file in tmp_path.iterdir()} == {0, 1, 2, 3}


@pytest.mark.soak_on(8)
def test_a_hanging_worker_is_named(cores):
    with pytest.raises(DataError, match=r"worker \d .pid \d+. of the DataLoader returned nothing for 3 s.*batch \d"):
        train(cores, fault=hanging, num_workers=2, timeout=3)
    assert len(train(cores)[1]["loss"]) == 2


@pytest.mark.parametrize("workers", [0, 2])
def test_an_exception_keeps_its_type_and_line(cores, workers):
    with pytest.raises(ValueError, match="sample 40 is broken") as error:
        train(cores, fault=raising, num_workers=workers)
    assert ("worker process" in str(error.value)) == bool(workers)
    assert len(train(cores)[1]["loss"]) == 2
