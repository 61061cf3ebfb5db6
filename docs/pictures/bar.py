"""Takes a picture of a real training's progress bar, in its third epoch: `python docs/pictures/bar.py`.

The training runs in a pseudo-terminal, and what that terminal would show is written as SVG by rich.
"""

from __future__ import annotations

import io
import re
import sys

from looks import FOLDER, ROOT
from rich.console import CONSOLE_SVG_FORMAT, Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, DIMMED_MONOKAI, TerminalTheme
from rich.text import Text

sys.path.insert(0, str(ROOT / "tests"))
from pseudo_terminal import in_a_terminal

COLUMNS = 126
TRAINING = """
from sklearn.datasets import load_digits
from torch import nn
import tpufit

tpufit.set_random_seed(0)
images, labels = load_digits(return_X_y=True)
net = nn.Sequential(
    nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(),
    nn.Flatten(), nn.Linear(4096, 10),
)
model = tpufit.Model(net)
model.compile(optimizer="adamw", loss="cross_entropy", metrics=["accuracy"])
model.fit((images / 16).astype("float32"), labels, batch_size=2, epochs=3, cores=8)
"""


def on_screen(written: str) -> list[str]:
    """Return the lines that the terminal shows, with their colors. Each line is rewritten or erased as a whole."""
    lines, row = [""], 0
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", written):
        if part == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif part == "\x1b[1A":
            row -= 1
        elif part in ("\x1b[2K", "\r"):
            lines[row] = "" if part == "\x1b[2K" else lines[row]
        elif not part.startswith("\x1b") or part.endswith("m"):
            lines[row] += part
    return [line for line in lines if Text.from_ansi(line).plain.strip()]


def picture(lines: list[str], theme: TerminalTheme) -> str:
    """Return a window with the lines, as SVG that loads no font."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    for line in lines:
        console.print(Text.from_ansi(line), no_wrap=True, crop=True)
    code = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.S).replace(
        "Fira Code", "Menlo, Consolas"
    )
    return console.export_svg(title="python train.py", theme=theme, code_format=code, unique_id="bar")


if __name__ == "__main__":
    written = in_a_terminal(TRAINING, TERM="xterm-256color", COLUMNS=str(COLUMNS))
    third = [match.end() for match in re.finditer(r"Epoch 3/3[^\n\r]*", written)]
    lines = on_screen(written[: third[len(third) // 2]])
    FOLDER.mkdir(parents=True, exist_ok=True)
    for look, theme in (("light", DEFAULT_TERMINAL_THEME), ("dark", DIMMED_MONOKAI)):
        path = FOLDER / f"bar-{look}.svg"
        path.write_text(picture(lines, theme))
        print(path.relative_to(ROOT))
