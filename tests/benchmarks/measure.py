"""Measurements in a process. It doesn't import torch, because the Keras process would have to load it."""

from __future__ import annotations

import threading
import time
from pathlib import Path

# The host-bound MLP, the only workload that Keras runs too; the others are in workloads.py.
LAYERS, WIDTH, CLASSES, BATCH, RATE, MOMENTUM = 10, 32, 10, 64, 0.1, 0.9

# Epochs that aren't counted. Two, because a manual loop compiles another graph when it resets its sums.
WARM_UP = 2

# The steps, from 1, after which a "first" run reads the loss: the first, and one after any capture.
READ_AT = (1, 5)


class Missing(Exception):  # noqa: N818 - nothing is wrong
    """A row that can't be measured here: a peer isn't installed, or tpufit doesn't have the argument."""


class Clock:
    """Times epochs, and the first steps.

    Attributes:
        wall: Seconds of each epoch, from the request for its first batch until its last result is on the host.
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
        """Call this before XLA is imported or started; the network and the data exist."""
        self._begun = time.perf_counter()

    def begin_epoch(self) -> None:
        self._host = host_seconds()
        self._wall = time.perf_counter()

    def end_epoch(self, loss: float) -> None:
        """Call this with a number, not a tensor: so the caller has waited for the device."""
        self.wall.append(time.perf_counter() - self._wall)
        self.host.append(host_seconds() - self._host)
        self.loss = loss

    def end_step(self) -> None:
        self.reached.append(time.perf_counter() - self._begun)


def host_seconds() -> float:
    """Return the CPU seconds of all Python threads and autograd's, running or ended. XLA's threads are the device."""
    ours = {thread.native_id for thread in threading.enumerate()}
    device = 0
    for task in Path("/proc/self/task").iterdir():
        try:
            if int(task.name) not in ours and not (task / "comm").read_text().startswith("pt_autograd"):
                device += int((task / "schedstat").read_text().split()[0])
        except OSError:  # the thread has just ended
            continue
    return time.process_time() - device / 1e9


def peak_megabytes() -> float:
    """Return the peak resident memory of the process. (`getrusage` would include its parent's.)"""
    return _memory("self", "VmHWM")


def core_megabytes() -> dict[str, float]:
    """Return the memory of the largest process of another core, or nothing if there is none.

    `core_peak_mb` includes the files that processes share, such as PyTorch's libraries; `core_own_mb` is what the
    process has allocated.
    """
    children = [pid for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()]
    if not children:
        return {}
    names = {"core_peak_mb": "VmHWM", "core_own_mb": "RssAnon"}
    return {name: max(_memory(pid, field) for pid in children) for name, field in names.items()}


def _memory(pid: str, field: str) -> float:
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith(f"{field}:")) / 1024
