"""Pods of TPU hosts for tests: processes of this machine act as hosts, see `pod/plugin.cc`, for TorchTPU `as_tpu.cc`.

On TorchTPU each has torchrun's variables, and starts a further process for each core but its first.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import plugins
from processes import ends, process_group

HERE = Path(__file__).resolve().parent
PATH = str(HERE.parent), str(HERE)


def build() -> dict[str, str]:
    """Build the plugin unless it exists, and return the environment that it needs."""
    if not find_spec("torch_xla"):
        return plugins.as_tpu()
    library, cpu = plugins.built("plugin")
    return {"POD_LIBRARY": library, "POD_INNER": cpu}


@dataclass
class HostResult:
    """A host's process that has ended.

    Attributes:
        code: Its exit code; None if it was killed after the time limit.
        out: Its output on stdout.
        err: Its output on stderr.
    """

    code: int | None
    out: str
    err: str


@dataclass
class Pod:
    """A pod.

    Attributes:
        hosts: The number of hosts.
        cores: The number of cores of each.
        folder: The working directory of all hosts.
        interleaved: True if a host's cores aren't adjacent.
        env: Further environment of each host.
    """

    hosts: int
    cores: int
    folder: Path
    interleaved: bool = False
    env: dict[str, str] = field(default_factory=dict)

    @contextmanager
    def started(self, code: str, **each: str) -> Iterator[list[subprocess.Popen[bytes]]]:
        """Start all hosts with the same code; on leaving, running processes are killed.

        Their output goes to the files `out0`, `err0` and so on.

        Args:
            code: The Python code of each host.
            each: Code that runs first on a single host, by name: `host1="..."`.
        """
        with ExitStack() as stack:
            # In a separate folder, because the paths of sockets must be short.
            sockets = stack.enter_context(tempfile.TemporaryDirectory(prefix="pod-"))
            environment = {
                **os.environ,
                **build(),
                "PYTHONPATH": os.pathsep.join(filter(None, [*PATH, os.environ.get("PYTHONPATH")])),
                "MASTER_ADDR": "localhost",
                "MASTER_PORT": str(stack.enter_context(_reserved_port())),
                "POD_HOSTS": str(self.hosts),
                "POD_CORES": str(self.cores),
                "POD_INTERLEAVED": str(int(self.interleaved)),
                "POD_FOLDER": sockets,
                **self.env,
            }
            processes = []
            for host in range(self.hosts):
                program = textwrap.dedent(each.get(f"host{host}", "")) + textwrap.dedent(code)
                out, err = (stack.enter_context((self.folder / f"{name}{host}").open("wb")) for name in ("out", "err"))
                processes.append(
                    stack.enter_context(
                        process_group(
                            [sys.executable, "-X", "faulthandler", str(HERE / "pod" / "host.py"), program],
                            stdout=out,
                            stderr=err,
                            cwd=self.folder,
                            env={**environment, "POD_HOST": str(host), **self._name_host(host)},
                        )
                    )
                )
            yield processes

    def _name_host(self, host: int) -> dict[str, str]:
        """Return the environment variables by which TorchTPU knows a host."""
        names = {"RANK": host, "WORLD_SIZE": self.hosts, "LOCAL_RANK": host, "LOCAL_WORLD_SIZE": self.hosts}
        return {} if find_spec("torch_xla") else {name: str(number) for name, number in names.items()}

    def wait_for_results(self, processes: list[subprocess.Popen[bytes]], timeout: float = 600) -> list[HostResult]:
        """Wait until all hosts have ended, or kill them after the timeout, in seconds."""
        deadline = time.monotonic() + timeout
        exited_by_itself = [ends(process, lambda: deadline) for process in processes]
        return [
            HostResult(
                process.wait() if exited else None,
                *((self.folder / f"{name}{host}").read_text(errors="replace") for name in ("out", "err")),
            )
            for host, (process, exited) in enumerate(zip(processes, exited_by_itself, strict=True))
        ]

    def run(self, code: str, timeout: float = 600, **each: str) -> list[HostResult]:
        """Run code on all hosts, and return each host's result."""
        with self.started(code, **each) as processes:
            return self.wait_for_results(processes, timeout)


@contextmanager
def _reserved_port() -> Iterator[int]:
    """Reserve a port on which host 0 can listen.

    The port stays bound here, so the kernel gives it to no other process. A socket that doesn't listen leaves its port
    to another socket if both have SO_REUSEADDR, as PyTorch's store has.
    """
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("", 0))
        yield reserved.getsockname()[1]
