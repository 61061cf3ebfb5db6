"""Measures tpufit on several virtual cores of TorchTPU, beside torch_xla's.

    python tests/benchmarks/cores.py --torchtpu PYTHON [--cores 1 4 8] [--rounds 3] [--out DIR]

PYTHON is that of an environment with TorchTPU. Each row is a separate process, once in each round. The network is the
small one of `engine.py`, with arrays as its data. A complete run writes `results/cores.json`. README.md in this folder
explains the columns.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
from pathlib import Path
from typing import Any

from engine import FIRST, HERE, machine, medians, run, versions

COLUMNS = {
    "first_step_s": ("s to the end of step 1", "{:.2f}"),
    "ms_per_step": ("ms per step", "{:.3f}"),
    "host_ms_per_step": ("host CPU ms", "{:.3f}"),
    "peak_mb": ("peak MB of the user's process", "{:.0f}"),
    "core_peak_mb": ("peak MB of another core's process", "{:.0f}"),
    "core_own_mb": ("of that, anonymous memory, MB", "{:.0f}"),
}
EPOCHS = 7, 300  # epochs, of which two warm up, and the steps of each


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--torchtpu", type=Path, metavar="PYTHON", required=True)
    parser.add_argument("--cores", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=HERE / "results", help="the folder of the results")
    args = parser.parse_args()
    report: dict[str, Any] = {"date": datetime.datetime.now(datetime.timezone.utc).date().isoformat()}
    report |= {"machine": machine(), "versions": versions(), "rounds": args.rounds}
    rounds: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for _ in range(args.rounds):
        for cores in args.cores:
            for runtime in ("torch_xla", "torch_tpu"):
                found = measured(runtime, cores, args.torchtpu)
                rounds.setdefault((runtime, cores), []).append(found)
                print(f"{runtime}, {cores} cores: {found}", flush=True)
    report["rows"] = [
        {"runtime": runtime, "cores": cores, "medians": medians(found), "rounds": found}
        for (runtime, cores), found in rounds.items()
    ]
    print_table(report["rows"])
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "cores.json").write_text(json.dumps(report, indent=1) + "\n")


def measured(runtime: str, cores: int, torchtpu: Path) -> dict[str, Any]:
    """Measure the first step and some epochs, each in a new process."""
    found: dict[str, Any] = {"load_before": round(os.getloadavg()[0], 2)}
    for kind, (epochs, steps) in (("first", FIRST), ("epochs", EPOCHS)):
        spec = {"contender": "tpufit", "workload": "mlp", "kind": kind, "epochs": epochs, "steps": steps}
        spec |= {"cores": cores, "fit": {"shuffle": False}, "torchtpu": runtime == "torch_tpu"}
        result = run(spec, torchtpu)
        if "failed" in result:
            raise SystemExit(f"{runtime}, {cores} cores: {result['failed']}")
        found |= {name: result[name] for name in COLUMNS if name in result}
    return found


def print_table(rows: list[dict[str, Any]]) -> None:
    print("\n| runtime | cores | " + " | ".join(label for label, _ in COLUMNS.values()) + " |")
    print("| --- |" + " ---: |" * (len(COLUMNS) + 1))
    for row in rows:
        numbers = row["medians"]
        cells = [form.format(numbers[name]) if name in numbers else "" for name, (_, form) in COLUMNS.items()]
        print(f"| {row['runtime']} | {row['cores']} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
