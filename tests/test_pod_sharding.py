"""On a pod the parts of a split weight are on several hosts, and no host has the whole state."""

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from pods import Pod
from safetensors.torch import load_file

pytestmark = pytest.mark.soak

SHAPES = [
    pytest.param(shape, id=f"{shape[0]}x{shape[1]}{'-interleaved' * shape[2]}")
    for shape in ((2, 2, False), (4, 2, False), (2, 4, True))
]
CODE = """
import json, weakref
import torch
from torch import nn
from engines import engine_of
import tpufit
from tpufit import runtime
from tpufit.callbacks import ModelCheckpoint
from tpufit.runtime import transfer

torch.manual_seed(5)
X, Y = torch.randn(75, 32), torch.randint(0, 4, (75,))
me = tpufit.process_index()
transfer.AT_ONCE = 1 << 16

def compiled(seed=6, shard="fsdp", **arguments):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(32, 300), nn.BatchNorm1d(300), nn.ReLU(), nn.Linear(300, 256), nn.Linear(256, 4))
    model = tpufit.Model(net)
    model.compile("adamw", "cross_entropy", metrics=["accuracy"], shard=shard, use_ema=True, **arguments)
    return model

def fit(model, epochs=2, **arguments):
    torch.manual_seed(7)
    return model.fit(X, Y, 4, epochs, verbose=0, validation_data=(X[:13], Y[:13]), **arguments).history

told = {}
model = compiled()
told["history"] = fit(model, callbacks=[ModelCheckpoint("run", save_freq=2)])
told["split"] = len(engine_of(model).state.device.shardings)
told["evaluated"] = model.evaluate(X, Y, verbose=0)
rows = model.predict(X[:29], batch_size=4, verbose=0)
told["predicted"] = None if rows is None else rows.tolist()

held, most, real = {}, [0], transfer.to_host
def noting(tensors, *args, **kwargs):
    values = real(tensors, *args, **kwargs)
    for value in values:
        held[id(value)] = value.nbytes
        weakref.finalize(value, held.pop, id(value), None)
    most[0] = max(most[0], sum(held.values()))
    return values
transfer.to_host = noting
before = runtime.counts()
model.save("saved")
told["most"], told["state"] = most[0], sum(t.nbytes for t in engine_of(model).state.device.tensors)
model.save_weights("weights.safetensors")
transfer.to_host = real

whole = compiled(shard=None, seed=8)
told["resumed whole"] = fit(whole, epochs=3, resume="saved")
again = compiled(seed=9)
told["resumed"] = fit(again, epochs=3, callbacks=[ModelCheckpoint("run")], resume=True)
torch.save({name: value for name, value in again.state_dict().items()}, f"weights{me}.pt")
json.dump(told, open(f"told{me}", "w"))
"""


@cache
def results(hosts, cores, interleaved=False):
    folder = Path(mkdtemp(prefix="pod-sharding-"))
    ended = Pod(hosts, cores, folder, interleaved).run(CODE, timeout=500)
    assert [host.code for host in ended] == [0] * hosts, "\n".join(host.err[-3000:] for host in ended)
    return folder, [json.loads((folder / f"told{host}").read_text()) for host in range(hosts)]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_pod_with_split_weights_is_equal_to_one_host(shape):
    hosts, cores, interleaved = shape
    one_folder, (one,) = results(1, hosts * cores)
    folder, told = results(hosts, cores, interleaved)
    for host in told:
        assert host["split"] == one["split"] > 4
        for name in ("history", "evaluated", "resumed", "resumed whole"):
            assert host[name] == one[name], name
        assert host["predicted"] in (None, one["predicted"])
    assert told[0]["predicted"] is not None
    expected = torch.load(one_folder / "weights0.pt")
    for host in range(hosts):
        own = torch.load(folder / f"weights{host}.pt")
        assert all(torch.equal(own[name], value) for name, value in expected.items())


@pytest.mark.parametrize("shape", SHAPES)
def test_process_0_saves_the_whole_state(shape):
    hosts, cores, interleaved = shape
    one_folder, _ = results(1, hosts * cores)
    folder, told = results(hosts, cores, interleaved)
    for file in ("saved/model.safetensors", "saved/training.safetensors", "weights.safetensors"):
        one, other = load_file(one_folder / file), load_file(folder / file)
        assert one.keys() == other.keys()
        assert all(torch.equal(other[name], value) for name, value in one.items()), file
    largest = 300 * 256 * 4
    for host in told:
        assert host["most"] <= (1 << 16) + largest < host["state"] / 2
