"""`tpufit.verify()`: tests on a real device what was so far only compiled, or run on virtual cores.

| file | content |
| --- | --- |
| `check` | the definition of a check: its processes, and figures with bounds |
| `all_checks` | all checks, in their order |
| `device_start`, `numerics`, `equivalence`, `resumption`, `memory`, `speed` | the checks |
| `nets` | the nets that the checks train, and their training in plain PyTorch |
| `check_process` | the code that runs in a check's process |
| `runner` | runs the processes, which may hang, crash or be killed |
| `report` | the result, as a table and as JSON |
| `anonymize` | removes names of users, hosts and folders from a text |
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

from ..errors import StartError, require_whole
from ..utils.terminal import say, standard_output
from .all_checks import CHECKS
from .check import Check
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
    """Verify on this device that tpufit computes what PyTorch does, resumes after a kill, frees memory, ...

    Each check runs in separate processes with a time limit, so that none can hang or stop the others. A line is printed
    for each check, and a table at the end. In a notebook, call this before anything else, because only one process can
    use a TPU. Without a TPU the checks run on virtual cores of the CPU, and those that need a TPU don't count. On a
    pod, start it on all hosts; the first host writes the report.

    Args:
        out: The file of the report, rewritten after each check (default `"tpufit-report.json"`). It contains no names
            of users, hosts or folders. A profile is written to the folder `tpufit-report-profile` next to it.
        quick: Run only the most important checks (default False).
        timeout: The seconds after which no further check starts, and the running one is stopped (default 600).
        virtual_cores: The number of cores without a TPU (default 8).
        checks: The checks (default: all).

    Returns:
        A `Verification`: print it, or read `passed` and `results`.

    Raises:
        StartError: This process uses the TPU, so no other process can.
        ArgumentError: `virtual_cores` isn't a whole number of at least 1.

    Example:
        >>> import tpufit
        >>> report = tpufit.verify(quick=True)  # doctest: +SKIP
        >>> report.passed  # doctest: +SKIP
        True
    """
    require_whole("virtual_cores", virtual_cores)
    _require_free_tpu()
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


def _require_free_tpu() -> None:
    """Raise an error if this process uses the TPU."""
    runtime = sys.modules.get("tpufit.runtime")
    cores = runtime.get_settled_cores() if runtime else None
    if cores is not None and cores.platform == "TPU":
        raise StartError(
            f"tpufit.verify() trains in other processes, but this process already computes on {cores}, and only one "
            "process can use a TPU. Restart it (in a notebook: the kernel), and call tpufit.verify() first"
        )
