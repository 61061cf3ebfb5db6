"""The doctor: each check by its facts, and whole reports of machines with faults."""

import re
import resource
import textwrap

import pytest

from tpufit.checkup import format_table
from tpufit.checkup.checks import CHECKS
from tpufit.checkup.facts import Facts, Pod, Process
from tpufit.checkup.trial import ALL, Trial
from tpufit.utils.children import explain_end
from tpufit.utils.hardware import CHIPS

V3, V5E = CHIPS["0x0027"], CHIPS["0x0063"]
GOOD = {"torch": "2.9.0", "torch_xla": "2.9.0"}
TPU = {"torch": "2.13.0", "torch_tpu": "0.2.0", "libtpu": "0.0.51"}
KAGGLE = {"torch": "2.8.0+cpu", "torch_xla": "2.8.0"}
COMPILER = {**GOOD, "libtpu": "0.0.21", "jax": "0.7.1", "jaxlib": "0.7.1"}


def rows(**facts):
    return [row for check in CHECKS for row in check(Facts(**facts))]


def test_a_sound_machine_has_no_findings():
    assert [row for row in rows() if row.status != "ok" or row.cure] == []
    trials = (Trial(1, "1 core", 2.0, 0.001, 5e9, 16 << 30), Trial(ALL, "8 cores", 3.0, 0.002, 5e9, 16 << 30))
    tpu = rows(versions={**GOOD, "libtpu": "0.0.21"}, chips=(V5E,) * 8, place="TPU VM", trials=trials)
    assert [row for row in tpu if row.status != "ok"] == []
    found = {row.name: row.found for row in tpu}
    assert found["device"] == "TPU v5e: 8 chips, 8 cores of at least 16 GB each; on TPU VM"
    assert found["training on all cores"].startswith("8 cores: first step 3.0 s with compiling, then 2 ms per step")
    assert (found["host to device and back"], found["device memory"]) == ("5 GB/s", "16 GiB")


@pytest.mark.parametrize(
    ("facts", "name", "status", "says"),
    [
        ({"python": (3, 9, 1)}, "Python", "error", "3.10 to 3.13"),
        ({"versions": {"torch": "2.8.0+cpu", "torch_xla": "2.8.0"}}, "torch and torch_xla", "ok", r"2\.8\.0\+cpu"),
        ({"versions": {**GOOD, "torch": "2.13.0"}}, "torch and torch_xla", "error", "pip install torch==2.9.0"),
        ({"versions": {**GOOD, "torch": "2.8.0"}}, "torch and torch_xla", "error", "pip install torch_xla==2.8.0$"),
        (
            {"versions": {"torch": "2.9.0"}},
            "torch and torch_xla",
            "error",
            r"without a runtime .*'tpufit\[xla\]' .*'tpufit\[tpu\]'",
        ),
        ({"versions": TPU}, "torch and torch_tpu", "ok", r"torch 2\.13\.0, torch_tpu 0\.2\.0$"),
        ({"versions": TPU | {"torch": "2.9.0"}}, "torch and torch_tpu", "error", "works with torch 2.11 to 2.15"),
        ({"versions": TPU | {"torch_xla": "2.9.0"}}, "torch and torch_xla", "error", "pip uninstall -y torch_xla$"),
        ({"versions": TPU, "chips": (V5E,)}, "libtpu", "ok", "0.0.51$"),
        ({"versions": TPU | {"libtpu": None}, "chips": (V5E,)}, "libtpu", "error", "pip install libtpu==0.0.51: "),
        ({"chips": (V3,) * 4}, "libtpu", "error", r"pip install libtpu==0\.0\.21(\.1)?: without"),
        ({"versions": {**GOOD, "libtpu": "0.0.21.1"}, "chips": (V5E,)}, "libtpu", "ok", "0.0.21.1$"),
        ({"versions": {**KAGGLE, "libtpu": "0.0.17"}, "chips": (V5E,)}, "libtpu", "ok", "0.0.17$"),
        (
            {"versions": {**KAGGLE, "libtpu": "0.0.21.1"}, "chips": (V5E,)},
            "libtpu",
            "warning",
            "torch_xla 2.8.0; if training doesn't start: pip install libtpu==0.0.17$",
        ),
        # A working installation isn't changed, whatever its versions, and without a TPU no runtime is needed.
        (
            {"versions": {**GOOD, "libtpu": "0.0.99"}, "chips": (V5E,), "trials": (Trial(1, "1 core", 2.0),)},
            "libtpu",
            "ok",
            "0.0.99$",
        ),
        (
            {"versions": {**GOOD, "libtpu": "0.0.7"}, "chips": (V5E,), "trials": (Trial(1, failure="aborted"),)},
            "libtpu",
            "warning",
            r"if training doesn't start: pip install libtpu==0\.0\.21(\.1)?$",
        ),
        ({"versions": {**GOOD, "libtpu": "0.0.7"}}, "libtpu", "ok", "0.0.7$"),
        ({"versions": COMPILER}, "the TPU's compiler", "ok", "libtpu 0.0.21, jax 0.7.1, jaxlib 0.7.1$"),
        ({"versions": COMPILER | {"jax": "0.7.2", "jaxlib": "0.7.2"}}, "the TPU's compiler", "ok", "jaxlib 0.7.2$"),
        ({"versions": COMPILER | {"jax": "0.8.0"}}, "the TPU's compiler", "ok", "jax 0.8.0.*; untested"),
        ({"versions": {**GOOD, "jax": "0.7.1"}}, "the TPU's compiler", "warning", "libtpu missing"),
        (
            {"versions": {**COMPILER, "jaxlib": None}},
            "the TPU's compiler",
            "warning",
            "needs jaxlib too: pip install jaxlib==0.7.1$",
        ),
        ({"versions": {**GOOD, "libtpu": "0.0.21"}}, "the TPU's compiler", "ok", "not installed; only preflight needs"),
        ({"versions": {**GOOD, "tensorflow": "2.18"}}, "TensorFlow", "warning", "tensorflow-cpu"),
        ({"environ": {"PJRT_DEVICE": "TPU"}}, "device", "error", "no TPU on the PCI bus.*unset it"),
        ({"environ": {"PJRT_DEVICE": "CPU"}, "chips": (V3,) * 4}, "device", "warning", "leaves the TPU idle"),
        ({"place": "Kaggle"}, "device", "warning", "Settings > Accelerator"),
        ({"place": "Kaggle", "gpus": 2}, "device", "ok", "2 NVIDIA GPUs, of which training uses one"),
        ({"versions": {"torch": "2.9.0"}, "gpus": 1}, "torch", "ok", "torch 2.9.0, which is enough for a GPU$"),
        ({"versions": {"torch": "2.9.0"}, "gpus": 1, "chips": (V5E,)}, "torch and torch_xla", "error", "pip install"),
        ({"place": "Colab"}, "device", "warning", "Change runtime type"),
        ({"process": Process(pod=Pod(("a", "b", "c")))}, "hosts", "ok", "one of 3 hosts of a pod"),
        (
            {"process": Process(pod=Pod(("a", "b", "c"), missing=("b",)))},
            "hosts",
            "error",
            "missing: b. Their names can't be resolved",
        ),
        ({"process": Process(pod=Pod(activity="process 1 is gone"))}, "hosts now", "ok", "process 1 is gone"),
        (
            {"environ": {"XRT_TPU_CONFIG": "localservice;0;localhost:51011"}},
            "environment",
            "warning",
            "PJRT_DEVICE=TPU",
        ),
        (
            {"environ": {"TPU_PROCESS_ADDRESSES": "local"}},
            "environment",
            "warning",
            "unset them, or the start",
        ),
        ({"environ": {"TPU_VISIBLE_CHIPS": "0"}}, "environment", "warning", "this process doesn't see all cores"),
        ({"environ": {"XLA_USE_BF16": "1"}}, "environment", "warning", r"compile\(precision='bf16'\)"),
        ({"environ": {"XLA_AUTO_SPMD": "1"}}, "environment", "warning", "divides batches itself"),
        ({"environ": {"PT_XLA_DEBUG": "1"}}, "environment", "warning", "every step slow"),
        ({"holders": {17: "python old.py"}}, "processes on the TPU", "error", "17 .python old.py.*doctor ends nothing"),
        ({"holders": {1: "python me.py"}}, "processes on the TPU", "ok", "this process"),
        ({"process": Process(imported_xla=True)}, "this process", "warning", "xla_device"),
        ({"process": Process(cores="8 cores (XLA:TPU)")}, "this process", "ok", "computes on 8 cores"),
        ({"memory": {"RAM": 64 << 30, "the container (cgroup)": 1 << 30}}, "host memory", "error", "1 GiB by the cont"),
        ({"memory": {"RAM": 3 << 30}}, "host memory", "warning", "3 GiB by RAM"),
        ({"cpus": 2, "chips": (V3,) * 4}, "CPUs", "warning", "CachedDataset"),
        ({"disk": 1 << 30}, "free disk", "warning", "make room"),
        (
            {"trials": (Trial(ALL, failure="signal 6 ended its process. It said:\nF00", status=-6),)},
            "training on all cores",
            "error",
            "check the rows before it",
        ),
        (
            {"trials": (Trial(1, failure="no answer", status=None),)},
            "training on 1 core",
            "error",
            "it hangs",
        ),
        (
            {"trials": (Trial(1, failure=explain_end(-9, ""), status=-9),)},
            "training on 1 core",
            "error",
            "host memory ran out",
        ),
        (
            {"chips": (V5E,), "trials": (Trial(1, "1 core", 1.0, 1.0, 2e8),)},
            "host to device and back",
            "warning",
            "device_transform",
        ),
    ],
)
def test_each_fault_has_its_row_and_its_cure(facts, name, status, says):
    found = [row for row in rows(**facts) if row.name == name]
    assert [row.status for row in found] == [status]
    assert re.search(says, f"{found[0].found}\n{found[0].cure}", re.DOTALL), found
    assert bool(found[0].cure) == (status != "ok")
    assert format_table(found).row_count == 1


def test_on_kaggle_fit_removes_stale_variables():
    (row,) = [
        row
        for row in rows(place="Kaggle", chips=(V3,) * 4, environ={"CLOUD_TPU_TASK_ID": "0"})
        if row.name == "environment"
    ]
    assert "here fit removes the first two" in row.cure


DOCTOR = "import sys\nfrom tpufit.__main__ import main\nsys.exit(main(['doctor'{}]))"
LOOK = DOCTOR.format(", '--no-train'")


@pytest.mark.slow
def test_doctor_on_this_machine(run_python):
    process = run_python(DOCTOR.format(""), env={"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": None}, timeout=300)
    assert process.returncode == 0, process.stdout + process.stderr
    assert re.search(r"ok +training on 1 core +1 core \(XLA:CPU\): first step [\d.]+ s with compiling", process.stdout)
    assert re.search(r"ok +training on all cores +8 cores \(XLA:CPU, virtual\): first step", process.stdout)
    assert re.search(r"host to device and back +[\d.e+]+ GB/s", process.stdout)


def test_doctor_with_stale_variables(run_python):
    process = run_python(LOOK, env={"XRT_TPU_CONFIG": "localservice;0;localhost:51011", "PJRT_DEVICE": None})
    assert process.returncode == 0  # a warning isn't a failure
    assert re.search(r"warning +environment +XRT_TPU_CONFIG=localservice;0;localhost:51011", process.stdout)


HIDDEN = """
import importlib.metadata as metadata, sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch_xla":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
real = metadata.distribution
def distribution(name):
    if name == "torch_xla":
        raise metadata.PackageNotFoundError(name)
    return real(name)
metadata.distribution = distribution
"""


@pytest.mark.runtime("torch_xla")
def test_doctor_without_torch_xla(run_python):
    process = run_python(HIDDEN + LOOK)
    assert process.returncode == 1, process.stderr
    assert re.search(r"error +torch and torch_xla +torch 2\.[89]\.0\S*, torch_xla missing", process.stdout)
    text = " ".join(process.stdout.split())  # a row of the table may have several lines
    assert re.search(r"Run: pip install ('tpufit\[xla\]'|torch_xla==2\.8\.0) ", text)


@pytest.mark.slow
def test_doctor_with_little_memory(run_python):
    """So little memory that torch can't be imported: the doctor runs, and its failed training is a row."""
    limit = f"""
    import resource
    resource.setrlimit(resource.RLIMIT_AS, ({1 << 30}, {1 << 30}))
    """
    # On a machine with many processors, NumPy's threads alone would need more.
    process = run_python(textwrap.dedent(limit) + DOCTOR.format(""), env={"OPENBLAS_NUM_THREADS": "1"}, fresh=True)
    assert process.returncode == 1, process.stderr
    assert re.search(r"error +host memory +1 GiB by ulimit -v \(RLIMIT_AS\)", process.stdout)
    assert re.search(r"error +training on 1 core", process.stdout)
    assert resource.getrlimit(resource.RLIMIT_AS)[0] != 1 << 30


@pytest.mark.slow
def test_doctor_while_this_process_uses_the_device(run_python):
    code = """
    import tpufit
    tpufit.init(cores=1)
    rows = {row.name: row for row in tpufit.doctor()}
    assert "1 core (XLA:CPU)" in rows["this process"].found and "training on 1 core" not in rows
    """
    process = run_python(code, env={"PJRT_DEVICE": "CPU"})
    assert process.returncode == 0, process.stderr
