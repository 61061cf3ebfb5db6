"""A training of a few steps in a process of its own: how many cores a process has is settled once, and XLA may abort.

python -m tpufit.checkup.trial 8     # on 8 cores; prints one line of JSON
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from torch import nn

from ..runtime import Layout, Placement, device_memory, platform, start, to_device, to_host

ALL = 0  # cores: every core of a TPU; on a CPU so many virtual ones:
_VIRTUAL = 8
_ROWS = 64  # a core
_STEPS = 20
_SENT = 64 << 20  # bytes


@dataclass(frozen=True)
class Trial:
    """What a training gave, or how it ended.

    Attributes:
        cores: How many cores were asked for; 0 for all of them.
        ran_on: The cores in words, or nothing if it failed.
        first: Seconds of the first step, in which its graph is traced and compiled.
        step: Seconds a step takes afterwards.
        bandwidth: Bytes a second to the device and back.
        memory: The device's memory in bytes, or None where the runtime doesn't tell.
        failure: The last lines of what the process wrote, if it failed.
        status: Its exit status; below 0 the signal that ended it; None if it was still running.
    """

    cores: int
    ran_on: str = ""
    first: float = 0.0
    step: float = 0.0
    bandwidth: float = 0.0
    memory: int | None = None
    failure: str = ""
    status: int | None = 0


def run(cores: int, timeout: float) -> Trial:
    """Train in another process.

    Args:
        cores: How many cores; 0 for all of them.
        timeout: After how many seconds it is ended.
    """
    command = [sys.executable, "-m", __name__, str(cores)]
    here = str(Path(__file__).resolve().parents[2])  # this very tpufit, from wherever it was imported
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}
    try:
        ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return Trial(cores, failure=f"no answer within {timeout:g} s", status=None)
    if ended.returncode == 0:
        return Trial(cores, **json.loads(ended.stdout.splitlines()[-1]))
    lines = [line for line in ended.stderr.splitlines() if line.strip()]
    raised = [i for i, line in enumerate(lines) if line[0] != " " and ("Error" in line or "Check failed" in line)]
    return Trial(cores, failure="\n".join(lines[raised[-1] :] if raised else lines[-3:]), status=ended.returncode)


def train(cores: int) -> Trial:
    """Train in this process.

    Args:
        cores: How many cores; 0 for all of them.
    """
    from ..model import Model

    wanted: int | str = cores or "auto"
    if cores == ALL and platform() == "CPU":
        wanted = _VIRTUAL
    now = start(wanted, f"tpufit.doctor() with cores={wanted}")
    model = Model(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)))
    model.compile("adamw", "mse", scale_lr=None)
    rows = _ROWS * now.count
    x, y = np.random.rand(rows, 32).astype("float32"), np.random.rand(rows, 8).astype("float32")
    began = perf_counter()
    model.fit(x, y, _ROWS, epochs=1, verbose=0)
    first = perf_counter() - began
    model.fit(x, y, _ROWS, epochs=2, verbose=0)  # proves the graph
    began = perf_counter()
    model.fit(x, y, _ROWS, epochs=_STEPS, verbose=0)
    step = (perf_counter() - began) / _STEPS
    return Trial(cores, str(now), first, step, _bandwidth(Placement(now)), device_memory())


def _bandwidth(place: Placement) -> float:
    """Bytes a second there and back, of a tensor that is whole on every core."""
    tensor = torch.zeros(_SENT // 4)
    began = perf_counter()
    to_host(to_device([tensor], place, Layout.WHOLE), "bandwidth")
    return 2 * _SENT / (perf_counter() - began)


if __name__ == "__main__":
    result = asdict(train(int(sys.argv[1])))
    del result["cores"]
    print(json.dumps(result))
