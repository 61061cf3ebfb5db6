"""Draws the timeline of traced and of replayed steps: `python docs/pictures/replay.py`."""

from __future__ import annotations

from looks import INK, OURS, THEIRS, save
from matplotlib import pyplot
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle


def draw(look: str) -> Figure:
    """Draw two pairs of lanes, for the host and the device, with the same device work in every step."""
    figure, ax = pyplot.subplots(figsize=(9, 4.2), layout="constrained")
    device = {"light": "#74b816", "dark": "#82c91e"}[look]

    def box(x: float, y: float, width: float, color: str, text: str = "") -> None:
        ax.add_patch(Rectangle((x, y), width, 0.7, facecolor=color, edgecolor="none"))
        ax.text(x + width / 2, y + 0.35, text, ha="center", va="center", fontsize=9, color="black")

    ax.text(0, 5.1, "traced: Python runs at every step, and the TPU waits for it", fontweight="bold", color=INK[look])
    for step in range(4):
        box(2.5 * step, 4.1, 2.4, THEIRS[look], "Python traces the step")
        box(2.5 * step + 2.4, 3.2, 0.95, device, "step")
    ax.text(0, 2.1, "replayed: the compiled step is started directly, and the TPU never waits", fontweight="bold")
    starts = [0.0, 0.45, 0.9, 1.9, 2.9, 3.9, 4.9, 5.9, 6.9, 7.9]  # the host is at most two steps ahead
    for step, start in enumerate(starts):
        box(start, 1.1, 0.3, OURS[look])
        box(0.35 + step, 0.2, 0.95, device, "step")
    for y, text in ((4.45, "host"), (3.55, "TPU"), (1.45, "host"), (0.55, "TPU")):
        ax.text(-0.2, y, text, ha="right", va="center")
    ax.annotate("", (11, -0.15), (0, -0.15), arrowprops={"arrowstyle": "->", "color": INK[look]})
    ax.text(11, -0.3, "time", ha="right", va="top")
    ax.set(xlim=(-0.9, 11.1), ylim=(-0.7, 5.5))
    ax.axis("off")
    return figure


if __name__ == "__main__":
    save("replay-{}.svg", draw)
