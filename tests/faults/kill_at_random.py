"""Kill -9 at random moments of a training that saves every step in the background, again and again.

    python tests/faults/kill_at_random.py 200 [--cores 1] [--seed 0] [--folder DIR]

After each kill the newest checkpoint must be whole, no older than the last one that was said to be saved, and to the
byte the one that a training has written that was never killed. The next process goes on from it, and what reaches the
end must give that training's digest. A process is forked after the imports and before the device is started.
"""

from __future__ import annotations

import argparse
import os
import random
import select
import signal
import sys
import tempfile
import time
import traceback
import warnings
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch_xla  # noqa: F401 - imported once, for all that are forked
import training

from tpufit.checkpoint import CheckpointDirectory

LIMIT = 300.0  # seconds that one process may take


@dataclass
class Child:
    """A forked training, and what it said before it ended or was killed."""

    pid: int
    output: int
    lines: list[str] = field(default_factory=list)
    rest: str = ""

    def listen(self, seconds: float, until: str | None = None) -> bool:
        """Take in what it says, for a time or until a line begins so. Returns whether it is still there."""
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

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        while self.listen(LIMIT):
            pass
        os.waitpid(self.pid, 0)
        os.close(self.output)

    def said(self, word: str) -> list[str]:
        return [line.split()[1] for line in self.lines if line.startswith(f"{word} ")]


def forked(folder: Path, cores: int) -> Child:
    """A process that trains into a folder, from where the last one was."""
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return Child(pid, read)
    try:
        os.dup2(write, 1)
        warnings.simplefilter("ignore")  # that it dropped what the one before had not finished
        training.say("digest", training.run(cores, str(folder), training.Say(), resume=True))
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def main(kills: int, cores: int, seed: int, where: Path) -> int:
    """Returns how many of the kills have lost anything."""
    moments = random.Random(seed)
    reference = forked(where / "reference", cores)
    reference.listen(LIMIT, "done")
    begun = time.monotonic()
    while reference.listen(LIMIT):
        pass
    length = time.monotonic() - begun
    (expected,) = reference.said("digest")
    os.waitpid(reference.pid, 0)
    good = training.prints(where / "reference")
    print(f"never killed: {len(good)} checkpoints, {length:.2f} s after the first step", flush=True)

    killed = lost = torn = ends = trainings = 0
    newest = 0
    folder = where / "run-0"
    while killed < kills:
        child = forked(folder, cores)
        faults = []
        # Most are killed among its quick steps, some while it makes ready or compiles.
        first = "done" if moments.random() < 0.85 else "step"
        alive = child.listen(LIMIT, first) and child.listen(moments.uniform(0, length))
        child.kill()
        steps = child.said("step")
        if steps and int(steps[0]) != newest:
            faults.append(f"went on from step {steps[0]}, and {newest} was committed")
        if alive and not child.said("digest"):
            killed += 1
            torn += any(folder.glob(".step-*"))
        elif child.said("digest") == [expected]:
            ends += 1
            length *= 0.9  # it is quicker than the one that was timed: too many would not be killed at all
        else:
            faults.append(f"ended with {child.lines[-3:]}, and {expected} was expected")
        checkpoint = CheckpointDirectory(folder).newest()
        newest = checkpoint.step if checkpoint is not None else 0
        promised = max(map(int, child.said("saved")), default=0)
        if newest < promised:
            faults.append(f"step {promised} was said to be saved, and {newest} is the newest")
        wrong = [name for name, found in training.prints(folder).items() if found != good[name]]
        if wrong:
            faults.append(f"{wrong} differ from those of the training that was never killed")
        lost += bool(faults)
        print(f"kill {killed}: newest {newest}, said to be saved {promised} {'; '.join(faults)}", flush=True)
        if child.said("digest") or faults:
            trainings += 1
            newest, folder = 0, where / f"run-{trainings}"
    print(
        f"{killed} kills on {cores} cores, {torn} while writing, {ends} trainings to the end, {lost} lost", flush=True
    )
    return lost


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Kill -9 at random moments.")
    parser.add_argument("kills", type=int)
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        sys.exit(main(arguments.kills, arguments.cores, arguments.seed, arguments.folder or Path(place)) > 0)
