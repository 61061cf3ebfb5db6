"""Errors of the runtime: the known texts of XLA, libtpu and torch_xla, with tpufit's sentences for them."""

import re
import signal
from dataclasses import replace
from types import MappingProxyType

import fake_torch_xla
import numpy as np
import pytest
import torch
from torch import nn

import tpufit
from tpufit.backend import StepMemory
from tpufit.errors import (
    CoresError,
    DeviceBusyError,
    DeviceLostError,
    OutOfMemoryError,
    PartitionError,
    StartError,
    StateLostError,
)
from tpufit.runtime import devices, translate
from tpufit.utils import hardware, releases

# The texts are torch_xla's.
pytestmark = pytest.mark.runtime("torch_xla")
GB = 1 << 30
OF_2_8 = releases.parse_release(releases.find_version("torch_xla")) == "2.8"
LOAD = StepMemory(
    role="train", rows=512, cores=8, weights=2 * GB, learns=2 * GB, optimizer=4 * GB, batch=GB // 4, precision="fp32"
)


@pytest.mark.parametrize(
    ("text", "kind", "sentence"),
    [
        # XLA:TPU during compilation
        (
            "Bad StatusOr access: RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory "
            "space hbm. Used 21.95G of 15.48G hbm. Exceeded hbm capacity by 6.47G.\n\nTotal hbm usage >= 22.47G:",
            OutOfMemoryError,
            "no room for a train step of 64 rows per core: it needs 21.95G of 15.48G",
        ),
        # libtpu, loading a program and allocating a tensor
        (
            "RESOURCE_EXHAUSTED: Error loading program: Attempting to reserve 7.04G at the bottom of memory. That was "
            "not possible. There are 6.90G free, 0B reserved, and 6.90G reservable.",
            OutOfMemoryError,
            "it requested 7.04G more, and 6.90G are free",
        ),
        (
            "Bad StatusOr access: RESOURCE_EXHAUSTED: Error allocating device buffer: Attempting to allocate 196.00M. "
            "That was not possible. There are 134.44M free.; (1x0x0_HBM0)",
            OutOfMemoryError,
            "it requested 196.00M more, and 134.44M are free",
        ),
        ("Error preparing computation: Out of memory allocating 24000000000336 bytes.", OutOfMemoryError, "21.83 TiB"),
        (
            "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space vmem.",
            OutOfMemoryError,
            "more scratch memory than a core has",
        ),
        (
            "INTERNAL: Core halted unexpectedly: INTERNAL: Accelerator device halted prematurely",
            DeviceLostError,
            "the device was lost.*Restart the process",
        ),
        ("UNAVAILABLE: Socket closed", DeviceLostError, "resume from the last checkpoint"),
        (
            "INTERNAL: during context [pre-optimization]: RET_CHECK failure (spmd_partitioner.cc:4214)",
            PartitionError,
            "could not split this step over the cores.*cores=1",
        ),
    ],
)
def test_each_text_has_a_sentence_above_it(text, kind, sentence):
    fault = translate(RuntimeError(text), LOAD)
    assert type(fault) is kind
    assert f"\ntorch_xla says: {text}" in str(fault)
    first = str(fault).partition("\n")[0]
    assert re.search(sentence, first), first


def test_an_out_of_memory_error_says_what_uses_memory_and_what_to_try():
    said = str(translate(RuntimeError("RESOURCE_EXHAUSTED: Out of memory"), LOAD))
    assert "weights 2 GiB, optimizer 4 GiB, gradients 2 GiB, batch 256 MiB; the rest are activations" in said
    assert "a smaller batch_size (32) with compile(accumulate_steps=2)" in said
    assert "Try compile(shard='fsdp'), with 1 GiB instead of 8 GiB of state on a core, or compile(remat=True)" in said
    assert "compile(precision='bf16')" in said and "an optimizer with less state" in said
    split = replace(LOAD, weights=GB, learns=GB, optimizer=2 * GB, split=True)
    assert "shard" not in str(translate(RuntimeError("RESOURCE_EXHAUSTED: Out of memory"), split))
    little = replace(LOAD, weights=9, learns=9, optimizer=9)
    said = str(translate(RuntimeError("RESOURCE_EXHAUSTED: Out of memory"), little))
    assert "shard" not in said and "Try compile(remat=True)" in said
    small = StepMemory(role="predict", rows=8, cores=8, weights=1, learns=1, optimizer=0, batch=1, precision="bf16")
    said = str(translate(RuntimeError("RESOURCE_EXHAUSTED: Out of memory"), small))
    assert "predict step of 1 row per core" in said and "optimizer" not in said and "bf16" not in said


@pytest.mark.parametrize("error", [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("sharding")])
def test_unknown_errors_are_unchanged(error):
    assert translate(error, LOAD) is None


@pytest.fixture
def fresh(monkeypatch):
    monkeypatch.setattr(releases, "find_version", {"torch": "2.9.0", "torch_xla": "2.9.0"}.get)
    monkeypatch.setattr(devices, "_settled", None)
    monkeypatch.setattr(devices, "_failed", None)
    monkeypatch.setenv("CPU_NUM_DEVICES", "1")
    monkeypatch.delenv("PJRT_DEVICE", raising=False)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("The TPU is already in use by process with pid 17. Not attempting to load libtpu.so", "in use by process 17"),
        ("UNKNOWN: TPU initialization failed: open(/dev/accel2): Operation not permitted", "in use by process 17"),
        ("open(/dev/vfio/0): Device or resource busy", "tpufit kills no process"),
    ],
)
def test_a_busy_device_error_names_the_processes_that_hold_it(fresh, monkeypatch, text, sentence):
    monkeypatch.setattr(hardware, "find_tpu_processes", lambda: {17: "python old_run.py"})
    fake_torch_xla.install(monkeypatch, fails=text)
    with pytest.raises(DeviceBusyError, match=sentence) as error:
        devices.start("auto", "fit()")
    assert "17 (python old_run.py)" in str(error.value) and text in str(error.value)
    assert text in str(error.value.__cause__)


def test_the_old_text_of_a_missing_configuration(fresh, monkeypatch):
    fake_torch_xla.install(monkeypatch, fails="Missing XLA configuration")
    with pytest.raises(StartError, match="no device is chosen. Set PJRT_DEVICE=TPU"):
        devices.start("auto", "fit()")


FIT = "import numpy as np, torch, tpufit\nm = tpufit.Model(torch.nn.Linear(2, 1))\nm.compile('sgd', 'mse')\n"
FIT += "m.fit(np.ones((8, 2), 'f4'), np.ones((8, 1), 'f4'), verbose=0)"


# The driver is installed with the TPU's compiler, of which it is a part.
NO_TPU = "this host has no TPU chip on its PCI bus"
if releases.find_version("libtpu") is None:
    NO_TPU = "its driver, libtpu, is not installed. On a TPU run: pip install libtpu=="


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        ({"PJRT_DEVICE": "TPU"}, NO_TPU),
        pytest.param(
            {"PJRT_DEVICE": "XRT"},
            "torch_xla supports only TPU and CPU here. Unset PJRT_DEVICE",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_a_missing_device(run_python, env, sentence):
    """And the process survives: torch_xla 2.8 would end it at the second call, and at its exit."""
    again = "try:\n    tpufit.init()\nexcept tpufit.errors.StartError as error:\n    print(error)\n"
    process = run_python(FIT.replace("m.fit", f"{again}m.fit"), env=env)
    assert process.returncode == 1 and "StartError" in process.stderr and sentence in process.stderr, process.stderr
    assert sentence in process.stdout and "torch_xla can't be started again" in process.stderr


class Hungry(nn.Module):
    """Allocates 24 terabytes in its forward pass, on request."""

    def __init__(self, size=4):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, 3))
        self.hungry = True

    def forward(self, x):
        y = x @ self.weight
        if self.hungry:
            y = y + (torch.ones(10**14, device=x.device) * y.sum().detach()).cumsum(0).sort()[0][:1]
        return y


def data(size=4):
    return np.ones((8, size), "float32"), np.ones((8, 3), "float32")


HUNGRY = """
import numpy as np, torch, tpufit
class Hungry(torch.nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y + (torch.ones(10**14, device=x.device) * y.sum().detach()).cumsum(0).sort()[0][:1]
model = tpufit.Model(Hungry(4, 3))
model.compile("adam", "mse")
model.fit(np.ones((8, 4), "f4"), np.ones((8, 3), "f4"), batch_size=8, verbose=0)
"""


@pytest.mark.slow
def test_a_full_memory_is_named_by_every_release(run_python):
    """A known limitation: torch_xla 2.8 ends the process."""
    ended = run_python(HUNGRY)
    assert ended.returncode == (-signal.SIGABRT if OF_2_8 else 1), ended.stderr
    assert "Out of memory allocating" in ended.stderr
    assert OF_2_8 or "tpufit.errors.OutOfMemoryError: the device has no room for a train step" in ended.stderr


@pytest.mark.skipif(OF_2_8, reason="torch_xla 2.8 ends the process, see test_a_full_memory_is_named")
@pytest.mark.cores(1, 4, timeout=300)
def test_training_continues_after_a_full_memory(cores):
    def model(size=4, **options):
        made = tpufit.Model(Hungry(size))
        made.compile("adam", "mse", **options)
        return made

    fed = model()
    with pytest.raises(OutOfMemoryError, match=f"train step of {8 // cores} rows per core.*TiB more") as error:
        fed.fit(*data(), batch_size=8 // cores, verbose=0, cores=cores)
    assert "Out of memory allocating" in str(error.value.__cause__)  # it keeps the traceback, as a notebook does
    assert torch.equal(fed.state_dict()["weight"], torch.ones(4, 3))  # nothing has changed,
    fed.module.hungry = False
    history = fed.fit(*data(), batch_size=8 // cores, epochs=3, verbose=0)
    assert history.history["loss"][0] == pytest.approx(9.0)  # and the first step is still the first
    assert history.history["loss"][2] < 9.0

    with pytest.raises(OutOfMemoryError, match="eval step"):
        fed.module.hungry = True
        fed.evaluate(*data(), batch_size=8 // cores, verbose=0)
    fed.module.hungry = False
    assert np.isfinite(fed.evaluate(*data(), batch_size=8 // cores, verbose=0))

    large = model(1 << 20)  # large enough that its memory is donated to the step, and so lost with it
    with pytest.raises(StateLostError, match=r"step \d failed.*none have been saved.*no room for a train step"):
        large.fit(*data(1 << 20), batch_size=8 // cores, verbose=0)
    assert np.isfinite(fed.fit(*data(), batch_size=8 // cores, verbose=0).history["loss"]).all()


@pytest.mark.cores(1, timeout=300)
def test_a_graph_that_does_not_compile_changes_nothing(cores, monkeypatch):
    import torch_xla

    text = "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory. Used 21.95G of 15.48G hbm."

    def fails(*roots):
        raise RuntimeError(text)

    module = Hungry()
    module.hungry = False
    model = tpufit.Model(module)
    model.compile("adam", "mse")
    with monkeypatch.context() as patch:
        patch.setattr(torch_xla._XLAC, "_xla_warm_up_cache", fails)
        with pytest.raises(OutOfMemoryError, match="it needs 21.95G of 15.48G"):
            model.fit(*data(), batch_size=8, verbose=0)
    assert model.fit(*data(), batch_size=8, verbose=0).history["loss"][0] == pytest.approx(9.0)


@pytest.mark.cores(1, timeout=300)
def test_a_batch_may_contain_objects(cores):
    """Otherwise the error would be "'mappingproxy' object does not support item assignment"."""
    info = {"kind": Hungry, "tags": MappingProxyType({"a": 1})}
    seen = []

    class Own(tpufit.Model):
        def train_step(self, batch):
            seen.append(batch["info"])
            loss = self.compute_loss(batch["x"], batch["y"], self(batch["x"]))
            self.apply_gradients(loss)
            return {"loss": loss}

    model = Own(nn.Linear(4, 3))
    model.compile("sgd", "mse")
    x, y = data()
    model.fit([{"x": x, "y": y, "info": info}], verbose=0, cores=cores)
    assert seen and all(one["kind"] is Hungry and dict(one["tags"]) == {"a": 1} for one in seen)


@pytest.mark.cores(4, timeout=300)
def test_a_mesh_that_does_not_fit(cores):
    from tpufit.backend import Cores, Sharding
    from tpufit.runtime import make_placement, start, to_device

    start(cores, "a test")
    with pytest.raises(
        CoresError, match="cores differ from the cores that tpufit has settled.*\n.*must match the global number"
    ):
        to_device([torch.ones(8, 2)], make_placement(Cores(2, 0, "CPU", "a test")), Sharding.ROWS)
