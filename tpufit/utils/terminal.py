"""Standard output: a console that can draw on it if it is a terminal, and a line of text."""

import sys

from rich.console import Console


def standard_output() -> Console:
    """Standard output as it is now, drawn on only if it really is a terminal or a notebook.

    Unlike rich's own console it is not misled by `FORCE_COLOR`, which is set in many a CI whose logs can't be drawn on.
    """
    # Soft wrap: the lines that a program prints above a bar go through this console, and must stay as they are.
    return Console(force_terminal=None if sys.stdout.isatty() else False, soft_wrap=True)


def can_draw(console: Console) -> bool:
    """True if a line can be drawn over another one: in a terminal, or in a notebook.

    Example:
        >>> import io
        >>> can_draw(Console(file=io.StringIO()))
        False
    """
    return console.is_jupyter or (console.is_terminal and not console.is_dumb_terminal)


def say(text: str) -> None:
    """Print a line, above a progress bar if one is being drawn.

    Example:
        >>> say("Epoch 4: early stopping")
        Epoch 4: early stopping
    """
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
