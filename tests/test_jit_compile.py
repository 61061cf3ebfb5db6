"""`compile(jit_compile=True)` on a GPU, where `torch.compile` compiles the module. The CPU acts as the GPU."""

import shutil
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import tpufit
from tpufit.backend import Sharding
from tpufit.backend.eager import EagerPlacement
from tpufit.errors import CoresError, OutOfMemoryError
from tpufit.runtime import devices, translate
from tpufit.step import engine
from tpufit.utils import releases

# PyTorch's compiler imports modules that PyTorch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 8)).astype("float32")
Y = RNG.integers(0, 3, 40)


class Gpu(EagerPlacement):
    """The CPU's memory, as a device separate from the host."""

    on_host = False


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(devices, "_settled", None)
    monkeypatch.setattr(devices, "_means_gpu", lambda: True)  # PyTorch's optimizers call is_available too
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(engine, "make_placement", lambda cores, recorder: Gpu(torch.device("cpu")))
    counters.clear()
    yield
    torch.compiler.reset()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        # Without the bias, whose gradient is only rounding, which Adam would amplify.
        self.layers = nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.calls += 1
        return self.layers(x)


def trained(jit_compile, epochs=3, callbacks=(), resume=False, seed=0, **arguments):
    torch.manual_seed(seed)
    model = tpufit.Model(Net())
    model.compile("adamw", "cross_entropy", metrics=["accuracy"], jit_compile=jit_compile, **arguments)
    graphs = []
    count = tpufit.callbacks.LambdaCallback(on_epoch_end=lambda *_: graphs.append(counters["stats"]["unique_graphs"]))
    fitted = model.fit(
        X,
        Y,
        batch_size=16,
        epochs=epochs,
        verbose=0,
        validation_data=(X, Y),
        callbacks=[count, *callbacks],
        resume=resume,
    )
    return fitted.history | {"graphs": graphs}, model.predict(X, verbose=0), model


OPTIONS = {
    "bf16": {"precision": "bf16"},
    "averaged": {"accumulate_steps": 2, "use_ema": True, "ema_momentum": 0.5},
}


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        pytest.param("aot_eager", "bf16", marks=pytest.mark.soak),
        pytest.param("aot_eager", "averaged", marks=pytest.mark.slow),
        pytest.param("inductor", "averaged", marks=pytest.mark.soak),
    ],
)
def test_a_compiled_training_equals_eager_steps(gpu, monkeypatch, tmp_path, backend, options):
    expected, expected_outputs, _ = trained("auto", **OPTIONS[options])
    assert not counters["stats"]
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    history, outputs, model = trained(True, **OPTIONS[options])
    # Graphs for training and for evaluation, of full batches and of the last batch. Later epochs need no others.
    graphs = history.pop("graphs")
    # The number of graphs depends on the imports of other tests in this process.
    assert 2 <= graphs[0] == graphs[-1]
    assert expected.pop("graphs") == [0, 0, 0]
    tolerance = 1e-5 if options != "bf16" else 1e-2
    for name, values in expected.items():
        assert history[name] == pytest.approx(values, abs=tolerance), name
    np.testing.assert_allclose(outputs, expected_outputs, rtol=0, atol=tolerance)
    names = list(Net().state_dict())
    assert list(model.state_dict()) == list(model.module.state_dict()) == names and type(model.module) is Net
    model.save_weights(tmp_path / "net.safetensors")
    torch.save(model.module, tmp_path / "net.pt")
    net = torch.load(tmp_path / "net.pt", weights_only=False)
    again = tpufit.Model(net)
    again.load_weights(tmp_path / "net.safetensors")
    np.testing.assert_allclose(net.eval()(torch.tensor(X)).detach(), outputs, rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", [tpufit.callbacks.ModelCheckpoint, tpufit.callbacks.BackupAndRestore])
def test_a_compiled_training_resumes_from_its_checkpoint(gpu, monkeypatch, tmp_path, kind):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    expected = trained(True, epochs=2)[2].state_dict()

    def stop(epoch, logs):
        if epoch == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(True, 2, [kind(tmp_path / "run"), tpufit.callbacks.LambdaCallback(on_epoch_begin=stop)])
    for jit_compile in (True, False):  # the names in a checkpoint are the module's
        folder = shutil.copytree(tmp_path / "run", tmp_path / f"{jit_compile}")
        resume = kind is tpufit.callbacks.ModelCheckpoint
        _, _, model = trained(jit_compile, 2, [kind(folder)], resume=resume, seed=1)
        assert model.steps_taken == 6
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=0 if jit_compile else 1e-6)


def test_batches_go_to_a_gpu_through_pinned_memory_and_weights_do_not(monkeypatch):
    there, said = EagerPlacement(torch.device("cuda")), []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: said.append("pinned") or tensor)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *where, **how: said.append((*where, how)) or tensor)
    sent = there.device, {"non_blocking": True}
    there.send([torch.ones(2)], Sharding.ROWS)
    assert said == ["pinned", sent]
    there.send([torch.ones(2)])
    assert said[2:] == [sent]
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", {there.device: 7}.get)
    assert there.memory_used == 7


def test_false_and_eager_steps_compile_nothing(gpu):
    trained(False, epochs=1)
    trained(True, epochs=1, run_eagerly=True)
    assert not counters["stats"]


def test_a_count_of_cores_needs_a_runtime_where_there_is_a_gpu(gpu, monkeypatch):
    monkeypatch.setattr(releases, "find_version", {"torch": "2.13.0"}.get)
    with pytest.raises(CoresError, match=r"cores=8 asks for cores of a TPU or a CPU.* cores='auto', the default"):
        devices.start(8, "fit(cores=8)")


def test_idle_gpus_are_reported_once(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.warns(UserWarning, match=r"this host has 2 GPUs, and tpufit computes only on cuda:0") as told:
        trained("auto", epochs=1)
    assert len(told) == 1


def test_a_full_gpu_gives_a_clear_error(gpu):
    words = (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 14.74 GiB of which 1.10 GiB is "
        "free. Including non-PyTorch memory, this process has 13.64 GiB memory in use."
    )
    devices.start("auto", "test")
    error = translate(torch.OutOfMemoryError(words))
    assert type(error) is OutOfMemoryError
    first, second = str(error).split("\n")
    need = "it requested 2.00 GiB more, and 1.10 GiB are free"
    assert first == f"the device has no room: {need}. Take a smaller batch_size"
    assert second == f"PyTorch says: {words}"


class WithFunction(nn.Module):
    def __init__(self, compile):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 2)
        self.hidden = compile(lambda x: self.first(x).tanh())

    def forward(self, x):
        return self.second(self.hidden(x))


@pytest.mark.cores(1, 8)
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_a_compiled_function_inside_the_module(cores, run_eagerly):
    tpufit.init(cores)  # first: autograd looks up the existing devices once
    x, y = torch.randn(32, 4, generator=torch.Generator().manual_seed(0)), torch.arange(32) % 2
    net, plain = WithFunction(partial(torch.compile, backend="eager")), WithFunction(lambda function: function)
    plain.load_state_dict(net.state_dict())
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    for i in (0, 16):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(plain(x[i : i + 16]), y[i : i + 16]).backward()
        optimizer.step()
    model = tpufit.Model(net)
    model.compile(lambda p: torch.optim.SGD(p, 0.1), "cross_entropy", scale_lr=None, run_eagerly=run_eagerly)
    model.fit(x, y, 16 // cores, shuffle=False, verbose=0, cores=cores)
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight, plain.state_dict()[name], rtol=0, atol=1e-6)
