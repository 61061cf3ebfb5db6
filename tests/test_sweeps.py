"""Many trainings of one architecture in one process: later trainings compile nothing, and leave nothing behind."""

import gc

import pytest
import torch
from torch import nn

import tpufit
from tpufit import runtime

X = torch.randn(32, 6, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)


def trial(number, cores):
    """Train a new net with its own rate, decay and seed. Return the cost, and the losses."""
    tpufit.set_random_seed(number)
    model = tpufit.Model(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 1)))
    # No decay equals another number of the step, e.g. the dropout's: XLA would merge both into one.
    rate, decay = 1e-3 * (number + 1), 0.0103 * (number + 1)
    model.compile(lambda parameters: torch.optim.AdamW(parameters, rate, weight_decay=decay), "mse")
    before = runtime.counts()
    how = {"validation_data": (X, Y), "verbose": 0, "cores": cores}
    history = model.fit(X, Y, 8 // cores, 2, **how).history
    return runtime.counts() - before, history["loss"]


@pytest.mark.cores(1, 8)
@pytest.mark.runtime("torch_xla")  # in TorchTPU's graphs a weight decay is a constant
def test_another_rate_decay_and_seed_compile_nothing(cores):
    _, first = trial(0, cores)
    for number in (1, 2):
        counts, losses = trial(number, cores)
        assert not counts.graphs and not counts.compiled and not counts.fallbacks
        assert losses != first


@pytest.mark.soak
@pytest.mark.cores(1, 8)
def test_fifty_trials_leave_nothing_behind(cores):
    def find_alive():
        gc.collect()
        return [one for one in gc.get_objects() if isinstance(one, (torch.Tensor, nn.Module, tpufit.Model))]

    others = find_alive()  # of other tests; kept, so that no new object gets the id of one of them
    known = set(map(id, others))

    def alive():
        return sum(id(one) not in known for one in find_alive())

    for number in range(3):
        trial(number, cores)
    before = alive()
    for number in range(50):
        counts, _ = trial(number, cores)
        assert not counts.compiled
    assert alive() <= before
