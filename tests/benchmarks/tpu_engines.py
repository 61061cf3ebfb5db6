"""Compiles the same training steps of torch_xla, of TorchTPU, and of TorchTPU without tpufit, with one compiler.

    python tests/benchmarks/tpu_engines.py --xla PYTHON [--only NAME ...] [--by ENGINE ...] [--texts DIR]

Run it where TorchTPU is installed, with the JAX that `model.preflight` needs there. PYTHON is the Python of an
environment with torch_xla, which traces the steps of torch_xla; the compiler of TorchTPU's environment compiles all
programs for a v5e-8. The networks are those of `networks.py` and `transformers_networks.py`. For TorchTPU without
tpufit see `torchtpu_alone.py`. Results are written after each program.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from engine import HERE, ROOT, machine
from tpu_programs import TRAININGS, figures, preflight_runs

sys.path.append(str(ROOT / "tests"))
from plugins import as_tpu

from tpufit.preflight.preflight_plan import TRACED
from tpufit.preflight.run_preflight import PreflightRun
from tpufit.preflight.tpu_slices import find_slice
from tpufit.utils import releases
from tpufit.utils.children import explain_end

ON = "v5e-8"
FIGURES = ("cycles", "bytes", "temporaries")
ENGINES = ("torch_xla", "torch_tpu", "alone")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--xla", type=Path, metavar="PYTHON", help="of an environment with torch_xla")
    parser.add_argument("--only", nargs="+", choices=TRAININGS, metavar="NAME", help="networks, by name")
    parser.add_argument("--by", nargs="+", choices=ENGINES, help="compile only the programs of these engines")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="where results are kept (default: results/)")
    parser.add_argument("--texts", type=Path, metavar="DIR", help="store the programs, as traced and as compiled")
    parser.add_argument("--trace", nargs=2, metavar=("NAME", "DIR"), help=argparse.SUPPRESS)  # in a separate process
    args = parser.parse_args()
    if args.trace:
        traced(args.trace[0], args.by[0], Path(args.trace[1]))
        return
    path = args.out / "tpu_engines.json"
    kept = json.loads(path.read_text())["networks"] if path.exists() else {}
    for name in args.only or TRAININGS:
        for engine in args.by or ENGINES:
            today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
            found = compiled(name, engine, args.xla, args.texts)
            kept[name] = {**kept.get(name, {}), "date": today, engine: found}
            print(name, engine, found, flush=True)
            report = {
                "machine": machine(),
                "compiler": releases.find_compiler_versions(),
                "slice": ON,
                "networks": kept,
            }
            path.write_text(json.dumps(report, indent=1) + "\n")
            (args.out / "tpu_engines.md").write_text(table(report))


def traced(name: str, engine: str, folder: Path) -> None:
    """Trace the train step of a network into a folder, with this environment's engine, or with TorchTPU alone."""
    on = find_slice(ON)
    if engine == "alone":
        from torchtpu_alone import trace_alone

        trace_alone(TRAININGS[name], on.devices, folder)
        return
    ((_, run),) = preflight_runs(name, "tpufit")
    run.trace(run.plan(on), folder)


def compiled(name: str, engine: str, xla: Path | None, texts: Path | None) -> dict[str, Any]:
    """Return the figures of a network's step, traced by an engine, from this environment's compiler.

    If the trace fails, return its error instead, as `"failed"`. The programs are written into the folder `texts`, if
    any.
    """
    python = xla if engine == "torch_xla" else sys.executable
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        command = [str(python), __file__, "--by", engine, "--trace", name, path]
        environ = dict(os.environ)
        if engine == "torch_xla":
            environ["PYTHONPATH"] = str(ROOT)
        elif engine == "alone":
            environ |= as_tpu()
        ended = subprocess.run(command, env=environ, cwd=path, stderr=subprocess.PIPE, text=True)
        if ended.returncode:
            return {"failed": explain_end(ended.returncode, ended.stderr)}
        ((_, run),) = preflight_runs(name, "tpufit")
        facts = json.loads((folder / TRACED).read_text())
        rows = max(one["rows"] for one in facts.values())
        number = [n for n, one in facts.items() if one["role"] == "train" and one["rows"] == rows][-1]
        (program,) = PreflightRun.compile(run, {number: facts[number]}, folder, find_slice(ON))
        before = (folder / f"{number}.before.txt").read_text()
        if texts is not None:
            texts.mkdir(parents=True, exist_ok=True)
            for stage, text in (("before", before), ("after", program.text)):
                (texts / f"{name}-{engine}-{stage}.txt".replace("/", "-")).write_text(text)
        found = figures(program, before)
    return {one: found[one] for one in (*FIGURES, "between_cores", "without_estimate", "wide", "seconds")}


def table(report: dict[str, Any]) -> str:
    """Return the figures as a page."""
    compiler = ", ".join(f"{name} {version}" for name, version in report["compiler"].items())
    lines = [f"# Steps by both engines for a {ON}, through one compiler ({compiler})", ""]
    head = ["network", "million cycles, torch_xla", "TorchTPU", "ratio", "bytes, ratio", "temporaries, ratio"]
    head += ["between cores, torch_xla", "TorchTPU", "million cycles, TorchTPU alone", "ratio to it"]
    lines += [f"| {' | '.join(head)} |", f"| --- |{' ---: |' * 5} --- | --- | ---: | ---: |"]
    for name, each in report["networks"].items():
        if not all("cycles" in each.get(engine, {}) for engine in ENGINES[:2]):
            continue
        xla, tpu = each["torch_xla"], each["torch_tpu"]
        cells = [name, f"{xla['cycles'] / 1e6:.3f}", f"{tpu['cycles'] / 1e6:.3f}"]
        cells += [f"{tpu[one] / xla[one]:.3f}" if xla[one] else "" for one in FIGURES]
        for one in (xla, tpu):
            cells.append(", ".join(f"{n['count']} {kind}" for kind, n in one["between_cores"].items()))
        alone = each.get("alone", {})
        if "cycles" in alone:
            cells += [f"{alone['cycles'] / 1e6:.3f}", f"{tpu['cycles'] / alone['cycles']:.3f}"]
        else:
            cells += ["fails" if alone else "", ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
