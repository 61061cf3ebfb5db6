"""Measures the imports before the first step.

    python tests/benchmarks/start.py [--rounds 5]

Each row is a separate process, once in each round; its number is the median over the rounds, in seconds of processor
time, which depends less on other load than wall time. Writes `results/start.json`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys

from engine import HERE, ROOT, machine, versions

# The setup, which doesn't count, and the timed import.
ROWS = {
    "torch": ("", "import torch"),
    "tpufit after torch": ("import torch", "import tpufit; tpufit.Model"),
    "torchmetrics after torch": ("import torch", "import torchmetrics"),
    "torch_xla after torch": ("import torch", "import torch_xla, torch_xla.runtime"),
    "tpufit.init after tpufit": ("import torch, tpufit; tpufit.Model", "tpufit.init(1)"),
}
TIMER = """
import time
{first}
cpu, wall = time.process_time(), time.perf_counter()
{timed}
print(time.process_time() - cpu, time.perf_counter() - wall)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in ROWS}
    load = os.getloadavg()[0]
    for _ in range(rounds):
        for name, (first, timed) in ROWS.items():
            seconds[name].append(run(TIMER.format(first=first, timed=timed)))
    report = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "machine": machine(),
        "versions": versions(),
        "load_before": round(load, 2),
        "rows": {
            name: {
                "cpu_s": round(statistics.median(cpu for cpu, _ in found), 3),
                "wall_s": round(statistics.median(wall for _, wall in found), 3),
                "rounds": [[round(number, 3) for number in pair] for pair in found],
            }
            for name, found in seconds.items()
        },
    }
    for name, row in report["rows"].items():
        print(f"{name}: {row['cpu_s']:.2f} s of the processor, {row['wall_s']:.2f} s on the wall")
    (HERE / "results" / "start.json").write_text(json.dumps(report, indent=1) + "\n")


def run(code: str) -> tuple[float, float]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PJRT_DEVICE": "CPU"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    cpu, wall = map(float, done.stdout.split()[-2:])
    return cpu, wall


if __name__ == "__main__":
    main()
