"""A process that has imported what most of the tests' processes import, and forks to become each of them.

A Python that trains something on XLA takes five seconds of computing to import PyTorch, torch_xla and tpufit; a fork of
one that has, none. `processes.process_group` sends commands here:

    pytest, or a worker of it                       python warm.py <a socket>
        command, folder, environment, files    ->
                                                    forks twice; the first child ends at once, and so the second one
                                                    is adopted by pytest, as if pytest had started it
        the second one's process id            <-
                                                    it becomes what the command says

The imports know the environment of pytest, so `takes` refuses a command that is to have another where that may matter.
"""

from __future__ import annotations

import array
import atexit
import builtins
import ctypes
import importlib
import json
import math
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

import numpy as np

# A test of the harness, whose stand-ins are not to be imported here, sets it to nothing.
IMPORTED = os.environ.get(
    "WARM_IMPORTS", "torchmetrics torch_xla.core.xla_model torch_xla.runtime torch_xla.distributed.spmd tpufit.model"
)
# Who reads these reads them when Python starts or while the modules above are imported.
READ_EARLY = (
    "PYTHON",
    "LD_",
    "OMP_",
    "MKL_",
    "OPENBLAS_",
    "XLA_",
    "TORCH",
    "JAX",
    "LIBTPU",
    "TF_",
    "HF_",
    "TPU",
    "LC_",
    "LANG",
)
PR_SET_CHILD_SUBREAPER = 36  # see prctl(2)
SCRIPT = "script"
Command = Sequence[str | os.PathLike[str]]


class Forked:
    """A process that was forked for a command: of `subprocess.Popen`, what tests use."""

    def __init__(self, pid: int, args: Sequence[str]) -> None:
        self.pid = pid
        self.args = args
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        limit = math.inf if timeout is None else timeout
        deadline = time.monotonic() + limit
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, limit)
            time.sleep(0.02)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Server:
    """The parent's side: starts the process at the first command, which is sent to it as all others are."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._environment: dict[str, str] = {}

    def takes(self, command: Command, environment: Mapping[str, str]) -> bool:
        """Whether a fork would do the same as a new process."""
        if command[0] != sys.executable or not _parsed([*map(os.fspath, command)]):
            return False
        before = self._environment or os.environ
        changed = {name for name in {*before, *environment} if before.get(name) != environment.get(name)}
        return not any(name.startswith(READ_EARLY) for name in changed - {"PYTHONPATH"})

    def fork(
        self, command: Command, environment: Mapping[str, str], folder: str | os.PathLike[str], out: int, err: int
    ) -> Forked:
        with self._lock:
            if self._socket is None:
                self._start()
            assert self._socket is not None
            before = self._environment
            changed = {name: value for name, value in environment.items() if before.get(name) != value}
            removed = [name for name in before if name not in environment]
            request = Request([*map(os.fspath, command)], os.fspath(folder), changed, removed)
            text = json.dumps(asdict(request)).encode()
            adopting = ctypes.CDLL(None).prctl
            adopting(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                fds = array.array("i", [out, err])
                self._socket.sendmsg(
                    [len(text).to_bytes(8, "little")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds.tobytes())]
                )
                self._socket.sendall(text)
                pid = int.from_bytes(_exactly(self._socket, 8), "little")
            finally:
                adopting(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        return Forked(pid, request.command)

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        self._environment = dict(os.environ)
        command = [sys.executable, "-X", "faulthandler", __file__, str(theirs.fileno())]
        # In a group of its own: what interrupts pytest leaves it alone, until pytest has ended.
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, start_new_session=True, pass_fds=[theirs.fileno()], env=self._environment
        )
        theirs.close()
        self._socket = ours
        atexit.register(self._end)

    def _end(self) -> None:
        if self._socket and self._process:
            self._socket.close()
            self._process.wait()


def _parsed(command: Sequence[str]) -> tuple[str, str, list[str]] | None:
    """Take a command of Python apart: `-c`, `-m` or SCRIPT; what follows; the arguments. None: with other options."""
    rest = list(command[1:])
    while rest[:1] == ["-u"] or rest[:2] == ["-X", "faulthandler"]:
        rest = rest[1:] if rest[0] == "-u" else rest[2:]
    if rest[:1] in (["-c"], ["-m"]) and len(rest) > 1:
        return rest[0], rest[1], rest[2:]
    if rest and rest[0].endswith(".py"):
        return SCRIPT, rest[0], rest[1:]
    return None


def _exactly(stream: socket.socket, count: int) -> bytes:
    read = b""
    while len(read) < count:
        part = stream.recv(count - len(read))
        if not part:
            raise ConnectionError("the process that forks for tests has ended")
        read += part
    return read


@dataclass
class Request:
    """What a forked process is to become.

    Attributes:
        command: The command, as for `subprocess`.
        folder: The folder that it works in.
        changed: What its environment has other than the server's had at the start.
        removed: What its environment doesn't have of that.
    """

    command: list[str]
    folder: str
    changed: dict[str, str]
    removed: list[str]


def _serve(stream: socket.socket) -> Request:
    """Fork for each request, and return in the forked process, whose output goes where it is to go."""
    while True:
        head, ancillary, *_ = stream.recvmsg(8, socket.CMSG_SPACE(8))
        if not head:
            os._exit(0)  # nobody is there any more
        request = Request(**json.loads(_exactly(stream, int.from_bytes(head, "little"))))
        files = array.array("i", ancillary[0][2])
        first = os.fork()
        if not first:
            parent = os.getpid()
            if os.fork():
                os._exit(0)
            for number, file in enumerate(files, start=1):
                os.dup2(file, number)
                os.close(file)
            os.setsid()
            while os.getppid() == parent:
                time.sleep(0.001)
            stream.sendall(os.getpid().to_bytes(8, "little"))
            stream.close()
            return request
        os.waitpid(first, 0)
        for file in files:
            os.close(file)


def _become(request: Request, path: list[str]) -> None:
    """Make a forked process what a new one would be, and run its code."""
    os.chdir(request.folder)
    for name in request.removed:
        os.environ.pop(name, None)
    os.environ.update(request.changed)
    sys.stdout.reconfigure(line_buffering="-u" in request.command)  # type: ignore[union-attr]
    tempfile.tempdir = None
    np.random.seed()  # or all forks would draw the same
    kind, what, arguments = _parsed(request.command) or ("", "", [])
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [{"-c": "", "-m": request.folder}.get(kind, os.path.dirname(what)), *given, *path]
    sys.argv[:] = [what if kind == SCRIPT else kind, *arguments]
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    if kind == SCRIPT:
        main.__file__ = os.path.abspath(what)
    try:
        code = what if kind == "-c" else Path(what).read_text()
        exec(compile(code, "<string>" if kind == "-c" else what, "exec"), main.__dict__)
    except Exception as error:
        # As a new process shows it: from the code's own line on.
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


def main() -> None:
    given = set(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    path = [entry for entry in sys.path[1:] if entry not in given]
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # the checkout's tpufit, whichever is installed
    for name in IMPORTED.split():
        importlib.import_module(name)
    _become(_serve(socket.socket(fileno=int(sys.argv[1]))), path)


if __name__ == "__main__":
    main()
