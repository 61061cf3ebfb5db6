"""A server process that imports PyTorch, torch_xla and tpufit once, and forks itself for each of the tests' processes.

A new Python needs five seconds of processor time for these imports, a fork none. Each process of pytest starts its own
server when it needs the first fork:

    pytest (`Server`, `Forked`)                 python fork_server.py <a socket> (`serve`)
        a connection, files, command          ->
                                                forks; the child runs the command
        the child's process id                <-
        its exit status                       <- when it has ended
        the end of the connection             -> kills the child's process group

When pytest ends, even by kill -9, the server kills all groups and ends. If the server is killed, Linux kills its
children.

The imports read some environment variables, so `takes` refuses a command for which these variables differ.
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import gc
import importlib
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np

# A test of the harness sets it to "", because its stand-ins must not be imported here.
_RUNTIME = "torch_xla torch_xla.distributed.spmd" if find_spec("torch_xla") else ""
IMPORTED = os.environ.get("WARM_IMPORTS", f"torchmetrics {_RUNTIME} tpufit.model")
# Variables that are read when Python starts or during the imports above, and two of them that `run` applies. XLA reads
# its variables later, when the device starts.
READ_EARLY = ("PYTHON", "LD_", "OMP_", "MKL_", "OPENBLAS_", "PJRT_", "TORCH", "TPU_", "HF_", "LC_", "LANG")
APPLIED = ("PYTHONPATH", "PYTHONFAULTHANDLER")
PR_SET_PDEATHSIG = 1  # of prctl(2): the signal that Linux sends a process when its parent ends
Command = Sequence[str | os.PathLike[str]]


class Forked:
    """A process that was forked for a command, with the members of `subprocess.Popen` that tests use.

    Its process id isn't given to another process before `end`.
    """

    def __init__(self, connection: Connection, args: Sequence[str]) -> None:
        self._connection = connection
        self.args = args
        self.pid: int = self._received()
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and self._connection.poll():
            self.returncode = self._received()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not self._connection.poll(timeout):
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = self._received()
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def end(self) -> None:
        """Kill the process group, and set `returncode`."""
        self._connection.send("end")
        self.wait()
        with suppress(EOFError):  # the server closes the connection after the kill
            while True:
                self._connection.recv()
        self._connection.close()

    def _received(self) -> int:
        try:
            return int(self._connection.recv())
        except EOFError:
            raise ConnectionError(
                "the server that forks the tests' processes has ended (tests/fork_server.py)"
            ) from None


class Server:
    """pytest's side: starts the server process at the first command, and sends commands to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: Connection
        self._environment: dict[str, str] = {}

    def takes(self, command: Command, environment: Mapping[str, str]) -> bool:
        """True if a fork behaves as a new process would."""
        if command[0] != sys.executable or parsed([*map(os.fspath, command)]) is None:
            return False
        before = self._environment or os.environ
        changed = {name for name in {*before, *environment} if before.get(name) != environment.get(name)}
        return not any(name.startswith(READ_EARLY) for name in changed.difference(APPLIED))

    def fork(
        self, command: Command, environment: Mapping[str, str], folder: str | os.PathLike[str], out: int, err: int
    ) -> Forked:
        words = [*map(os.fspath, command)]
        ours, theirs = Pipe()
        with self._lock:
            self._start()
            assert self._process is not None
            for file in (theirs.fileno(), out, err):
                send_handle(self._control, file, self._process.pid)
            self._control.send((words, os.fspath(folder), dict(environment)))
        theirs.close()
        return Forked(ours, words)

    def _start(self) -> None:
        if self._process is not None:
            return
        self._control, theirs = Pipe()
        self._environment = dict(os.environ)
        # In its own process group, so that Ctrl-C for pytest doesn't reach it.
        self._process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", __file__, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        atexit.register(self._end, self._process)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        self._control.close()
        process.wait()


def parsed(command: Sequence[str]) -> tuple[str, str, list[str]] | None:
    """Parse a Python command: `-c`, `-m` or ""; code, module or a script's path; arguments. None with other options."""
    rest = list(command[1:])
    if rest[:2] == ["-X", "faulthandler"]:
        rest = rest[2:]
    if rest[:1] in (["-c"], ["-m"]) and len(rest) > 1:
        return rest[0], rest[1], rest[2:]
    return ("", rest[0], rest[1:]) if rest and rest[0].endswith(".py") else None


class Request(NamedTuple):
    """A command to run, with its working directory and environment."""

    command: list[str]
    folder: str
    environment: dict[str, str]


class Child(NamedTuple):
    """A forked process, its process descriptor, and the connection to pytest."""

    pid: int
    ended: int
    connection: Connection

    def reports(self) -> None:
        """Wait for the end, and report the exit status; the process id stays reserved."""
        end = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        assert end is not None
        with suppress(OSError):  # pytest may have closed the connection
            self.connection.send(end.si_status if end.si_code == os.CLD_EXITED else -end.si_status)

    def ends(self) -> None:
        """Kill the process and its group."""
        os.kill(self.pid, signal.SIGKILL)  # it may not lead its group yet
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.reports()
        os.waitpid(self.pid, 0)
        self.connection.close()
        os.close(self.ended)


def serve(control: Connection) -> Request:
    """Fork for each request; this returns only in a forked process."""
    children: list[Child] = []
    running: set[int] = set()  # descriptors of processes that haven't reported their end
    while True:
        ready = wait([control, *running, *(child.connection for child in children)])
        for child in list(children):
            if child.connection in ready:
                children.remove(child)
                running.discard(child.ended)
                with suppress(EOFError, OSError):  # pytest has ended
                    child.connection.recv()
                child.ends()
            elif child.ended in ready:
                running.remove(child.ended)
                child.reports()
        if control not in ready:
            continue
        try:
            handle, *files = [recv_handle(control) for _ in range(3)]
            request = Request(*control.recv())
        except EOFError:
            for child in children:
                child.ends()
            os._exit(0)
        connection = Connection(handle)
        pid = os.fork()
        if not pid:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            os.setsid()
            connection.send(os.getpid())
            for place, file in enumerate(files, start=1):
                os.dup2(file, place)
            for opened in (control, connection, *(child.connection for child in children)):
                opened.close()
        for file in files:
            os.close(file)
        if not pid:
            for child in children:
                os.close(child.ended)
            return request
        children.append(Child(pid, os.pidfd_open(pid), connection))
        running.add(children[-1].ended)


def run(request: Request, path: list[str], before: Mapping[str, str]) -> None:
    """Set up a forked process like a new one, and run its code; `before` was the environment of the imports."""
    os.chdir(request.folder)
    set_by_imports = {name: value for name, value in os.environ.items() if name not in {*before, "XLA_FLAGS"}}
    os.environ.clear()
    os.environ.update(set_by_imports | request.environment)
    if torch_xla := sys.modules.get("torch_xla"):
        torch_xla._setup_xla_flags()  # as during its import
    tempfile.tempdir = None
    np.random.seed()  # otherwise all forks would draw the same numbers
    kind, what, arguments = parsed(request.command) or ("", "", [])
    first = {"-c": "", "-m": request.folder}.get(kind, os.path.dirname(what))
    sys.path[:] = [first, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *path]
    sys.argv[:] = [kind or what, *arguments]
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    if not kind:
        main.__file__ = os.path.abspath(what)
    try:
        exec(compile(what if kind else Path(what).read_text(), "<string>" if kind else what, "exec"), main.__dict__)
    except Exception as error:
        # As in a new process, the traceback begins at the code's line.
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


def main() -> None:
    before = dict(os.environ)
    given = set(filter(None, before.get("PYTHONPATH", "").split(os.pathsep)))
    path = [entry for entry in sys.path[1:] if entry not in given]
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # the checkout's tpufit, even if another is installed
    if IMPORTED:
        from tpufit.utils.defer_import import defer_import

        with defer_import("torch_xla._dynamo.dynamo_bridge"):  # as tpufit itself imports it
            for name in IMPORTED.split():
                importlib.import_module(name)
    gc.collect()
    gc.freeze()  # or each fork's collector would search, and so copy, all that the imports have made
    request, status = serve(Connection(int(sys.argv[1]))), 0
    try:
        run(request, path, before)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if status and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    # Exit as Python does, but without tearing down the imported modules, which takes two seconds in a fork.
    threading._shutdown()  # type: ignore[attr-defined] # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status & 0xFF)


if __name__ == "__main__":
    main()
