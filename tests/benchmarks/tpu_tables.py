"""Writes the figures of `tpu_programs.py` as tables: `python tests/benchmarks/tpu_tables.py [DIR]`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

# The file with each contender's figures.
FILES = {"tpufit": "tpu_programs.json", "Keras": "tpu_keras.json", "by hand": "tpu_by_hand.json"}
_SAME = 0.02  # the largest relative difference in operations for the same work


def table(programs: list[dict[str, Any]]) -> str:
    """Return the figures as a Markdown table."""
    lines = [
        "| network | TPU | fits | cycles | MB read and written | GFLOP | temporaries, MB | between cores | gathers "
        "| 64-bit operations | compiled in, s |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | --- | ---: | ---: | ---: |",
    ]
    for one in programs:
        if "failed" in one:
            lines.append(f"| {one['name']} | {one['slice']} | FAILED: {one['failed']} |" + " |" * 8)
            continue
        between = ", ".join(f"{n['count']} {kind} ({n['bytes']:,} B)" for kind, n in one["between_cores"].items())
        gathers = sum(count for _, _, count, _ in one["gathers"])
        cells = [one["name"], one["slice"], "yes" if one["fits"] else "NO", f"{one['cycles']:,}"]
        cells += [f"{one['bytes'] / 1e6:,.1f}", f"{one['flops'] / 1e9:,.3g}", f"{one['temporaries'] / 1e6:,.1f}"]
        cells += [between, str(gathers or ""), str(one["wide"] or ""), f"{one['seconds']:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def beside_transformers(programs: list[dict[str, Any]]) -> str:
    """Return a page that compares the models of transformers with the same networks written by hand."""
    found = {(one["name"], one["slice"]): one for one in programs if "failed" not in one}
    lines = [
        "# Models of transformers as they come, to the same networks by hand",
        "",
        "| model | TPU | million cycles | by hand | ratio | MB read and written, ratio | temporaries, ratio "
        "| 64-bit operations | by hand |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for (name, on), one in found.items():
        model, _, kind = name.partition(" of ")
        own = found.get((f"{model} by hand", on))
        if kind != "transformers" or own is None:
            continue
        ratios = (one[figure] / own[figure] if own[figure] else 1 for figure in ("cycles", "bytes", "temporaries"))
        cells = [model, on, f"{one['cycles'] / 1e6:.3f}", f"{own['cycles'] / 1e6:.3f}"]
        cells += [f"{ratio:.2f}" for ratio in ratios] + [str(one["wide"]), str(own["wide"])]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def comparison(folder: Path) -> None:
    """Write the figures of all contenders side by side; exit with an error if their work differs."""
    reports = {
        name: json.loads((folder / file).read_text()) for name, file in FILES.items() if (folder / file).exists()
    }
    found = {
        name: {(one["name"], one["slice"]): one for one in report["programs"] if "failed" not in one}
        for name, report in reports.items()
    }
    peers = [name for name in found if name != "tpufit"]
    rows = list(dict.fromkeys(row for name in peers for row in found[name]))
    lines, differ = [], []
    for row in rows:
        those = {name: one[row] for name, one in found.items() if row in one}
        lines += [_cells(row, name, one, those.get("Keras")) for name, one in those.items()]
        flops = {name: one["traced_flops"] for name, one in those.items() if "traced_flops" in one}
        if flops and max(flops.values()) > (1 + _SAME) * min(flops.values()):
            differ.append(f"{row[0]} on {row[1]}: " + ", ".join(f"{name} {n:,.0f}" for name, n in flops.items()))
    if not rows:
        return
    text = f"# The same training steps by tpufit, by Keras on JAX, and by hand\n\n{_HEAD}\n" + "\n".join(lines) + "\n"
    text += _precisions(folder)
    (folder / "tpu_peers.md").write_text(text)
    print(text)
    if differ:
        raise SystemExit("these don't do the same work, by their operations: " + "; ".join(differ))


_HEAD = """\
| network | TPU | step | million cycles | to Keras's | MB read and written | to Keras's | temporaries, MB | to Keras's \
| GFLOP traced | compiled | sums between cores | gathers |
| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- | --- |"""


def _precisions(folder: Path) -> str:
    """Return the results of `precision.py`, by seed."""
    path = folder / "precision.json"
    if not path.exists():
        return ""
    rows = json.loads(path.read_text())["rows"]
    kinds = list(next(iter(rows.values())))
    lines = ["", "Rows held out, after training on XLA's CPU:", "", f"| training | {' | '.join(kinds)} |"]
    lines.append("| --- |" + " --- |" * len(kinds))
    for name, found in rows.items():
        lines.append(f"| {name} | {' | '.join(', '.join(f'{n:.4f}' for n in found[kind]) for kind in kinds)} |")
    return "\n".join(lines) + "\n"


def _cells(row: tuple[str, str], name: str, one: dict[str, Any], keras: dict[str, Any] | None) -> str:
    cells = [*row, name]
    for figure, digits in (("cycles", 3), ("bytes", 1), ("temporaries", 1)):
        cells.append(f"{one[figure] / 1e6:,.{digits}f}")
        cells.append(f"{one[figure] / keras[figure]:.2f}" if keras and keras[figure] else "")
    if one.get("without_estimate"):
        cells[3] += f" + {one['without_estimate']} unknown"
    between = one["between_cores"]
    sums = between.get("all-reduce", {"count": 0, "bytes": 0})
    gathers = [f"{n['count']} {kind} ({n['bytes']:,} B)" for kind, n in between.items() if kind != "all-reduce"]
    cells += [f"{one[name] / 1e9:,.4g}" if name in one else "" for name in ("traced_flops", "flops")]
    cells += [f"{sums['count']} ({sums['bytes']:,} B)", ", ".join(gathers)]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    comparison(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent / "results")
