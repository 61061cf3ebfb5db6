"""Processes for tests. Each has its own process group, and is killed after its time limit or at the end of its test.

They are forks of a process that has imported PyTorch and tpufit (`fork_server.py`), or new processes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import IO, Any

import fork_server
from fork_server import Command

GRACE = 10.0  # seconds to write the stacks of all threads
# Sets PR_SET_PDEATHSIG (1) of prctl(2): Linux kills the command when pytest ends. The setting survives exec.
LEASH = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execvp(sys.argv[1], sys.argv[1:])"
Process = subprocess.Popen[bytes] | fork_server.Forked
SERVER = fork_server.Server()  # each process of pytest has its own


def run(command: Command, *, timeout: float, fresh: bool = False, **popen: Any) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` with text output and a timeout that also ends grandchildren.

    Args:
        fresh: False if it may be a fork of a process that has imported PyTorch and tpufit (see `fork_server.py`).

    Raises:
        subprocess.TimeoutExpired: The process took longer than `timeout` seconds. Its output ends with the stacks.
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
    """Start a command. On leaving, it and its descendants are killed, and `returncode` is set.

    Args:
        stdout: A file; a pipe would stay open as long as a grandchild lives.
        stderr: A file.
        fresh: As for `run`.
    """
    if not fresh and SERVER.takes(command, env):
        fork = SERVER.fork(command, env, cwd, stdout.fileno(), stderr.fileno())
        try:
            yield fork
        finally:
            fork.end()
        return
    process = subprocess.Popen(
        [sys.executable, "-IS", "-c", LEASH, *command],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        stdout=stdout,
        stderr=stderr,
        cwd=cwd,
        env=env,
    )
    try:
        yield process
    finally:
        # Before wait(): the group's number isn't reused before the leader is reaped.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def ends(process: Process, deadline: Callable[[], float]) -> bool:
    """Wait for the end of a process, or abort it after `deadline()`, a value of `time.monotonic()` that may change.

    On SIGABRT, Python's faulthandler (enabled in pytest, and by `-X faulthandler`) writes the stacks of all threads to
    stderr, also if the process hangs in native code.

    Returns:
        True if the process ended by itself.
    """
    while not has_exited(process):
        if time.monotonic() > deadline():
            os.kill(process.pid, signal.SIGABRT)
            patience = time.monotonic() + GRACE
            while not has_exited(process) and time.monotonic() < patience:
                time.sleep(0.05)
            return False
        time.sleep(0.05)
    return True


def has_exited(process: Process) -> bool:
    """True if a process has ended. Its process id isn't given to another process yet."""
    if isinstance(process, fork_server.Forked):
        return process.poll() is not None
    # Not poll(), which reaps the process.
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
