"""`tpufit.doctor()`: checks everything that a training on this machine needs to run, and to be fast.

| file | content |
| --- | --- |
| `facts` | gathers facts, without judging them |
| `checks` | turns facts into rows with cures |
| `trial` | trains a few steps in another process |
| `training` | the code of that process |
"""

from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .checks import CHECKS, Row
from .facts import collect_facts


def doctor(train: bool = True, timeout: float = 300.0) -> list[Row]:
    """Check this machine, and print a table of its state, with a cure for each fault.

    It needs neither a TPU nor torch, starts no runtime in this process, and ends no other process.

    Args:
        train: True (default) trains a few steps on one core and on all cores, each in another process.
        timeout: The most seconds that each training may take (default 300).

    Returns:
        The rows of the table. Everything works if no row has the status `"error"`.

    Example:
        >>> import contextlib, io, tpufit
        >>> with contextlib.redirect_stdout(io.StringIO()):
        ...     rows = tpufit.doctor(train=False)
        >>> rows[0].name, rows[0].status
        ('Python', 'ok')
    """
    facts = collect_facts(train, timeout)
    rows = [row for check in CHECKS for row in check(facts)]
    Console(width=None if Console().is_terminal else 120).print(format_table(rows))
    return rows


def format_table(rows: Iterable[Row]) -> Table:
    """Format the rows as a rich table."""
    table = Table("", "check", "what there is, and what to do", box=None, header_style="bold")
    for row in rows:
        color = {"ok": "green", "warning": "yellow", "error": "red"}[row.status]
        cure = f"\n-> {row.cure}" if row.cure else ""
        table.add_row(f"[{color}]{row.status}[/]", row.name, escape(row.found + cure))
    return table
