"""Preflights that fail: each ends with one sentence, and leaves no process, folder or change behind."""

import json
import pickle
import random
import re
import signal

import pytest
import torch
from engines import engine_of
from torch import nn
from torch.nn import functional as F

import tpufit
from tpufit.data.user_data import recognize
from tpufit.errors import PreflightError
from tpufit.preflight.pickling import pickle_training
from tpufit.preflight.preflight_plan import make_plan
from tpufit.trainer.fit_arguments import TrainingData, ValidationData

pytestmark = pytest.mark.runtime("torch_xla")

X, Y = torch.randn(64, 6), torch.arange(64) % 3


# Without the compiler


def pretend(folder, monkeypatch, **versions):
    """Pretend that packages have other versions."""
    for name, version in versions.items():
        (folder / f"{name}-{version}.dist-info").mkdir()
        words = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (folder / f"{name}-{version}.dist-info" / "METADATA").write_text(words)
    monkeypatch.syspath_prepend(folder)


def compiled():
    model = tpufit.Model(nn.Linear(6, 3))
    model.compile("adamw", "cross_entropy")
    return model.preflight(X, Y, verbose=0)


UNTRIED = r"untested with the installed TPU compiler \(libtpu 0\.0\.7, jax \S+, jaxlib \S+\) and torch_xla 2"


@pytest.mark.soak
def test_a_compiler_of_another_version_is_tried(tmp_path, monkeypatch):
    pretend(tmp_path, monkeypatch, libtpu="0.0.7")
    with pytest.warns(
        UserWarning, match=rf"{UNTRIED}.*The preflight uses it; a tested version: pip install libtpu==0\.0\."
    ):
        report = compiled()
    assert report.fits and "libtpu 0.0.7" in str(report)


@pytest.mark.soak
def test_a_compiler_of_another_version_that_fails(tmp_path, monkeypatch):
    pretend(tmp_path, monkeypatch, libtpu="0.0.7")
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text("raise ImportError('this jaxlib is of another year')")
    with pytest.warns(UserWarning, match=UNTRIED), pytest.raises(PreflightError) as error:
        compiled()
    first, second = str(error.value).splitlines()
    assert first == "compiling for v5e-8 failed: ImportError: this jaxlib is of another year"
    assert re.fullmatch(
        rf"Perhaps because tpufit is {UNTRIED}\.\d\.\d. A tested version: pip install libtpu==\S+", second
    )


ABSENT = """
    import sys
    from importlib import metadata
    real = metadata.Distribution.from_name

    def from_name(name):
        if name in {}:
            raise metadata.PackageNotFoundError(name)
        return real(name)

    metadata.Distribution.from_name = from_name
    lines = ["import tpufit", "from torch import nn, zeros", "model = tpufit.Model(nn.Linear(2, 2))"]
    lines += ["model.compile('adamw', 'mse')", "model.fit(zeros(64, 2), zeros(64, 2))"]
    open("script.py", "w").write(chr(10).join(lines))
    from tpufit.__main__ import main
    sys.exit(main(["preflight", "script.py"]))
"""


@pytest.mark.parametrize(
    ("absent", "command"),
    [
        (("libtpu", "jax", "jaxlib"), r"libtpu==\S+ jax==(\S+) jaxlib==\1"),
        pytest.param(
            ("jaxlib",), r"jaxlib==\S+", marks=pytest.mark.soak
        ),  # it comes with jax, unless pip was told to omit it
    ],
)
def test_without_the_compiler(run_python, absent, command):
    ended = run_python(ABSENT.format(absent))
    assert ended.returncode == 2, ended.stderr
    here = ", ".join(f"{name} {'missing' if name in absent else '[0-9.]+'}" for name in ("libtpu", "jax", "jaxlib"))
    said = (
        rf"error: a preflight needs the TPU's compiler: pip install {command}, which takes up to 1 GB \(from Python "
        rf"3\.11 on\)\. Here: torch_xla 2\S+, {here}"
    )
    assert re.fullmatch(said, ended.stderr.splitlines()[-1])


# A process that ends early


STRUCK = """
import json, os, resource, signal, subprocess, sys, tempfile, threading, time
from pathlib import Path
from traceback import walk_stack
os.mkdir("temporary")
tempfile.tempdir = os.path.abspath("temporary")
import torch
from torch import nn
import tpufit

X, Y = torch.randn(64, 6), torch.arange(64) % 3
model = tpufit.Model(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)))
model.compile("adamw", "cross_entropy")
fork, python = sys.executable, os.path.join(sys.prefix, "bin", "python")
before = {name: value.clone() for name, value in model.state_dict().items()}

def processes():
    "The children of this process, and their words."
    found = {}
    for task in Path("/proc/self/task").iterdir():
        for child in (task / "children").read_text().split():
            try:
                found[int(child)] = Path("/proc", child, "cmdline").read_text().replace(chr(0), " ")
            except OSError:
                pass
    return found

def when(word, action):
    "Do something as soon as there is a child with a word in its command."
    def wait():
        while True:
            own = Path("/proc/self/cmdline").read_text().replace(chr(0), " ")
            for pid, words in processes().items():
                if word in words and words != own:  # those of a child that has not begun are still ours
                    return action(pid)
            time.sleep(0.001)
    threading.Thread(target=wait, daemon=True).start()

class Limited(subprocess.Popen):
    "A process that begins with little memory, if its command has a word."
    word = None

    def __init__(self, args, **options):
        if self.word is not None and any(self.word in arg for arg in args):
            # Less than PyTorch's libraries take: it ends when it loads them, and not anywhere in their C++.
            options["preexec_fn"] = lambda: resource.setrlimit(resource.RLIMIT_AS, (1 << 28, 1 << 28))
        super().__init__(args, **options)

subprocess.Popen = Limited

def kill(pid):
    os.kill(pid, signal.SIGKILL)

def interrupt(pid):
    main = threading.main_thread().ident
    while subprocess.Popen.wait.__code__ not in [f.f_code for f, _ in walk_stack(sys._current_frames()[main])]:
        time.sleep(0.001)  # until it waits for the child
    os.kill(os.getpid(), signal.SIGINT)

def strike(name, *how, **options):
    if how:
        when(*how)
    try:
        model.preflight(X, Y, 4, tpu="v5e-8", verbose=0, **options)
        said = "it ended well"
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
    left = [name for name in os.listdir("temporary") if name.startswith("tpufit")]
    assert not processes() and not left, (processes(), left)
    print(json.dumps({name: said}), flush=True)

def begin_anew(pid):
    sys.executable = python

# What is struck in its first moments is a new process.
sys.executable = python
strike("tracer killed", "preflight.tracing", kill)
strike("no time", timeout=0.5)
Limited.word = "preflight.tracing"
strike("no memory for the tracer")
Limited.word = None
sys.executable = fork
strike("compiler killed", "compiling.py", kill)
strike("interrupted", "compiling.py", interrupt)
when("preflight.tracing", begin_anew)
Limited.word = "compiling.py"
strike("no memory for the compiler")
Limited.word = None
assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
losses = model.fit(X, Y, 8, epochs=20, verbose=0, cores=1).history["loss"]
print(json.dumps({"trained": losses[-1] < losses[0]}))
"""
KILLED = (
    "PreflightError: {} failed: the system killed its process, most likely because host memory ran out. Close "
    "other programs, or use a machine with more"
)


@pytest.mark.soak
def test_processes_that_end_early(run_python):
    ended = run_python(STRUCK, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    said = {name: words for line in ended.stdout.splitlines() for name, words in json.loads(line).items()}
    assert said.pop("trained") is True
    assert said.pop("tracer killed") == KILLED.format("tracing for 8 cores")
    assert said.pop("compiler killed") == KILLED.format("compiling for v5e-8")
    assert said.pop("no time") == (
        "PreflightError: tracing for 8 cores took longer than 0.5 s, and was stopped. Pass a larger timeout"
    )
    assert said.pop("interrupted") == "KeyboardInterrupt: "
    for name in ("tracer", "compiler"):
        words = said.pop(f"no memory for the {name}")
        assert re.match(
            r"PreflightError: \w+ for (8 cores|v5e-8) failed: its process isn't allowed enough host memory\. Raise",
            words,
        )
        assert len(words.splitlines()) == 2, words
    assert not said


LEFT = """
import ctypes, os, signal, threading, time
from contextlib import suppress
from pathlib import Path
import torch
from torch import nn
import tpufit

class Slow(tpufit.Model):
    "Takes forever to trace, or a minute to compile."

    def train_step(self, batch):
        if os.environ["CHILD"] == "preflight.tracing":
            ctypes.CDLL(None).prctl(15, b"at work")  # the process's name, in its status
            while True:
                time.sleep(1)
        return super().train_step(batch)

def at_work(child):
    "True once it traces, or has loaded the compiler."
    words, status, maps = (Path("/proc", child, name).read_text() for name in ("cmdline", "status", "maps"))
    return os.environ["CHILD"] in words and ("at work" in status or "libtpu" in maps)

def kill():
    "End this process once its child is at work, and tell the child."
    while True:
        for task in Path("/proc/self/task").iterdir():
            for child in (task / "children").read_text().split():
                with suppress(OSError):  # it has just ended
                    if at_work(child):
                        print(child, flush=True)
                        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.01)

threading.Thread(target=kill, daemon=True).start()
layers = [nn.Sequential(nn.Conv2d(24, 24, 3, padding=1), nn.BatchNorm2d(24), nn.GELU()) for _ in range(40)]
model = Slow(nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(3)))
model.module(torch.zeros(2, 24, 24, 24))
model.compile("adamw", "cross_entropy")
model.preflight(torch.zeros(64, 24, 24, 24), torch.arange(64) % 3, 8, tpu="v5e-8", verbose=0)
"""


@pytest.mark.soak
@pytest.mark.parametrize("child", ["preflight.tracing", "compiling.py"])
def test_no_process_outlives_one_that_is_killed(run_python, tmp_path, child):
    (tmp_path / "left.py").write_text(LEFT)
    ended = run_python(
        """
        import subprocess, sys, time
        from pathlib import Path
        killed = subprocess.run([sys.executable, "left.py"], stdout=subprocess.PIPE, text=True)
        status = Path("/proc", killed.stdout.strip(), "status")
        while status.exists() and "State:\\tZ" not in status.read_text():
            time.sleep(0.01)
        print(killed.returncode)
        """,
        timeout=300,
        env={"CHILD": child, "TMPDIR": str(tmp_path)},  # where a killed process leaves its folder
    )
    assert ended.stdout.split() == [str(-signal.SIGKILL)], ended.stderr


# Steps that can't be compiled


class Step(tpufit.Model):
    """A step with a user's line between the loss and the update."""

    def train_step(self, batch):
        x, y = batch
        loss = self.fault(F.cross_entropy(self.module(x), y))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return {"loss": loss}


class Reads(Step):
    def fault(self, loss):
        self.last = loss.item()
        return loss


class Prints(Step):
    def fault(self, loss):
        print("the loss is", loss)
        return loss


class Decides(Step):
    def fault(self, loss):
        if loss > 1:
            loss = loss * 2
        return loss


class Counts(Step):
    count = 0

    def fault(self, loss):
        self.count += 1
        return loss * self.count


class Idles(Step):
    """Its program is the same each time, but `fit` would trace it each time."""

    def fault(self, loss):
        self.count = getattr(self, "count", 0) + 1
        return loss


class Draws(Step):
    def fault(self, loss):
        return loss * random.random()


class Layer(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(6, 3), function

    def forward(self, x):
        return self.linear(x) + self.function(x)


CURE = "Return it from train_step as a log, choose with torch.where instead of if, or leave it out"


def user_model(kind=tpufit.Model, module=None):
    torch.manual_seed(0)
    model = kind(module or nn.Linear(6, 3))
    model.compile("adamw", "cross_entropy")
    return model


def trace(model):
    """Trace the steps of a fit, as the process of a preflight does."""
    from tpufit.preflight.tracing import Tracer

    plan = make_plan(engine_of(model), TrainingData(recognize(X, Y), batch_size=4), ValidationData(), 8)
    state, _ = engine_of(model).state.tensors()
    Tracer(pickle.loads(pickle_training(plan, model, state.keys()))).trace()


@pytest.mark.cores(8)
@pytest.mark.parametrize(
    ("model", "says"),
    [
        (lambda: user_model(Reads), f"the train step reads a value from the device at HERE, for which .*{CURE}"),
        (lambda: user_model(Prints), f"reads a value from the device at HERE, .*{CURE}"),
        (lambda: user_model(Decides), f"reads a value from the device at HERE, .*{CURE}"),
        (
            lambda: user_model(Counts),
            r"can't be replayed: its Python changes Counts\.count \(from 2 to 3\)\. Keep counters in a buffer",
        ),
        (lambda: user_model(Idles), r"its Python changes Idles\.count \(from 2 to 3\)"),
        (lambda: user_model(Draws), "draws a random number on the host at HERE, .*Draw it on the device"),
    ],
    ids=["item", "print", "if", "counter", "idle counter", "random"],
)
def test_a_step_that_cannot_be_replayed(cores, model, says):
    with pytest.raises(PreflightError) as error:
        trace(model())
    assert re.search(says.replace("HERE", r"test_preflight_faults\.py:\d+"), str(error.value)), error.value


@pytest.mark.cores(8)
@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda x: torch.histc(x, 4).mean(), "the step calls histc at HERE, which would run on the host.*do it in the"),
        (lambda x: torch.unique(x).mean(), "aten::_unique2 .* at HERE: .*count with a one-hot product instead"),
        (lambda x: x[x > 0].mean(), r"aten::nonzero .* at HERE: .*torch\.where\(mask, x, 0\)"),
    ],
    ids=["histc", "unique", "mask"],
)
def test_an_operation_on_the_host(cores, function, says):
    with pytest.raises(PreflightError) as error:
        trace(user_model(module=Layer(function)))
    assert re.search(says.replace("HERE", r"test_preflight_faults\.py:\d+"), str(error.value)), error.value


class Divides(tpufit.Model):
    def train_step(self, batch):
        return {"loss": 1 / 0}


@pytest.mark.cores(8)
def test_an_error_in_a_step_has_its_line(cores, tmp_path):
    from tpufit.preflight import tracing

    model = user_model(Divides)
    plan = make_plan(engine_of(model), TrainingData(recognize(X, Y), batch_size=4), ValidationData(), 8)
    (tmp_path / tracing.PLAN).write_bytes(pickle_training(plan, model, engine_of(model).state.tensors()[0].keys()))
    with pytest.raises(ZeroDivisionError):
        tracing.main(tmp_path)
    line = Divides.train_step.__code__.co_firstlineno + 1
    assert json.loads((tmp_path / tracing.FAULT).read_text()) == {
        "kind": "PreflightError",
        "message": "the steps can't be traced: ZeroDivisionError: division by zero "
        f"(at test_preflight_faults.py:{line})",
    }


SCRIPT = """
import os, sys
import tpufit
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.linear = nn.Linear(wide, 3)

    def forward(self, x):
        return self.linear(x)

class Ends(tpufit.Model):
    def train_step(self, batch):
        os._exit(3)

def said(kind, wide=6):
    model = kind(Net(wide))
    model.compile("adamw", "cross_entropy")
    try:
        model.preflight(torch.zeros(64, 6), torch.zeros(64).long(), 4, verbose=0)
    except tpufit.errors.TpufitError as error:
        print(f"{type(error).__name__}: {error}", flush=True)

said(tpufit.Model, wide=7)
said(Ends)
"""


@pytest.mark.slow
def test_errors_of_the_users_own_code_name_its_line(run_python, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    ended = run_python("import runpy; runpy.run_path('train.py', run_name='__main__')")
    narrow, ends = ended.stdout.splitlines()
    assert re.match(r"BatchError: the module's layer 'linear', Linear\(in_features=7, .* \(at train\.py:13\)$", narrow)
    assert ends == "PreflightError: tracing for 8 cores failed: its process ended with status 3"
