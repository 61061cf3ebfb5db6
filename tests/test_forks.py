"""A forked process can't use its parent's device; workers that only read data work."""

import multiprocessing
import os
import select
import signal
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import tpufit
from tpufit.errors import ForkedError

pytestmark = [
    pytest.mark.cores(1, 8),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning"),
]

X = np.random.default_rng(0).random((16, 4)).astype("float32")
Y = X.sum(1, keepdims=True)


def trained(cores):
    model = tpufit.Model(nn.Linear(4, 1))
    model.compile("sgd", "mse")
    model.fit(X, Y, batch_size=8 // cores or 1, verbose=0, cores=cores)
    return model


def in_fork(call):
    """Call a function in a forked child, and return its error or result as text."""
    out, into = os.pipe()
    child = os.fork()
    if not child:
        try:
            said = str(call())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(into, said.encode())
        os._exit(0)
    os.close(into)
    if not select.select([out], [], [], 120)[0]:  # it hangs
        os.kill(child, signal.SIGKILL)
    with open(out) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


@pytest.mark.soak_on(8)
def test_each_use_of_the_device_in_a_fork_is_an_error(cores):
    model = trained(cores)
    weight = model.module.weight
    uses = (
        lambda: model.predict(X, verbose=0),
        lambda: model.fit(X, Y, verbose=0),
        lambda: model(X),
        model.state_dict,
        model.get_weights,
        lambda: trained(cores),
        lambda: tpufit.init(cores),
        weight.cpu,
        lambda: float(weight.sum()),
        lambda: repr(weight),
        lambda: torch.ones(3).to(weight.device),
        lambda: torch.equal(weight, weight),
        lambda: torch.nonzero(weight.detach()),
        lambda: torch.empty(1, 4).copy_(weight.detach()),
    )
    ours = "ForkedError: this process was forked after the device had been started"
    torch_tpus = "cannot access or re-initialize TPU in a forked subprocess"
    for use in uses:
        said = in_fork(use)
        assert said.startswith(ours) or torch_tpus in said, said
    assert in_fork(lambda: X.sum() == X.sum()) == "True"
    assert model.predict(X, verbose=0).shape == (16, 1)


def test_a_fork_prints_nothing(cores, capfd, monkeypatch):
    trained(cores)
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)  # pytest's own prints nothing in a fork
    capfd.readouterr()
    assert in_fork(lambda: "done") == "done"
    assert capfd.readouterr() == ("", "")


@pytest.mark.soak
def test_a_fork_ends_with_its_own_exit_status(cores, run_python):
    ended = run_python(
        f"""
        import os, sys, warnings
        import torch, tpufit
        warnings.simplefilter("ignore")
        model = tpufit.Model(torch.nn.Linear(4, 1))
        model.compile("sgd", "mse")
        model.fit(torch.ones(8, 4), torch.ones(8, 1), verbose=0, cores={cores})
        child = os.fork()
        if not child:
            sys.exit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """
    )
    assert ended.stdout.split() == ["7"], ended.stderr


def predicted(model, queue):
    try:
        queue.put(model.predict(X, verbose=0))
    except ForkedError as error:
        queue.put(str(error))


@pytest.mark.soak
def test_a_forked_multiprocessing_process_is_refused(cores):
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=predicted, args=(trained(cores), queue))
    process.start()
    assert "get_context('spawn')" in queue.get()
    process.join(120)
    assert process.exitcode == 0


class Rows(Dataset):
    def __init__(self, model=None, weight=None):
        self.model = model
        self.weight = weight

    def __len__(self):
        return 16

    def __getitem__(self, i):
        if self.model is not None:
            return X[i], self.model.predict(X[i : i + 1], verbose=0)[0]
        return X[i], Y[i] if self.weight is None else Y[i] * self.weight.cpu().sum().item()


@pytest.mark.soak
def test_workers_can_read_but_cannot_use_the_device(cores):
    model = trained(cores)
    before = model.get_weights()[0]
    for rows in (Rows(model), Rows(weight=model.module.weight)):
        loader = DataLoader(rows, batch_size=4, num_workers=1, multiprocessing_context="fork")
        with pytest.raises(ForkedError, match="Caught ForkedError in DataLoader worker process 0"):
            model.fit(loader, verbose=0)
    np.testing.assert_array_equal(model.get_weights()[0], before)
    loader = DataLoader(Rows(), batch_size=4, num_workers=2, multiprocessing_context="fork")
    assert len(model.fit(loader, epochs=2, verbose=0).history["loss"]) == 2
