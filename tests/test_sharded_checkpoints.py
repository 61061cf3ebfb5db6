"""State that is split over the cores is saved tensor by tensor, and loaded on any number of cores."""

import weakref
from functools import partial

import pytest
import torch
from engines import engine_of
from safetensors.torch import load_file, save_file
from torch import nn, optim

import tpufit
from tpufit import runtime
from tpufit.callbacks import BackupAndRestore, Callback, ModelCheckpoint
from tpufit.checkpoint import AsyncCheckpointWriter, read
from tpufit.errors import CheckpointNotWrittenError
from tpufit.runtime import transfer
from tpufit.utils.files import write_one_by_one

X = torch.randn(128, 32, generator=torch.Generator().manual_seed(1))
Y = X[:, :8].argmax(1)
ADAMW = partial(optim.AdamW, lr=1e-3)


def compiled(shard, seed=0, **compiling):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(32, 512), nn.BatchNorm1d(512), nn.GELU(), nn.Linear(512, 300), nn.Linear(300, 8))
    net.add_module("tied", net[3])
    net.add_module("last", nn.Linear(300, 512, bias=False))
    net.last.weight = nn.Parameter(net.last.weight.detach().bfloat16())
    model = tpufit.Model(Tied(net))
    model.compile(ADAMW, "cross_entropy", metrics=["accuracy"], scale_lr=None, shard=shard, **compiling)
    return model


class Tied(nn.Module):
    """A layer with two names, and a weight of another dtype."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        y = self.net[3](self.net[2](self.net[1](self.net[0](x))))
        return self.net[4](y + 0.01 * (y @ self.net.last.weight.float().mT @ self.net.last.weight.float()))


def fit(model, cores, epochs=1, **options):
    torch.manual_seed(3)
    return model.fit(X, Y, 32 // cores, epochs, verbose=0, cores=cores, **options).history


def state_of(model):
    """Return everything that training changes, on the host."""
    tensors = dict(model.state_dict())
    names = {id(p): name for name, p in model.named_parameters()}
    model.write_back()
    for parameter, state in model.optimizer.state.items():
        tensors |= {f"{names[id(parameter)]}/{key}": runtime.to_host([v], "test")[0] for key, v in state.items()}
    for own in engine_of(model).state.optimizers.values():
        for part in own.kept:
            tensors |= {f"{type(part).__name__}/{i}": v for i, v in enumerate(runtime.to_host(part.tensors, "test"))}
    return tensors


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name].cpu()), name


@pytest.mark.cores(8)
def test_a_split_state_is_saved_and_loaded_bit_for_bit(cores, tmp_path):
    model = compiled("fsdp", use_ema=True, accumulate_steps=3)
    fit(model, cores)
    model.save(tmp_path / "split")
    expected = state_of(model)
    for shard in (None, "fsdp", {"net.0.weight": 1, "net.last.weight": 0}):
        again = compiled(shard, seed=1, use_ema=True, accumulate_steps=3)
        fit(again, cores)
        tpufit.checkpoint.restore(engine_of(again), read(tmp_path / "split"))
        assert_equal(expected, state_of(again))
        again.save(tmp_path / "again")
        for file in ("model.safetensors", "training.safetensors"):
            assert_equal(load_file(tmp_path / "split" / file), load_file(tmp_path / "again" / file))
    loaded = tpufit.load(tmp_path / "split", compiled(None, seed=1).module)  # on the host
    assert_equal(model.state_dict(), loaded.state_dict())


@pytest.mark.soak
@pytest.mark.cores(2, 4, 8)
@pytest.mark.parametrize(("before", "after"), [("fsdp", "fsdp"), ("fsdp", None), (None, "fsdp")])
def test_resuming_with_another_layout_changes_nothing(cores, tmp_path, before, after):
    whole = compiled(None)
    fit(whole, cores, epochs=2, callbacks=[ModelCheckpoint(tmp_path / "whole", save_freq=3)])
    first = compiled(before)
    with pytest.raises(KeyboardInterrupt):
        fit(first, cores, epochs=2, callbacks=[ModelCheckpoint(tmp_path / "run", save_freq=3), Stop(7)])
    second = compiled(after, seed=9)
    fit(second, cores, epochs=2, callbacks=[ModelCheckpoint(tmp_path / "run")], resume=True)
    assert second.steps_taken == whole.steps_taken == 8
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(second.state_dict()[name], value, rtol=1e-5, atol=1e-6)


class Stop(Callback):
    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, batch, logs=None):
        if self.model.steps_taken == self.step:
            raise KeyboardInterrupt


@pytest.mark.cores(8)
def test_a_backup_and_only_weights(cores, tmp_path):
    model = compiled("fsdp")
    fit(model, cores, callbacks=[BackupAndRestore(tmp_path / "backup", delete_checkpoint=False)])
    model.save_weights(tmp_path / "weights.safetensors", finite_only=True)
    fresh = compiled("fsdp", seed=4)
    fresh.load_weights(tmp_path / "weights.safetensors")
    assert_equal(model.state_dict(), fresh.state_dict())
    fit(fresh, cores)
    fresh.load_weights(tmp_path / "weights.safetensors")
    assert_equal(model.state_dict(), fresh.state_dict())


@pytest.mark.cores(8)
def test_only_a_part_is_on_the_host_at_once(cores, tmp_path, monkeypatch):
    monkeypatch.setattr(transfer, "AT_ONCE", 1 << 18)
    model = compiled("fsdp")
    fit(model, cores)
    held, most, real = {}, [0], transfer.to_host

    def noting(tensors, *args, **kwargs):
        values = real(tensors, *args, **kwargs)
        for value in values:
            key = id(value)
            held[key] = value.nbytes
            weakref.finalize(value, held.pop, key, None)
        most[0] = max(most[0], sum(held.values()))
        return values

    monkeypatch.setattr(transfer, "to_host", noting)
    before = runtime.counts()
    model.save(tmp_path / "a")
    size = sum(file.stat().st_size for file in (tmp_path / "a").iterdir())
    bound = 300 * 512 * 4  # the largest tensor
    assert 1 << 18 <= most[0] <= bound < size / 4
    assert not (runtime.counts() - before).graphs
    most[0] = 0
    model.save_weights(tmp_path / "weights.safetensors")
    assert most[0] <= bound


@pytest.mark.cores(8)
def test_weights_that_arent_finite_arent_saved(cores, tmp_path):
    model = compiled("fsdp")
    fit(model, cores)
    weights = model.state_dict()
    weights["net.0.weight"][0, 0] = float("nan")
    model.load_state_dict(weights)
    with pytest.raises(CheckpointNotWrittenError, match=r"net\.0\.weight has NaN"):
        model.save_weights(tmp_path / "weights.safetensors", finite_only=True)
    run = tpufit.checkpoint.CheckpointDirectory(tmp_path / "run")
    writer = AsyncCheckpointWriter(run)
    checkpoint = tpufit.checkpoint.take_checkpoint(engine_of(model), {})
    assert not checkpoint.is_on_host
    writer.submit(checkpoint)
    with pytest.raises(CheckpointNotWrittenError, match=r"net\.0\.weight has NaN"):
        writer.finish()
    assert not run.steps() and not (tmp_path / "weights.safetensors").exists()


BYTES = torch.arange(48, dtype=torch.uint8).view(3, 16)
EIGHT_BITS = ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"]


@pytest.mark.parametrize("dtype", ["complex64", "uint16", "uint32", "uint64", *EIGHT_BITS])
def test_rare_dtypes_are_written_as_by_safetensors(tmp_path, dtype):
    tensors = {"x": BYTES.view(getattr(torch, dtype))}
    write_one_by_one(tmp_path / "ours.safetensors", tensors, iter(tensors.values()), {"format": "pt"})
    save_file(tensors, tmp_path / "theirs.safetensors")
    ours, theirs = (load_file(tmp_path / f"{whose}.safetensors")["x"] for whose in ("ours", "theirs"))
    assert ours.dtype is theirs.dtype and ours.shape == theirs.shape
    assert ours.view(torch.uint8).equal(theirs.view(torch.uint8))
