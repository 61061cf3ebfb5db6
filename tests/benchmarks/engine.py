"""Measures a training step with tpufit, and with its alternatives.

    python tests/benchmarks/engine.py [--quick] [--only NAME ...] [--rounds 3] [--torchtpu PYTHON] [--out DIR]

Each row runs in a separate process, one after the other, once in each round. A complete run writes
`results/engine.json`; `--quick` and `--only` (groups, rows or parts of their names) only print, unless `--out` is
given. `--torchtpu` names the Python of an environment with TorchTPU, which runs the rows on TorchTPU. README.md in this
folder explains the rows.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
import plugins

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent

TIMEOUT = 600.0  # the time limit of a process, in seconds
PACKAGES = ("torch", "torch_xla", "torchmetrics", "accelerate", "lightning", "keras", "jax", "jaxlib", "numpy")

# Epochs (two warm up) and steps in each epoch, complete and quick.
SIZES = {
    "mlp": ((7, 300), (3, 50)),
    "mlp-8-cores": ((5, 100), (3, 20)),
    "convnet": ((5, 20), (3, 4)),
    "transformer": ((5, 20), (3, 4)),
    "memory": ((2, 4), (2, 2)),
}
FIRST = (1, 6)

TRACE = {"jit_compile": False}
TEN = {"steps_per_execution": 10}
# The rows that tpufit is compared with, each within a round; then the median is taken.
RATIOS = [
    ("tpufit", "hand", "ms_per_step"),
    ("tpufit", "lightning", "ms_per_step"),
    ("tpufit", "replay", "ms_per_step"),
    ("tpufit", "keras", "ms_per_step"),
    ("tpufit-10", "keras-10", "ms_per_step"),
    ("torchtpu", "keras", "ms_per_step"),
    ("torchtpu-10", "keras-10", "ms_per_step"),
    ("torchtpu", "tpufit", "ms_per_step"),
    ("fits-tpufit", "fits-keras", "ms_per_step"),
    ("fits-shuffled-tpufit", "fits-shuffled-keras", "ms_per_step"),
    ("tpufit-8", "hand-8", "ms_per_step"),
    ("tpufit-traced", "hand", "host_ms_per_step"),
    ("convnet-tpufit-traced", "convnet-hand", "host_ms_per_step"),
    ("transformer-tpufit-traced", "transformer-hand", "host_ms_per_step"),
    ("convnet-tpufit", "convnet-hand", "host_ms_per_step"),
    ("transformer-tpufit", "transformer-hand", "host_ms_per_step"),
    ("large-tpufit", "large-hand", "peak_mb"),
]


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        group: Its table.
        name: Its name for `--only` and in the JSON.
        label: Its name in the tables.
        contender: The function that runs it, in `contenders_torch.py` or `contender_keras.py`.
        workload: Its name in `workloads.py`.
        options: Further arguments of this function: `cores`, `compile`, `fit`, `fits` (a call of `fit` for each epoch,
            all of which is timed) or `donate`; `long` for ten times as many steps an epoch; `torchtpu` to run it in the
            environment of `--torchtpu`.
        kind: The quantity: `"epochs"`, `"first"` (the time to the first step) or `"memory"`.
    """

    group: str
    name: str
    label: str
    contender: str
    workload: str
    options: dict[str, Any] = field(default_factory=dict)
    kind: str = "epochs"

    def is_meant(self, name: str) -> bool:
        """True if this is its group or its name, or a part of its name that isn't another row's whole name."""
        known = {name for row in rows() for name in (row.group, row.name)}
        return name in (self.group, self.name) if name in known else name in self.name

    def spec(self, quick: bool) -> dict[str, Any]:
        epochs, steps = FIRST if self.kind == "first" else SIZES[self.group][quick]
        sizes = {"epochs": epochs, "steps": 10 * steps if self.options.get("long") else steps}
        return {"contender": self.contender, "workload": self.workload, "kind": self.kind, **sizes, **self.options}


def rows() -> list[Row]:
    """Return every row, in the order of the tables and of a round: compared rows are adjacent."""

    def mlp(name: str, label: str, contender: str, **options: Any) -> Row:
        return Row("mlp-8-cores" if "cores" in options else "mlp", name, label, contender, "mlp", options)

    found = [
        mlp("eager", "PyTorch, eager on the CPU", "eager"),
        mlp("accelerate", "Accelerate", "accelerate"),
        mlp("lightning", "Lightning", "lightning"),
        mlp("hand", "torch_xla, by hand", "hand"),
        mlp("tpufit", "tpufit", "tpufit"),
        mlp("replay", "bare replay", "bare_replay"),
        mlp("tpufit-beside", "tpufit, in turn with a bare replay of its own graph", "tpufit_beside_replay"),
        mlp("keras", "Keras 3 on JAX", "keras_jax"),
        mlp("tpufit-10", "tpufit, 10 steps per execution", "tpufit", compile=TEN),
        mlp("keras-10", "Keras 3 on JAX, 10 steps per execution", "keras_jax", compile=TEN),
        mlp("torchtpu", "tpufit on TorchTPU", "tpufit", torchtpu=True),
        mlp("torchtpu-10", "tpufit on TorchTPU, 10 steps per execution", "tpufit", compile=TEN, torchtpu=True),
        mlp("long-tpufit", "tpufit, 3,000 steps an epoch", "tpufit", long=True),
        mlp("long-torchtpu", "tpufit on TorchTPU, 3,000 steps an epoch", "tpufit", torchtpu=True, long=True),
        mlp(
            "long-torchtpu-beside",
            "tpufit on TorchTPU, in turn with a bare replay of its own program, 3,000 steps an epoch",
            "tpufit_beside_replay",
            torchtpu=True,
            long=True,
        ),
        mlp("long-keras", "Keras 3 on JAX, 3,000 steps an epoch", "keras_jax", long=True),
        mlp("fits-tpufit", "tpufit, arrays, one fit an epoch", "tpufit", fit={"shuffle": False}, fits=True),
        mlp("fits-keras", "Keras 3 on JAX, arrays, one fit an epoch", "keras_jax", fits=True),
        mlp("fits-shuffled-tpufit", "tpufit, shuffled arrays, one fit an epoch", "tpufit", fit={}, fits=True),
        mlp("fits-shuffled-keras", "Keras 3 on JAX, the same", "keras_jax", fit={"shuffle": True}, fits=True),
        mlp("tpufit-traced", "tpufit, jit_compile=False", "tpufit", compile=TRACE),
        mlp("replay-donating", "bare replay, state donated", "bare_replay", donate=True),
        mlp("hand-8", "torch_xla, by hand, 8 cores", "hand", cores=8),
        mlp("tpufit-8", "tpufit, 8 cores", "tpufit", cores=8, fit={"shuffle": False}),
        mlp("replay-8", "bare replay, 8 cores", "bare_replay", cores=8),
    ]
    for net in ("convnet", "transformer"):
        found += [
            Row(net, f"{net}-hand", "torch_xla, by hand", "hand", net),
            Row(net, f"{net}-tpufit-traced", "tpufit, jit_compile=False", "tpufit", net, {"compile": TRACE}),
            Row(net, f"{net}-tpufit", "tpufit", "tpufit", net),
            Row(net, f"{net}-replay", "bare replay", "bare_replay", net),
        ]
    for net in ("mlp", "convnet", "transformer"):
        for contender, label in (("hand", "torch_xla, by hand"), ("tpufit", "tpufit")):
            found.append(Row("first-step", f"first-{net}-{contender}", f"{net}: {label}", contender, net, kind="first"))
    for contender, label in (("hand", "torch_xla, by hand"), ("tpufit", "tpufit")):
        found.append(
            Row("memory", f"large-{contender}", f"600 MB of state: {label}", contender, "large", kind="memory")
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one round of few steps: that it runs, not how fast")
    parser.add_argument("--only", metavar="NAME", nargs="+", help="groups, rows, or parts of rows' names")
    parser.add_argument("--rounds", type=int, help="how often each row is measured (default 3; quick 1)")
    parser.add_argument("--torchtpu", type=Path, metavar="PYTHON", help="the Python of an environment with TorchTPU")
    parser.add_argument("--out", type=Path, help="where to write (default, for a complete run: results/)")
    args = parser.parse_args()
    chosen = [row for row in rows() if args.only is None or any(row.is_meant(name) for name in args.only)]
    if not chosen:
        parser.error(f"no row is called {' or '.join(args.only)}; there are {', '.join(row.name for row in rows())}")
    if os.getloadavg()[0] > 0.5:
        print(f"the machine is busy (load {os.getloadavg()[0]:.1f}): expect larger numbers", flush=True)
    begun = time.monotonic()
    report = {"date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(), "quick": args.quick}
    report |= {"machine": machine(), "versions": versions()}
    report |= measure(chosen, args.rounds or (1 if args.quick else 3), args.quick, args.torchtpu)
    print_tables(report)
    print(f"\n{time.monotonic() - begun:.0f} s")
    complete = args.only is None and not args.quick
    if args.out or complete:
        write(report, args.out or HERE / "results")
    if report["failed"]:
        sys.exit(1)


def measure(chosen: list[Row], rounds: int, quick: bool, torchtpu: Path | None) -> dict[str, Any]:
    """Measure all rows once in each round, so that other load affects all rows equally."""
    results: dict[str, list[dict[str, Any]]] = {row.name: [] for row in chosen}
    skipped: dict[str, str] = {}
    failed: dict[str, str] = {}
    for number in range(1, rounds + 1):
        for row in chosen:
            if row.name in skipped:
                continue
            load = os.getloadavg()[0]
            result = run(row.spec(quick), torchtpu)
            for outcome, names, word in (("missing", skipped, "skipped"), ("failed", failed, "FAILED")):
                if outcome in result:
                    names[row.name] = result[outcome]
                    print(f"{word} {row.name}: {result[outcome]}", flush=True)
            if "peak_mb" not in result:
                continue
            results[row.name].append(result | {"load_before": round(load, 2)})
            print(f"round {number}: {row.name}: {summary(result)}", flush=True)
    measured = [
        {
            "group": row.group,
            "name": row.name,
            "label": row.label,
            "spec": row.spec(quick),
            "medians": medians(results[row.name]),
            "rounds": results[row.name],
        }
        for row in chosen
        if results[row.name]
    ]
    return {"rounds": rounds, "rows": measured, "ratios": ratios(results), "skipped": skipped, "failed": failed}


def ratios(results: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """Return the ratios in `RATIOS` for the rows that were measured in every round."""
    found = {}
    for ours, other, key in RATIOS:
        pairs = list(zip(results.get(ours, []), results.get(other, []), strict=False))
        if pairs and len(results[ours]) == len(results[other]):
            found[f"{ours} / {other}, {key}"] = round(statistics.median(a[key] / b[key] for a, b in pairs), 3)
    return found


def run(spec: dict[str, Any], torchtpu: Path | None) -> dict[str, Any]:
    """Measure in a new process. If it fails or hangs, return its last output; the others continue."""
    path = os.pathsep.join(
        filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
    )  # the checkout, even if another tpufit is installed
    environment = {**os.environ, "PYTHONPATH": path, "PJRT_DEVICE": "CPU", "TF_CPP_MIN_LOG_LEVEL": "2"}
    environment.pop("CPU_NUM_DEVICES", None)
    python = sys.executable
    if spec.get("torchtpu"):
        if torchtpu is None:
            return {"missing": "--torchtpu names no environment"}
        python = str(torchtpu.absolute())
        environment |= plugins.as_tpu() | {"PYTHONPATH": str(ROOT)}  # without Keras's packages
        del environment["PJRT_DEVICE"]
    command = [python, str(HERE / "worker.py"), json.dumps(spec)]
    # In a separate folder, because Lightning leaves files in the working directory.
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "out").open("w+") as out:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | str = process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            code = f"none after {TIMEOUT:.0f} s"
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        if code != 0 and process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        lines = out.read().strip().splitlines()
    for line in reversed(lines):  # the very last line may be a warning at exit
        if code == 0 and line.startswith("{"):
            return json.loads(line)
    return {"failed": f"exit code {code}: {lines[-1] if lines else 'no output'}"}


def medians(results: list[dict[str, Any]]) -> dict[str, float]:
    """Return the median of each number over the rounds; a round's number is the median of its epochs."""
    numbers = [key for key, value in results[0].items() if isinstance(value, (int, float))] if results else []
    return {key: round(statistics.median(result[key] for result in results), 6) for key in numbers}


def summary(result: dict[str, Any]) -> str:
    """Return one process's result as a short text."""
    if "first_step_s" in result:
        return f"first step {result['first_step_s']:.2f} s, fifth {result['fifth_step_s']:.2f} s"
    if "ms_per_step" in result:
        return f"{result['ms_per_step']:.3f} ms per step (host {result['host_ms_per_step']:.3f})"
    return f"{result['peak_mb']:.0f} MB"


def print_tables(report: dict[str, Any]) -> None:
    """Return a Markdown table for each group, of the medians."""
    columns = {
        "ms_per_step": ("ms per step", "{:.3f}"),
        "host_ms_per_step": ("host CPU ms", "{:.3f}"),
        "first_step_s": ("s to the end of step 1", "{:.2f}"),
        "fifth_step_s": ("of step 5", "{:.2f}"),
        "graphs": ("graphs compiled", "{:.0f}"),
        "peak_mb": ("peak MB", "{:.0f}"),
        "loss": ("last epoch's loss", "{:.5f}"),
    }
    for group in dict.fromkeys(row["group"] for row in report["rows"]):
        members = [row for row in report["rows"] if row["group"] == group]
        shown = [key for key in columns if any(key in row["medians"] for row in members)]
        print(f"\n| {group} | " + " | ".join(columns[key][0] for key in shown) + " |")
        print("| --- |" + " ---: |" * len(shown))
        for row in members:
            cells = [columns[key][1].format(row["medians"][key]) if key in row["medians"] else "" for key in shown]
            print(f"| {row['label']} | " + " | ".join(cells) + " |")
    print()
    for name, ratio in report["ratios"].items():
        print(f"{name}: {ratio}")
    for row in report["rows"]:
        if "to_own_replay" in row["medians"]:
            ratio = row["medians"]["to_own_replay"]
            print(f"{row['name']} / bare replay of its graph, ms_per_step: {ratio:.3f}")
    for word in ("skipped", "failed"):
        for name, reason in report[word].items():
            print(f"{word} {name}: {reason}")


def machine() -> dict[str, Any]:
    """Return facts about the machine, without anything that identifies it."""
    processors = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in processors if line.startswith("model name")), "unknown")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(memory, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "device": "XLA:CPU",
    }


def versions() -> dict[str, str]:
    """Return the versions of Python, of every package in use, and tpufit's commit."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    try:
        describe = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
        found["tpufit"] = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        found["tpufit"] = "unknown"
    return found


def write(report: dict[str, Any], folder: Path) -> None:
    """Return the numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "engine.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
