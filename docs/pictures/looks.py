"""Shared by all pictures: each is drawn twice, for light and for dark pages, into docs/pages/pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import matplotlib
from cycler import cycler

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "pages" / "pictures"
OURS = {"light": "#d9480f", "dark": "#ff922b"}
THEIRS = {"light": "#adb5bd", "dark": "#5c6370"}
LINES = {"light": ["#1971c2", "#e8590c", "#2f9e44", "#9c36b5"], "dark": ["#74c0fc", "#ffa94d", "#8ce99a", "#e599f7"]}
INK = {"light": "#212529", "dark": "#ced4da"}


def style(look: str) -> Mapping[str, object]:
    """Return Matplotlib's settings for `"light"` or `"dark"`, with a transparent background."""
    ink = INK[look]
    names = ("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color", "axes.edgecolor")
    return {
        **dict.fromkeys(names, ink),
        "axes.facecolor": "none",
        "figure.facecolor": "none",
        "savefig.facecolor": "none",
        "axes.prop_cycle": cycler(color=LINES[look]),
        "legend.framealpha": 0,
        "font.size": 11,
        "svg.hashsalt": "tpufit",  # makes the file reproducible
    }


def save(name: str, draw: Callable[[str], Figure]) -> None:
    """Draw a picture for both looks.

    Args:
        name: The file, with `{}` for the look: `"engine-{}.svg"`.
        draw: A function of the look that returns the figure.
    """
    FOLDER.mkdir(parents=True, exist_ok=True)
    for look in ("light", "dark"):
        with pyplot.rc_context(style(look)):
            figure = draw(look)
            path = FOLDER / name.format(look)
            metadata = {"Date": None} if path.suffix == ".svg" else {}
            figure.savefig(path, dpi=144, metadata=metadata)
            pyplot.close(figure)
            print(path.relative_to(ROOT))
