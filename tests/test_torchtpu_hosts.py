"""Several hosts of TorchTPU cores: the processes of torchrun, each with a core, and a pod's."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tpufit.drivers.torchtpu.host import find_host
from tpufit.errors import StartError

HERE = os.path.dirname(__file__)
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]

TRAINED = """
import json, os, signal, sys, time
import torch, tpufit
from torch import nn
from tpufit.callbacks import Callback, CSVLogger, ModelCheckpoint

X, Y = torch.randn(61, 3, generator=torch.Generator().manual_seed(0)), torch.arange(61) % 4

def made():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 4))
    model = tpufit.Model(net)
    model.compile("adamw", "cross_entropy", metrics=["accuracy"], scale_lr=None)
    return model

def trained(model, epochs=2, **options):
    size = 16 // (tpufit.runtime.get_settled_cores() or tpufit.runtime.start("auto", "test")).count
    model.fit(X, Y, size, epochs, verbose=2, callbacks=[ModelCheckpoint("run"), *options.pop("also", [])], **options)

def told(model):
    rows = model.predict(X, verbose=0)
    own = model.predict(X, verbose=0, local=True)
    return {
        "history": model.history.history,
        "evaluated": model.evaluate(X, Y, 8 // tpufit.runtime.get_settled_cores().count, verbose=0),
        "predicted": None if rows is None else torch.as_tensor(rows).tolist(),
        "own": len(own),
        "weights": [value.cpu().tolist() for value in model.module.state_dict().values()],
    }
"""


def to_files(code):
    return TRAINED + code + "\njson.dump(told(model), open(f'told{tpufit.process_index()}', 'w'))\n"


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"TPU_WORKER_HOSTNAMES": "localhost", "WORLD_SIZE": "1"}, (0, 1, "localhost", 0)),
        ({"TPU_WORKER_HOSTNAMES": "t0,t1,t2", "JOB_COMPLETION_INDEX": "2"}, (2, 3, "t0", 29500)),
        ({"TPU_WORKER_HOSTNAMES": "t0,t1", "NODE_RANK": "1", "MASTER_PORT": "7"}, (1, 2, "t0", 7)),
    ],
)
def test_a_pod_is_found_by_its_variables(given, found):
    host = find_host(given)
    assert (host.index, host.count, host.address, host.port) == found


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"WORLD_SIZE": "8", "RANK": "3"}, "LOCAL_RANK isn't set"),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, "Set TPU_WORKER_ID"),
    ],
)
def test_a_missing_variable_is_named(given, named):
    with pytest.raises(StartError, match=named):
        find_host(given)


@pytest.fixture
def torchrun(tmp_path):
    """Start a script by torchrun, on two cores."""

    def start(code, **environ):
        (tmp_path / "train.py").write_text(code)
        path = os.pathsep.join([os.path.dirname(HERE), os.environ.get("PYTHONPATH", "")])
        return subprocess.Popen(
            [*TORCHRUN, "train.py"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return start


@pytest.mark.slow
@pytest.mark.runtime("torch_tpu")
def test_processes_of_torchrun_train_as_cores_of_one_host(tmp_path, torchrun, run_python):
    """Also as one core does, to rounding, which goes on from the checkpoint of two."""
    code = "model = made()\ntrained(model, also=[CSVLogger('log.csv')])"
    with torchrun(to_files(code)) as process:
        assert process.wait(200) == 0, process.stdout.read()
    first, second = (json.loads((tmp_path / f"told{rank}").read_text()) for rank in (0, 1))
    assert second.pop("predicted") is None
    rows = first.pop("predicted")
    assert len(rows) == 61 and (first.pop("own"), second.pop("own")) == (31, 30)
    assert first == second
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 3
    assert sorted(path.name[-1] for path in tmp_path.glob("run/step-*")) == ["4", "8"]
    alone = run_python("import os; os.mkdir('alone'); os.chdir('alone')\n" + to_files("tpufit.init(2)\n" + code))
    assert alone.returncode == 0, alone.stderr
    same = json.loads((tmp_path / "alone" / "told0").read_text())
    assert (same.pop("predicted"), same.pop("own")) == (rows, 61)
    assert same == first
    resumed = run_python(to_files("tpufit.init(1)\nmodel = made()\ntrained(model, 3, resume=True)"))
    assert resumed.returncode == 0, resumed.stderr
    assert "cores: 2 -> 1" in resumed.stderr
    assert len(json.loads((tmp_path / "told0").read_text())["history"]["loss"]) == 3


AT_STEP = """
class At(Callback):
    def on_train_batch_end(self, batch, logs=None):
        if self.model.steps_taken == 6 and not os.path.exists("no more"):
            DO
"""


@pytest.mark.soak
@pytest.mark.runtime("torch_tpu")
def test_an_error_of_one_process_ends_all_of_torchrun(tmp_path, torchrun):
    do = "assert tpufit.process_index() == 0, 'no more of this'"
    with torchrun(to_files(AT_STEP.replace("DO", do) + "model = made()\ntrained(model, 100, also=[At()])")) as process:
        assert process.wait(200) == 1
        said = process.stdout.read()
    assert "no more of this" in said and not (tmp_path / "told0").exists(), said


@pytest.mark.soak
@pytest.mark.runtime("torch_tpu")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_to_torchrun_ends_all_and_a_restart_resumes(tmp_path, torchrun, name):
    code = AT_STEP.replace("DO", "open('here', 'w').close(); time.sleep(1)")
    code = to_files(code + "model = made()\ntrained(model, 4, also=[At()], resume=True)")
    with torchrun(code) as process:
        deadline = time.monotonic() + 120
        while not (tmp_path / "here").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.Signals[name])
        assert process.wait(60) != 0
        said = process.stdout.read()
    assert max(path.name[-2:] for path in tmp_path.glob("run/step-*")) in ("06", "07"), said
    (tmp_path / "no more").touch()
    with torchrun(code) as process:
        assert process.wait(200) == 0, process.stdout.read()
    resumed = json.loads((tmp_path / "told0").read_text())
    for path in tmp_path.glob("run/*"):
        path.rename(tmp_path / f"old-{path.name}")
    with torchrun(code) as process:
        assert process.wait(200) == 0, process.stdout.read()
    whole = json.loads((tmp_path / "told0").read_text())
    assert resumed == whole
