"""The process of a check: `python -m tpufit.verification.check_process JOB`. It writes each figure immediately."""

import faulthandler
import json
import signal
import sys
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from time import monotonic

from ..backend import Cores
from ..errors import TpufitError
from ..runtime import platform, process_index, start
from .check import ALL, NONE, Setting

FIGURES = "figures.jsonl"
FAULT = "fault.json"
STARTED = "started.json"


@dataclass(frozen=True)
class Job:
    """The task of a process."""

    module: str  # of its function
    function: str
    cores: int  # `NONE`, `ONE` or `ALL`
    virtual: int  # the number of virtual cores for `ALL` on a CPU
    folder: str  # of the check
    artifacts: str  # the folder next to the report
    until: float  # the time, on this machine's monotonic clock, at which the process writes its stacks


def main(job: Job) -> None:
    """Run one part of a check in this process."""
    # A shell starts background processes with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.dump_traceback_later(max(0.1, job.until - monotonic()))
    folder = Path(job.folder)
    cores = None if job.cores == NONE else _start(job, folder)
    part = getattr(import_module(job.module), job.function)
    try:
        with (folder / FIGURES).open("a") as file:
            for figure in part(Setting(cores, folder, Path(job.artifacts))):
                file.write(json.dumps(asdict(figure)) + "\n")
                file.flush()
    except Exception as error:  # any error is the check's result
        kind = "" if isinstance(error, TpufitError) else f"{type(error).__name__}: "
        (folder / FAULT).write_text(json.dumps(f"{kind}{error}"))
        raise
    finally:
        faulthandler.cancel_dump_traceback_later()


def _start(job: Job, folder: Path) -> Cores:
    wanted: int | str = job.cores or "auto"
    if job.cores == ALL and platform() == "CPU":
        wanted = job.virtual
    cores = start(wanted, "tpufit.verify()")
    facts = {"platform": cores.platform, "cores": cores.count, "hosts": cores.hosts, "host": process_index()}
    (folder / STARTED).write_text(json.dumps(facts))
    return cores


if __name__ == "__main__":
    main(Job(**json.loads(sys.argv[1])))
