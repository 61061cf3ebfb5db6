"""`fit(batch_size="auto")` finds the largest batch that fits, by trial or by the TPU's compiler."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import tpufit
from tpufit.errors import ArgumentError, OutOfMemoryError
from tpufit.preflight.tpu_slices import find_slice_of_chips
from tpufit.trainer.auto_batch_size import find_largest
from tpufit.utils import hardware, releases
from tpufit.utils.hardware import CHIPS, GENERATIONS

X = np.random.default_rng(0).normal(size=(640, 4)).astype("float32")
Y = X[:, :3].copy()
OF_2_8 = releases.parse_release(releases.find_version("torch_xla")) == "2.8"


class Limited(nn.Module):
    """Allocates 24 terabytes if a batch has too many rows."""

    def __init__(self, most, further=1):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.drop, self.most = nn.Linear(4, 3), nn.Dropout(0.2), most
        self.further = nn.Parameter(torch.rand(further))

    def forward(self, x):
        y = self.drop(self.layer(x)) + self.further.mean()
        if self.training and len(x) > self.most:
            y = y + (torch.ones(10**12, device=x.device) * y.sum().detach()).cumsum(0).sort()[0][:1]
        return y


def made(module, **options):
    model = tpufit.Model(module)
    model.compile("adam", "mse", scale_lr=None, **options)
    return model


def fit(model, cores, batch_size, **how):
    tpufit.set_random_seed(0)
    history = model.fit(X, Y, batch_size, 2, cores=cores, **{"verbose": 0, **how}).history
    return history, model.state_dict()


@pytest.fixture
def memory_is_known(monkeypatch):
    """Pretend that the memory is known, as on a TPU."""
    import torch_xla.core.xla_model as xm

    monkeypatch.setattr(xm, "get_memory_info", lambda device: {"bytes_limit": 16 << 30, "bytes_used": 0})


def test_the_largest_size():
    for fitting in range(1, 200):
        for most in (1, 20, 32, 33, 64, 1000):
            found, tried = find_largest(lambda size, fitting=fitting: size <= fitting, most)
            assert found <= min(fitting, most) and len(tried) == len(set(tried)) <= 12
            assert found + max(1, found // 8) >= min(fitting, most)
    assert find_largest(lambda size: False, 100) == (None, [32, 16, 8, 4, 2, 1])


class Rows(IterableDataset):
    def __iter__(self):
        return iter(zip(X, Y, strict=True))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (DataLoader(TensorDataset(torch.ones(4, 4), torch.ones(4, 3)), batch_size=2), "DataLoader has batches already"),
        ([(X[:8], Y[:8])], "list has batches already"),
        (Rows(), "Rows is an IterableDataset"),
    ],
)
def test_batched_data_are_refused_before_the_start(data, message):
    with pytest.raises(ArgumentError, match=f"needs arrays or a map-style dataset: this {message}"):
        made(nn.Linear(4, 3)).fit(data, batch_size="auto")


@pytest.mark.cores(1, 8)
def test_auto_is_the_default_size_on_a_cpu(cores, capsys):
    model = made(nn.Linear(4, 3))
    history, _ = fit(model, cores, "auto", verbose=2)
    said = capsys.readouterr().out
    assert "batch_size='auto': 32 rows per core, the default, because only a TPU reports its memory\n" in said
    assert f"batch 32 x {cores}" in said and "batch size" in str(model.report())
    assert len(history["loss"]) == 2 and model.steps_taken == 2 * (640 // (32 * cores) + (640 % (32 * cores) > 0))
    with pytest.raises(ArgumentError, match="batch_size must be"):
        fit(model, cores, "large")
    for method in (model.lr_find, model.batches):
        with pytest.raises(ArgumentError, match="'global', got 'auto', which only fit and preflight take"):
            method(X, Y, batch_size="auto", cores=cores)


@pytest.mark.slow
@pytest.mark.skipif(OF_2_8, reason="torch_xla 2.8 ends the process where memory is full")
@pytest.mark.cores(1, 8, quick=False)
@pytest.mark.parametrize("further", [1, pytest.param(1 << 21, id="lost", marks=pytest.mark.soak)])
def test_auto_tries_sizes_without_a_compiler(cores, further, memory_is_known, capsys):
    """Also with a state so large that a failed step consumes it."""
    model = made(Limited(40 * cores, further))
    model.module.eval()  # a prediction may leave the net in eval mode; the trial trains anyway
    before = model.get_weights()
    model.fit(X, Y, "auto", 0, cores=cores, verbose=2)
    said = capsys.readouterr().out
    assert "40 rows per core, the largest tried size that fits (32, 64, 48, 40, 44)" in said
    assert model.steps_taken == 0 and all(map(np.array_equal, before, model.get_weights()))
    assert "the largest tried size that fits" in str(model.report())
    found = fit(model, cores, "auto")
    expected = fit(made(Limited(10**9, further)), cores, 40)
    assert found[0] == expected[0] and all(torch.equal(found[1][name], value) for name, value in expected[1].items())

    model.module.most = 0
    with pytest.raises(OutOfMemoryError, match="not even one row per core fits: the device has no room"):
        model.fit(X, Y, "auto", verbose=0)
    assert all(torch.equal(expected[1][name], value) for name, value in model.state_dict().items())


def test_the_slice_of_a_hosts_chips():
    assert find_slice_of_chips([GENERATIONS["v5e"]] * 4, 8, 1).name == "v5e-8"  # of two hosts
    assert find_slice_of_chips([GENERATIONS["v6e"]], 1, 1).name == "v6e-1"
    old = [CHIPS["0x0027"]] * 4
    assert (find_slice_of_chips(old, 8, 8 << 30).name, find_slice_of_chips(old, 8, 15 << 30).name) == ("v2-8", "v3-8")
    assert find_slice_of_chips([CHIPS["0x0076"]] * 4, 8, 1).name == "v7x-8"
    assert find_slice_of_chips([], 1, 1) is None and find_slice_of_chips(old, 3, 1) is None


@pytest.mark.soak
@pytest.mark.cores(1)
def test_auto_compiles_sizes_with_a_compiler(cores, memory_is_known, monkeypatch, capsys):
    pytest.importorskip("libtpu")
    monkeypatch.setattr(hardware, "find_chips", lambda: [GENERATIONS["v5e"]])
    model = made(nn.Linear(4, 3))
    fit(model, cores, "auto", verbose=2)
    said = capsys.readouterr().out
    assert "640 rows per core, the most that fit according to the TPU's compiler" in said and model.steps_taken == 2
