"""Processes for tests: each in a group of its own, and none outlives its time or its test."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import IO, Any

import warm
from warm import Command

GRACE = 10.0  # seconds for the stacks of all threads to be written
Process = subprocess.Popen[bytes] | warm.Forked
SERVER = warm.Server()  # one for each process of pytest


def run(command: Command, *, timeout: float, fresh: bool = False, **popen: Any) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` with text output and a timeout that always holds.

    Args:
        fresh: False for a process that may be a fork of one that has imported PyTorch and tpufit (see `warm.py`).

    Raises:
        subprocess.TimeoutExpired: It was still running after `timeout` seconds. Its output ends with the stacks.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        with process_group(command, fresh=fresh, stdout=out, stderr=err, **popen) as process:
            deadline = time.monotonic() + timeout  # the first fork waits for the imports
            ended = ends(process, lambda: deadline)
        out.seek(0)
        err.seek(0)
        stdout, stderr = (file.read().decode(errors="replace") for file in (out, err))
    if not ended:
        raise subprocess.TimeoutExpired(command, timeout, stdout, stderr)
    return subprocess.CompletedProcess(command, process.wait(), stdout, stderr)


@contextmanager
def process_group(
    command: Command,
    *,
    stdout: IO[bytes],
    stderr: IO[bytes],
    fresh: bool = False,
    cwd: str | os.PathLike[str] = ".",
    env: Mapping[str, str] = os.environ,
) -> Iterator[Process]:
    """Start a command. On leaving, what is left of it and of all that it started is killed, and `returncode` is set.

    Args:
        stdout: A file, not a pipe, which stays open as long as a grandchild lives. So is `stderr`.
        fresh: As for `run`.
    """
    process: Process
    if not fresh and SERVER.takes(command, env):
        process = SERVER.fork(command, env, cwd, stdout.fileno(), stderr.fileno())
    else:
        # Where `sys.executable` stands for Python, it would ask for a fork at the address.
        given = {name: value for name, value in env.items() if not (fresh and name == warm.ADDRESS)}
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, start_new_session=True, stdout=stdout, stderr=stderr, cwd=cwd, env=given
        )
    try:
        yield process
    finally:
        # Before wait(): as long as the leader is not reaped, nobody else is given the group's number.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def ends(process: Process, deadline: Callable[[], float]) -> bool:
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


def _exited(process: Process) -> bool:
    # Not poll(), which reaps it (see process_group).
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
