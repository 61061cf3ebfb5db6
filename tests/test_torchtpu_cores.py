"""Several TorchTPU cores from one process: shared tensors, faults, interrupts and refusals."""

import os
import sys
from pathlib import Path

import plugins
import processes
import pytest

pytestmark = [pytest.mark.runtime("torch_tpu"), pytest.mark.slow]

TRAINED = """
import os, signal, subprocess, sys, time
import torch, tpufit
from torch import nn
from tpufit.callbacks import Callback

X, Y = torch.randn(61, 3, generator=torch.Generator().manual_seed(0)), torch.arange(61) % 4

def others():
    found = subprocess.run(["pgrep", "-P", str(os.getpid()), "-f", "core_process"], capture_output=True, text=True)
    return [int(pid) for pid in found.stdout.split()]

def made(**options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    model = tpufit.Model(net)
    model.compile("sgd", "cross_entropy", metrics=["accuracy"], scale_lr=None, **options)
    return model

def trained(model, **options):
    return model.fit(X, Y, 16 // CORES, shuffle=False, verbose=0, cores=CORES, **options).history
"""


def on(cores, code):
    return TRAINED.replace("CORES", str(cores)) + code


def test_user_changes_of_weights_reach_all_cores(run_python):
    code = """
class Halves(Callback):
    def on_epoch_end(self, epoch, logs=None):
        with torch.no_grad():
            for parameter in self.model.module.parameters():
                parameter.mul_(0.5)
            self.model.module[0].weight.data.add_(0.25)

model = made()
history = trained(model, epochs=3, callbacks=[Halves()])
outputs = torch.as_tensor(model.predict(X, verbose=0)).double()
print([round(x, 4) for x in [*history["loss"], *history["accuracy"], float(outputs.square().sum())]])
assert "RANK" not in os.environ and not torch.distributed.is_initialized()
"""
    said = [run_python(on(cores, code), timeout=200) for cores in (1, 4)]
    assert [process.returncode for process in said] == [0, 0], said[1].stderr
    assert said[0].stdout == said[1].stdout != ""


def test_a_call_of_the_model_gives_all_rows(run_python):
    code = """
model = made()
trained(model)
expected = torch.as_tensor(model.predict(X[:8], verbose=0))
outputs = [model(X[:rows]) for rows in (1, 3, 8)]
print(all(torch.allclose(one, expected[: len(one)], atol=1e-6) for one in outputs))
print(*(tuple(one.shape) for one in [*outputs, model(X[:5], training=True)]))
trained(model)
"""
    process = run_python(on(4, code), timeout=200)
    assert process.stdout == "True\n(1, 4) (3, 4) (8, 4) (5, 4)\n", process.stderr


def test_rows_that_the_cores_do_not_divide_are_exact(run_python):
    """13 rows in the last batch. Without 32-bit indices each kind would end the process."""
    code = f"""
sys.path.insert(0, {str(Path(__file__).parent)!r})
from torch.nn import functional as F
from row_losses import KINDS

def loss_of(out, y):
    kinds = ("index", "gather", "one-hot by scatter_", "index_add_", "a margin at the label", "half of the rows")
    return sum(KINDS[kind](out, y) for kind in kinds) + F.cross_entropy(out, y)

class Trained(tpufit.Model):
    def train_step(self, batch):
        x, y = batch
        loss = loss_of(self(x), y)
        self.apply_gradients(loss)
        return {{"loss": loss}}

torch.manual_seed(0)
net, plain = nn.Linear(3, 4), nn.Linear(3, 4)
plain.load_state_dict(net.state_dict())
model = Trained(net)
model.compile(torch.optim.SGD(net.parameters(), 0.1), scale_lr=None)
history = trained(model, epochs=2)["loss"]
optimizer = torch.optim.SGD(plain.parameters(), 0.1)
expected = []
for _ in range(2):
    total = 0.0
    for rows, labels in zip(X.split(16), Y.split(16), strict=True):
        loss = loss_of(plain(rows), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * len(rows)
    expected.append(total / 61)
torch.testing.assert_close(torch.tensor(history), torch.tensor(expected), rtol=1e-4, atol=1e-4)
for one, other in zip(net.parameters(), plain.parameters(), strict=True):
    torch.testing.assert_close(one.detach().cpu(), other.detach(), rtol=1e-4, atol=1e-4)
print(*(tuple(o.shape) for o in [torch.as_tensor(model.predict(X, batch_size=4, verbose=0))]))
"""
    process = run_python(on(4, code), timeout=250)
    assert process.returncode == 0, process.stderr
    assert process.stdout.strip() == "(61, 4)"


def test_replayed_steps_equal_traced_steps_bit_for_bit(run_python):
    code = """
def weights(**options):
    model = made(**options)
    trained(model, epochs=2)
    return {name: value.cpu() for name, value in model.module.state_dict().items()}

replayed, traced = weights(), weights(jit_compile=False)
print(all(torch.equal(value, traced[name]) for name, value in replayed.items()))
"""
    process = run_python(on(2, code), timeout=250)
    assert process.returncode == 0, process.stderr
    assert process.stdout.strip() == "True"


@pytest.mark.parametrize(
    ("how", "why"), [("SIGKILL", "the process of core 2 is gone: "), ("SIGSTOP", "has sent no heartbeat for 3 s")]
)
def test_a_core_that_dies_or_hangs_ends_the_step_with_one_error(run_python, monkeypatch, how, why):
    monkeypatch.setenv("TPUFIT_HOST_TIMEOUT", "3")
    code = """
class Fails(Callback):
    reads_weights = False

    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            os.kill(others()[-1], signal.HOW)
            self.when = time.monotonic()

model, fails = made(), Fails()
weights = {name: value.clone() for name, value in model.module.state_dict().items()}
try:
    trained(model, epochs=100, callbacks=[fails])
except (tpufit.errors.DeviceLostError, tpufit.errors.StateLostError) as error:
    print(time.monotonic() - fails.when < 30, error)
for call in (lambda: model.predict(X, verbose=0), lambda: trained(made())):
    try:
        call()
    except (tpufit.errors.DeviceLostError, tpufit.errors.StateLostError) as error:
        print(error)
print(others())
"""
    process = run_python(on(3, code.replace("HOW", how)).replace("61", "60"), timeout=200)
    assert process.returncode == 0, process.stderr
    said = process.stdout
    assert said.startswith("True ") and said.endswith("\n[]\n"), said
    assert said.count(why) == said.count("Restart the process (in a notebook: the kernel)") >= 2, said


def test_a_value_that_user_code_reads_after_a_loss_is_an_error(run_python, monkeypatch):
    monkeypatch.setenv("TPUFIT_HOST_TIMEOUT", "3")
    code = """
class Reads(Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if batch == 2:
            os.kill(others()[-1], signal.SIGSTOP)

    def on_train_batch_end(self, batch, logs=None):
        weight = self.model.module[0].weight
        for read in (lambda: weight.detach().cpu()[0, 0].item(), lambda: weight[0, 0].item(), weight.tolist):
            try:
                print(type(read()).__name__)
            except tpufit.errors.DeviceLostError as error:
                print(str(error)[:31])

try:
    trained(made(), epochs=2, callbacks=[Reads()])
except (tpufit.errors.DeviceLostError, tpufit.errors.StateLostError):
    print("the step failed")
"""
    process = run_python(on(2, code).replace("61", "60"), timeout=200)
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines() == [
        *["float", "float", "list"] * 2,
        *["this process has lost its cores"] * 3,
        "the step failed",
    ]


def test_after_an_error_of_all_cores_the_next_fit_works(run_python):
    code = """
class Large(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 4)
        self.more = 0

    def forward(self, x):
        out = self.head(x)
        if self.more:
            many = out.sum() * torch.arange(1 << self.more, device=out.device).float()
            out = out + (many.sort()[0] if self.training else many.cumsum(0))[5:6]  # the first can't be compiled
        return out

model = tpufit.Model(Large())
model.compile("sgd", "cross_entropy", scale_lr=None)
trained(model)
pids = others()
model.module.more = 44
for call in (lambda: model.predict(X, verbose=0), lambda: trained(model)):
    try:
        call()
    except (tpufit.errors.OutOfMemoryError, tpufit.errors.StateLostError, NotImplementedError) as error:
        print(type(error).__name__)
model.module.more = 0
history = trained(model, epochs=2)
print(len(history["loss"]), others() == pids)
"""
    process = run_python(on(2, code), timeout=200)
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines() == ["OutOfMemoryError", "NotImplementedError", "2 True"]


def test_interrupts_at_any_moment_keep_the_cores_intact(run_python):
    """At the start, and then two each time, so that the second interrupts the handling of the first."""
    code = """
import random, threading
from tpufit.runtime.driver import driver

driver().load()
draw, armed, sent, ended = random.Random(0), threading.Event(), 0, False

def interrupt():
    global sent
    while sent < 150:
        armed.wait()
        time.sleep(0.2 if sent < 20 else draw.random() * draw.choice([0.001, 0.01, 0.1, 0.3]))
        for _ in range(2):
            sent += 1
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(draw.random() * draw.choice([0.0001, 0.001, 0.01]))

def train():
    armed.set()
    model = made()
    while sent < 150:
        model.fit(X, Y, 8, shuffle=False, verbose=0, cores=2, epochs=draw.choice([1, 30]))
        model.predict(X, 8, verbose=0)

def go_on():
    while sent < 150:
        try:
            train()
        except KeyboardInterrupt:
            armed.clear()

def end():
    global ended
    while not ended:
        try:
            go_on()
            time.sleep(0.2)
            ended = True
        except KeyboardInterrupt:
            pass

threading.Thread(target=interrupt, daemon=True).start()
end()
print(len(others()), [round(x, 4) for x in trained(made(), epochs=3)["loss"]])
"""
    process = run_python(on(2, code), timeout=250)
    assert process.returncode == 0, process.stderr
    plain = run_python(on(1, "print(1, [round(x, 4) for x in trained(made(), epochs=3)['loss']])"), timeout=200)
    assert process.stdout == plain.stdout


def test_no_process_outlives_the_users(run_python):
    code = """
trained(made())
pids = others()
assert len(pids) == 1
print(*pids, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    process = run_python(on(2, code), timeout=200)
    assert process.returncode == -9
    code = f"""
import os, time
deadline = time.monotonic() + 20
while os.path.exists("/proc/{int(process.stdout)}") and time.monotonic() < deadline:
    time.sleep(0.1)
print(os.path.exists("/proc/{int(process.stdout)}"))
"""
    assert run_python(code).stdout.strip() == "False"


@pytest.mark.soak
def test_signals_at_random_moments_lose_nothing(tmp_path):
    """Kills, SIGTERM and Ctrl-C, and kills of another core. More by hand, see `kill_at_random.py`."""
    script = Path(__file__).parent / "faults" / "kill_at_random.py"
    command = [sys.executable, script, "4", "--cores", "4", "--signals", "KILL", "TERM", "INT", "OTHER"]
    ended = processes.run([*command, "--folder", tmp_path], timeout=600, env={**os.environ, **plugins.as_tpu()})
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "4 kills on 4 cores" in ended.stdout and " 0 lost" in ended.stdout


def test_unsupported_features_on_several_cores(run_python):
    code = """
class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 4)

    def forward(self, x):
        out = self.head(x)
        return out * 2 if out.sum().item() > 0 else out

model = tpufit.Model(Reads())
model.compile("sgd", "cross_entropy", scale_lr=None)
split = made(shard={"0.weight": 0})
trained(split)
with torch.no_grad():
    split.module[0].weight.mul_(0.5)
for call in (lambda: trained(model), lambda: trained(split)):
    try:
        call()
    except (tpufit.errors.ReplayError, tpufit.errors.PlacementError) as error:
        print(error)
"""
    process = run_python(on(2, code), timeout=200)
    assert process.returncode == 0, process.stderr
    first, second = process.stdout.splitlines()
    assert "can't run on several cores of torch_tpu, which needs all of it as one graph: " in first
    assert first.endswith("Or compute on one core, with cores=1, or without graphs, with run_eagerly=True")
    assert second.startswith("user code has changed a tensor of shape (8, 3) in place, outside of a step.")


def test_auto_is_one_core_without_a_tpu_and_more_cores_are_refused(run_python):
    code = """
from tpufit.runtime import get_settled_cores

try:
    tpufit.init([2])
except tpufit.errors.CoresError as error:
    print(error)
tpufit.init()
print(get_settled_cores().count)
model = made()
model.fit(X, Y, 16, verbose=0)
for cores in (2, [1]):
    try:
        model.fit(X, Y, 8, verbose=0, cores=cores)
    except tpufit.errors.CoresError as error:
        print(str(error)[:45])
"""
    process = run_python(on(1, code), timeout=200)
    assert process.stdout.splitlines() == [
        "cores=[2] was requested, but without a TPU torch_tpu gives this process core 0. Pass cores=1",
        "1",
        "2 cores were requested, but this process comp",
        "cores=[1] was requested, but this process com",
    ], process.stderr
