"""Weights on disk: complete or absent, tied tensors stored once, nothing unpickled, and mismatches named."""

import json
import os
import pickle

import pytest
import safetensors
import torch
from torch import nn

import tpufit
from tpufit.checkpoint import read_weights, write_weights
from tpufit.errors import ArgumentError, WeightsError
from tpufit.runtime.driver import driver


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.b.weight = self.a.weight
        self.register_buffer("count", torch.tensor(7))


def test_weights_are_saved_with_ties_and_scalars(tmp_path):
    path = tmp_path / "new" / "folder" / "w.safetensors"
    first, second = tpufit.Model(Tied()), tpufit.Model(Tied())
    first.save_weights(path)
    second.load_weights(path)
    assert second.module.b.weight is second.module.a.weight
    for name, value in first.state_dict().items():
        assert torch.equal(second.state_dict()[name], value)
    with safetensors.safe_open(path, "pt") as file:  # all users can read it, and it contains the tied tensor once
        assert sorted(file.keys()) == ["a.bias", "a.weight", "b.bias", "count"]
        assert json.loads(file.metadata()["tied"]) == {"b.weight": "a.weight"}
    assert os.listdir(path.parent) == ["w.safetensors"]


def test_a_state_is_a_copy():
    model = tpufit.Model(Tied())
    state = model.state_dict()
    with torch.no_grad():
        model.module.a.bias.add_(1)
    assert not torch.equal(state["a.bias"], model.module.a.bias)


def test_a_failed_write_leaves_only_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "w.safetensors"
    write_weights(path, {"x": torch.ones(2)})

    def fail(*arguments):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        write_weights(path, {"x": torch.zeros(2)})
    assert torch.equal(read_weights(path)["x"], torch.ones(2))
    assert os.listdir(tmp_path) == ["w.safetensors"]


def test_killed_while_writing_leaves_the_old_file(run_python, tmp_path):
    code = """
    import os, signal, safetensors.torch, torch
    from tpufit.checkpoint import write_weights
    write_weights("w.safetensors", {"x": torch.ones(1000)})
    real = safetensors.torch.save_file
    def half(tensors, path, metadata):
        real(tensors, path, metadata)
        os.truncate(path, 100)
        os.kill(os.getpid(), signal.SIGKILL)
    safetensors.torch.save_file = half
    write_weights("w.safetensors", {"x": torch.zeros(1000)})
    """
    assert run_python(code).returncode == -9
    assert torch.equal(read_weights(tmp_path / "w.safetensors")["x"], torch.ones(1000))


class Canary:
    def __reduce__(self):
        return (os.mkdir, ("hatched",))


def test_nothing_is_unpickled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "w.safetensors").write_bytes(pickle.dumps(Canary()))
    with pytest.raises(WeightsError, match="not a safetensors file"):
        read_weights("w.safetensors")
    torch.save({"x": torch.ones(2)}, tmp_path / "t.safetensors")
    with pytest.raises(WeightsError, match="not a safetensors file"):
        read_weights("t.safetensors")
    assert not (tmp_path / "hatched").exists()


@pytest.mark.parametrize("name", ["w.pt", "w.h5", "w.weights.h5", "w.keras", "w"])
def test_other_formats_are_refused(tmp_path, name):
    model = tpufit.Model(nn.Linear(2, 2))
    for call in (model.save_weights, model.load_weights)[: 1 if name == "w.pt" else 2]:
        with pytest.raises(ArgumentError, match=r"a path ending in '\.safetensors'"):
            call(tmp_path / name)


def test_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="no weights at"):
        read_weights(tmp_path / "w.safetensors")


class Inner(nn.Module):
    """Its own names begin with a prefix that wrappers use."""

    def __init__(self):
        super().__init__()
        self.model = nn.Linear(3, 2)


@pytest.mark.parametrize("make", [lambda: nn.Linear(3, 2), Inner], ids=["plain", "inner"])
@pytest.mark.parametrize("prefix", ["", "module.", "model.", "_orig_mod.", "model._orig_mod.module."])
@pytest.mark.parametrize("place", [None, "state_dict", "model_state_dict", "model"])
def test_a_file_of_torch_save_is_loaded(tmp_path, make, prefix, place):
    net, model = make(), tpufit.Model(make())
    weights = {prefix + name: value for name, value in net.state_dict().items()}
    optimizer = torch.optim.Adam(net.parameters())
    whole = {"epoch": 3, "optimizer": optimizer.state_dict(), place: weights}
    torch.save(weights if place is None else whole, tmp_path / "w.ckpt")
    model.load_weights(tmp_path / "w.ckpt")
    for name, value in net.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"state_dict": {}, "hyper": Canary()}, r"contains an object, .*mkdir, that needs unpickling"),
        (nn.Linear(2, 2), r"Linear, that needs unpickling.*weights_only=False"),
        ({"net": {"weight": torch.ones(2, 2)}}, r"contains a dict of 'net': .*weights_only=True\)\[\.\.\.\]"),
        ([torch.ones(2)], r"contains a list: weights are tensors by name"),
        (b"no file of torch's", r"is not a file of torch.save, or it is damaged$"),
        (b"PK\x03\x04 half", r"is not a file of torch.save, or it is damaged"),
    ],
)
def test_a_file_of_torch_save_that_is_refused(tmp_path, monkeypatch, content, says):
    monkeypatch.chdir(tmp_path)
    if isinstance(content, bytes):
        (tmp_path / "w.pt").write_bytes(content)
    else:
        torch.save(content, tmp_path / "w.pt")
    model = tpufit.Model(nn.Linear(2, 2))
    before = model.state_dict()
    with pytest.raises(WeightsError, match=says):
        model.load_weights("w.pt")
    assert not (tmp_path / "hatched").exists()
    assert torch.equal(before["weight"], model.state_dict()["weight"])


def test_mismatches_are_named(tmp_path):
    path = tmp_path / "w.safetensors"
    model = tpufit.Model(nn.Linear(3, 2))
    write_weights(path, {"weight": torch.ones(2, 4), "scale": torch.ones(1)})
    with pytest.raises(WeightsError) as error:
        model.load_weights(path)
    message = str(error.value)
    assert "missing in the weights: bias" in message and "unknown to the module: scale" in message
    assert "weight: (2, 4) in the weights, (2, 3) in the module" in message
    before = model.state_dict()
    write_weights(path, {"weight": torch.ones(2, 4), "bias": torch.full((2,), 5.0)})
    with pytest.warns(UserWarning, match="of another shape"):
        model.load_weights(path, skip_mismatch=True)
    assert model.state_dict()["bias"].tolist() == [5.0, 5.0]
    assert torch.equal(model.state_dict()["weight"], before["weight"])


class TiedHead(nn.Module):
    """As a GPT whose last layer is its embedding."""

    def __init__(self):
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.body(self.embedding(x)))


def test_a_tie_that_cannot_be_kept(tmp_path):
    model, path = tpufit.Model(TiedHead()), tmp_path / "parted.safetensors"
    before = model.state_dict()
    parted = before | {"head.weight": before["head.weight"] + 1, "body.bias": torch.ones(3)}
    safetensors.torch.save_file({name: value.clone() for name, value in parted.items()}, path)
    says = "tied in the module, but with different values in the weights: embedding.weight and head.weight"
    for load in (lambda: model.load_weights(path), lambda: model.load_state_dict(parted)):
        with pytest.raises(WeightsError, match=says):
            load()
    with pytest.raises(WeightsError, match=says):
        model.set_weights([value.numpy() for value in parted.values()])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.warns(UserWarning, match=says):
        model.load_weights(path, skip_mismatch=True)
    after = model.state_dict()
    assert torch.equal(after["embedding.weight"], before["embedding.weight"])
    assert torch.equal(after["body.bias"], torch.ones(3))

    equal = {name: value.clone() for name, value in before.items()}  # two copies of one value keep the tie
    equal["embedding.weight"] = equal["head.weight"] = torch.full((5, 3), 2.0)
    model.load_state_dict({name: value.clone() for name, value in equal.items()})
    assert model.module.head.weight is model.module.embedding.weight
    assert torch.equal(model.state_dict()["head.weight"], torch.full((5, 3), 2.0))


def test_a_module_with_extra_state():
    class Odd(nn.Linear):
        def get_extra_state(self):
            return {"anything": object()}

    with pytest.raises(WeightsError, match="_extra_state"):
        tpufit.Model(Odd(2, 2)).state_dict()


@pytest.mark.cores(1, 8)
@pytest.mark.soak_on(1)
def test_torch_saves_after_a_fit_load_without_torch_xla(cores, tmp_path, run_python):
    model, x = tpufit.Model(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))), torch.ones(16, 3)
    model.compile("adam", "mse")
    model.fit(x, x, batch_size=2, verbose=0, cores=cores)
    state = model.module.state_dict()
    torch.save([state, model.optimizer.state_dict(), list(model.parameters())], tmp_path / "w.pt")
    assert {tensor.device.type for tensor in [*state.values(), *model.parameters()]} == {driver().device_type}
    result = run_python("""
        import sys; sys.modules["torch_xla"] = None
        import torch
        weights, optimizer, parameters = torch.load("w.pt")
        print({t.device.type for t in [*weights.values(), *parameters, optimizer["state"][0]["exp_avg"]]})
        print(parameters[0].requires_grad, *weights["0.weight"].flatten().tolist())
    """)
    assert result.returncode == 0, result.stderr
    devices, values = result.stdout.splitlines()
    assert devices == "{'cpu'}"
    assert values.split() == ["True", *map(str, model.state_dict()["0.weight"].flatten().tolist())]
