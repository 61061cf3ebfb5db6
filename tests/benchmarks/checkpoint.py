"""Measures checkpoints: how long training is blocked, and how long a save and a load take.

    python tests/benchmarks/checkpoint.py [--quick] [--rounds 7] [--out DIR] [--folder DIR]

Everything happens in one `fit` of a network of 17 million weights with Adam, 203 MB of state: between its steps all
rows are measured once in each round, one after the other. A complete run writes `results/checkpoint.json`; `--quick`
uses a small network and only prints, unless `--out` is given. README.md in this folder explains the rows.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine import HERE, machine, versions
from torch import Tensor, nn

import tpufit
from tpufit.callbacks import Callback, ModelCheckpoint
from tpufit.checkpoint import Checkpoint, CheckpointDirectory, make_state_outside_fit, read, take_checkpoint
from tpufit.checkpoint import manager as saver
from tpufit.utils.files import flush

WIDTHS = (1024, 4096, 3072, 32)
QUICK = (64, 128, 64, 32)
BATCH = 32
SLOW = 2.0  # the additional seconds of a slow disk


@dataclass(frozen=True)
class Target:
    """A ratio of two rows, taken within a round, and its upper limit."""

    row: str
    other: str
    at_most: float


TARGETS = [
    Target("blocked", "host-copy", 1.10),
    Target("save", "torch-save", 2.5),
    Target("load", "torch-load", 2.5),
]
LABELS = {
    "host-copy": "the state's tensors copied to the host, and nothing else",
    "blocked": "how long the training thread stands still for an asynchronous save",
    "save": "a save: hashed, synced, committed",
    "torch-save": "`torch.save` of the same tensors, and fsync",
    "load": "a load: verified",
    "torch-load": "`torch.load` of what that has saved",
}


class Slow(CheckpointDirectory):
    """A run's folder on a disk that is slow on request."""

    seconds = 0.0

    def write(self, checkpoint: Checkpoint) -> Path:
        time.sleep(self.seconds)
        return super().write(checkpoint)


class Measure(Callback):
    """Measures all rows between two steps, once in each round, and then lets some steps run."""

    def __init__(self, keep: ModelCheckpoint, folder: Path, rounds: int) -> None:
        assert keep.checkpoint_writer is not None
        self.writer, self.folder, self.left = keep.checkpoint_writer, folder, rounds
        self.seconds: dict[str, list[float]] = {name: [] for name in LABELS}
        self.loads: list[float] = []
        self.steps_meanwhile: list[int] = []
        self._slow = False
        self._passing = 4  # the first steps compile

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._slow:
            if self.writer.poll() is None:
                self.steps_meanwhile[-1] += 1
                return
            self._slow = False
        self._passing -= 1
        if self._passing > 0:
            return
        if not self.left:
            self.model.stop_training = True
            return
        self.left, self._passing = self.left - 1, 2
        float(logs["loss"])  # the step is over, so that nothing is pending during a measurement
        self.loads.append(round(os.getloadavg()[0], 2))
        self._measure_files()
        device = _tensors(self.model)
        self._time("host-copy", lambda: _copied(device))
        # The next moment for checkpoints follows immediately.
        self.writer.run.seconds = SLOW  # type: ignore[attr-defined]
        self.steps_meanwhile.append(0)
        self._slow = True
        self.model.save_checkpoint(self.writer)

    def _measure_files(self) -> None:
        checkpoint = take_checkpoint(self.model._engine, make_state_outside_fit(self.model._engine))
        ours, theirs = self.folder / "ours", self.folder / "theirs.pt"
        shutil.rmtree(ours, ignore_errors=True)
        theirs.unlink(missing_ok=True)
        both = {**checkpoint.weights, **checkpoint.training}
        run = CheckpointDirectory(ours)
        self._time("torch-save", lambda: (torch.save(both, theirs), flush(theirs)))
        self._time("save", lambda: run.write(checkpoint))
        self._time("torch-load", lambda: torch.load(theirs))
        self._time("load", lambda: read(ours / f"step-{checkpoint.step:010d}"))

    def _time(self, name: str, work: Callable[[], object]) -> None:
        begun = time.perf_counter()
        work()
        self.seconds[name].append(time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one round of a small network: that it runs, not how fast")
    parser.add_argument("--rounds", type=int, help="how often each row is measured (default 7; quick 1)")
    parser.add_argument("--out", type=Path, help="where to write (default, for a complete run: results/)")
    parser.add_argument("--folder", type=Path, help="on which disk to save (default: that of temporary files)")
    args = parser.parse_args()
    rounds = args.rounds or (1 if args.quick else 7)
    report: dict[str, Any] = {"date": datetime.datetime.now(datetime.timezone.utc).date().isoformat()}
    found = {n: v for n, v in (versions() | {"safetensors": metadata.version("safetensors")}).items() if "not" not in v}
    report |= {"quick": args.quick, "machine": machine(), "versions": found, "rounds": rounds}
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        report |= measure(QUICK if args.quick else WIDTHS, rounds, Path(name))
    print_tables(report)
    if args.out or not args.quick:
        out = args.out or HERE / "results"
        out.mkdir(parents=True, exist_ok=True)
        (out / "checkpoint.json").write_text(json.dumps(report, indent=1) + "\n")


def measure(widths: tuple[int, ...], rounds: int, folder: Path) -> dict[str, Any]:
    tpufit.set_random_seed(0)
    net = nn.Sequential(*[nn.Linear(*pair) for pair in pairwise(widths)])
    model = tpufit.Model(net)
    model.compile("adam", "cross_entropy")
    keep = ModelCheckpoint(folder / "run", save_freq=1_000_000, keep_last=1)
    assert keep.checkpoint_writer is not None
    keep.checkpoint_writer.run.__class__ = Slow
    watch = Measure(keep, folder, rounds + 1)  # the first loads code and files into memory, and doesn't count
    blocked = _timed_saves(watch)
    x = np.random.default_rng(0).normal(size=(64 * BATCH, widths[0])).astype(np.float32)
    try:
        model.fit(x, np.arange(len(x)) % widths[-1], BATCH, 100_000, verbose=0, callbacks=[keep, watch], cores=1)
    finally:
        saver.CheckpointManager.note = blocked  # type: ignore[method-assign]
    rows = [
        {"name": name, "label": label, "ms": round(1e3 * statistics.median(watch.seconds[name][1:]), 1)}
        | {"rounds": [round(1e3 * seconds, 1) for seconds in watch.seconds[name][1:]]}
        for name, label in LABELS.items()
    ]
    return {
        "parameters": sum(parameter.numel() for parameter in net.parameters()),
        "megabytes": round(sum(tensor.nbytes for tensor in _tensors(model)) / 1e6, 1),
        "load_before": watch.loads[1:],
        "rows": rows,
        "ratios": ratios({name: times[1:] for name, times in watch.seconds.items()}),
        "slow_disk_s": SLOW,
        "steps_during_a_slow_save": watch.steps_meanwhile[1:],
    }


def ratios(seconds: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Return the ratios in `TARGETS`, each taken within a round, as medians over the rounds."""
    found = []
    for target in TARGETS:
        ratio = statistics.median(a / b for a, b in zip(seconds[target.row], seconds[target.other], strict=True))
        found.append(
            {"name": f"{target.row} / {target.other}", "ratio": round(ratio, 3), "target": f"at most {target.at_most}"}
            | {"reached": ratio <= target.at_most}
        )
    return found


def print_tables(report: dict[str, Any]) -> None:
    """Return a Markdown table of the medians, and the ratios."""
    print(f"\n{report['parameters']:,} weights, {report['megabytes']} MB\n\n| row | ms |\n| --- | ---: |")
    for row in report["rows"]:
        print(f"| {row['label']} | {row['ms']:,.1f} |")
    print()
    for ratio in report["ratios"]:
        verdict = "" if report["quick"] else ": reached" if ratio["reached"] else ": MISSED"
        print(f"{ratio['name']}: {ratio['ratio']} (is to be {ratio['target']}{verdict})")
    print(f"steps while a save took {report['slow_disk_s']} s longer: {report['steps_during_a_slow_save']}")


def _timed_saves(watch: Measure) -> Any:
    """Let the moments of checkpoints be timed. Return the previous function."""
    usual = saver.CheckpointManager.note

    def timed(self: Any, *args: Any, **kwargs: Any) -> None:
        if watch.model._engine.log.wanted_saves:
            watch._time("blocked", lambda: usual(self, *args, **kwargs))
        else:
            usual(self, *args, **kwargs)

    saver.CheckpointManager.note = timed  # type: ignore[method-assign]
    return usual


def _tensors(model: Any) -> list[Tensor]:
    """Return the content of a checkpoint of this model: weights, moments and the numbers of the steps."""
    model.write_back()
    states = (value for state in model.optimizer.state.values() for value in state.values())
    return [*model.module.state_dict().values(), *(value for value in states if isinstance(value, Tensor))]


def _copied(tensors: list[Tensor]) -> list[Tensor]:
    import torch_xla

    return torch_xla._XLAC._xla_get_cpu_tensors([tensor for tensor in tensors if tensor.device.type == "xla"])


if __name__ == "__main__":
    main()
