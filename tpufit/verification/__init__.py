"""`tpufit.verify()`: shows on a real device what was only compiled or run on virtual cores.

| file | its idea |
| --- | --- |
| `check` | what a check is: its processes, and figures with bounds |
| `plan` | all checks, in their order |
| `starting`, `numerics`, `sameness`, `endings`, `memory`, `speed` | the checks |
| `nets` | the nets that they train, and plain PyTorch's training of them |
| `process` | the code that a check's process runs |
| `runner` | runs the processes, which may hang, crash or be killed |
| `report` | the result, for people and as JSON |
| `anonymous` | a text without names of users, hosts and folders |
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

from ..errors import StartError, require_whole
from ..utils.terminal import say, standard_output
from .check import Check
from .plan import CHECKS
from .report import Verification
from .runner import Result, Runner

_SECONDS = 600.0


def verify(
    out: str | os.PathLike[str] = "tpufit-report.json",
    quick: bool = False,
    *,
    timeout: float = _SECONDS,
    virtual_cores: int = 8,
    checks: Sequence[Check] = CHECKS,
) -> Verification:
    """Verify on this device that tpufit computes what PyTorch does, goes on after a kill, gives memory back, ...

    Each check runs in processes of its own, each with a time limit, so that none can hang or take the others along.
    A line is printed for each, and a table at the end. In a notebook call it before anything else: a TPU serves one
    process. Without a TPU it runs on virtual cores of the CPU, and what only a TPU can tell counts for nothing.
    On a pod start it on all hosts: the first one writes the report.

    Args:
        out: The file that the report is written to, again after each check (default `"tpufit-report.json"`). It holds
            no names of users, hosts or folders. A profile is written to a folder beside it, `tpufit-report-profile`.
        quick: Run only the most telling checks (default False).
        timeout: The seconds after which no further check is begun, and the running one is ended (default 600).
        virtual_cores: The number of cores where there is no TPU (default 8).
        checks: The checks (default: all).

    Returns:
        A `Verification`: print it, or read `passed` and `results`.

    Raises:
        StartError: This process holds the TPU, so that no other can have it.
        ArgumentError: `virtual_cores` is no whole number of at least 1.

    Example:
        >>> import tpufit
        >>> report = tpufit.verify(quick=True)  # doctest: +SKIP
        >>> report.passed  # doctest: +SKIP
        True
    """
    require_whole("virtual_cores", virtual_cores)
    _not_here()
    path = Path(out)
    began = perf_counter()
    runner = Runner(virtual_cores, path.with_name(f"{path.stem}-profile").absolute(), timeout)
    results: list[Result] = []
    chosen = [check for check in checks if check.quick or not quick]
    for number, check in enumerate(chosen, 1):
        results.append(runner.run(check))
        say(f"{number:2}/{len(chosen)} {results[-1].status:15} {check.name} ({results[-1].seconds:.0f} s)")
        report = Verification(tuple(results), runner.device, perf_counter() - began, quick)
        if not runner.device.host:
            report.save(path)
    console = standard_output()
    console.width = console.width if console.is_terminal else 120
    console.print(report)
    say(f"The report is in {path}." if not runner.device.host else "The first host has the report.")
    return report


def _not_here() -> None:
    """Raise an error if this process holds the TPU."""
    runtime = sys.modules.get("tpufit.runtime")
    cores = runtime.settled() if runtime else None
    if cores is not None and cores.platform == "TPU":
        raise StartError(
            f"tpufit.verify() trains in other processes, and a TPU serves one: this one computes on {cores}. Restart "
            "it (in a notebook: the kernel), and call tpufit.verify() first"
        )
