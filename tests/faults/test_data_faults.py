"""Samples that stop never end an epoch quietly, and every row counts on any number of cores."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import tpufit
from tpufit.errors import DataError

pytestmark = pytest.mark.cores(1, 8, timeout=300, quick=False)

X = np.random.default_rng(0).normal(size=(60, 4)).astype("float32")
Y = np.arange(60) % 3


def compiled():
    torch.manual_seed(0)
    model = tpufit.Model(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))
    model.compile("adam", "cross_entropy", scale_lr=None)
    return model


class Rows(Dataset):
    """Calls `fault` for one sample."""

    def __init__(self, fault):
        self.fault = fault

    def __len__(self):
        return 60

    def __getitem__(self, i):
        if i == 40:
            self.fault()
        return X[i], Y[i]


def stops():
    raise StopIteration


def overruns():
    raise IndexError("row 40 of 30")


@pytest.mark.parametrize("fault", [stops, overruns])
@pytest.mark.parametrize("workers", [None, 0, 2])
def test_a_fault_of_a_sample_never_ends_an_epoch_quietly(cores, fault, workers):
    rows = Rows(fault)
    data = (rows, None, 8 // cores) if workers is None else (DataLoader(rows, 8 // cores, num_workers=workers),)
    with pytest.raises((DataError, RuntimeError, IndexError), match="StopIteration|row 40 of 30"):
        compiled().fit(*data, epochs=2, verbose=0, cores=cores)


def test_60_rows_are_the_same_on_any_number_of_cores(cores):
    """On 8 cores each has 7 or 8 of them. Compared with plain PyTorch, which has no cores."""
    model = compiled()
    history = model.fit([(torch.from_numpy(X), torch.from_numpy(Y))], epochs=6, verbose=0, cores=cores).history
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer, losses = torch.optim.Adam(plain.parameters()), []
    for _ in range(6):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(plain(torch.from_numpy(X)), torch.from_numpy(Y))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert history["loss"] == pytest.approx(losses, abs=1e-6)
