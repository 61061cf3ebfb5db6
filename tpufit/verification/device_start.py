"""Does the device start, and what does the doctor find?"""

from collections.abc import Iterator
from time import perf_counter

import torch
from torch import nn

from ..checkup.checks import CHECKS, TPU_PROCESSES
from ..checkup.facts import collect_facts
from ..model import Model
from .check import Figure, Setting
from .nets import batch_size


def run_doctor(setting: Setting) -> Iterator[Figure]:
    """Report the doctor's table without its trainings, which the other checks cover."""
    facts = collect_facts(train=False, timeout=0.0)
    rows = [row for check in CHECKS for row in check(facts)]
    yield Figure("errors", sum(row.status == "error" for row in rows), at_most=0)
    for row in rows:
        if row.cure and row.name != TPU_PROCESSES:
            yield Figure(row.name, f"{row.status}: {row.found}. {row.cure}")


def train_tiny_net(setting: Setting) -> Iterator[Figure]:
    """Train a tiny net on the cores of this process."""
    torch.manual_seed(0)
    model = Model(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    model.compile("adamw", "mse", scale_lr=None)
    x = torch.randn(64, 8)
    began = perf_counter()
    first, *_, last = model.fit(x, x[:, :1], batch_size(setting.cores), epochs=20, verbose=0).history["loss"]
    yield Figure("20 steps, with compiling", perf_counter() - began, unit="s")
    yield Figure("last loss / first", last / first, at_most=1.0)
    yield Figure("cores", setting.count, at_least=1)
