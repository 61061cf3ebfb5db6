"""The place where a line that changes is drawn: in a terminal, or in a notebook's cell."""

import io
import sys
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ...utils.terminal import can_draw


class Canvas(Protocol):
    """One line that can be drawn again and again, by any thread."""

    def draw(self, line: Text) -> None:
        """Draw the line in the place of the one before."""

    def end(self, line: Text) -> None:
        """Draw it for the last time; it stays."""


# The console of the canvas that is drawn on, if there is one: two at a time would overwrite each other.
_DRAWN_ON: list[Console] = []


def canvas_of(console: Console) -> Canvas | None:
    """Begin to draw where a console writes; None if another canvas is drawn on, or it is no terminal or notebook."""
    if _DRAWN_ON or not can_draw(console):
        return None
    canvas = NotebookCanvas() if console.is_jupyter else TerminalCanvas(console)
    _DRAWN_ON.append(console)
    return canvas


def print_line(line: str, console: Console) -> None:
    """Print a line that stays, whole however narrow the terminal is, and above the canvas if one is drawn on."""
    if console.is_jupyter:
        print(line)
    else:
        # Only the console that is drawn on knows that it must print above the line that moves.
        (_DRAWN_ON or [console])[0].print(Text(line), soft_wrap=True)


class TerminalCanvas:
    """The last line of a terminal. Whatever is printed meanwhile comes above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(
            console=console,
            auto_refresh=False,  # its thread would draw while nothing has changed
            transient=True,
            # Else the lines that a program writes to a file of errors would come to the terminal.
            redirect_stderr=sys.stderr.isatty(),
        )
        self._live.start()

    def draw(self, line: Text) -> None:
        """Draw the line, cut to the width of the terminal."""
        self._live.update(line, refresh=True)

    def end(self, line: Text) -> None:
        """Leave the line, whole however narrow the terminal is."""
        _DRAWN_ON.clear()
        self._live.stop()
        self._console.print(line, soft_wrap=True)


class NotebookCanvas:
    """An output of a notebook's cell, which keeps its place and is kept with the notebook. It needs no ipywidgets."""

    def __init__(self) -> None:
        self._handle: Any = None

    def draw(self, line: Text) -> None:
        """Draw the line."""
        from IPython.display import display  # it is there where a notebook is

        bundle = {"text/plain": line.plain, "text/html": as_html(line)}
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)

    def end(self, line: Text) -> None:
        """Leave the line."""
        _DRAWN_ON.clear()
        self.draw(line)


def as_html(line: Text) -> str:
    """A line with its colours, for a notebook.

    Example:
        >>> as_html(Text("3/4"))
        '<pre style="margin:0;white-space:pre-wrap">3/4</pre>'
    """
    console = Console(file=io.StringIO(), record=True, force_jupyter=False, width=max(1, line.cell_len))
    console.print(line, end="")
    return console.export_html(
        inline_styles=True, code_format='<pre style="margin:0;white-space:pre-wrap">{code}</pre>'
    )
