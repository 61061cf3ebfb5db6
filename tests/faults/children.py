"""Processes into which tests inject faults from outside."""

from __future__ import annotations

import functools
import os
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import processes

FAULTS = Path(__file__).resolve().parent
# For `run_python`: the child can import `training`, and the checkout's tpufit.
ENV = {"PYTHONPATH": os.pathsep.join([str(FAULTS.parents[1]), str(FAULTS)])}


class Child:
    """A running Python process, and its output so far."""

    def __init__(self, process: Any, out: Path, err: Path, timeout: float) -> None:
        self.process, self._out, self._err, self._end = process, out, err, time.monotonic() + timeout

    @property
    def output(self) -> str:
        return self._out.read_text(errors="replace")

    @property
    def errors(self) -> str:
        return self._err.read_text(errors="replace")

    def wait_for(self, line: str) -> None:
        """Wait until it has printed a line."""
        self._wait(lambda: line in self.output.splitlines(), repr(line))

    def wait_for_error(self, words: str) -> None:
        """Wait until it has printed words on stderr."""
        self._wait(lambda: words in self.errors, repr(words))

    def wait_for_checkpoint(self, step: int) -> None:
        """Wait until the folder `run` has a whole checkpoint. A training that is held doesn't say that it is saved."""
        manifest = self._out.parent / "run" / f"step-{step:010d}" / "manifest.json"
        self._wait(manifest.exists, f"a checkpoint of step {step}")

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        while not condition():
            assert not processes.has_exited(self.process), f"it ended without {what}\n{self.output}\n{self.errors}"
            assert time.monotonic() < self._end, f"it never had {what}\n{self.output}\n{self.errors}"
            time.sleep(0.01)

    def send(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM, and end `training.hold` once the training has noted it."""
        self.send(signal.SIGTERM)
        self.wait_for_error("SIGTERM: finishing the step")
        (self._out.parent / "go").touch()

    def end(self) -> int:
        """Wait for its end, and return its exit status, which is negative after a signal."""
        assert processes.ends(self.process, lambda: self._end), f"it never ended\n{self.output}\n{self.errors}"
        return int(self.process.wait())


@contextmanager
def started(code: str, folder: Path, timeout: float = 240, fresh: bool = False) -> Iterator[Child]:
    """Run code that may `from training import *`, optionally in a new Python. Afterwards the process is killed."""
    out, err = folder / "stdout", folder / "stderr"
    (folder / "go").unlink(missing_ok=True)
    with out.open("wb") as stdout, err.open("wb") as stderr:
        command = [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(code)]
        environment = {**os.environ, **ENV}
        where = {"stdout": stdout, "stderr": stderr, "cwd": folder, "env": environment}
        with processes.process_group(command, fresh=fresh, **where) as process:
            yield Child(process, out, err, timeout)


@functools.cache
def reference(cores: int) -> str:
    """Return the digest of an undisturbed training."""
    command = [sys.executable, "-c", f"from training import *; print(run({cores}))"]
    ended = processes.run(command, timeout=240, env={**os.environ, **ENV})
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()
