"""Kill -9 at every write of a checkpoint and at random moments: committed checkpoints exist, and are complete."""

import os
import sys

import children
import processes
import pytest

# A separate process forks one for each kill, before torch has started threads.
KILLED_AT_EACH_WRITE = """
import os, shutil, signal, sys, warnings
from pathlib import Path
import torch
from tpufit.checkpoint import format as ck, store
from tpufit.checkpoint import Checkpoint, CheckpointDirectory, Score

warnings.simplefilter("ignore")  # that it dropped what was not finished

def made(step, value, metric=None):
    weights = {"w": torch.full((300,), float(value))}
    rated = None if metric is None else Score("val_loss", metric, "min")
    return Checkpoint(step, weights, {"m": torch.full((300,), float(value))}, {"value": value}, ["w"], rated)

def kill_at(n):
    "Let the process be killed right after its n-th change of the folder."
    left = [n]
    def counted(name, function):
        def call(*args, **kwargs):
            result = function(*args, **kwargs)
            left[0] -= 1
            if not left[0]:
                os.write(1, f"killed after {name} {Path(str(args[0])).name}\\n".encode())
                os.kill(os.getpid(), signal.SIGKILL)
            return result
        return call
    store.flush = counted("flush", store.flush)
    ck.write_file = counted("write", ck.write_file)
    Path.write_text = counted("write", Path.write_text)
    for name in ("rename", "unlink", "rmdir", "mkdir"):
        setattr(os, name, counted(name, getattr(os, name)))
        if hasattr(Path, "_accessor"):  # of Python 3.10, which holds on to the functions
            setattr(Path._accessor, name, getattr(os, name))

def killed(folder, n, work):
    pid = os.fork()
    if not pid:
        kill_at(n)
        work(folder)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.WIFSIGNALED(status)

def case(name, before, work, check):
    n = 0
    while True:
        n += 1
        folder = Path(name, str(n))
        before(CheckpointDirectory(folder))
        alive = not killed(folder, n, work)
        run = CheckpointDirectory(folder)
        check(run, reads=True)  # as one who only reads finds it
        run.open()  # and as the next training does
        check(run, reads=False)
        left = [p.name for p in folder.iterdir() if p.name != ".lock" and not p.name.startswith("step-")]
        assert not left, left
        run.close()
        if alive:
            break
    print(name, n - 1, flush=True)

def two(run):
    run.write(made(1, 1)); run.write(made(2, 2))

def next_one(folder):
    run = CheckpointDirectory(folder); run.open(); run.write(made(3, 3))

def newest_is(*steps):
    def check(run, reads):
        found = run.newest()
        assert found.step in steps and found.state == {"value": found.step}, found
        assert found.weights["w"].tolist() == found.training["m"].tolist() == [float(found.step)] * 300
    return check

case("next", two, next_one, newest_is(2, 3))

def again(folder):
    run = CheckpointDirectory(folder); run.open(); run.write(made(2, 9))

def one_of_both(run, reads):
    found = run.newest()
    # A reader who comes between two renames finds the one before; whoever opens the folder puts it back.
    assert (found.step, found.state["value"]) in ((2, 2), (2, 9), (1, 1)), found
    assert reads or found.step == 2, found

case("same step", two, again, one_of_both)

def many(run):
    for step, loss in enumerate((0.1, 0.5, 0.4, 0.3), 1):
        run.write(made(step, step, loss))

def pruned(folder):
    run = CheckpointDirectory(folder, keep_last=1, keep_best=1); run.open(); run.write(made(5, 5, 0.9))

def best_and_newest(run, reads):
    assert run.best().step == 1 and run.newest().step in (4, 5)
    assert all(step in run.steps() for step in (1, run.newest().step))

case("prune", many, pruned, best_and_newest)
"""


@pytest.mark.slow
def test_after_each_write_of_a_checkpoint(run_python):
    ended = run_python(KILLED_AT_EACH_WRITE)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    counts = dict(line.rsplit(" ", 1) for line in ended.stdout.splitlines() if not line.startswith("killed"))
    # Each file is written and synced; a folder is created, renamed and synced; an equal step is moved, then deleted.
    assert int(counts["next"]) >= 10
    assert int(counts["same step"]) > int(counts["next"])
    assert int(counts["prune"]) > int(counts["next"])
    for where in ("model.safetensors", "training.safetensors", "state.json", "manifest.json"):
        assert f"killed after flush {where}" in ended.stdout


@pytest.mark.soak
def test_training_survives_kills_at_random_moments(tmp_path):
    command = [sys.executable, children.FAULTS / "kill_at_random.py", "5", "--cores", "8", "--folder", tmp_path]
    ended = processes.run(command, timeout=1200)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "5 kills on 8 cores" in ended.stdout
    assert " 0 lost" in ended.stdout


@pytest.mark.soak
def test_each_kind_of_state():
    ended = processes.run([sys.executable, children.FAULTS / "kill_states.py"], timeout=2400)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.endswith(" 0 lost\n")
    assert int(ended.stdout.splitlines()[-1].split()[0]) > 90


@pytest.mark.soak
def test_the_lock_of_a_killed_process_is_free(tmp_path):
    code = f"""
        import os, time
        from tpufit.checkpoint import CheckpointDirectory
        run = CheckpointDirectory({str(tmp_path / "run")!r})
        run.open()
        if os.fork():
            print("open", flush=True)
        time.sleep(600)  # the forked one, as a loader's worker, lives on
        """
    again = f"from tpufit.checkpoint import CheckpointDirectory; CheckpointDirectory({str(tmp_path / 'run')!r}).open()"
    with children.started(code, tmp_path) as child:
        child.wait_for("open")
        command = [sys.executable, "-c", again]
        environment = {**os.environ, **children.ENV}
        refused = processes.run(command, timeout=120, env=environment)
        assert f"CheckpointBusyError: process {child.process.pid} on" in refused.stderr
        child.send(9)
        assert child.end() == -9
        assert processes.run(command, timeout=120, env=environment).returncode == 0
