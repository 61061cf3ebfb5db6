"""The cost of splitting weights over the cores, and the memory saved: on virtual cores, and by the TPU's compiler.

    python tests/benchmarks/shard.py [--steps] [--tpus]

`--steps` measures steps on 8 virtual cores, alternating with steps of whole weights. A virtual core's memory is the
host's, and data between cores are copied. `--tpus` compiles a GPT for 8 cores of a v5e and a v6e: with whole weights,
with split weights, and as a plain JAX step whose weights are split in the same way. Results: `results/shard.json`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
import torch
from engine import HERE, ROOT, machine, versions
from networks import GPT2, TRAININGS, of_words

import tpufit
from tpufit.preflight.analysis import analyze
from tpufit.preflight.children import run
from tpufit.preflight.compiling import NO_HOST
from tpufit.preflight.hlo import parse_arguments
from tpufit.preflight.tpu_slices import find_slice

NETWORK, SLICES = "GPT 4 x 512", ("v5e-8", "v6e-8")
STEPS = 10  # in an epoch, of which the first two compile

STEP = """
import json, sys, time
import torch, tpufit
from shard import small, of_words
shard = json.loads(sys.argv[1])
model = tpufit.Model(small())
model.compile("adamw", of_words, precision="fp32", scale_lr=None, shard=shard)
x = torch.randint(0, 1024, (8 * 10, 64))
times = []

class Clock(tpufit.callbacks.Callback):
    reads_weights = False
    def on_epoch_begin(self, epoch, logs=None):
        self.began = time.perf_counter()
    def on_epoch_end(self, epoch, logs=None):
        times.append(time.perf_counter() - self.began)

model.fit(x, x, batch_size=1, epochs=5, verbose=0, cores=8, callbacks=[Clock()])
print(json.dumps({"epochs": times, "held": model._engine.state.bytes_per_core(model._engine.state.device.tensors)}))
"""


def small() -> torch.nn.Module:
    """3.4 million weights."""
    torch.manual_seed(0)
    return GPT2(vocabulary=1024, length=64, width=256, depth=4, dropout=0.0)


def steps() -> dict[str, Any]:
    """Return the milliseconds of a step on 8 virtual cores, as a median, and the bytes of state on a core."""
    found: dict[str, list[float]] = {"whole": [], "split": []}
    held = {}
    for _ in range(3):  # alternating, because the machine's speed drifts
        for name, shard in (("whole", None), ("split", "fsdp")):
            environ = os.environ | {"PJRT_DEVICE": "CPU", "PYTHONPATH": f"{ROOT}:{HERE}"}
            command = [sys.executable, "-c", STEP, json.dumps(shard)]
            ended = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
            one = json.loads(ended.stdout.splitlines()[-1])
            found[name] += [1000 * seconds / STEPS for seconds in one["epochs"][2:]]
            held[name] = one["held"]
    medians = {name: round(statistics.median(times), 2) for name, times in found.items()}
    return {"milliseconds": medians, "fastest": {n: round(min(t), 2) for n, t in found.items()}, "held": held}


def figures(program: Any) -> dict[str, Any]:
    between: dict[str, Counter[str]] = {}
    for one in program.collectives:
        between.setdefault(one.kind + one.content_phrase, Counter()).update(count=one.count, bytes=one.nbytes)
    return {
        "fits": program.fits,
        "cycles": program.cost.cycles,
        "bytes": program.cost.nbytes,
        "flops": program.cost.flops,
        "memory": program.memory.parts,
        "between cores": {kind: dict(sums) for kind, sums in between.items()},
        "compiled in": round(program.seconds, 1),
    }


def of_tpufit(shard: str | None) -> dict[str, Any]:
    training = TRAININGS[NETWORK]
    with torch.device("meta"):
        net = training.make()
    model = tpufit.Model(net)
    model.compile("adamw", of_words, metrics=["accuracy"], precision=training.precision, shard=shard)
    x, y = training.batch(8)
    reports = model.preflight(x, y, batch_size=training.rows, tpu=list(SLICES), verbose=0).reports
    return {report.tpu.name: figures(report.step) | {"seconds": report.seconds} for report in reports}


def of_jax() -> dict[str, Any]:
    found = {}
    for name in SLICES:
        on = find_slice(name)
        with tempfile.TemporaryDirectory() as folder:
            run([str(HERE / "jax_fsdp.py"), NETWORK, folder, name], f"JAX for {name}", 3600, False, NO_HOST)
            compiled = json.loads(Path(folder, f"jax.{name}.json").read_text())
            after = Path(folder, f"jax.{name}.txt").read_text()
        arguments = [{"source": "state", "name": ""} for _ in parse_arguments(after)]
        facts = {"role": "train", "cause": "", "rows": 8 * TRAININGS[NETWORK].rows, "steps": 1, "lines": []}
        facts |= {"precision": "bf16", "remat": False, "arguments": arguments}
        found[name] = figures(analyze(facts, compiled, "", after, on))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", action="store_true", help="measure steps on 8 virtual cores")
    parser.add_argument("--tpus", action="store_true", help="compile for TPUs")
    args = parser.parse_args()
    path = HERE / "results" / "shard.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()

    def keep(name: str, found: dict[str, Any]) -> None:
        kept[name] = {"date": today, "machine": machine(), "versions": versions()} | found
        path.write_text(json.dumps(kept, indent=1) + "\n")
        print(name, json.dumps(found, indent=1), flush=True)

    if args.steps or not args.tpus:
        keep("8 virtual cores", steps())
    if args.tpus or not args.steps:
        keep(f"{NETWORK}, split", of_tpufit("fsdp"))
        keep(f"{NETWORK}, split, in JAX", of_jax())
        keep(f"{NETWORK}, whole", of_tpufit(None))


if __name__ == "__main__":
    main()
