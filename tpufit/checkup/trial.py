"""Trains a few steps in another process, because a process can't change its number of cores, and may be aborted."""

import json
import subprocess
from dataclasses import dataclass

from ..utils.child_python import child_python

ALL = 0  # cores: every core of a TPU; on a CPU, 8 virtual cores


@dataclass(frozen=True)
class Trial:
    """The result of a training."""

    cores: int  # requested; 0 for all
    ran_on: str = ""  # the cores as text, or "" if it failed
    first: float = 0.0  # seconds of the first step, which is traced and compiled
    step: float = 0.0  # seconds of a later step
    bandwidth: float = 0.0  # bytes per second to the device and back
    memory: int | None = None  # of the device in bytes; None if the runtime doesn't report it
    failure: str = ""  # the process's last lines, if it failed
    status: int | None = 0  # its exit status; below 0 the signal that ended it; None if it was still running


def run(cores: int, timeout: float) -> Trial:
    """Train in another process, on a number of cores (0 for all), for at most `timeout` seconds."""
    python = child_python(["-m", f"{__package__}.training", str(cores)])
    try:
        ended = subprocess.run(**python, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return Trial(cores, failure=f"no answer within {timeout:g} s", status=None)
    if ended.returncode == 0:
        return Trial(**json.loads(ended.stdout.splitlines()[-1]))
    lines = [line for line in ended.stderr.splitlines() if line.strip()]
    raised = [i for i, line in enumerate(lines) if line[0] != " " and ("Error" in line or "Check failed" in line)]
    return Trial(cores, failure="\n".join(lines[raised[-1] :] if raised else lines[-3:]), status=ended.returncode)
