"""Compiles the train steps of many networks with the TPU's own compiler, on a machine without a TPU.

    python tests/benchmarks/tpu_programs.py [--only NAME] [--contender WHOSE] [--small] [--anew]

The small networks are those of `tests/architectures.py` and of the examples, for a v3-8, a v5e-8 and a v6e-8. The
large networks are those of `networks.py`; some are also compiled as a step of Keras on JAX (`--contender Keras`), or as
a step written by hand with torch_xla (`--contender "by hand"`). The compiler's figures have no noise, so only a step
that has changed since its figures were written to `results/` is compiled again. Figures are written after each network.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from engine import HERE, ROOT, machine, versions
from networks import TRAININGS as OWN
from tpu_peers import PEERS
from tpu_tables import FILES, beside_transformers, comparison, table
from transformers_networks import PAIRS

import tpufit
from tpufit.errors import TpufitError
from tpufit.preflight.analysis import CompiledProgram
from tpufit.preflight.hlo import parse_operations
from tpufit.preflight.run_preflight import PreflightRun, make_preflight_run
from tpufit.preflight.run_script import run_script
from tpufit.preflight.tpu_slices import Slice, find_slice
from tpufit.runtime import has_flash, keeps_bfloat16

SMALL = ("v3-8", "v5e-8", "v6e-8")  # of 8 cores each: one trace serves all
CORES = 8
TRAININGS = OWN | PAIRS
EXAMPLES = {
    "bert.py": [],
    "cached_images.py": ["--count", "96", "--epochs", "2"],
    "char_gpt.py": [],
    "digits.py": [],
    "gan.py": [],
    "one_cycle.py": [],
}
WIDE = ("f64", "s64", "u64", "c128")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", metavar="NAME", help="a network's name, or a part of several")
    parser.add_argument("--contender", choices=FILES, default="tpufit", help="whose step (default: tpufit)")
    parser.add_argument("--small", action="store_true", help="without the large networks, which take minutes each")
    parser.add_argument("--anew", action="store_true", help="also compile networks whose figures are known")
    parser.add_argument("--texts", type=Path, metavar="DIR", help="keep the programs that are compiled, as text")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="where results are kept (default: results/)")
    parser.add_argument("--network", help=argparse.SUPPRESS)  # in a separate process
    args = parser.parse_args()
    path = args.out / FILES[args.contender]
    report = json.loads(path.read_text()) if path.exists() else {"programs": []}
    if args.network:
        kept = {} if args.anew else {(one["name"], one["slice"]): one for one in report["programs"]}
        print(json.dumps(compiled(args.network, args.contender, kept, args.texts)))
        return
    sys.path.append(str(ROOT / "tests"))
    known = names(args.contender)
    chosen = [name for name in known if (args.only or "") in name and not (args.small and name in TRAININGS)]
    chosen = [args.only] if args.only in known else chosen
    if not chosen:
        parser.error(f"no network is called {args.only!r}; there are {', '.join(known)}")
    for folder in filter(None, (args.out, args.texts)):
        folder.mkdir(parents=True, exist_ok=True)
    for name in chosen:
        found = in_a_process(name, args)
        for one in found:
            print(f"{one['name']} on {one['slice']}: {one.get('failed') or one['cycles']}", flush=True)
        others = [one for one in report["programs"] if one["network"] != name]
        report = {"machine": machine() | {"device": "none"}, "versions": versions() | compiler()}
        report["programs"] = sorted(others + found, key=lambda one: known.index(one["network"]))
        path.write_text(json.dumps(report, indent=1) + "\n")
    if args.contender == "tpufit":
        figures = f"# What the TPU's compiler makes of training steps\n\n{table(report['programs'])}\n"
        (args.out / "tpu_programs.md").write_text(figures)
        print(figures)
        (args.out / "tpu_transformers.md").write_text(beside_transformers(report["programs"]))
    comparison(args.out)


def names(contender: str) -> list[str]:
    from architectures import ARCHITECTURES

    if contender in PEERS:
        return [name for name, training in TRAININGS.items() if training.peer]
    return [*ARCHITECTURES, *(f"examples/{script}" for script in EXAMPLES), *TRAININGS]


def compiler() -> dict[str, str]:
    return {"libtpu": metadata.version("libtpu")}


def in_a_process(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the figures of a network, whose script or trace may end the process."""
    command = [sys.executable, __file__, "--network", name, "--contender", args.contender, *["--anew"] * args.anew]
    command += ["--out", str(args.out.resolve())] + (["--texts", str(args.texts.resolve())] if args.texts else [])
    with tempfile.TemporaryDirectory() as folder:  # examples leave files in the working directory
        process = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    for line in reversed(process.stdout.splitlines()):
        if process.returncode == 0 and line.startswith("["):
            found: list[dict[str, Any]] = json.loads(line)
            return found
    lines = (process.stderr.strip() or "nothing").splitlines()
    words = next((line for line in reversed(lines) if "Error" in line and line[0] != " "), lines[-1])
    return [{"network": name, "name": name, "slice": on, "failed": words} for on in slices_of(name)]


def slices_of(name: str) -> tuple[str, ...]:
    return TRAININGS[name].slices if name in TRAININGS else SMALL


def compiled(
    network: str, contender: str, kept: Mapping[tuple[str, str], dict[str, Any]], texts: Path | None
) -> list[dict[str, Any]]:
    """Return the figures of a network's train step on each slice; the stored figures, if the program is the same."""
    found = []
    slices = [find_slice(on) for on in slices_of(network)]
    # One trace serves all slices for which the step is traced in the same way.
    forms = {on.name: (keeps_bfloat16(on.chip.kind), has_flash(on.chip.kind)) for on in slices}
    alike = [[on for on in slices if forms[on.name] == form] for form in dict.fromkeys(forms.values())]
    for name, preflight_run in preflight_runs(network, contender):
        for group in alike if contender == "tpufit" else [slices]:
            found += _compiled_alike(network, name, preflight_run, group, kept, texts, contender)
    order = [on.name for on in slices]
    return sorted(found, key=lambda one: order.index(one["slice"]))


def _compiled_alike(
    network: str,
    name: str,
    preflight_run: PreflightRun,
    slices: list[Slice],
    kept: Mapping[tuple[str, str], dict[str, Any]],
    texts: Path | None,
    contender: str,
) -> list[dict[str, Any]]:
    found = []
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        try:
            traced = preflight_run.trace(preflight_run.plan(slices[0]), folder)
        except TpufitError as error:
            failed = {"network": network, "name": name, "failed": str(error)}
            return [failed | {"slice": on.name} for on in slices]
        # The first steps may have separate programs, such as a step that builds a table.
        rows = max(one["rows"] for one in traced.values())
        number = [n for n, one in traced.items() if one["role"] == "train" and one["rows"] == rows][-1]
        program = folder / f"{number}.hlo"
        # A trace doesn't show the work of kernels, such as flash attention.
        of_kernels = b"tpu_custom_call" in program.read_bytes()
        work = {} if of_kernels else {"traced_flops": traced_flops(program) / CORES}
        for on in slices:
            key = digest(program, traced[number], on)
            known = kept.get((name, on.name), {})
            if known.get("hash") != key or "failed" in known:  # its process may have been ended
                today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
                known = {"network": network, "name": name, "slice": on.name, "hash": key, "date": today}
                try:
                    (done,) = preflight_run.compile({number: traced[number]}, folder, on)
                    known |= figures(done, (folder / f"{number}.before.txt").read_text())
                    if texts:
                        kind = "-".join([contender, name, on.name]).replace("/", "-").replace(" ", "-")
                        (texts / f"{kind}.txt").write_text(done.text)
                except TpufitError as error:
                    known["failed"] = str(error)
            found.append({**known, **work})
    return found


def preflight_runs(network: str, contender: str) -> list[tuple[str, PreflightRun]]:
    """Return each `fit` of a network, by a name."""
    sys.path.append(str(ROOT / "tests"))
    from architectures import ARCHITECTURES, BATCH

    quiet = {"verbose": 0, "timeout": 3600.0}
    if network in ARCHITECTURES:
        one = ARCHITECTURES[network]
        net = one.net()
        model = one.model(net)
        model.compile(one.optimizer(net), one.loss, metrics=one.metrics)
        arguments = dict(zip(("x", "y"), one.data, strict=False)) | {"batch_size": BATCH // CORES}
        return [(network, make_preflight_run(model._engine, arguments | quiet))]
    if network in TRAININGS:
        training = TRAININGS[network]
        with torch.device("meta"):  # no program depends on the weights
            net = training.make()
        model = tpufit.Model(net)
        optimizer = torch.optim.AdamW(net.parameters())
        model.compile(
            optimizer, training.loss, metrics=list(training.metrics), precision=training.precision, remat=training.remat
        )
        x, y = training.batch(CORES)
        preflight_run = make_preflight_run(model._engine, {"x": x, "y": y, "batch_size": training.rows} | quiet)
        return [
            (network, PEERS[contender](**vars(preflight_run), name=network) if contender in PEERS else preflight_run)
        ]
    script = ROOT / network
    found: list[PreflightRun] = []

    class Kept(Exception):  # noqa: N818 - nothing is wrong
        """Ends a script after its fit is known."""

    def keep(self: tpufit.Model, **arguments: Any) -> None:
        found.append(make_preflight_run(self._engine, arguments | quiet))
        raise Kept

    tpufit.Model.preflight = keep  # type: ignore[method-assign]
    with suppress(Kept):
        run_script(script, EXAMPLES[script.name], tpufit.Model, {}, print)
    return [(network, one) for one in found]


def digest(program: Path, facts: Mapping[str, Any], on: Slice) -> str:
    """Return a hash of the compiler's whole input, except the source lines in a program."""
    from jax._src.lib import xla_client

    options = xla_client._xla.HloPrintOptions()
    options.print_metadata, options.print_large_constants = False, True
    module = xla_client._xla.XlaComputation(program.read_bytes()).get_hlo_module()
    given = [facts["arguments"], on.name, on.topology, on.chip.flags, on.chip.config, compiler()]
    return hashlib.sha256((module.to_string(options) + json.dumps(given)).encode()).hexdigest()[:16]


def traced_flops(program: Path) -> float:
    """Return the operations of a traced program on all cores, before any compiler changes them."""
    from jax._src.lib import xla_client

    module = xla_client._xla.XlaComputation(program.read_bytes()).get_hlo_module()
    return float(xla_client._xla.hlo_module_cost_analysis(xla_client.make_cpu_client(), module)["flops"])


def figures(program: CompiledProgram, before: str) -> dict[str, Any]:
    """Return the figures of a program to be stored."""
    between: dict[str, Counter[str]] = {}
    for one in program.collectives:
        between.setdefault(one.kind, Counter()).update(count=one.count, bytes=one.nbytes)
    wide = {o.name: str(a) for o, _ in parse_operations(before) for a in o.arrays if a.dtype in WIDE and a.nbytes > 8}
    return {
        "fits": program.fits,
        "rows": program.rows,
        "cycles": program.cost.cycles,
        "without_estimate": program.text.count(f'"estimated_cycles":"{2**63 - 1}"'),
        "bytes": program.cost.nbytes,
        "flops": program.cost.flops,
        "memory": program.memory.total,
        "temporaries": program.memory.temporaries,
        "between_cores": between,
        "gathers": [[one.kind, one.where, one.count, one.nbytes] for one in program.collectives if one.gathers],
        "wide": len(wide),
        "warnings": dict(program.warnings),
        "seconds": round(program.seconds, 1),
    }


if __name__ == "__main__":
    main()
