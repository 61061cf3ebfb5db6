"""`verify`: each check fails with its fault, no check affects others, and the report contains no names."""

import getpass
import json
import os
import socket
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pods
import pytest
import torch

import tpufit
from tpufit import verification
from tpufit.__main__ import main
from tpufit.checkup.checks import Row
from tpufit.utils.hardware import CHIPS
from tpufit.verification import device_start, equivalence, memory, nets, numerics, resumption, speed
from tpufit.verification.all_checks import CHECKS
from tpufit.verification.anonymize import anonymize
from tpufit.verification.check import NONE, Check, Figure, Process, Setting
from tpufit.verification.report import Verification
from tpufit.verification.runner import (
    FAILED,
    NO_START,
    NO_TIME,
    NOT_ON_A_CPU,
    NOT_ON_A_POD,
    NOT_ON_ONE_CORE,
    PASSED,
    Device,
    Result,
    Runner,
)

# Checks whose parts are in a module of the test, which their processes import.
FAULTY = """
import os, signal, time
from tpufit.verification.check import Figure

def passes(setting):
    yield Figure("difference", 0.0, at_most=0)
    (setting.folder / "left").write_text("for the next process")

def looks(setting):
    yield Figure("left", float((setting.folder / "left").exists()), at_least=1)

def differs(setting):
    yield Figure("difference", 2.0, at_most=1)

def slow_here(setting):
    yield Figure("speed", 1.0, at_least=2, on_tpu=True)

def hangs(setting):
    yield Figure("before", 1.0)
    time.sleep(1000)

def crashes(setting):
    yield Figure("before", 1.0)
    os.kill(os.getpid(), signal.SIGSEGV)

def raises(setting):
    yield from ()
    raise ValueError(f"nothing at {os.path.expanduser('~')}/secret/data.bin")

def kills(setting):
    yield from ()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def faulty(tmp_path, monkeypatch):
    (tmp_path / "faulty_parts.py").write_text(FAULTY)
    monkeypatch.syspath_prepend(str(tmp_path))
    import faulty_parts

    yield faulty_parts
    del sys.modules["faulty_parts"]


def runner(tmp_path, **device):
    made = Runner(8, tmp_path / "kept", 1000.0)
    made.device = Device(**device) if device else made.device
    return made


@pytest.mark.soak
def test_no_check_affects_the_others(faulty, tmp_path, capsys):
    """All in one `verify`: checks that hang, crash, raise or differ fail, and later checks run."""
    checks = [
        Check("crashes", (Process(faulty.crashes, NONE),)),
        Check("raises", (Process(faulty.raises, NONE),)),
        Check("is to be killed", (Process(faulty.kills, NONE, ends=-9),)),
        Check("is to be killed, and lives", (Process(faulty.differs, NONE, ends=-9),)),
        Check("differs", (Process(faulty.differs, NONE),)),
        Check("hangs", (Process(faulty.hangs, NONE),), seconds=60.0),
        Check("passes", (Process(faulty.passes, NONE), Process(faulty.looks, NONE))),
    ]
    report = verification.verify(tmp_path / "report.json", checks=checks)
    found = {result.name: result for result in report.results}
    assert [name for name, result in found.items() if result.status == PASSED] == ["is to be killed", "passes"]
    assert "not finished within 60 s. It was at faulty_parts.py:" in found["hangs"].failure
    assert found["hangs"].figures == found["crashes"].figures == (Figure("before", 1.0),)  # no measurement is lost
    assert "signal 11 ended its process" in found["crashes"].failure
    assert found["raises"].failure == "ValueError: nothing at data.bin"
    assert "it ended with status 0 instead of -9" in found["is to be killed, and lives"].failure
    assert not found["differs"].failure and not found["differs"].figures[0].holds
    assert report.status == 1 and not report.passed
    said = json.loads((tmp_path / "report.json").read_text())
    assert [check["status"] for check in said["checks"]] == [result.status for result in report.results]
    printed = capsys.readouterr().out
    assert f"1/7 {FAILED}" in printed and "7/7 passed" in printed and "not finished within" in printed


@pytest.mark.slow
@pytest.mark.soak
def test_bounds_of_a_tpu_say_nothing_about_a_cpu(faulty, tmp_path):
    slow = Check("speed", (Process(faulty.slow_here, NONE),))
    assert runner(tmp_path, platform="CPU", cores=8).run(slow).status == PASSED
    assert runner(tmp_path, platform="TPU", cores=8).run(slow).status == FAILED
    differs = Check("speed", (Process(faulty.differs, NONE),), only_tpu=True)
    assert runner(tmp_path, platform="CPU", cores=8).run(differs).status == NOT_ON_A_CPU
    # A crash is a failure anywhere.
    crashes = Check("speed", (Process(faulty.crashes, NONE),), only_tpu=True)
    assert runner(tmp_path, platform="CPU", cores=8).run(crashes).status == FAILED


@pytest.mark.slow
def test_a_check_that_cannot_run_never_passes(faulty, tmp_path):
    passes = (Process(faulty.passes, NONE),)
    on_cpu = runner(tmp_path, platform="CPU", cores=1)
    assert on_cpu.run(Check("too large", passes, only_tpu=True, runs_on_cpu=False)).status == NOT_ON_A_CPU
    assert on_cpu.run(Check("all", passes, several=True)).status == NOT_ON_ONE_CORE
    assert Runner(8, tmp_path, -1.0).run(Check("late", passes)).status == NO_TIME
    # Ended by the total time limit, which isn't its own failure.
    ended = Runner(8, tmp_path, 0.5).run(Check("hangs", (Process(faulty.hangs, NONE),)))
    assert ended.status == NO_TIME and not ended.failure
    assert not Verification([Result("late", NO_TIME)]).passed
    assert Verification([Result("all", NO_START), Result("one", PASSED)]).status == 1


@pytest.mark.soak
def test_a_device_that_does_not_start_is_tried_once(faulty, tmp_path, monkeypatch):
    monkeypatch.setenv("PJRT_DEVICE", "NOTHING")
    here = runner(tmp_path)
    first = here.run(Check("starts", (Process(faulty.passes),)))
    assert first.status == FAILED and "PJRT_DEVICE" in first.failure
    assert here.run(Check("next", (Process(faulty.passes),))).status == NO_START
    assert here.run(Check("without a device", (Process(faulty.passes, NONE),))).status == PASSED


# The faults. Each check first passes here, or in the run of all checks (the last test).


def setting(cores, tmp_path):
    return Setting(tpufit.runtime.start(cores, "the test"), tmp_path, tmp_path / "kept")


def wrong(figures):
    return [figure.name for figure in figures if not figure.holds]


def test_an_error_of_the_doctor_is_detected(monkeypatch, tmp_path):
    row = Row("torch", "error", "2.7", "install 2.9")
    monkeypatch.setattr(device_start, "CHECKS", [*device_start.CHECKS, lambda facts: [row]])
    found = list(device_start.run_doctor(Setting(None, tmp_path, tmp_path)))
    assert wrong(found) == ["errors"] and Figure("torch", "error: 2.7. install 2.9") in found


@pytest.mark.cores(1, quick=False)
def test_a_training_that_learns_nothing_is_detected(cores, tmp_path, monkeypatch):
    compile, upwards = tpufit.Model.compile, partial(torch.optim.SGD, lr=0.01, maximize=True)
    monkeypatch.setattr(tpufit.Model, "compile", lambda model, _, loss, **how: compile(model, upwards, loss, **how))
    assert wrong(device_start.train_tiny_net(setting(cores, tmp_path))) == ["last loss / first"]


@pytest.mark.cores(1, quick=False)
@pytest.mark.parametrize(
    ("part", "seen"),
    [
        pytest.param(numerics.check_conv, "fp32, highest", id="conv"),
        pytest.param(numerics.check_lstm, "fp32, highest", id="lstm", marks=pytest.mark.soak),
        pytest.param(numerics.check_gpt, "fp32, highest", id="gpt", marks=pytest.mark.soak),
        pytest.param(numerics.check_attention, "losses of 5 steps, length 256", id="attention", marks=pytest.mark.soak),
    ],
)
def test_a_wrong_precision_is_detected(cores, tmp_path, monkeypatch, part, seen):
    compiled = nets.compile_model
    monkeypatch.setattr(nets, "compile_model", lambda task, net, **options: compiled(task, net, precision="bf16"))
    assert seen in wrong(part(setting(cores, tmp_path)))


def rounded(x, passes):
    """Multiply as a TPU does, with a sum of several bfloat16 numbers for each factor."""
    total = torch.zeros_like(x)
    for _ in range(passes):
        total += (x - total).bfloat16().float()
    return total


def imitated(x, weights, precision, setting):
    passes = {"default": 1, "high": 2, "highest": 3}[precision]
    return rounded(x, passes) @ rounded(weights, passes)


def test_the_check_of_precisions_passes_with_a_tpus_results(monkeypatch, tmp_path):
    monkeypatch.setattr(numerics, "multiply_on_device", imitated)
    assert wrong(numerics.check_precisions(Setting(None, tmp_path, tmp_path))) == []


def test_a_precision_without_effect_is_detected(monkeypatch, tmp_path):
    calls = []

    def found_again(x, weights, precision, setting):
        calls.append(precision)
        return imitated(x, weights, precision if len(calls) <= 3 else "default", setting)

    monkeypatch.setattr(numerics, "multiply_on_device", found_again)
    found = wrong(numerics.check_precisions(Setting(None, tmp_path, tmp_path)))
    assert "highest, second time" in found and not [name for name in found if "first" in name]


def altered(monkeypatch, option):
    """A training with this option has a rate that differs in its last digits."""
    compiled = nets.compile_model

    def other(task, net, **options):
        model = compiled(task, net, **options)
        if options.get(option) not in (None, False):
            model.learning_rate = task.rate * 1.01
        return model

    monkeypatch.setattr(nets, "compile_model", other)


@pytest.mark.cores(1, quick=False)
@pytest.mark.parametrize(
    ("part", "option", "seen"),
    [
        pytest.param(equivalence.check_replay, "jit_compile", "replayed: tensors that differ", id="replayed"),
        pytest.param(
            equivalence.check_replay,
            "steps_per_execution",
            "4 steps in one program: losses",
            id="joined",
            marks=pytest.mark.soak,
        ),
        pytest.param(
            equivalence.check_recomputation, "remat", "remat=True: losses", id="remat", marks=pytest.mark.soak
        ),
        pytest.param(equivalence.check_sharding, "shard", "shard='fsdp': losses", id="shard", marks=pytest.mark.soak),
        pytest.param(
            equivalence.check_uneven_batch,
            "matmul_precision",
            "evaluated loss against PyTorch",
            id="uneven",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_a_training_that_differs_is_detected(cores, tmp_path, monkeypatch, part, option, seen):
    altered(monkeypatch, option)
    assert seen in wrong(part(setting(cores, tmp_path)))


@pytest.mark.cores(1, quick=False)
def test_dropout_that_differs_is_detected(cores, tmp_path, monkeypatch):
    here = setting(cores, tmp_path)
    assert list(equivalence.compute_alone(here)) == [] and wrong(equivalence.compare_cores(here)) == []
    another = lambda module, x: x.masked_fill(x.cumsum(1) % 4 == 0, 0)  # noqa: E731
    monkeypatch.setattr(equivalence._Dropping, "forward", another)
    assert wrong(equivalence.compare_cores(here)) == ["elements that dropout treats differently"]


@pytest.mark.soak_on(8)
@pytest.mark.cores(1, 8, quick=False)
def test_a_tensor_that_stays_on_the_device_is_detected(cores, tmp_path, monkeypatch):
    here, kept, compiled = setting(cores, tmp_path), [], nets.compile_model

    def leaking(task, net, **options):
        place = tpufit.runtime.make_placement(here.cores)
        kept.append(tpufit.runtime.to_device([torch.zeros(4)], place))
        return compiled(task, net, **options)

    assert wrong(memory.check_release(here)) == []
    monkeypatch.setattr(nets, "compile_model", leaking)
    assert wrong(memory.check_release(here)) == ["more tensors on the device, fits 3 to 5"]


@pytest.mark.cores(1, quick=False)
def test_a_resumed_training_that_is_one_step_off_is_seen(cores, tmp_path, monkeypatch):
    here, fit = setting(cores, tmp_path), tpufit.Model.fit

    def one_more(model, x, y, *args, callbacks, **options):
        fit(model, x, y, *args, callbacks=callbacks, **options)
        if callbacks[0].filepath.endswith("run"):
            model.train_on_batch(x[:8], y[:8])

    monkeypatch.setattr(tpufit.Model, "fit", one_more)
    assert wrong(resumption.check_interrupt(here)) == ["steps more than uninterrupted", "tensors that differ"]


@pytest.mark.cores(1, quick=False)
def test_a_training_that_began_anew_is_seen(cores, tmp_path):
    """Nothing was there to go on from: that the weights agree shows nothing."""
    assert wrong(resumption.check_resume(setting(cores, tmp_path))) == ["remaining batches"]


@pytest.mark.cores(1, quick=False)
def test_a_step_that_is_too_large_and_no_error_is_seen(cores, tmp_path, monkeypatch):
    here, fit, limit = setting(cores, tmp_path), tpufit.Model.fit, 4 << 20  # which is no limit at all on a CPU
    monkeypatch.setattr(memory, "device_memory", lambda: limit)
    assert wrong(memory.check_too_large(here)) == ["OutOfMemoryError, hidden layer of 8 MiB"]

    def lacking(model, *args, **options):
        if isinstance(model.module, memory.Wide):
            raise tpufit.errors.OutOfMemoryError("a core has 4 MiB\nand more")
        return fit(model, *args, **options)

    monkeypatch.setattr(tpufit.Model, "fit", lacking)
    found = list(memory.check_too_large(here))
    assert wrong(found) == [] and Figure("message", "a core has 4 MiB") in found


class Clock:
    """A clock that shows times one after the other."""

    def __init__(self, *times):
        self.times = iter(times)

    def __call__(self):
        return next(self.times)


@pytest.mark.cores(1, quick=False)
def test_a_slow_checkpoint_is_seen_on_a_tpu(cores, tmp_path, monkeypatch):
    here = setting(cores, tmp_path)
    monkeypatch.setattr(resumption, "_WIDTH", 64)
    for slow, seen in ((2.0, []), (11.0, ["checkpoint / copy"])):
        monkeypatch.setattr(resumption, "perf_counter", Clock(0.0, slow, 20.0, 21.0))
        found = list(resumption.measure_checkpoint(here))
        assert wrong(found) == seen and all(figure.on_tpu for figure in found if figure.bounded)


@pytest.mark.cores(1, quick=False)
def test_steps_that_take_longer_than_predicted_are_seen_on_a_tpu(cores, tmp_path, monkeypatch):
    here, step = setting(cores, tmp_path), 0.1
    predicted = {"seconds": step, "memory": 1 << 20, "flops": 1e12, "peak": 1e14}
    for factor, seen in ((1.0, []), (5.0, ["GPT: measured / predicted"])):
        took = factor * step * speed._STEPS
        monkeypatch.setattr(speed, "perf_counter", Clock(0.0, 1.0, 1.0, 1.0 + took))
        found = list(speed.measure_net("GPT", here, predicted))
        assert wrong(found) == seen and all(figure.on_tpu for figure in found if figure.bounded)


@pytest.mark.soak_on(8)
@pytest.mark.cores(1, 8, quick=False)
def test_numbers_that_change_on_their_way_are_seen(cores, tmp_path, monkeypatch):
    here, to_host = setting(cores, tmp_path), speed.to_host
    assert wrong(speed.measure_transfers(here)) == []
    monkeypatch.setattr(speed, "to_host", lambda tensors, why: [value.bfloat16() for value in to_host(tensors, why)])
    assert wrong(speed.measure_transfers(here)) == ["numbers that changed on the way"]


@pytest.mark.cores(1, quick=False)
def test_a_profile_that_was_not_written_is_seen(cores, tmp_path, monkeypatch):
    without = partial(speed.TensorBoard, profile_batch=0)
    monkeypatch.setattr(speed, "TensorBoard", lambda folder, **options: without(folder))
    assert wrong(speed.check_profile(setting(cores, tmp_path))) == ["profiles written"]


def test_the_slice_of_each_host_is_known(monkeypatch):
    for chips, name in (((CHIPS["0x0063"],) * 8, "v5e-8"), ((CHIPS["0x005e"],) * 4, "v4-8"), ((), "v5e-1")):
        monkeypatch.setattr(speed, "find_chips", lambda found=chips: found)
        assert speed.find_local_slice().name == name
    monkeypatch.setattr(speed, "find_chips", lambda: (CHIPS["0x0027"],) * 4)
    assert speed.find_local_slice().name == "v3-8"


def test_the_report_names_nobody():
    host, user = socket.gethostname(), getpass.getuser()
    text = anonymize(
        f"{host}: [Errno 13] /mnt/{user}/deep/er/file.txt of gs://bucket/run, 10.0.0.1:8470 in {os.getcwd()}"
    )
    for name in (host, "/mnt", "deep", "10.0.0.1", "bucket", str(Path.cwd().parent)):
        assert name not in text
    assert "file.txt" in text and "Errno 13" in text
    assert anonymize("1e-5/2 s at 1/3 and and/or") == "1e-5/2 s at 1/3 and and/or"
    assert len(anonymize("x y " * 10_000)) < 1600


def test_a_report_with_nan_and_infinity_is_valid_json(tmp_path):
    figures = (Figure("a", float("nan"), at_most=1), Figure("b", float("inf"), at_most=1), Figure("c", 0.0, at_most=0))
    report = Verification([Result("check", FAILED, 1.0, figures)], Device("TPU", 8))
    report.save(tmp_path / "new" / "report.json")
    said = json.loads((tmp_path / "new" / "report.json").read_text())
    assert said["checks"][0]["figures"][2] == {"name": "c", "value": 0.0, "at_most": 0}
    assert [figure["value"] for figure in said["checks"][0]["figures"]] == ["nan", "inf", 0.0]
    assert said["passed"] is False and said["machine"]["platform"] == "TPU" and said["versions"]["torch"]
    assert "1 FAILED" in str(report) and os.listdir(tmp_path / "new") == ["report.json"]


# Each process of a check is a host's: torch_xla finds the pod's plugin there as it finds an installed one.
ON_A_POD = """
import os, sys
from pathlib import Path

installed = Path({installed!r})
if os.environ["POD_HOST"] == "0":
    (installed / "pod-0.dist-info").mkdir(parents=True)
    (installed / "pod-0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\\nName: pod\\nVersion: 0\\n")
    (installed / "pod.py").write_text(Path({host!r}).read_text().partition("plugins.use")[0])
    (installed / "pod-0.dist-info" / "entry_points.txt").write_text("[torch_xla.plugins]\\npod = pod:Pod\\n")
while not (installed / "pod-0.dist-info" / "entry_points.txt").exists():
    pass
sys.path.append(str(installed))

from tpufit import verification
from tpufit.verification.all_checks import CHECKS

# The cores of this pod are those of a CPU.
report = verification.verify("report.json", quick=True, checks=[check for check in CHECKS if not check.only_tpu])
print("STATUS", report.status)
"""


@pytest.mark.soak
def test_the_checks_pass_on_a_pod(tmp_path):
    host, installed = str(pods.HERE / "pod" / "host.py"), str(tmp_path / "installed")
    pod = pods.Pod(2, 2, tmp_path)
    ended = pod.run(ON_A_POD.format(host=host, installed=installed), timeout=1200)
    assert ["STATUS 0" in one.out for one in ended] == [True, True], "\n".join(one.out + one.err for one in ended)
    report = json.loads((tmp_path / "report.json").read_text())
    statuses = {check["name"]: check["status"] for check in report["checks"]}
    assert set(statuses.values()) == {PASSED, NOT_ON_A_POD}
    assert report["machine"]["hosts"] == 2 and statuses["a training resumes after kill -9"] == NOT_ON_A_POD
    assert "The first host has the report" in ended[1].out


@pytest.mark.cores(1)
def test_verify_is_refused_in_a_process_that_uses_the_device(cores, monkeypatch, tmp_path):
    from dataclasses import replace

    from tpufit.runtime import devices

    here = tpufit.runtime.start(cores, "the test")
    monkeypatch.setattr(devices, "_settled", replace(here, platform="TPU"))
    with pytest.raises(tpufit.errors.StartError, match="this process already computes on 1 core"):
        tpufit.verify(tmp_path / "report.json")
    assert not (tmp_path / "report.json").exists()


def test_each_check_has_a_name_of_its_own_and_a_part_that_a_process_finds():
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    parts = [process.part for check in CHECKS for process in check.processes]
    assert all(getattr(sys.modules[part.__module__], part.__qualname__) is part for part in parts)
    page = (Path(__file__).parents[1] / "docs" / "pages" / "howto" / "run-on-your-tpu.md").read_text()
    assert all(
        f"`{status}`" in page
        for status in (PASSED, FAILED, NO_START, NO_TIME, NOT_ON_A_CPU, NOT_ON_ONE_CORE, NOT_ON_A_POD)
    )


@pytest.mark.soak
def test_the_most_telling_checks_pass_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    virtual = "8" if find_spec("torch_xla") else "4"
    status = main(["verify", "--quick", "--timeout", "3000", "--virtual-cores", virtual])
    report = json.loads((tmp_path / "tpufit-report.json").read_text())
    assert [check for check in report["checks"] if check["status"] not in (PASSED, NOT_ON_A_CPU)] == []
    assert status == 0 and len(report["checks"]) == sum(check.quick for check in CHECKS)
    assert len((tmp_path / "tpufit-report.json").read_text()) < 20_000


# What has been shown.


@pytest.fixture
def shown():
    import importlib.util

    path = Path(__file__).parents[1] / "docs" / "tpu_reports.py"
    spec = importlib.util.spec_from_file_location("shown", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pages_say_what_the_reports_show(shown):
    found = shown.reports(shown.DOCS / "reports")
    assert [page.name for page in shown.PAGES if shown.updated(page.read_text(), found) != page.read_text()] == []
    assert [page.name for page in shown.PAGES if "<!-- shown: sentence -->" not in page.read_text()] == []


@pytest.mark.runtime("torch_xla")
def test_a_report_changes_what_they_say(shown, tmp_path, monkeypatch):
    from tpufit.verification import report as reporting

    results = [Result("starts on all cores", PASSED), Result("data reaches the device and returns", PASSED)]
    monkeypatch.setattr(reporting.hardware, "find_chips", lambda *root: [CHIPS["0x0063"]] * 8)
    Verification(results, Device("TPU", 8), date="2026-12-01").save(tmp_path / "a.json")
    Verification(results, Device("CPU", 8), date="2026-12-01").save(tmp_path / "virtual.json")
    found = shown.reports(tmp_path)
    (readme, *_), text = shown.PAGES, shown.updated(shown.PAGES[0].read_text(), found)
    assert "**Shown on v5e, 8 cores.**" in text and shown.NOTHING not in text
    assert shown.updated(text, []) == readme.read_text()  # and back
    assert "| v5e, 8 cores | " in shown.table(found) and "| 2026-12-01 | 2 of 2 |  |" in shown.table(found)
    results[1] = Result("data reaches the device and returns", FAILED)
    Verification(results, Device("TPU", 8), date="2026-12-02").save(tmp_path / "b.json")
    assert shown.sentence(shown.reports(tmp_path)) == (
        "**No TPU has passed all checks yet.** Checks failed on v5e, 8 cores."
    )
