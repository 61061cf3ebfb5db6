"""Kills a training with each kind of state of `test_states.py` by kill -9, and checks that it resumes bit for bit.

    python tests/faults/kill_states.py [NAME ...]

It forks a process for each training, before any thread has begun.
"""

from __future__ import annotations

import os
import pickle
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from test_states import CASES, differences, train

from tpufit.callbacks import Callback, ModelCheckpoint

if find_spec("torch_xla") is not None:
    import torch_xla  # noqa: F401 - imported once, for all that are forked

LIMIT = 120.0  # the time limit for the first checkpoint, in seconds


class Killed(Callback):
    """Kills the process at a step, after a checkpoint exists."""

    reads_weights = False

    def __init__(self, step: int, folder: Path):
        self.left, self.folder = step, folder

    def on_train_step_begin(self, batch: int, logs: Any = None) -> None:
        self.left -= 1
        if self.left <= 0:
            end = time.monotonic() + LIMIT
            while not any(self.folder.glob("step-*")) and time.monotonic() < end:
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGKILL)


def status_of(work: Callable[[], None]) -> int:
    """Run a function in a separate process, and return its exit status, which is negative after a signal."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)  # the nets are so small that several threads would wait for each other
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def lost_by(name: str, where: Path) -> list[str]:
    """Return the differences between a killed and resumed training and an undisturbed training."""
    make, _ = CASES[name]
    moments = random.Random(name)
    frequency = moments.choice([1, 2, 3])
    checkpoint = {"filepath": where / "run", "save_freq": frequency}
    step = moments.randrange(frequency + 1, 12)  # of twelve

    def whole() -> None:
        (where / "expected").write_bytes(pickle.dumps(train(make, eager=True)))

    def broken() -> None:
        train(make, ModelCheckpoint(**checkpoint), Killed(step, where / "run"), eager=True)

    def again() -> None:
        found = train(make, ModelCheckpoint(**checkpoint), eager=True, resume=True, seed=99)
        (where / "found").write_bytes(pickle.dumps(found))

    statuses = [status_of(work) for work in (whole, broken, again)]
    if statuses != [0, -signal.SIGKILL, 0]:
        return [f"exit statuses {statuses}"]
    return differences(*(pickle.loads((where / file).read_bytes()) for file in ("expected", "found")))


def main(names: list[str]) -> int:
    """Return the number of cases that lost data."""
    chosen = names or [name for name, (_, said) in CASES.items() if not said]
    lost = 0
    for name in chosen:
        with tempfile.TemporaryDirectory() as place:
            found = lost_by(name, Path(place))
        lost += bool(found)
        print(f"{name}: {', '.join(found) or 'as if never killed'}", flush=True)
    print(f"{len(chosen)} kills, {lost} lost", flush=True)
    return lost


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) > 0)
