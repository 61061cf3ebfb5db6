"""The process of a trial: `python -m tpufit.checkup.training 8` trains on 8 cores, and prints JSON."""

import json
import sys
from dataclasses import asdict
from time import perf_counter

import numpy as np
import torch
from torch import nn

from ..backend import Placement
from ..model import Model
from ..runtime import device_memory, make_placement, platform, start, to_device, to_host
from .trial import ALL, Trial

_VIRTUAL = 8
_ROWS = 64  # per core
_STEPS = 20
_SENT = 64 << 20  # bytes


def train(cores: int) -> Trial:
    """Train in this process, on a number of cores, or all with 0."""
    wanted: int | str = cores or "auto"
    if cores == ALL and platform() == "CPU":
        wanted = _VIRTUAL
    now = start(wanted, f"tpufit.doctor() with cores={wanted}")
    model = Model(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)))
    model.compile("adamw", "mse", scale_lr=None)
    rows = _ROWS * now.count
    x = np.random.rand(rows, 32).astype("float32")
    y = np.random.rand(rows, 8).astype("float32")
    began = perf_counter()
    model.fit(x, y, _ROWS, epochs=1, verbose=0)
    first = perf_counter() - began
    model.fit(x, y, _ROWS, epochs=2, verbose=0)  # proves the graph
    began = perf_counter()
    model.fit(x, y, _ROWS, epochs=_STEPS, verbose=0)
    step = (perf_counter() - began) / _STEPS
    return Trial(cores, str(now), first, step, _measure_bandwidth(make_placement(now)), device_memory())


def _measure_bandwidth(place: Placement) -> float:
    """Measure the bytes per second to the device and back, with a tensor that is whole on every core."""
    tensor = torch.zeros(_SENT // 4)
    began = perf_counter()
    to_host(to_device([tensor], place), "bandwidth")
    return 2 * _SENT / (perf_counter() - began)


if __name__ == "__main__":
    print(json.dumps(asdict(train(int(sys.argv[1])))))
