"""Draws the results of the benchmarks, with labels for users: `python docs/pictures/charts.py`."""

from __future__ import annotations

import json
import re
from typing import Any

from looks import OURS, ROOT, THEIRS, save
from matplotlib import pyplot
from matplotlib.figure import Figure

RESULTS = ROOT / "tests" / "benchmarks" / "results"
# The rows of host.json that matter to users, with their labels.
STEPS = {
    "Lightning": "Lightning on torch_xla",
    "torch_xla, by hand": "torch_xla, hand-written loop",
    "Accelerate": "Accelerate on torch_xla",
    "PyTorch, eager on the CPU": "PyTorch without XLA",
    "Keras 3 on JAX": "Keras 3 on JAX",
    "tpufit": "tpufit",
    "tpufit, 10 steps per execution": "tpufit, 10 steps in one program",
    "Keras 3 on JAX, 10 steps per execution": "Keras 3 on JAX, 10 steps in one program",
}


def bars(look: str, rows: list[tuple[str, float]], title: str, unit: str) -> Figure:
    """Draw horizontal bars, the longest on top, with tpufit's bars highlighted."""
    figure, ax = pyplot.subplots(figsize=(9, 0.42 * len(rows) + 0.9), layout="constrained")
    colors = [(OURS if name.startswith("tpufit") else THEIRS)[look] for name, _ in rows]
    drawn = ax.barh([name for name, _ in rows], [value for _, value in rows], color=colors, height=0.7)
    ax.bar_label(drawn, [f"{value:.3g}" for _, value in rows], padding=4)
    ax.invert_yaxis()
    ax.margins(x=0.1)
    ax.set_title(title, loc="left", fontweight="bold")
    figure.supxlabel(unit, fontsize=9)
    ax.tick_params(axis="y", length=0)
    ax.tick_params(axis="x", bottom=False, labelbottom=False)
    ax.spines[["top", "right", "bottom"]].set_visible(False)
    return figure


def engine(look: str) -> Figure:
    report = json.loads((RESULTS / "host.json").read_text())
    small = {row["label"]: row["medians"]["ms_per_step"] for row in report["rows"] if row["group"] == "mlp"}
    rows = sorted(((name, small[label]) for label, name in STEPS.items()), key=lambda row: -row[1])
    machine = report["machine"]
    unit = f"milliseconds, fewer are better; {machine['cores']} CPU cores, no TPU; {report['date']}"
    return bars(look, rows, "One training step of a small network", unit)


def peers() -> dict[str, dict[str, float]]:
    """Return the million cycles of each network's step on a v5e-8, by library."""
    found: dict[str, dict[str, float]] = {}
    for line in (RESULTS / "tpu_peers.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) > 3 and cells[1] == "v5e-8" and re.match(r"[\d.]+", cells[3]):
            found.setdefault(cells[0], {})[cells[2]] = float(cells[3].split()[0])
    return found


def programs(look: str) -> Figure:
    shares = {"by hand": "torch_xla, by hand", "Keras": "Keras 3 on JAX", "tpufit": "tpufit"}
    shown = {name: rows for name, rows in peers().items() if rows.keys() >= shares.keys()}
    figure, ax = pyplot.subplots(figsize=(9, 0.85 * len(shown) + 1.2), layout="constrained")
    palette: Any = {
        "by hand": THEIRS[look],
        "Keras": {"light": "#6c757d", "dark": "#868e96"}[look],
        "tpufit": OURS[look],
    }
    for place, (who, label) in enumerate(shares.items()):
        values = [rows[who] / rows["Keras"] for rows in shown.values()]
        at = [row + 0.26 * (place - 1) for row in range(len(shown))]
        drawn = ax.barh(at, values, height=0.24, color=palette[who], label=label)
        ax.bar_label(drawn, [f"{rows[who]:.3g}" for rows in shown.values()], padding=4, fontsize=9)
    ax.set_yticks(range(len(shown)), list(shown))
    ax.invert_yaxis()
    ax.margins(x=0.08)
    ax.set_title("One training step, compiled for a TPU v5e-8", loc="left", fontweight="bold")
    note = "million cycles, the TPU compiler's estimate; bars are relative to Keras's; fewer are better"
    figure.supxlabel(note, fontsize=9)
    ax.tick_params(axis="y", length=0)
    ax.tick_params(axis="x", bottom=False, labelbottom=False)
    ax.spines[["top", "right", "bottom"]].set_visible(False)
    ax.legend(loc="lower right")
    return figure


if __name__ == "__main__":
    save("engine-{}.svg", engine)
    save("programs-{}.svg", programs)
