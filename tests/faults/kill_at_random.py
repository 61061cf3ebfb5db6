"""Kills or interrupts a training at random moments, many times. It saves every step in the background.

    python tests/faults/kill_at_random.py 200 [--cores 1] [--signals KILL TERM INT OTHER] [--seed 0] [--folder DIR]

After each kill the newest checkpoint must be complete, no older than the last reported save, and equal byte for byte to
the checkpoint of an undisturbed training. The next process resumes from it, and a process that reaches the end must
have the digest of the undisturbed training. Processes are forked after the imports and before the device starts.

`--signals` names the signals from which each one is drawn. After SIGTERM and Ctrl-C the training must end by itself. On
TorchTPU several cores are several processes: OTHER is a kill -9 of another core's process, after which the training
must end by itself, too. Afterwards no process, and so no open port, and no temporary file may remain.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import training

from tpufit.checkpoint import CheckpointDirectory

if find_spec("torch_xla"):
    import torch_xla  # noqa: F401 - imported once, for all that are forked

LIMIT = 300.0  # the time limit of a process, in seconds
ENDS = 120.0  # seconds that a process has to end after a signal or the loss of a core
OTHER = "OTHER"  # kill -9 of another core's process
PR_SET_CHILD_SUBREAPER = 36  # see prctl(2)


@dataclass
class Child:
    """A forked training, and its output before it ended or was killed."""

    pid: int
    output: int
    lines: list[str] = field(default_factory=list)
    rest: str = ""

    def listen(self, seconds: float, until: str | None = None) -> bool:
        """Read its output, for a time or until a line begins with a text. Return True if it is still running."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if not select.select([self.output], [], [], left)[0]:
                return True
            data = os.read(self.output, 1 << 16)
            if not data:
                return False
            *lines, self.rest = (self.rest + data.decode()).split("\n")
            self.lines += lines
            if until is not None and any(line.startswith(until) for line in lines):
                return True
        return True

    def send(self, name: str) -> None:
        """Send a signal to it, unless it has ended."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.Signals[f"SIG{name}"])

    def end(self, seconds: float) -> bool:
        """Wait for its end, and kill it after `seconds`. Return True if it ended by itself."""
        ended = not self.listen(seconds)
        self.send("KILL")
        while self.listen(LIMIT):
            pass
        os.waitpid(self.pid, 0)
        os.close(self.output)
        return ended

    def processes(self) -> list[int]:
        """Return the processes of its other cores."""
        found = subprocess.run(["pgrep", "-P", str(self.pid), "-f", "core_process"], capture_output=True, text=True)
        return [int(pid) for pid in found.stdout.split()]

    def said(self, word: str) -> list[str]:
        return [line.split()[1] for line in self.lines if line.startswith(f"{word} ")]


def forked(folder: Path, cores: int) -> Child:
    """Start a process that trains into a folder, and resumes from the last checkpoint."""
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return Child(pid, read)
    try:
        os.dup2(write, 1)
        os.dup2(os.open(errors_of(folder), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        warnings.simplefilter("ignore")  # the warning that it dropped an unfinished checkpoint
        training.say("digest", training.run(cores, str(folder), training.Say(), resume=True))
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def errors_of(folder: Path) -> Path:
    """Return the file with the errors of a training into a folder."""
    return folder.with_suffix(".txt")


@dataclass
class Reference:
    """The undisturbed training."""

    digest: str
    checkpoints: dict[str, str]  # the hash of each, by its name
    start: float  # seconds to its first step
    length: float  # seconds after its first step


def undisturbed(folder: Path, cores: int) -> Reference:
    """Train once without a signal."""
    begun = time.monotonic()
    child = forked(folder, cores)
    child.listen(LIMIT, "step")
    start = time.monotonic() - begun
    child.listen(LIMIT, "done")
    begun = time.monotonic()
    child.end(LIMIT)
    length = time.monotonic() - begun
    (digest,) = child.said("digest")
    found = Reference(digest, training.prints(folder), start, length)
    print(
        f"undisturbed: {len(found.checkpoints)} checkpoints, {start:.1f} s to the first step, {length:.1f} s after it",
        flush=True,
    )
    return found


def disturb(child: Child, moments: random.Random, usual: Reference, signals: list[str]) -> tuple[bool, str]:
    """Send a random signal at a random moment. Return True if the training was still running, and the signal's name."""
    # Most signals come during the quick steps, some at the start or in the compilation.
    first = moments.choices([None, "step", "done"], [0.1, 0.15, 0.75])[0]
    if first is None:
        alive = child.listen(moments.uniform(0, usual.start))
    else:
        alive = child.listen(LIMIT, first) and child.listen(moments.uniform(0, usual.length))
    name = moments.choice(signals)
    others = child.processes() if name == OTHER else []
    if others:
        os.kill(moments.choice(others), signal.SIGKILL)
    else:
        name = "KILL" if name == OTHER else name
        child.send(name)
    return alive, f"{name} {'in the start' if first is None else f'after {first}'}"


def leftovers(temporary: Path) -> list[str]:
    """Wait up to 120 seconds for the remaining processes of an ended training. List remaining processes and files."""
    remaining = []
    deadline = time.monotonic() + 120
    with suppress(ChildProcessError):  # raised if none remains, because this process has adopted them
        while time.monotonic() < deadline:
            if not os.waitpid(-1, os.WNOHANG)[0]:
                time.sleep(0.05)
        remaining.append("processes remain")
    return remaining + [f"the file {path} remains" for path in temporary.iterdir()]


def main(kills: int, cores: int, signals: list[str], seed: int, where: Path) -> int:
    """Return the number of signals after which data were lost, or processes or files remained."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    temporary = where / "temporary"
    temporary.mkdir(parents=True)
    tempfile.tempdir = os.environ["TMPDIR"] = str(temporary)  # of the trainings and their processes
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(where / "inductor")  # PyTorch 2.13 keeps it, by default in TMPDIR
    moments = random.Random(seed)
    usual = undisturbed(where / "reference", cores)
    killed = lost = torn = ends = trainings = 0
    newest = 0
    folder = where / "run-0"
    while killed < kills:
        child = forked(folder, cores)
        alive, sent = disturb(child, moments, usual, signals)
        faults = [] if child.end(ENDS) else [f"kept running for {ENDS:g} s"]
        faults += leftovers(temporary)
        steps = child.said("step")
        if steps and int(steps[0]) != newest:
            faults.append(f"resumed from step {steps[0]}, and {newest} was committed")
        if alive and not child.said("digest"):
            killed += 1
            torn += any(folder.glob(".step-*"))
        elif child.said("digest") == [usual.digest]:
            ends += 1
            usual.length *= 0.9  # it is quicker than the timed one, and too many would end before their signal
        else:
            faults.append(f"ended with {child.lines[-3:]}, and {usual.digest} was expected")
        checkpoint = CheckpointDirectory(folder).newest()
        newest = checkpoint.step if checkpoint is not None else 0
        promised = max(map(int, child.said("saved")), default=0)
        if newest < promised:
            faults.append(f"step {promised} was said to be saved, and {newest} is the newest")
        wrong = [name for name, found in training.prints(folder).items() if found != usual.checkpoints[name]]
        if wrong:
            faults.append(f"{wrong} differ from those of the undisturbed training")
        print(f"{killed}: {sent}: newest {newest}, said to be saved {promised} {'; '.join(faults)}", flush=True)
        if faults:
            print(errors_of(folder).read_text(errors="replace")[-3000:], flush=True)
        lost += bool(faults)
        if child.said("digest") or faults:
            trainings += 1
            newest, folder = 0, where / f"run-{trainings}"
    print(
        f"{killed} kills on {cores} cores, {torn} while writing, {ends} trainings to the end, {lost} lost", flush=True
    )
    return lost


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Kills and signals at random moments.")
    parser.add_argument("kills", type=int)
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--signals", nargs="+", choices=["KILL", "TERM", "INT", OTHER], default=["KILL"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = arguments.folder or Path(place)
        sys.exit(main(arguments.kills, arguments.cores, arguments.signals, arguments.seed, folder) > 0)
