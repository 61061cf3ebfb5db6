"""Standard output: a console for drawing in terminals, and plain lines of text."""

import sys

from rich.console import Console


def standard_output() -> Console:
    """Return a console on the current standard output, which draws only in a real terminal or a notebook.

    Unlike rich's default console it ignores `FORCE_COLOR`, which many CIs set although their logs can't be redrawn.
    """
    # Soft wrap, because lines that a program prints above a bar go through this console, and must not change.
    return Console(force_terminal=None if sys.stdout.isatty() else False, soft_wrap=True)


def can_draw(console: Console) -> bool:
    """True if a line can be redrawn: in a terminal or a notebook.

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
