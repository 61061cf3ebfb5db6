"""A process that has imported what most of the tests' processes import, and forks to become each of them.

A Python that trains something on XLA takes five seconds of computing to import PyTorch, torch_xla and tpufit; a fork of
one that has, none. `processes.process_group` sends commands here:

    pytest, or a worker of it                       python warm.py <a socket> <one that listens>
        command, folder, environment, files    ->
                                                    forks twice; the first child ends at once, and so the second one
                                                    is adopted by pytest, as if pytest had started it
        the second one's process id            <-
                                                    it becomes what the command says

What the library itself starts, such as a preflight's processes, it starts by `sys.executable`. The fixture
`warm_children` puts `warm_child.py` in its place, which asks for a fork at the server's address, and is for the library
what the fork is: it hands on signals and files, ends the fork with itself, and ends as the fork does. So do the
processes of `multiprocessing` that aren't forks of their parent: workers, and a server that forks workers.

The imports know the environment of pytest, so `takes` refuses a command that is to have another where that may matter.
"""

from __future__ import annotations

import array
import atexit
import builtins
import ctypes
import fcntl
import importlib
import json
import math
import os
import runpy
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

import numpy as np

# A test of the harness, whose stand-ins are not to be imported here, sets it to nothing.
IMPORTED = os.environ.get("WARM_IMPORTS", "torchmetrics torch_xla torch_xla.distributed.spmd tpufit.model")
# Who reads these reads them when Python starts or while the modules above are imported. XLA reads its own later, when
# the device starts.
READ_EARLY = ("PYTHON", "LD_", "OMP_", "MKL_", "OPENBLAS_", "PJRT_", "TORCH", "TPU_", "HF_", "LC_", "LANG")
READ_LATE = ("PYTHONPATH", "PYTHONFAULTHANDLER")
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # see prctl(2)
ADDRESS = "WARM_ADDRESS"  # of the server, in the environment
SCRIPT = "script"
MOST_FILES = 32  # that a process is given
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
        self._python: Path | None = None

    def takes(self, command: Command, environment: Mapping[str, str]) -> bool:
        """Whether a fork would do the same as a new process."""
        if command[0] != sys.executable or not _parsed([*map(os.fspath, command)]):
            return False
        return _is_late(self._environment or os.environ, environment)

    def fork(
        self, command: Command, environment: Mapping[str, str], folder: str | os.PathLike[str], out: int, err: int
    ) -> Forked:
        with self._lock:
            self._start()
            assert self._socket is not None
            request = Request([*map(os.fspath, command)], os.fspath(folder), dict(environment))
            adopting = ctypes.CDLL(None).prctl
            adopting(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                fds = array.array("i", [out, err])
                send(self._socket, json.dumps(asdict(request)), fds)
                pid = int.from_bytes(_exactly(self._socket, 8), "little")
            finally:
                adopting(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        return Forked(pid, request.command)

    def python(self) -> str:
        """The path of what stands for Python where the library starts a process of its own."""
        with self._lock:
            if ADDRESS not in os.environ:  # which a process that is a fork itself has from pytest
                self._start()
            if self._python is None:
                folder = tempfile.mkdtemp(prefix="warm-")
                atexit.register(shutil.rmtree, folder, ignore_errors=True)
                self._python = Path(folder, "python")
                own = shlex.join([sys.executable, "-IS", str(Path(__file__).with_name("warm_child.py"))])
                self._python.write_text(f'#!/bin/sh\nexec {own} "$@"\n')
                self._python.chmod(0o700)
            return str(self._python)

    def _start(self) -> None:
        if self._socket is not None:
            return
        ours, theirs = socket.socketpair()
        os.environ[ADDRESS] = address = f"tpufit-warm-{os.getpid()}-{os.urandom(8).hex()}"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind("\0" + address)
        listener.listen(16)  # here, so that whoever comes before the imports are done waits, and isn't refused
        self._environment = dict(os.environ)
        files = [theirs.fileno(), listener.fileno()]
        command = [sys.executable, "-X", "faulthandler", __file__, *map(str, files)]
        # In a group of its own: what interrupts pytest leaves it alone, until pytest has ended.
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, start_new_session=True, pass_fds=files, env=self._environment
        )
        theirs.close()
        listener.close()
        self._socket = ours
        atexit.register(self._end)

    def _end(self) -> None:
        if self._socket and self._process:
            self._socket.close()
            self._process.wait()


def _parsed(command: Sequence[str]) -> tuple[str, str, list[str]] | None:
    """Take a command of Python apart: `-c`, `-m` or SCRIPT; what follows; the arguments. None: with other options."""
    rest = list(command[1:])
    while rest[:1] in (["-u"], ["-P"], ["-B"]) or rest[:2] == ["-X", "faulthandler"]:
        rest = rest[1:] if rest[0] in ("-u", "-P", "-B") else rest[2:]
    if rest[:1] in (["-c"], ["-m"]) and len(rest) > 1:
        return rest[0], rest[1], rest[2:]
    if rest and rest[0].endswith(".py"):
        return SCRIPT, rest[0], rest[1:]
    return None


def _is_late(before: Mapping[str, str], environment: Mapping[str, str]) -> bool:
    """Whether all that is other in an environment is read after the imports, or is of no matter by then."""
    changed = {name for name in {*before, *environment} if before.get(name) != environment.get(name)}
    if environment.get("PJRT_DEVICE") == "POD" and "PJRT_DEVICE" in before:
        changed.discard("PJRT_DEVICE")  # the imports only prepare for a TPU, or set it if nobody did
    return not any(name.startswith(READ_EARLY) for name in changed.difference(READ_LATE))


def send(stream: socket.socket, text: str, files: array.array[int]) -> None:
    """Send a request, and the files that are to be the process's output, or its input and output."""
    size = len(text.encode()).to_bytes(8, "little")
    stream.sendmsg([size], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files.tobytes())])
    stream.sendall(text.encode())


def _received(stream: socket.socket) -> tuple[Request, array.array[int]] | None:
    head, ancillary, *_ = stream.recvmsg(8, socket.CMSG_SPACE(4 * MOST_FILES))
    if not head:
        return None
    size = int.from_bytes(head, "little")
    return Request(**json.loads(_exactly(stream, size))), array.array("i", ancillary[0][2])


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
        environment: Its environment.
        places: The numbers of the files that it is given.
    """

    command: list[str]
    folder: str
    environment: dict[str, str]
    places: Sequence[int] = (1, 2)


class Forking:
    """The server's side: forks for pytest, and for `warm_child.py`; `serve` returns in a forked process."""

    def __init__(self, control: socket.socket, listener: socket.socket) -> None:
        self.environment = dict(os.environ)
        self.control = control
        self.listener = listener
        self.selector = selectors.DefaultSelector()
        for stream in (self.control, self.listener):
            self.selector.register(stream, selectors.EVENT_READ)
        self.children: dict[int, socket.socket] = {}  # process ids, and who waits for each

    def serve(self) -> Request:
        while True:
            for key, _ in self.selector.select():
                request = None
                if key.fileobj is self.control:
                    request = self.for_pytest()
                elif key.fileobj is self.listener:
                    request = self.for_the_library()
                elif key.data in self.children:
                    self.ended(key.data)
                if request:
                    return request

    def for_pytest(self) -> Request | None:
        """Fork twice, and let pytest adopt the second process."""
        received = _received(self.control)
        if received is None:
            os._exit(0)  # nobody is there any more
        request, files = received
        first = os.fork()
        if not first:
            parent = os.getpid()
            if os.fork():
                os._exit(0)
            while os.getppid() == parent:
                time.sleep(0.001)
            os.setsid()  # before anybody can kill its group
            self.control.sendall(os.getpid().to_bytes(8, "little"))
            self.takes_files(files, request.places)
            return request
        os.waitpid(first, 0)
        for file in files:
            os.close(file)
        return None

    def for_the_library(self) -> Request | None:
        """Fork, and tell the one who waits the process's id at first, and how it ended at last."""
        waiting, _ = self.listener.accept()
        received = None
        with suppress(ConnectionError):  # it may be killed at any moment
            received = _received(waiting)
        if received is None:
            waiting.close()
            return None
        request, files = received
        # Who is a fork itself hands on what the imports set.
        known = (self.environment, dict(os.environ))
        takes = _parsed(request.command) and any(_is_late(before, request.environment) for before in known)
        child = os.fork() if takes else -1
        if not child:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            os.setsid()
            waiting.close()
            self.takes_files(files, request.places)
            return request
        for file in files:
            os.close(file)
        with suppress(ConnectionError):
            waiting.sendall(max(child, 0).to_bytes(8, "little"))
        if not takes:
            waiting.close()
            return None
        self.children[child] = waiting
        self.selector.register(os.pidfd_open(child), selectors.EVENT_READ, child)
        self.selector.register(waiting, selectors.EVENT_READ, child)  # which says nothing more, but may end
        return None

    def ended(self, child: int) -> None:
        """A child has ended, or who waits for it has, with whom it ends."""
        with suppress(ProcessLookupError):
            if not os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        waiting = self.children.pop(child)
        with suppress(OSError):
            waiting.sendall(os.waitstatus_to_exitcode(status).to_bytes(8, "little", signed=True))
        for key in [key for key in self.selector.get_map().values() if key.data == child]:
            self.selector.unregister(key.fileobj)
            if key.fileobj is not waiting:
                os.close(key.fd)
        waiting.close()

    def takes_files(self, files: array.array[int], places: Sequence[int]) -> None:
        """Give a forked process its own files, and take the server's away."""
        for key in list(self.selector.get_map().values()):
            if key.fileobj not in (self.control, self.listener):
                os.close(key.fd)
        self.selector.close()
        self.control.close()
        self.listener.close()
        apart = [fcntl.fcntl(file, fcntl.F_DUPFD, max(places) + 1) for file in files]  # no one's place is another's
        for file in files:
            os.close(file)
        for place, file in zip(places, apart, strict=True):
            os.dup2(file, place)
            os.close(file)


def _become(request: Request, path: list[str], before: Mapping[str, str]) -> None:
    """Make a forked process what a new one would be, and run its code; `before` was the environment of the imports."""
    os.chdir(request.folder)
    set_by_imports = {name: value for name, value in os.environ.items() if name not in {*before, "XLA_FLAGS"}}
    os.environ.clear()
    os.environ.update(set_by_imports | request.environment)
    if torch_xla := sys.modules.get("torch_xla"):
        torch_xla._setup_xla_flags()  # as it does when it is imported
    sys.stdout.reconfigure(line_buffering="-u" in request.command)  # type: ignore[union-attr]
    tempfile.tempdir = None
    np.random.seed()  # or all forks would draw the same
    sys.executable = request.command[0]  # what starts its own processes: with `warm_children` they are forks, too
    kind, what, arguments = _parsed(request.command) or ("", "", [])
    first = [] if "-P" in request.command[:2] else [{"-c": "", "-m": request.folder}.get(kind, os.path.dirname(what))]
    sys.path[:] = [*first, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *path]
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
    before = dict(os.environ)
    given = set(filter(None, before.get("PYTHONPATH", "").split(os.pathsep)))
    path = [entry for entry in sys.path[1:] if entry not in given]
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # the checkout's tpufit, whichever is installed
    forking = Forking(socket.socket(fileno=int(sys.argv[1])), socket.socket(fileno=int(sys.argv[2])))
    _import(IMPORTED.split())
    request, status = forking.serve(), 0
    try:
        _become(request, path, before)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if status and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    _end(status)


def _import(names: list[str]) -> None:
    if not names:
        return
    from tpufit.utils.deferred import deferred

    with deferred("torch_xla._dynamo.dynamo_bridge"):  # as tpufit itself imports it
        for name in names:
            importlib.import_module(name)


def _end(status: int) -> None:
    """End as Python does, but without taking apart what was imported, which takes two seconds of a forked process."""
    threading._shutdown()  # type: ignore[attr-defined] # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status & 0xFF)


if __name__ == "__main__":
    main()
