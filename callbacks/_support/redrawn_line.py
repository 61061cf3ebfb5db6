"""Draws a line that changes, in a terminal or a notebook's cell."""

import io
import sys
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ...utils.terminal import can_draw


class Canvas(Protocol):
    """One line that any thread can redraw."""

    def draw(self, line: Text) -> None:
        """Draw the line in place of the previous line."""

    def end(self, line: Text) -> None:
        """Draw the final line, which stays."""


# The active canvas's console, if any: two canvases would overwrite each other.
_ACTIVE_CONSOLES: list[Console] = []


def open_canvas(console: Console) -> Canvas | None:
    """Begin a canvas on a console; None if another canvas is active, or the console isn't a terminal or a notebook."""
    if _ACTIVE_CONSOLES or not can_draw(console):
        return None
    canvas = NotebookCanvas() if console.is_jupyter else TerminalCanvas(console)
    _ACTIVE_CONSOLES.append(console)
    return canvas


def print_line(line: str, console: Console) -> None:
    """Print a line that stays, above any active canvas, and wrap it in a narrow terminal."""
    if console.is_jupyter:
        print(line)
    else:
        # Only the active console knows that it must print above the canvas.
        (_ACTIVE_CONSOLES or [console])[0].print(Text(line), soft_wrap=True)


class TerminalCanvas:
    """The last line of a terminal. Other output is printed above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(
            console=console,
            auto_refresh=False,  # its thread would redraw unchanged lines
            transient=True,
            # Else stderr that is redirected to a file would appear in the terminal.
            redirect_stderr=sys.stderr.isatty(),
        )
        self._live.start()

    def draw(self, line: Text) -> None:
        """Draw the line, cropped to the terminal's width."""
        self._live.update(line, refresh=True)

    def end(self, line: Text) -> None:
        """Print the final line, wrapped in a narrow terminal."""
        _ACTIVE_CONSOLES.clear()
        self._live.stop()
        self._console.print(line, soft_wrap=True)


class NotebookCanvas:
    """An output of a notebook's cell, which is updated in place and saved with the notebook. Needs no ipywidgets."""

    def __init__(self) -> None:
        self._handle: Any = None

    def draw(self, line: Text) -> None:
        """Draw the line."""
        from IPython.display import display  # present in every notebook

        bundle = {"text/plain": line.plain, "text/html": as_html(line)}
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)

    def end(self, line: Text) -> None:
        """Draw the final line."""
        _ACTIVE_CONSOLES.clear()
        self.draw(line)


def as_html(line: Text) -> str:
    """Convert a line with its colors to HTML, for a notebook.

    Example:
        >>> as_html(Text("3/4"))
        '<pre style="margin:0;white-space:pre-wrap">3/4</pre>'
    """
    console = Console(file=io.StringIO(), record=True, force_jupyter=False, width=max(1, line.cell_len))
    console.print(line, end="")
    return console.export_html(
        inline_styles=True, code_format='<pre style="margin:0;white-space:pre-wrap">{code}</pre>'
    )
