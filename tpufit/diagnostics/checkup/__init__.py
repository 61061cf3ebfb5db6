"""`tpufit.doctor()`: looks at all that must be right before a training on this machine is fast, or runs at all.

| file | its idea |
| --- | --- |
| `facts` | what there is: gathered, and not judged |
| `checks` | facts to rows: each check is a function, and says what to do |
| `trial` | a training of a few steps, in a process of its own |
| `training` | what that process runs |
"""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from .checks import CHECKS, Row
from .facts import gather

__all__ = ["Row", "doctor", "table"]


def doctor(train: bool = True, timeout: float = 300.0) -> list[Row]:
    """Check this machine, and print a table: what is there, whether it is right, and what to do if not.

    It needs neither a TPU nor torch, and starts nothing in this process. Nobody's process is ended.

    Args:
        train: Whether to train a few steps on one core and on all of them, each in a process of its own (default: yes).
        timeout: How many seconds each of these may take (default 300).

    Returns:
        The rows of the table. All is well if none has the status `"error"`.

    Example:
        >>> import contextlib, io, tpufit
        >>> with contextlib.redirect_stdout(io.StringIO()):
        ...     rows = tpufit.doctor(train=False)
        >>> rows[0].name, rows[0].status
        ('Python', 'ok')
    """
    facts = gather(train, timeout)
    rows = [row for check in CHECKS for row in check(facts)]
    Console(width=None if Console().is_terminal else 120).print(table(rows))
    return rows


def table(rows: Iterable[Row]) -> Table:
    """The rows as rich prints them."""
    shown = Table("", "check", "what there is, and what to do", box=None, header_style="bold")
    for row in rows:
        colour = {"ok": "green", "warning": "yellow", "error": "red"}[row.status]
        cure = f"\n-> {row.cure}" if row.cure else ""
        shown.add_row(f"[{colour}]{row.status}[/]", row.name, _plain(row.found + cure))
    return shown


def _plain(text: str) -> str:
    return text.replace("[", r"\[")  # else rich takes it for a style
