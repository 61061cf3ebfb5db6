"""Measures the cost of callbacks: ten that read nothing, and one for which weights are written back into the module.

    python tests/benchmarks/hooks.py [--quick] [--out DIR]

A complete run writes `results/hooks.json`; `--quick` only prints, unless `--out` is given. README.md in this folder
explains the rows.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine import HERE, machine, versions
from workloads import WORKLOADS

import tpufit
from tpufit import runtime
from tpufit.callbacks import Callback, CallbackList

# The most microseconds that ten callbacks without reads may add to a step.
TARGET = 10.0


class Idle(Callback):
    """Overrides no hook of a batch, as most callbacks."""

    reads_weights = False

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None: ...


class Quiet(Idle):
    """Is called at every batch, and reads nothing."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None: ...
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None: ...


class Exposed(Callback):
    """May read the weights at every batch, so that they are written back into the module; it doesn't read them."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None: ...


class Reading(Idle):
    """Copies all weights to the host at every batch, which waits for the device."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.state_dict()


class Epochs(Callback):
    """Records the duration of each epoch, until its logs are numbers."""

    reads_weights = False

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._began = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seconds.append(time.perf_counter() - self._began)


VARIANTS: dict[str, Callable[[], list[Callback]]] = {
    "none": list,
    "ten_idle": lambda: [Idle() for _ in range(10)],
    "ten_quiet": lambda: [Quiet() for _ in range(10)],
    "one_exposed": lambda: [Exposed()],
    "one_reading": lambda: [Reading()],
}


def dispatch(callbacks: list[Callback], steps: int) -> float:
    """Return the microseconds per step of calling the hooks as the loop does, with nothing else."""
    hooks = CallbackList(callbacks)
    tell_begin, tell_end = hooks.has("on_train_batch_begin"), hooks.has("on_train_batch_end")
    logs: dict[str, Any] = {}
    began = time.perf_counter()
    for index in range(steps):
        if tell_begin:
            hooks.call("on_train_batch_begin", index)
        if tell_end:
            hooks.call("on_train_batch_end", index, logs)
    return (time.perf_counter() - began) / steps * 1e6


def in_fit(name: str, steps: int, rounds: int) -> dict[str, Any]:
    """Return the milliseconds per step of `fit` with each variant in turn, and its counters."""
    workload = WORKLOADS[name]
    model = tpufit.Model(workload.build())
    model.compile(lambda p: workload.optimizer(p, lr=workload.rate), "cross_entropy", metrics=["accuracy"])
    loader = workload.loader(steps)
    model.fit(loader, epochs=2, verbose=0)  # compiles
    found: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    counted: dict[str, dict[str, int]] = {}
    for _ in range(rounds):
        for variant, make in VARIANTS.items():
            epochs, before = Epochs(), runtime.counts()
            model.fit(loader, epochs=2, verbose=0, callbacks=[*make(), epochs])
            spent = runtime.counts() - before
            found[variant].append(min(epochs.seconds) / steps * 1e3)
            # Without back-pressure, whose number of waits depends on time and not on callbacks.
            waits = {reason: n for reason, n in spent.waits.items() if n and reason != "throttle"}
            counted[variant] = {"graphs": sum(spent.graphs.values()), "waits": sum(waits.values())}
    added = {
        variant: statistics.median((one - none) * 1e3 for one, none in zip(values, found["none"], strict=True))
        for variant, values in found.items()
    }
    return {
        "steps": steps,
        "tensors_of_state": len(model._engine.state.device.tensors),
        "ms_per_step": {variant: round(statistics.median(values), 4) for variant, values in found.items()},
        "added_us_per_step": {variant: round(value, 2) for variant, value in added.items()},
        "counters_of_two_epochs": counted,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="that it runs, not how fast")
    parser.add_argument("--out", type=Path, help="the folder to write to (default: results, in a complete run)")
    args = parser.parse_args()
    rounds, calls = (1, 1000) if args.quick else (7, 100_000)
    alone = {
        variant: round(statistics.median(dispatch(make(), calls) for _ in range(rounds)), 3)
        for variant, make in VARIANTS.items()
        if variant in ("none", "ten_idle", "ten_quiet")
    }
    report = {
        "date": datetime.date.today().isoformat(),
        "quick": args.quick,
        "machine": machine(),
        "versions": versions(),
        "rounds": rounds,
        "dispatch_us_per_step": alone,
        "target_us_per_step": TARGET,
        "fit": {
            "mlp": in_fit("mlp", 30 if args.quick else 300, rounds),
            "convnet": in_fit("convnet", 5 if args.quick else 50, rounds),
        },
    }
    print(json.dumps(report, indent=1))
    out = args.out or (None if args.quick else HERE / "results")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "hooks.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
