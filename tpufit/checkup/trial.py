"""Trains a few steps in another process, because a process can't change its number of cores, and may be aborted."""

import json
from dataclasses import dataclass

from ..utils import children

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
    failure: str = ""  # how its process ended, if it failed
    status: int | None = 0  # its exit status; below 0 the signal that ended it; None if it was still running


def run_trial(cores: int, timeout: float) -> Trial:
    """Train in another process, on a number of cores (0 for all), for at most `timeout` seconds."""
    ended = children.run(["-m", f"{__package__}.training", str(cores)], "training", timeout, clock=False)
    if ended.status is None:
        return Trial(cores, failure=f"no answer within {timeout:g} s", status=None)
    if ended.status:
        return Trial(cores, failure=children.explain_end(ended.status, ended.output), status=ended.status)
    # The runtime may write further lines after the result.
    result = next(line for line in reversed(ended.output.splitlines()) if line.startswith("{"))
    return Trial(**json.loads(result))
