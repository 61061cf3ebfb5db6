"""`run`: a process that may be ended, crash or take too long, with a clock while it runs. Its end is a sentence."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from time import perf_counter
from typing import Any

from ..errors import PreflightError
from ..utils.hardware import LACKS_MEMORY
from ..utils.own_python import own_python
from ..utils.terminal import can_draw, standard_output

_TICK = 0.2  # seconds


def run(
    command: Sequence[str], what: str, seconds: float, clock: bool = True, environ: Mapping[str, str] | None = None
) -> None:
    """Run a Python program in a process of its own, and wait for its end. Ctrl-C and kill -9 end it too.

    Args:
        command: The words after `python`.
        what: What it does, e.g. `"compiling for v5e-8"`.
        seconds: The seconds that it may take.
        clock: True (default) to show the seconds while it runs, where a line can be drawn over.
        environ: Further variables of its environment (default: none).

    Raises:
        PreflightError: It has failed, was ended by a signal, or took too long.
    """
    python = own_python(command, {"PYTHONFAULTHANDLER": "1", **(environ or {})})
    console = standard_output()
    began = perf_counter()
    status: Any = console.status(what) if clock and can_draw(console) else nullcontext()
    # A file and not a pipe, which nobody would empty while this waits.
    with tempfile.TemporaryFile("w+") as said, status as shown:
        process = subprocess.Popen(**python, stdout=said, stderr=said)
        try:
            while True:
                try:
                    process.wait(_TICK)
                    break
                except subprocess.TimeoutExpired:
                    taken = perf_counter() - began
                    if shown is not None:
                        shown.update(f"{what} ... {taken:.0f} s")
                    if taken > seconds:
                        raise PreflightError(
                            f"{what} took longer than {seconds:g} s, and was ended. Pass a larger timeout"
                        ) from None
        finally:
            process.kill()
            process.wait()
        said.seek(0)
        if process.returncode:
            raise PreflightError(f"{what} failed: {_reason(process.returncode, said.read())}")


def _reason(status: int, said: str) -> str:
    """The end of a process in a sentence, by its status and its last words."""
    if status == -signal.SIGKILL:
        killed = "the system killed its process, most likely for want of host memory"
        return f"{killed}. Close other programs, or use a machine with more"
    lines = [line for line in said.splitlines() if line.strip()]
    if "buffer is null" in said:  # a placeholder was read, which torch_xla ends the process for
        return f"the step reads a value from the device, or runs an operation on the host{_users_place(lines)}"
    stack = next((i for i, line in enumerate(lines) if line.startswith("Fatal Python error")), len(lines))
    marks = ("Error", "ERROR", "Check failed", "bad_alloc")
    words = [line for line in lines[:stack] if line[0] != " " and any(mark in line for mark in marks)]
    last = "\n".join(words[-1:] or lines[:stack][-5:])
    # Without memory a library may also end in a fault while it is loaded, and says nothing then.
    loading = status == -signal.SIGSEGV and "<frozen importlib" in said
    if loading or any(words in said for words in LACKS_MEMORY):
        last = last or f"signal {-status} ended it, as it loaded libraries"
        limits = "a container's limit, ulimit -v or ulimit -u"
        return (
            f"its process may not use enough host memory. Raise {limits}, or use a machine with more. It said:\n{last}"
        )
    if words and status > 0:
        return last
    end = f"signal {-status} ended its process" if status < 0 else f"its process ended with status {status}"
    return f"{end}. It said:\n{last}" if last else end


def _users_place(lines: Sequence[str]) -> str:
    """The user's line in the stack that Python writes when a signal ends it, innermost first."""
    frames = [line.strip() for line in lines if line.startswith('  File "')]
    libraries = (f"{os.sep}site-packages{os.sep}", f"{os.sep}tpufit{os.sep}", f"{os.sep}lib{os.sep}python", "<frozen")
    for frame in frames:
        path, _, rest = frame.removeprefix('File "').partition('", line ')
        if not any(part in path for part in libraries):
            return f", at {os.path.basename(path)}:{rest.split(' ')[0]}"
    return ""
