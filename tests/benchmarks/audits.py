"""Measures an audit: the time to trace a step again and compare it, and its share of short epochs.

    python tests/benchmarks/audits.py [--out DIR]

Each network of the table is trained for some steps on XLA:CPU with the smallest possible rows, and each replay is
audited: the time of an audit doesn't depend on the rows. The host-bound MLP of `workloads.py` is then trained in epochs
of 300 steps, the worst case: half a millisecond per step. `--out` writes `audits.json` there.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

os.environ.setdefault("PJRT_DEVICE", "CPU")
import torch
from engine import machine, versions
from networks import TRAININGS
from workloads import WORKLOADS

import tpufit
from tpufit import runtime
from tpufit.callbacks import Callback

NETWORKS = ("MLP 2 x 2048", "LSTM 2 x 256", "GPT 4 x 512", "ResNet-50", "ViT of 2 blocks")
STEPS = 20


class Auditing(Callback):
    """Lets each replay be audited, as after a rarely called hook."""

    reads_weights = False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model._engine.note_user_code(every_batch=False)


def audit_of(name: str) -> dict[str, float]:
    """Return the milliseconds of an audit, and the host's time for a replay."""
    training = replace(TRAININGS[name], rows=1)
    x, y = training.batch(STEPS)
    model = tpufit.Model(training.make())
    model.compile("adamw", training.loss, metrics=["accuracy"], precision=training.precision)
    model.fit(x, y, batch_size=1, epochs=1, verbose=0)  # captures
    before = runtime.counts()
    model.fit(x, y, batch_size=1, epochs=1, verbose=0, callbacks=Auditing())
    made = runtime.counts() - before
    return {"audits": made.waits["audit"], "audit_ms": 1e3 * made.seconds["audit"] / made.waits["audit"]}


def shares(epochs: int = 10, steps: int = 300) -> dict[str, float]:
    """Return the share of audits in short epochs of the host-bound MLP, and their number in each."""
    workload = WORKLOADS["mlp"]
    model = tpufit.Model(workload.build())
    model.compile(lambda p: workload.optimizer(p, lr=workload.rate), "cross_entropy", metrics=["accuracy"])
    data = workload.loader(steps)
    model.fit(data, epochs=2, verbose=0)
    before, began = runtime.counts(), perf_counter()
    model.fit(data, epochs=epochs, verbose=0)
    elapsed, made = perf_counter() - began, runtime.counts() - before
    return {
        "ms_per_step": 1e3 * elapsed / epochs / steps,
        "audits_an_epoch": made.waits["audit"] / epochs,
        "share": (made.seconds["audit"] + made.seconds["wait: audit"]) / elapsed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a folder for audits.json")
    args = parser.parse_args()
    torch.manual_seed(0)
    report: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "versions": versions(),
        "networks": {},
    }
    for name in NETWORKS:
        report["networks"][name] = audit_of(name)
        print(f"{name}: {report['networks'][name]['audit_ms']:.1f} ms an audit", flush=True)
    report["short_epochs"] = shares()
    print(report["short_epochs"])
    if args.out:
        (args.out / "audits.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
