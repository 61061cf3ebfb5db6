"""`Verification`: the results, as a table and as anonymous JSON."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from ..errors import say_count
from ..utils import hardware, releases
from ..utils.files import replacing
from ..utils.text import render
from .check import Figure
from .runner import FAILED, NO_START, NO_TIME, PASSED, Device, Result

_WIDTH = 120  # columns
_COLORS = {PASSED: "green", FAILED: "bold red", NO_START: "red", NO_TIME: "yellow"}


@dataclass(frozen=True)
class Verification:
    """The results of `verify`.

    Attributes:
        results: The results of the checks, in their order.
        device: The device.
        seconds: The total time.
        quick: True if only the most important checks ran.
        date: The day in UTC, in ISO 8601 format.

    Example:
        >>> report = Verification([Result("starts", PASSED, 2.0, (Figure("cores", 8, at_least=1),))], Device("CPU", 8))
        >>> report.passed, report.status
        (True, 0)
    """

    results: Sequence[Result]
    device: Device = field(default_factory=Device)
    seconds: float = 0.0
    quick: bool = False
    date: str = field(default_factory=lambda: datetime.now(timezone.utc).date().isoformat())

    @property
    def failed(self) -> list[Result]:
        """The checks that failed, or for which the device didn't start."""
        return [result for result in self.results if result.status in (FAILED, NO_START)]

    @property
    def passed(self) -> bool:
        """True if no check failed, and at least one passed."""
        return not self.failed and any(result.status == PASSED for result in self.results)

    @property
    def status(self) -> int:
        """The exit status of `python -m tpufit verify`: 0 if it passed, else 1."""
        return int(not self.passed)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a dict for JSON."""
        chips = hardware.find_chips()
        return {
            "date": self.date,
            "passed": self.passed,
            "quick": self.quick,
            "seconds": round(self.seconds),
            "machine": {
                "platform": self.device.platform,
                "cores": self.device.cores,
                "hosts": self.device.hosts,
                "chips": [chip.name for chip in chips],
                "place": hardware.find_platform(),
                "cpus": hardware.count_cpus(),
                "memory": min(hardware.read_memory_limits().values()),
            },
            "versions": {
                "python": ".".join(map(str, sys.version_info[:3])),
                **{name: releases.find_version(name) for name in ("tpufit", "torch")},
                **releases.find_compiler_versions(),
            },
            "checks": [_as_dict(result) for result in self.results],
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report as JSON, atomically.

        Args:
            path: The file; its folder is created if missing.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as draft:
            draft.write_text(json.dumps(self.as_dict(), indent=1, allow_nan=False) + "\n")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table("", "check", "figures", "s", box=None, header_style="bold")
        table.columns[3].justify = "right"
        for result in self.results:
            lines = [Text(str(figure), style="" if figure.holds else "red") for figure in result.figures]
            lines += [Text(result.failure, style="red")] if result.failure else []
            status = Text(result.status, style=_COLORS.get(result.status, "dim"))
            table.add_row(status, result.name, Text("\n").join(lines), f"{result.seconds:.0f}")
        yield table
        yield Text(f"\n{self.summary}", style="bold")

    @property
    def summary(self) -> str:
        """The outcome in a sentence."""
        counts = {result.status: 0 for result in self.results}
        for result in self.results:
            counts[result.status] += 1
        said = ", ".join(f"{count} {status}" for status, count in counts.items())
        device = self.device
        where = f"{say_count(device.cores, 'core')} of a {device.platform}" if device.cores else "no device"
        where += f" on {device.hosts} hosts" if device.hosts > 1 else ""
        return f"{say_count(len(self.results), 'check')} on {where} in {self.seconds:.0f} s: {said}"

    def __str__(self) -> str:
        return render(self, _WIDTH)


def _as_dict(result: Result) -> dict[str, Any]:
    """Return a result as a dict, without empty and default values."""
    kept: dict[str, Any] = {"name": result.name, "status": result.status, "seconds": round(result.seconds, 1)}
    if result.figures:
        kept["figures"] = [_of_figure(figure) for figure in result.figures]
    return kept | ({"failure": result.failure} if result.failure else {})


def _of_figure(figure: Figure) -> dict[str, Any]:
    values = {
        name: value
        for name, value in asdict(figure).items()
        if value is not None and value is not False and value != ""
    }
    value = figure.value
    if not isinstance(value, str):
        # JSON can't represent infinity or NaN.
        value = float(f"{value:.4g}") if math.isfinite(value) else str(value)
    return values | {"value": value}
