"""`EagerPlacement` on a device other than the host, e.g. a GPU, trains as on the host.

The device belongs to the installed runtime: PyTorch can't read its tensors on the host, or mix them with host
tensors. Steps run operation by operation, without tpufit's driver.
"""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from engines import engine_of
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import tpufit
from tpufit import runtime
from tpufit.backend import HOST, Cores, Sharding
from tpufit.backend.eager import EagerPlacement, EagerProgram, HostState
from tpufit.callbacks import ModelCheckpoint
from tpufit.errors import PlacementError
from tpufit.runtime.driver import driver
from tpufit.step import engine
from tpufit.step.precision import warn_of_emulation

pytestmark = pytest.mark.cores(1)

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 8)).astype("float32")
Y = RNG.integers(0, 3, 40)


@pytest.fixture
def device(cores, monkeypatch):
    runtime.start(cores, "test")
    there = EagerPlacement(torch.device(driver().device_type, 0))
    monkeypatch.setattr(engine, "make_placement", lambda cores, recorder: there)
    # If a test has run a backward pass on the host before the device existed, autograd has no thread for the device.
    with torch.autograd.set_multithreading_enabled(False):
        yield there


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3))
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.calls += 1
        return self.layers(x) * self.scale


def trained(run_eagerly, epochs=2, callbacks=None, resume=False, **arguments):
    """Return the history, the predictions, the weights and the model after a training, on the device or on the host."""
    torch.manual_seed(0)
    model = tpufit.Model(Net())
    given = {"optimizer": "adamw", "loss": "cross_entropy", "metrics": ["accuracy"], **arguments}
    model.compile(**given, run_eagerly=run_eagerly)
    history = model.fit(
        X, Y, batch_size=16, epochs=epochs, verbose=0, validation_data=(X, Y), callbacks=callbacks, resume=resume
    )
    weights = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    return history.history, model.predict(X, verbose=0), weights, model


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({}, id="adamw"),
        pytest.param(
            {"accumulate_steps": 2, "use_ema": True, "ema_momentum": 0.5}, id="averaged", marks=pytest.mark.soak
        ),
        pytest.param({"optimizer": "sgd", "global_clip_norm": 0.1}, id="clipped", marks=pytest.mark.slow),
    ],
)
def test_a_training_on_an_eager_device_equals_one_on_the_host(device, arguments):
    history, outputs, weights, model = trained(False, **arguments)
    expected, expected_outputs, expected_weights, _ = trained(True, **arguments)
    assert {p.device for p in model.module.parameters()} == {device.device} and weights["calls"] == 6
    for name, values in expected.items():
        assert history[name] == pytest.approx(values, abs=1e-5), name
    np.testing.assert_allclose(outputs, expected_outputs, rtol=0, atol=1e-5)
    for name, value in expected_weights.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-5)
    own = engine_of(model)
    assert type(own.roles["train"].program) is EagerProgram and type(own.state.device) is HostState


def test_autocast_uses_the_devices_dtype(device):
    dtypes = []

    class Look(tpufit.Model):
        def train_step(self, batch):
            dtypes.append((self(batch[0]).dtype, self.module.weight.dtype))
            return super().train_step(batch)

    model = Look(nn.Linear(8, 3))
    model.compile("sgd", "cross_entropy", precision="bf16")
    model.fit(X, Y, batch_size=40, verbose=0)
    assert dtypes == [(torch.bfloat16, torch.float32)]


def test_an_optimizers_counts_stay_where_its_step_reads_them(device):
    *_, model = trained(False, epochs=1)
    states = model.optimizer.state.values()
    assert {state["step"].device.type for state in states} == {"cpu"} and {s["step"].item() for s in states} == {3}
    assert {state["exp_avg"].device for state in states} == {device.device}


@pytest.mark.slow
def test_a_training_is_resumed(device, tmp_path):
    options = {"use_ema": True, "accumulate_steps": 2}
    _, expected, expected_weights, _ = trained(False, epochs=2, **options)
    trained(False, epochs=1, callbacks=[ModelCheckpoint(tmp_path / "run")], **options)
    _, outputs, weights, model = trained(
        False, epochs=2, callbacks=[ModelCheckpoint(tmp_path / "run")], resume=True, **options
    )
    assert {p.device for p in model.module.parameters()} == {device.device}
    np.testing.assert_array_equal(outputs, expected)
    assert all(torch.equal(weights[name], value) for name, value in expected_weights.items())
    model.to_cpu()
    assert {p.device.type for p in model.module.parameters()} == {"cpu"} and engine_of(model).state.placement == HOST


def test_host_data_are_moved_to_the_module_and_back(device):
    *_, model = trained(False, epochs=1)
    outputs = model(X)
    assert outputs.device.type == "cpu"
    np.testing.assert_allclose(outputs.detach(), model.predict(X, verbose=0), rtol=0, atol=1e-6)


def test_a_gpu_placement_doesnt_start_it():
    place = runtime.make_placement(Cores(1, 2, "CUDA", "test"))
    assert place == EagerPlacement(torch.device("cuda:2")) != HOST
    assert (place.eager, place.on_host, place.count, place.has_mesh) == (True, False, 1, False)
    assert str(Cores(1, 2, "CUDA", "test")) == "1 GPU (cuda:2)"


def test_only_rows_use_pinned_memory():
    place = EagerPlacement(torch.device("cuda:1"))
    with FakeTensorMode():  # tensors of a GPU that isn't there; it has no pinned memory
        weight, row = torch.empty(2), torch.empty(2)
        assert place.send([weight], [Sharding.WHOLE])[0].device == place.device
        with pytest.raises(AssertionError, match="_pin_memory"):
            place.send([row], [Sharding.ROWS])


@pytest.mark.runtime("torch_xla")  # PyTorch 2.13 can move them, PyTorch 2.9 can't
def test_weights_of_another_gpu_are_moved():
    place = EagerPlacement(torch.device("cuda:1"))
    with FakeTensorMode():
        runtime.move([torch.empty(2, device="cuda:1")], place)
        with pytest.raises(
            PlacementError, match="a tensor can't be moved to cuda:1. Delete .* PyTorch says: Creating a new"
        ):
            runtime.move([torch.empty(2, device="cuda:0")], place)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_gpu_without_bfloat16_is_an_error(monkeypatch, precision):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    warns = pytest.warns(UserWarning, match="Tesla T4 has no bfloat16 units") if precision == "bf16" else nullcontext()
    with warns:
        warn_of_emulation(precision, torch.device("cuda:0"))
