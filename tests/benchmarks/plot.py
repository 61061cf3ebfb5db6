"""The plot of `results/engine.json`: `python tests/benchmarks/plot.py` draws it anew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

OURS, THEIRS, FLOOR = "#d9480f", "#868e96", "#ced4da"
PANELS = {
    "mlp": ("ms_per_step", "Small MLP: ms per step"),
    "convnet": ("host_ms_per_step", "Conv net, batch norm, AdamW: host ms per step"),
    "transformer": ("host_ms_per_step", "Transformer, AdamW: host ms per step"),
}


def draw(report: dict[str, Any], path: Path) -> None:
    """One panel a workload, the slowest on top."""
    panels = {
        group: sorted((row for row in report["rows"] if row["group"] == group), key=lambda row: -row["medians"][value])
        for group, (value, _) in PANELS.items()
    }
    panels = {group: rows for group, rows in panels.items() if rows}
    if not panels:
        return
    heights = [len(rows) for rows in panels.values()]
    figure, axes = plt.subplots(
        len(panels),
        figsize=(8, 0.32 * sum(heights) + 0.75 * len(panels)),
        gridspec_kw={"height_ratios": heights},
        squeeze=False,
        layout="constrained",
    )
    for ax, (group, rows) in zip(axes[:, 0], panels.items(), strict=True):
        key, title = PANELS[group]
        values = [row["medians"][key] for row in rows]
        bars = ax.barh([row["label"] for row in rows], values, color=[_color(row) for row in rows], height=0.72)
        ax.bar_label(bars, [f"{value:.3g}" for value in values], padding=4, fontsize=9)
        ax.set_xlim(0, max(values) * 1.1)
        ax.invert_yaxis()
        ax.set_title(title, loc="left", fontsize=10, fontweight="bold")
        ax.tick_params(axis="y", length=0, labelsize=9)
        ax.tick_params(axis="x", which="both", bottom=False, labelbottom=False)
        ax.spines[["top", "right", "bottom"]].set_visible(False)
    machine = report["machine"]
    note = f"Lower is better. {machine['device']} on {machine['cores']} cores of {machine['cpu']}, "
    figure.supxlabel(note + f"medians of {report['rounds']} round(s), {report['date']}", fontsize=8, color=THEIRS)
    figure.savefig(path, dpi=144)
    plt.close(figure)


def _color(row: dict[str, Any]) -> str:
    return {"tpufit": OURS, "bare_replay": FLOOR}.get(row["spec"]["contender"], THEIRS)


if __name__ == "__main__":
    results = Path(__file__).resolve().parent / "results"
    draw(json.loads((results / "engine.json").read_text()), results / "engine.png")
