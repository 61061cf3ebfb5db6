"""`Runner`: runs checks one after the other, each in separate processes, so that a crash doesn't stop the others."""

from __future__ import annotations

import json
import re
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import monotonic, perf_counter

from ..utils import children
from .anonymize import anonymize
from .check import ALL, NONE, Check, Figure, Process
from .check_process import FAULT, FIGURES, STARTED, Job

PASSED = "passed"
FAILED = "FAILED"
NOT_ON_A_CPU = "not on a CPU"
NOT_ON_ONE_CORE = "not on one core"
NOT_ON_A_POD = "not on a pod"
NO_START = "no start"
NO_TIME = "no time"

_GRACE = 5.0  # seconds for a hanging process to write its stacks
_ON_A_CPU = 4  # times the limit on a TPU: virtual cores share the real cores with other programs


@dataclass(frozen=True)
class Result:
    """The result of a check.

    Attributes:
        name: The check's name.
        status: `"passed"`, `"FAILED"`, `"not on a CPU"`, `"not on one core"`, `"not on a pod"`, `"no start"` (not
            run, because the device doesn't start on these cores) or `"no time"` (not run, or not finished).
        seconds: The check's duration.
        figures: The check's figures.
        failure: A description of the failure; empty if the check passed, or if only a figure is out of bounds.
    """

    name: str
    status: str
    seconds: float = 0.0
    figures: tuple[Figure, ...] = ()
    failure: str = ""


@dataclass(frozen=True)
class Device:
    """The device that the checks run on, as far as it is known.

    Attributes:
        platform: `"TPU"` or `"CPU"`; empty before the first start.
        cores: The number of cores; 0 before the first start on all cores.
        hosts: The number of hosts.
        host: The index of this host.
    """

    platform: str = ""
    cores: int = 0
    hosts: int = 1
    host: int = 0


class _TimeOverError(Exception):
    """The time limit of all checks is reached, before that of the running check."""


class Runner:
    """Runs checks."""

    def __init__(self, virtual: int, artifacts: Path, seconds: float) -> None:
        self._virtual = virtual
        self._artifacts = artifacts
        self._until = perf_counter() + seconds  # no check starts later
        self._started: dict[int, bool] = {}  # whether the device has started, by cores
        self.device = Device()

    def run(self, check: Check) -> Result:
        """Run a check."""
        on_cpu = self.device.platform == "CPU"
        if on_cpu and not check.runs_on_cpu:
            return Result(check.name, NOT_ON_A_CPU)
        if check.several and self.device.cores == 1:
            return Result(check.name, NOT_ON_ONE_CORE)
        if self.device.hosts > 1 and not check.on_pods:
            return Result(check.name, NOT_ON_A_POD)
        if any(self._started.get(process.cores) is False for process in check.processes):
            return Result(check.name, NO_START)
        began = perf_counter()
        if began > self._until:
            return Result(check.name, NO_TIME)
        with tempfile.TemporaryDirectory(prefix="tpufit-verify-") as name:
            folder = Path(name)
            try:
                failure = self._find_failure(check, folder)
            except _TimeOverError:
                return Result(check.name, NO_TIME, perf_counter() - began, _read_figures(folder / FIGURES))
            figures = _read_figures(folder / FIGURES)
        on_cpu = self.device.platform == "CPU"  # the check may have found out
        judged = [one for one in figures if not (one.on_tpu and on_cpu)]
        right = not failure and all(one.holds for one in judged)
        # A failing process counts on any device, but bounds may be for a TPU only.
        status = NOT_ON_A_CPU if check.only_tpu and on_cpu and not failure else PASSED if right else FAILED
        return Result(check.name, status, perf_counter() - began, figures, failure)

    def _find_failure(self, check: Check, folder: Path) -> str:
        """Run the processes of a check until one fails; describe the failure."""
        for number, process in enumerate(check.processes):
            limit = check.seconds * (_ON_A_CPU if self.device.platform == "CPU" else 1)
            # The device starts only once all hosts are ready. After a failure, a host may first have to wait until the
            # other hosts have stopped waiting for it.
            limit *= 2 if self.device.hosts > 1 else 1
            what = check.name if len(check.processes) == 1 else f"{check.name} ({number + 1})"
            remaining = self._until - perf_counter()
            ended = self._run_process(
                process, what, folder, max(1.0, min(limit, remaining)), shortened=remaining < limit
            )
            self._record_start(process.cores, folder / STARTED)
            if ended:
                return anonymize(ended)
        return ""

    def _run_process(self, process: Process, what: str, folder: Path, seconds: float, shortened: bool) -> str:
        """Run a process; describe its end, with an empty text if it ended as expected."""
        part = process.part
        until = monotonic() + seconds
        (folder / STARTED).unlink(missing_ok=True)
        job = Job(
            part.__module__, part.__qualname__, process.cores, self._virtual, str(folder), str(self._artifacts), until
        )
        command = ["-m", f"{__package__}.check_process", json.dumps(asdict(job))]
        ended = children.run(command, what, seconds + _GRACE)
        if (folder / FAULT).exists():
            fault: str = json.loads((folder / FAULT).read_text())
            return fault
        if ended.status is None and shortened:
            raise _TimeOverError
        if ended.status is None:
            return f"not finished within {seconds:.0f} s. It was at {_describe_place(ended.output)}"
        if ended.status == process.ends:
            return ""
        if ended.status == 0:
            return f"it ended with status 0 instead of {process.ends}"
        return children.explain_end(ended.status, ended.output)

    def _record_start(self, cores: int, started: Path) -> None:
        """Record whether the device has started on these cores, and its description."""
        if cores == NONE:
            return
        self._started[cores] = self._started.get(cores, False) or started.exists()
        if started.exists():
            facts = json.loads(started.read_text())
            self.device = Device(**facts) if cores == ALL else replace(self.device, platform=facts["platform"])


def _read_figures(path: Path) -> tuple[Figure, ...]:
    """Read the figures that the processes of a check have written."""
    lines = path.read_text().splitlines() if path.exists() else []
    figures = (Figure(**json.loads(line)) for line in lines)
    return tuple(
        Figure(**{**asdict(one), "value": anonymize(one.value)}) if isinstance(one.value, str) else one
        for one in figures
    )


def _describe_place(output: str) -> str:
    """Return the innermost frames of the main thread, from the stacks that Python writes."""
    main = output.rpartition("\nThread ")[2] if "\nThread " in output else output
    frames = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', main)
    return ", called from ".join(f"{Path(path).name}:{line} {name}" for path, line, name in frames[:6]) or "its start"
