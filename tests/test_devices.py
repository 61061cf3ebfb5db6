"""The start of the cores: valid requests, and the errors of invalid requests."""

import os
import textwrap
from contextlib import nullcontext

import fake_torch_xla
import pytest
import torch

from tpufit.backend import Cores
from tpufit.diagnostics import messages as advice
from tpufit.errors import ArgumentError, CoresError, StartError, VersionError
from tpufit.runtime import devices, make_placement
from tpufit.utils import releases
from tpufit.utils.hardware import CHIPS

# Mostly with a stand-in for torch_xla.
pytestmark = pytest.mark.runtime("torch_xla")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Each test acts as a process that hasn't settled its cores."""
    monkeypatch.setattr(releases, "find_version", {"torch": "2.9.0", "torch_xla": "2.9.0"}.get)
    monkeypatch.setattr(devices, "_settled", None)
    monkeypatch.setattr(devices, "_failed", None)
    monkeypatch.setenv("CPU_NUM_DEVICES", "1")  # restored after the test


def start(cores):
    return devices.start(cores, f"fit(cores={cores!r})")


@pytest.mark.parametrize(
    ("cores", "count", "index"),
    [("auto", 4, 0), (None, 4, 0), (4, 4, 0), ("4", 4, 0), (1, 1, 0), ("1", 1, 0), ([0], 1, 0), ([3], 1, 3)],
    ids=repr,  # "cores7", as an id, would mark a test for seven cores
)
def test_requests_for_a_tpu_of_four_cores(monkeypatch, cores, count, index):
    fake = fake_torch_xla.install(monkeypatch, devices=4)
    settled = start(cores)
    assert (settled.count, settled.index, settled.platform) == (count, index, "TPU")
    assert fake.calls == (["start", "use_spmd"] if count > 1 else ["start"])  # a single core is used without SPMD


@pytest.mark.parametrize(("cores", "says"), [(1, "1 of this TPU's 8 cores is used: fit(cores='auto')"), ("auto", None)])
def test_idle_cores_of_a_tpu_are_reported(monkeypatch, cores, says):
    fake_torch_xla.install(monkeypatch, devices=8)
    used = start(cores).count
    sentence = advice.report_idle_cores(used, devices.count_available_cores(used)) or ""
    assert sentence.partition(" uses")[0] == (says or "")


@pytest.mark.parametrize("cores", [8, "8", 2, 3])
def test_an_invalid_request_names_the_available_cores(monkeypatch, cores):
    fake_torch_xla.install(monkeypatch, devices=4)
    with pytest.raises(CoresError, match=rf"{cores} cores were requested, but this host has 4 TPU cores.*cores='auto'"):
        start(cores)


def test_a_missing_core(monkeypatch):
    fake_torch_xla.install(monkeypatch, devices=4)
    with pytest.raises(CoresError, match=r"cores=\[4\] was requested, but this host has 4 TPU cores, numbered from 0"):
        start([4])


@pytest.mark.parametrize("cores", [0, -1, 1.0, True, "eight", "1,", [], [0, 1], [-1], [True], {"a": 1}], ids=repr)
def test_an_invalid_number_of_cores(monkeypatch, cores):
    fake = fake_torch_xla.install(monkeypatch)
    with pytest.raises(ArgumentError, match="cores must be 'auto'"):
        start(cores)
    assert fake.calls == []  # nothing was started


@pytest.mark.parametrize(("cores", "virtual"), [("auto", 1), (8, 8), ("3", 3), ([5], 6)], ids=repr)
def test_a_cpu_has_the_requested_number_of_cores(monkeypatch, cores, virtual):
    fake = fake_torch_xla.install(monkeypatch, platform="CPU", devices=virtual)
    assert start(cores).count == (1 if cores == [5] else virtual)
    assert os.environ["CPU_NUM_DEVICES"] == str(virtual)
    assert "start" in fake.calls


@pytest.mark.parametrize("own", [[0, 1, 4, 5], [6, 2, 3, 7], range(8)])
def test_a_hosts_devices_need_not_be_adjacent(monkeypatch, own):
    fake_torch_xla.install(monkeypatch, devices=8, own=own)
    assert make_placement(Cores(8, 0, "TPU", "a test")).local_shards == tuple(sorted(own))
    assert make_placement(Cores(1, 3, "TPU", "a test")).local_shards is None


def test_settled_cores_are_returned_again(monkeypatch):
    fake_torch_xla.install(monkeypatch, devices=4)
    first = devices.start(4, "fit(cores=4)")
    assert start("auto") is start(None) is start(4) is start("4") is first
    for other in (1, [0], [2]):
        with pytest.raises(CoresError) as error:
            start(other)
        message = str(error.value)
        assert "4 cores" in message  # the cores in use
        assert "1 core was requested" in message or f"cores={other!r}" in message  # the requested cores
        assert "fit(cores=4) at test_devices.py:" in message  # the call that settled them
        assert "tpufit.init(cores=" in message  # the cure


def test_a_chosen_core_stays_the_same_core(monkeypatch):
    fake_torch_xla.install(monkeypatch, devices=4)
    start([2])
    assert start(1).index == start([2]).index == 2
    with pytest.raises(
        CoresError, match=r"cores=\[1\] was requested, but this process computes on 1 core \(number 2\)"
    ):
        start([1])


def test_a_runtime_that_was_started_with_other_cores(monkeypatch):
    fake_torch_xla.install(monkeypatch, platform="CPU", devices=2, started=True)
    with pytest.raises(CoresError, match="8 cores were requested, but this process was started with 2 CPU cores"):
        start(8)


def test_a_process_in_spmd_mode_already(monkeypatch):
    fake = fake_torch_xla.install(monkeypatch, platform="CPU", devices=2, started=True, spmd=True)
    with pytest.raises(CoresError, match="in SPMD mode, which uses all cores; pass cores=2"):
        start(1)
    assert start("auto").count == 2
    assert "use_spmd" not in fake.calls


def test_many_cores_are_refused_if_one_was_used(monkeypatch):
    fake = fake_torch_xla.install(monkeypatch, devices=8, started=True, locked=True)
    with pytest.raises(CoresError, match=r"already computed on one XLA device.*tpufit.init\(cores=8\) first"):
        start(8)
    assert "use_spmd" not in fake.calls  # otherwise a segmentation fault
    assert start(1).count == 1


def test_one_process_of_several(monkeypatch):
    fake_torch_xla.install(monkeypatch, devices=8, processes=4)
    with pytest.raises(CoresError, match="one of 4 hosts, which compute together on all 8 cores: pass cores='auto'"):
        start(1)


def test_a_runtime_that_does_not_start(monkeypatch):
    fake_torch_xla.install(monkeypatch, fails="The TPU is already in use by process with pid 17")
    with pytest.raises(StartError, match=r"(?s)the TPU is in use by.*End that process yourself.*pid 17"):
        start("auto")
    with pytest.raises(
        StartError, match=r"(?s)the TPU is in use by.*pid 17\ntorch_xla can't be started again in this process: then"
    ):
        start("auto")


@pytest.mark.parametrize(
    ("torch_version", "xla_version", "message"),
    [
        (
            "2.13.0",
            "2.9.0",
            "are torch 2.13.0 and torch_xla 2.9.0. Run: pip install torch==2.9.0 torch_xla==2.9.0",
        ),
        ("2.9.0", "2.8.1", "here are torch 2.9.0 and torch_xla 2.8.1. Run: pip install torch_xla==2.9.0"),
        ("2.8.0+cpu", "2.9.0", r"here are torch 2.8.0\+cpu and torch_xla 2.9.0. Run: pip install torch_xla==2.8.0"),
        ("2.7.0", "2.7.0", "a pair, 2.8 of both or 2.9 of both; here are"),
        ("2.10.0", "2.10.0", "a pair, 2.8 of both or 2.9 of both; here are"),
        (None, "2.9.0", "torch is not installed. Run: pip install torch==2.9.0 torch_xla==2.9.0"),
    ],
)
def test_incompatible_versions(torch_version, xla_version, message):
    with pytest.raises(VersionError, match=message):
        releases.check_versions(torch_version, xla_version)


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        (
            ("2.9.0", None, None),
            r"^torch 2.9.0 is here without a runtime .* install 'tpufit\[xla\]' .*'tpufit\[tpu\]' ",
        ),
        (("2.13.0", None, None), r"^torch 2.13.0 is here without a runtime .*'tpufit\[xla\]' .*'tpufit\[tpu\]' "),
        (("2.8.0", None, None), r"Run: pip install torch_xla==2.8.0 \(.*or: pip install 'tpufit\[tpu\]' "),
        ((None, None, None), r"^torch is not installed, nor is a runtime .*'tpufit\[xla\]' .*'tpufit\[tpu\]' "),
        (("2.9.0", None, "0.2.0"), r"^torch_tpu 0.2.0 works with torch 2.11 to 2.15; here is torch 2.9.0. .*\[tpu\]'$"),
        (("2.16.0", None, "0.2.0"), "works with torch 2.11 to 2.15; here is torch 2.16.0"),
        ((None, None, "0.2.0"), r"here is no torch. Run: pip install 'tpufit\[tpu\]'$"),
        (("2.13.0", "2.9.0", "0.2.0"), "^torch_xla 2.9.0 and torch_tpu 0.2.0 can't be .*: pip uninstall -y torch_xla$"),
        (("2.9.0+cpu", "2.9.0", "0.2.0"), "here is torch 2.9.0.cpu. Run: pip uninstall -y torch_tpu$"),
    ],
)
def test_a_missing_or_incompatible_runtime(versions, message):
    with pytest.raises(VersionError, match=message):
        releases.check_versions(*versions)


def test_compatible_versions():
    assert releases.check_versions("2.9.0+cpu", "2.9.0") == "2.9"
    assert releases.check_versions("2.8.0+cpu", "2.8.1") == "2.8"
    assert releases.check_versions("2.13.0+cpu", None, "0.2.0") == "2.13"


def test_steps_on_the_host_need_no_runtime_and_cores_do(monkeypatch):
    fake = fake_torch_xla.install(monkeypatch)
    monkeypatch.setattr(releases, "find_version", {"torch": "2.13.0"}.get)
    assert (devices.start([0], "fit()", eager=True).count, devices.platform(), devices.get_settled_cores()) == (
        1,
        "CPU",
        None,
    )
    assert devices.process_count() == 1
    for cores, eager in ((None, False), (8, True), ([1], True)):
        with pytest.raises(VersionError, match="without a runtime for its cores"):
            devices.start(cores, "fit()", eager=eager)
    monkeypatch.setattr(devices.hardware, "find_chips", lambda: [CHIPS["0x0063"]])
    assert devices.platform() == "TPU"  # so that nothing is silently computed on its host
    assert fake.calls == []


@pytest.mark.parametrize("versions", [{"torch": "2.13.0"}, {"torch": "2.9.0", "torch_xla": "2.9.0"}], ids=len)
def test_auto_is_a_gpu_without_a_tpu(monkeypatch, versions):
    fake = fake_torch_xla.install(monkeypatch, platform="CPU", devices=8)
    monkeypatch.setattr(releases, "find_version", versions.get)
    monkeypatch.setattr(devices, "_REQUESTED_DEVICE", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert (devices.platform(), devices.process_count(), devices.get_settled_cores()) == ("CUDA", 1, None)
    settled = start("auto")
    assert (settled.count, settled.index, settled.platform, str(settled)) == (1, 1, "CUDA", "1 GPU (cuda:1)")
    assert make_placement(settled).device == torch.device("cuda:1")
    assert start(1) is settled and devices.count_available_cores(1) == 1 and fake.calls == []
    with pytest.raises(
        CoresError, match=r"8 cores were requested, but this process computes on 1 GPU \(cuda:1\), settled"
    ):
        start(8)


@pytest.mark.parametrize("instead", ["a count", "PJRT_DEVICE", "a TPU", "steps on the host"])
def test_a_gpu_is_ignored_if_another_device_is_requested(monkeypatch, instead):
    fake_torch_xla.install(monkeypatch, platform="TPU" if instead == "a TPU" else "CPU", devices=8)
    monkeypatch.setattr(devices, "_REQUESTED_DEVICE", "CPU" if instead == "PJRT_DEVICE" else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    chips = [CHIPS["0x0063"]] if instead == "a TPU" else []
    monkeypatch.setattr(devices.hardware, "find_chips", lambda: chips)
    settled = devices.start(8 if instead == "a count" else "auto", "fit()", eager=instead == "steps on the host")
    assert settled.platform == ("TPU" if instead == "a TPU" else "CPU")


def test_versions_are_checked_before_the_start(monkeypatch):
    fake = fake_torch_xla.install(monkeypatch)
    monkeypatch.setattr(releases, "find_version", {"torch": "2.13.0", "torch_xla": "2.9.0"}.get)
    with pytest.raises(VersionError):
        start(8)
    assert fake.calls == []


KAGGLE = {"torch": "2.8.0+cpu", "torch_xla": "2.8.0", "libtpu": "0.0.17"}


@pytest.mark.parametrize(
    ("versions", "warned"),
    [
        (KAGGLE, False),
        (KAGGLE | {"libtpu": "0.0.30"}, True),
        ({"torch": "2.9.0", "torch_xla": "2.9.0", "libtpu": "0.0.30"}, False),
    ],
)
def test_a_libtpu_that_may_end_the_process(monkeypatch, versions, warned):
    monkeypatch.setattr(releases, "find_version", versions.get)
    fake_torch_xla.install(monkeypatch)
    cure = r"libtpu 0\.0\.30 is installed\. If the process crashes now: pip install libtpu==0\.0\.17$"
    with pytest.warns(UserWarning, match=cure) if warned else nullcontext():
        assert start("auto").count == 8


def test_what_fit_prints_about_the_cores():
    assert str(devices.Cores(8, 0, "CPU", "")) == "8 cores (XLA:CPU, virtual)"
    assert str(devices.Cores(1, 0, "TPU", "")) == "1 core (XLA:TPU)"
    assert str(devices.Cores(1, 3, "TPU", "")) == "1 core (number 3) (XLA:TPU)"
    assert str(devices.Cores(1, 0, "host", "")) == "the host's processor, without a runtime"


FIT = """
import numpy as np, torch, tpufit
model = tpufit.Model(torch.nn.Linear(2, 3))
model.compile("sgd", "cross_entropy")
def fit(cores=None):
    model.fit(np.ones((20, 2), "float32"), np.zeros(20, int), verbose=0, cores=cores)
"""


def last_line(process):
    assert process.returncode == 1, process.stderr  # an exception, not a signal
    return process.stderr.strip().splitlines()[-1]


@pytest.mark.slow
def test_changing_the_cores(run_python):
    line = last_line(run_python(FIT + "fit(4)\nfit()\nfit(8)"))
    assert "8 cores were requested, but this process computes on 4 cores (XLA:CPU, virtual)" in line
    assert "settled by fit(cores=4) at <string>:6" in line and "tpufit.init(cores=8)" in line


@pytest.mark.slow
def test_after_the_user_has_started_the_runtime(run_python):
    code = "import torch_xla.runtime as xr\nxr.global_runtime_device_count()\n"
    line = last_line(run_python(code + FIT + "fit(8)", env={"CPU_NUM_DEVICES": "2"}))
    assert "8 cores were requested, but this process was started with 2 CPU cores" in line


@pytest.mark.slow
def test_many_cores_are_refused_after_the_users_work_on_one(run_python):
    code = "import torch, torch_xla\ntorch.ones(2, device='xla').add_(1).cpu()\n"
    line = last_line(run_python(code + FIT + "fit(8)", env={"CPU_NUM_DEVICES": "8"}))
    assert "already computed on one XLA device" in line


@pytest.mark.slow
def test_fit_runs_on_a_chosen_core(run_python):
    code = """
    model.fit(np.ones((20, 2), "float32"), np.zeros(20, int), verbose=0, cores=[2])
    import torch_xla
    assert str(model.module.weight.device) == str(torch_xla.devices()[2]) == "xla:2", model.module.weight.device
    assert model.predict(np.ones((5, 2), "float32"), verbose=0).shape == (5, 3)
    print("done")
    """
    process = run_python(FIT + textwrap.dedent(code))
    assert "done" in process.stdout, process.stderr


@pytest.mark.slow
def test_init_settles_the_number_of_cores(run_python):
    process = run_python(FIT + "tpufit.init(cores=2)\nfit()\nprint(tpufit.runtime.get_settled_cores())")
    assert process.stdout.strip() == "2 cores (XLA:CPU, virtual)", process.stderr


@pytest.mark.slow
def test_fit_works_after_a_backward_pass_on_the_cpu(run_python):
    """Autograd counts the devices at its first backward pass, before torch_xla's device exists: a trap in notebooks."""
    code = """
    model.module(torch.ones(5, 2)).sum().backward()
    fit(2)
    print("done")
    """
    process = run_python(FIT + textwrap.dedent(code))
    assert "done" in process.stdout, process.stderr


@pytest.mark.slow
def test_predicting_first_does_not_settle_the_cores(run_python):
    code = """
    x = np.ones((5, 2), "float32")
    before = model.predict(x, verbose=0)
    assert tpufit.runtime.get_settled_cores() is None
    assert np.allclose(before, model.module(torch.ones(5, 2)).detach().numpy())
    fit(8)
    assert model.predict(x, verbose=0).shape == (5, 3)
    print("done")
    """
    process = run_python(FIT + textwrap.dedent(code))
    assert "done" in process.stdout, process.stderr


@pytest.mark.slow
def test_torch_compile_for_xla_is_imported_on_use(run_python):
    done = run_python(
        "import sys, torch, tpufit\n"
        "tpufit.init(1)\n"
        "assert 'torch._inductor.lowering' not in sys.modules\n"
        "twice = torch.compile(lambda x: x * 2, backend='openxla')\n"
        "print(twice(torch.ones(3, device='xla')).tolist())",
        env={"PJRT_DEVICE": "CPU"},
    )
    assert done.stdout.split("\n")[-2] == "[2.0, 2.0, 2.0]", done.stderr


WITH_A_CHIP = """
import glob, pathlib
from tpufit import runtime
from tpufit.utils import hardware

card = pathlib.Path("card")
card.mkdir()
(card / "vendor").write_text("0x1ae0")
(card / "device").write_text("0x0063")
found = glob.glob
glob.glob = lambda pattern, **rest: [str(card / "vendor")] if "/sys/bus/pci" in pattern else found(pattern, **rest)
hardware.find_chips = lambda *root: [hardware.CHIPS["0x0063"]]
try:
    runtime.start(1, "the test")
except Exception as error:
    print(type(error).__name__, error)
"""


def test_a_tpu_of_unknown_type_is_an_error(run_python):
    """torch_xla asks for the type during its import, and fails on a None."""
    silent = {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": None, "PJRT_DEVICE": None}
    process = run_python(WITH_A_CHIP, env=silent)
    assert process.stdout.startswith("StartError torch_xla can't be imported"), process.stdout + process.stderr
    assert "TPU_ACCELERATOR_TYPE to the type of the TPU" in process.stdout and "TypeError" in process.stdout
