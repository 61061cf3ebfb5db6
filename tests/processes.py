"""Processes for tests: each in a group of its own, and none outlives its time or its test."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

GRACE = 10.0  # seconds for the stacks of all threads to be written
Command = Sequence[str | os.PathLike[str]]


def run(command: Command, *, timeout: float, **popen: Any) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` with text output and a timeout that always holds.

    Raises:
        subprocess.TimeoutExpired: It was still running after `timeout` seconds. Its output ends with the stacks.
    """
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        with process_group(command, stdout=out, stderr=err, **popen) as process:
            ended = ends(process, lambda: deadline)
        out.seek(0)
        err.seek(0)
        stdout, stderr = (file.read().decode(errors="replace") for file in (out, err))
    if not ended:
        raise subprocess.TimeoutExpired(command, timeout, stdout, stderr)
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


@contextmanager
def process_group(command: Command, **popen: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command. On leaving, what is left of it and of all that it started is killed, and `returncode` is set.

    Give files for the output, not pipes: a pipe stays open as long as a grandchild lives.
    """
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, **popen)
    try:
        yield process
    finally:
        # Before wait(): as long as the leader is not reaped, nobody else is given the group's number.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def ends(process: subprocess.Popen[bytes], deadline: Callable[[], float]) -> bool:
    """Wait for the end of a process, or abort it once `time.monotonic()` is past `deadline()`, which may move.

    SIGABRT makes Python's faulthandler (on in pytest, and with `-X faulthandler`) write every thread's stack to stderr,
    also when the process hangs in native code.

    Returns:
        Whether it ended by itself.
    """
    while not _exited(process):
        if time.monotonic() > deadline():
            os.kill(process.pid, signal.SIGABRT)
            patience = time.monotonic() + GRACE
            while not _exited(process) and time.monotonic() < patience:
                time.sleep(0.05)
            return False
        time.sleep(0.05)
    return True


def _exited(process: subprocess.Popen[bytes]) -> bool:
    # Not poll(), which reaps it (see process_group).
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
