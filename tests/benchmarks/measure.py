"""What is measured in a process, and how. No torch here: the Keras process must not pay for it."""

from __future__ import annotations

import threading
import time
from pathlib import Path

# The host-bound MLP, the one workload that Keras takes part in too; the others are in workloads.py.
LAYERS, WIDTH, CLASSES, BATCH, RATE, MOMENTUM = 10, 32, 10, 64, 0.1, 0.9

# Epochs that aren't counted. Two, because a loop by hand compiles a graph more when it sets its sums back to zero.
WARM_UP = 2

# After which steps, from 1, a "first" run reads the loss: the end of the first, and of one after any capture.
READ_AT = (1, 5)


class Missing(Exception):  # noqa: N818 - nothing is wrong
    """This can't be measured here: a peer isn't installed, or tpufit doesn't have the argument yet."""


class Clock:
    """Times epochs, and the first steps.

    Attributes:
        wall: Seconds of each epoch, from before its first batch is asked for until its last result is on the host.
        host: Seconds of each epoch in which the host computed (see `host_seconds`).
        reached: Seconds from `begin` until the loss after each step of `READ_AT` was read.
        loss: The mean loss of the last epoch. Rows that do the same work agree on it.
    """

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.host: list[float] = []
        self.reached: list[float] = []
        self.loss = float("nan")

    def begin(self) -> None:
        """Nothing of XLA has been imported, started or moved yet; the network and the data are there."""
        self._begun = time.perf_counter()

    def begin_epoch(self) -> None:
        self._host = host_seconds()
        self._wall = time.perf_counter()

    def end_epoch(self, loss: float) -> None:
        """Call this with a number, not a tensor: whoever has it has waited for the device."""
        self.wall.append(time.perf_counter() - self._wall)
        self.host.append(host_seconds() - self._host)
        self.loss = loss

    def end_step(self) -> None:
        self.reached.append(time.perf_counter() - self._begun)


def host_seconds() -> float:
    """CPU seconds so far of all Python threads and autograd's, alive or ended. XLA's threads are the device here."""
    ours = {thread.native_id for thread in threading.enumerate()}
    device = 0
    for task in Path("/proc/self/task").iterdir():
        try:
            if int(task.name) not in ours and not (task / "comm").read_text().startswith("pt_autograd"):
                device += int((task / "schedstat").read_text().split()[0])
        except OSError:  # a thread that has ended meanwhile
            continue
    return time.process_time() - device / 1e9


def peak_megabytes() -> float:
    """The most memory that the process has ever had resident. (`getrusage` would count its parent's too.)"""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:")) / 1024
