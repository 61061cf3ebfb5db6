"""Runs code in a pseudo-terminal, and renders text with control sequences."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def in_a_terminal(code: str, watch: Callable[[str], object] = len, **environ: str) -> str:
    """Run code in a Python whose standard streams are a pseudo-terminal, and return its output.

    Args:
        watch: Called with the output so far, whenever it grows.
        environ: Variables of its environment.
    """
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "PYTHONPATH": str(ROOT), **environ}
    child = subprocess.Popen([sys.executable, "-c", code], stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    written = b""
    while True:
        try:
            written += os.read(ours, 65536)
        except OSError:  # a terminal's end of file
            break
        watch(written.decode(errors="ignore"))
    os.close(ours)
    assert child.wait(timeout=60) == 0, written.decode()
    return written.decode()


def on_screen(text: str) -> list[str]:
    """Return the lines that a terminal shows; supports carriage returns, cursor up, and erasing a line."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text):
        if part == "\r":
            column = 0
        elif part == "\n":
            row, column = row + 1, 0
            lines += [""] * (row == len(lines))
        elif part == "\x1b[1A":
            row -= 1
        elif part == "\x1b[2K":
            lines[row] = ""
        elif not part.startswith("\x1b"):
            lines[row] = lines[row][:column].ljust(column) + part + lines[row][column + len(part) :]
            column += len(part)
    return [line.rstrip() for line in lines if line.strip()]
