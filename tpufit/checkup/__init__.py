"""`tpufit.doctor()`: checks everything that a training on this machine needs to be fast, or to run at all.

| file | its idea |
| --- | --- |
| `facts` | gathers the facts, without a judgement |
| `checks` | turns facts into rows with their cures |
| `trial` | trains a few steps, in a process of its own |
| `training` | the code that this process runs |
"""

from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .checks import CHECKS, Row
from .facts import collect


def doctor(train: bool = True, timeout: float = 300.0) -> list[Row]:
    """Check this machine, and print a table of what it has, and what to do about each fault.

    It needs neither a TPU nor torch, starts nothing in this process, and ends no other.

    Args:
        train: True (default) to train a few steps on one core and on all of them, each in a process of its own.
        timeout: The seconds that each of these may take (default 300).

    Returns:
        The rows of the table. All is well if none has the status `"error"`.

    Example:
        >>> import contextlib, io, tpufit
        >>> with contextlib.redirect_stdout(io.StringIO()):
        ...     rows = tpufit.doctor(train=False)
        >>> rows[0].name, rows[0].status
        ('Python', 'ok')
    """
    facts = collect(train, timeout)
    rows = [row for check in CHECKS for row in check(facts)]
    Console(width=None if Console().is_terminal else 120).print(table(rows))
    return rows


def table(rows: Iterable[Row]) -> Table:
    """The rows as a table for rich."""
    shown = Table("", "check", "what there is, and what to do", box=None, header_style="bold")
    for row in rows:
        colour = {"ok": "green", "warning": "yellow", "error": "red"}[row.status]
        cure = f"\n-> {row.cure}" if row.cure else ""
        shown.add_row(f"[{colour}]{row.status}[/]", row.name, escape(row.found + cure))
    return shown
