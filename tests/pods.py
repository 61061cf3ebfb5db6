"""Pods of TPU hosts for tests, played by processes of this machine: see `pod/plugin.cc`.

The plugin is built with g++, around the CPU plugin of the wheel `xla-cpu-pjrt`, which pip fetches once.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from processes import ends, process_group

HERE = Path(__file__).resolve().parent
PATH = str(HERE.parent), str(HERE)
WHEEL = "xla-cpu-pjrt==0.0.1"
# Outside the checkout, so that a clean one needn't fetch 63 MB again.
KEPT = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "tpufit-pod"


def build() -> dict[str, str]:
    """Build the plugin, unless it has been, and return the environment that it needs."""
    source = HERE / "pod" / "plugin.cc"
    folder = KEPT / "wheel" / "xla_plugins" / "xla_cpu_pjrt"
    built = KEPT / f"pod-{hashlib.sha256(source.read_bytes()).hexdigest()[:16]}.so"
    KEPT.mkdir(parents=True, exist_ok=True)
    with (KEPT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", KEPT, WHEEL]
            subprocess.run(pip, check=True)
            with zipfile.ZipFile(next(KEPT.glob("xla_cpu_pjrt-*.whl"))) as wheel:
                wheel.extractall(KEPT / "wheel")
        if not built.exists():
            new = built.with_suffix(".new")
            options = ["-std=c++17", "-O1", "-shared", "-fPIC", "-I", folder / "include"]
            subprocess.run(["g++", *options, source, "-o", new, "-ldl"], check=True)
            new.rename(built)
    return {"POD_LIBRARY": str(built), "POD_INNER": str(folder / "xla_cpu_pjrt.so")}


@dataclass
class Ended:
    """A host's process that has ended.

    Attributes:
        code: Its exit code; None if it had to be killed.
        out: What it wrote to stdout.
        err: What it wrote to stderr.
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
        folder: The folder that all hosts work in.
        interleaved: True if a host's cores aren't neighbours.
        env: Further environment of each host.
    """

    hosts: int
    cores: int
    folder: Path
    interleaved: bool = False
    env: dict[str, str] = field(default_factory=dict)

    @contextmanager
    def started(self, code: str, **each: str) -> Iterator[list[subprocess.Popen[bytes]]]:
        """Start all hosts with the same code; on leaving, whatever is left is killed.

        What they write goes to the files `out0`, `err0` and so on.

        Args:
            code: The Python that each of them runs.
            each: Further code of one host that runs before, by name: `host1="..."`.
        """
        with ExitStack() as stack:
            # Sockets' paths must be short.
            sockets = stack.enter_context(tempfile.TemporaryDirectory(prefix="pod-"))
            environment = {
                **os.environ,
                **build(),
                "PYTHONPATH": os.pathsep.join(filter(None, [*PATH, os.environ.get("PYTHONPATH")])),
                "PJRT_DEVICE": "POD",
                "MASTER_ADDR": "localhost",
                "MASTER_PORT": str(_free_port()),
                "POD_HOSTS": str(self.hosts),
                "POD_CORES": str(self.cores),
                "POD_INTERLEAVED": str(int(self.interleaved)),
                "POD_FOLDER": sockets,
                **self.env,
            }
            processes = []
            for host in range(self.hosts):
                own = textwrap.dedent(each.get(f"host{host}", "")) + textwrap.dedent(code)
                out, err = (stack.enter_context((self.folder / f"{name}{host}").open("wb")) for name in ("out", "err"))
                processes.append(
                    stack.enter_context(
                        process_group(
                            [sys.executable, "-X", "faulthandler", str(HERE / "pod" / "host.py"), own],
                            stdout=out,
                            stderr=err,
                            cwd=self.folder,
                            env={**environment, "POD_HOST": str(host)},
                        )
                    )
                )
            yield processes

    def ended(self, processes: list[subprocess.Popen[bytes]], timeout: float = 240) -> list[Ended]:
        """Wait until all hosts have ended, or kill them."""
        deadline = time.monotonic() + timeout
        by_itself = [ends(process, lambda: deadline) for process in processes]
        return [
            Ended(
                process.wait() if ended else None,
                *((self.folder / f"{name}{host}").read_text(errors="replace") for name in ("out", "err")),
            )
            for host, (process, ended) in enumerate(zip(processes, by_itself, strict=True))
        ]

    def run(self, code: str, timeout: float = 240, **each: str) -> list[Ended]:
        """Run code on all hosts, and return how each ended."""
        with self.started(code, **each) as processes:
            return self.ended(processes, timeout)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return int(one.getsockname()[1])
