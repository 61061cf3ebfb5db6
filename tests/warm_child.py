"""Stands for Python where the library starts a process (`utils/child_python.py`): a fork of `warm.py` does its work.

It ends when its parent does, as the library's own start has it; the fork ends when it does, and it ends as the fork.
"""

import array
import ctypes
import json
import os
import resource
import signal
import socket
import sys

_HANDED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGABRT, signal.SIGUSR1, signal.SIGUSR2)


def main(arguments: list[str]) -> None:
    command = [sys.executable, *arguments]
    if arguments[:2] == ["-IS", "-c"]:  # see `child_python`
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if os.getppid() != int(arguments[3]):
            return
        command = [sys.executable, *arguments[4:]]
    address = os.environ.get("WARM_ADDRESS")
    status = _forked(command, address) if address else None
    if status is None:
        os.execv(sys.executable, command)
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(-status, signal.SIG_DFL) if status not in (-signal.SIGKILL, -signal.SIGSTOP) else None
        os.kill(os.getpid(), -status)
    os._exit(status)


def _forked(command: list[str], address: str) -> "int | None":
    """Have a command run, and return how it ended; None if it needs a new process."""
    stream = socket.socket(socket.AF_UNIX)
    stream.connect("\0" + address)
    files = [file for file in map(int, os.listdir("/proc/self/fd")) if file != stream.fileno() and _is_open(file)]
    request = {"command": command, "folder": os.getcwd(), "environment": dict(os.environ), "places": files}
    text = json.dumps(request).encode()
    given = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files).tobytes())]
    stream.sendmsg([len(text).to_bytes(8, "little")], given)
    stream.sendall(text)
    child = int.from_bytes(stream.recv(8), "little")
    if not child:
        return None
    for number in _HANDED_ON:
        signal.signal(number, lambda number, frame: os.kill(child, number))
    for file in files:
        os.close(file)  # a pipe ends when the fork does
    return int.from_bytes(stream.recv(8), "little", signed=True)


def _is_open(file: int) -> bool:
    try:
        return os.get_inheritable(file)
    except OSError:
        return False  # the one that the folder of files was read by


main(sys.argv[1:])
