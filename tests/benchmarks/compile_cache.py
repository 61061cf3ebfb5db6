"""What a second run with TorchTPU waits for until its first step has ended: programs are loaded, not compiled.

    python tests/benchmarks/compile_cache.py [--rounds 3] [--width 768] [--cores 1]

It runs where TorchTPU is installed, on the plugin for the CPU. Each row is a separate process, and each round runs all
rows once. The first process imports tpufit, starts the core, and sends a GPT of 12 blocks, its optimizer's state and a
batch. The second also takes a training step, with an empty cache of programs. The third takes the same step with the
cache that the second has filled. A row's numbers are medians, in seconds from the process's start to its last line: on
the wall, and of the processors. The results are added to
`results/compile_cache.json`.
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
from pathlib import Path

from engine import HERE, ROOT, machine

sys.path.insert(0, str(HERE.parent))
import plugins

from tpufit.utils import releases

START = """
import time
wall = time.perf_counter()
import json, torch, tpufit
from networks import GPT2
from torch.nn import functional as F

torch.manual_seed(0)
net = GPT2(width={width}, depth=12)
x = torch.randint(1000, (2, 32))
"""
SENT = """
from tpufit.runtime import make_placement, start, to_device, to_host
place = make_placement(start({cores}, "a benchmark"))
state = [p.detach() for p in net.parameters() for _ in range(3)]
sent = to_device([*state, x, x], place)
to_host(sent[-1:], "the last")
"""
STEP = """
def loss(logits, words):
    return F.cross_entropy(logits.flatten(0, 1), words.flatten())

model = tpufit.Model(net)
model.compile(torch.optim.AdamW(net.parameters()), loss)
model.fit(x, x, batch_size=2 // {cores}, verbose=0, cores={cores})
"""
END = """
from tpufit.utils.counters import totals
counts = totals()
print(json.dumps({{
    "wall_s": time.perf_counter() - wall,
    "processor_s": time.process_time(),
    "compiled": sum(counts.graphs.values()),
    "trace_s": counts.seconds.get("trace", 0.0),
    "compile_s": counts.seconds.get("compile", 0.0),
}}))
"""
ROWS = {"import and transfer": SENT, "first step, cold": STEP, "first step, warm": STEP}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--cores", type=int, choices=(1, 2), default=1)
    args = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ROWS}
    load = os.getloadavg()[0]
    size = 0
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            for name, code in ROWS.items():
                program = (START + code + END).format(width=args.width, cores=args.cores)
                found[name].append(run(program, folder))
                print(name, found[name][-1], flush=True)
            size = sum(path.stat().st_size for path in Path(folder).rglob("*.program"))
    rows = {
        name: {key: round(statistics.median(r[key] for r in all_), 2) for key in all_[0]}
        for name, all_ in found.items()
    }
    path = HERE / "results" / "compile_cache.json"
    kept = json.loads(path.read_text())["nets"] if path.exists() else {}
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    kept[f"GPT 12 x {args.width}, {args.cores} core" + "s" * (args.cores > 1)] = {
        "date": today,
        "load_before": round(load, 2),
        "rounds": args.rounds,
        "programs_bytes": size,
        "rows": rows,
    }
    versions = {name: releases.find_version(name) for name in ("torch", "torch_tpu", "libtpu")}
    report = {"machine": machine(), "versions": versions, "plugin": plugins.WHEEL, "nets": kept}
    path.write_text(json.dumps(report, indent=1) + "\n")


def run(program: str, cache: str) -> dict[str, float]:
    environ = {**os.environ, **plugins.as_tpu(), "XDG_CACHE_HOME": cache}
    del environ["TPUFIT_COMPILE_CACHE"]
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(HERE)])
    done = subprocess.run([sys.executable, "-c", program], env=environ, stdout=subprocess.PIPE, text=True, check=True)
    answer: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return answer


if __name__ == "__main__":
    main()
