"""`run`: runs a Python process that may crash, be killed or take too long, shows a clock, and reports how it ended."""

from __future__ import annotations

import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from .child_python import child_python
from .defer_interrupt import defer_interrupt
from .hardware import LACKS_MEMORY
from .terminal import can_draw, standard_output

_TICK = 0.2  # seconds


@dataclass(frozen=True)
class ProcessEnd:
    """How a process ended."""

    status: int | None  # the exit status; below 0 the signal that ended it; None after a timeout
    output: str  # on stdout and stderr


def run(
    command: Sequence[str], what: str, seconds: float, clock: bool = True, environ: Mapping[str, str] | None = None
) -> ProcessEnd:
    """Run a Python program in a new process, and wait for its end. Ctrl-C and kill -9 end it, too.

    Args:
        command: The words after `python`.
        what: What the program does, e.g. `"compiling for v5e-8"`.
        seconds: The most seconds that it may take.
        clock: True (default) shows the seconds while it runs, where a line can be redrawn.
    """
    python = child_python(command, {"PYTHONFAULTHANDLER": "1", **(environ or {})})
    console = standard_output()
    began = perf_counter()
    status: Any = console.status(what) if clock and can_draw(console) else nullcontext()
    # A file rather than a pipe, which would fill up during the wait.
    with tempfile.TemporaryFile("w+", errors="replace") as output, status as shown:
        process = None
        in_time = True
        try:
            with defer_interrupt():  # else an interrupt could come between the start of the process and the assignment
                process = subprocess.Popen(**python, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
            while in_time:
                try:
                    process.wait(_TICK)
                    break
                except subprocess.TimeoutExpired:
                    taken = perf_counter() - began
                    if shown is not None:
                        shown.update(f"{what} ... {taken:.0f} s")
                    in_time = taken <= seconds
        finally:
            if process is not None:
                process.kill()
                process.wait()
        output.seek(0)
        return ProcessEnd(process.returncode if in_time else None, output.read())


def explain_end(status: int, output: str) -> str:
    """Explain the end of a process by its exit status or, below 0, the signal that ended it.

    Example:
        >>> explain_end(-6, "F0000 xla.cc:1] Check failed: false")
        'signal 6 ended its process. It said:\\nF0000 xla.cc:1] Check failed: false'
    """
    if status == -signal.SIGKILL:
        killed = "the system killed its process, most likely because host memory ran out"
        return f"{killed}. Close other programs, or use a machine with more"
    lines = [line for line in output.splitlines() if line.strip()]
    stack = next((i for i, line in enumerate(lines) if line.startswith("Fatal Python error")), len(lines))
    marks = ("Error", "ERROR", "Check failed", "bad_alloc")
    words = [line for line in lines[:stack] if line[0] != " " and any(mark in line for mark in marks)]
    last = "\n".join(words[-1:] or lines[:stack][-5:])
    # Without memory, loading a library may also crash, with no message.
    loading = status == -signal.SIGSEGV and "<frozen importlib" in output
    if loading or any(text in output for text in LACKS_MEMORY):
        last = last or f"signal {-status} ended it while it loaded libraries"
        limits = "a container's limit, ulimit -v or ulimit -u"
        return (
            f"its process isn't allowed enough host memory. Raise {limits}, or use a machine with more. It "
            f"said:\n{last}"
        )
    if words and status > 0:
        return last
    end = f"signal {-status} ended its process" if status < 0 else f"its process ended with status {status}"
    return f"{end}. It said:\n{last}" if last else end
