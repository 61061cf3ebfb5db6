"""`run`: a process that may be ended, crash or take too long, with a clock while it runs. Its end is a sentence."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from ..errors import PreflightError
from ..utils import children


def run(
    command: Sequence[str], what: str, seconds: float, clock: bool = True, environ: Mapping[str, str] | None = None
) -> None:
    """Run a Python program in a process of its own, see `utils.children.run`, and wait for its end.

    Raises:
        PreflightError: It has failed, was ended by a signal, or took too long.
    """
    ended = children.run(command, what, seconds, clock, environ)
    if ended.status is None:
        raise PreflightError(f"{what} took longer than {seconds:g} s, and was ended. Pass a larger timeout")
    if ended.status:
        raise PreflightError(f"{what} failed: {_reason(ended.status, ended.said)}")


def _reason(status: int, said: str) -> str:
    """The end of a process in a sentence, by its status and its last words."""
    if "buffer is null" in said:  # a placeholder was read, which torch_xla ends the process for
        place = _users_place(said.splitlines())
        return f"the step reads a value from the device, or runs an operation on the host{place}"
    return children.reason(status, said)


def _users_place(lines: Sequence[str]) -> str:
    """The user's line in the stack that Python writes when a signal ends it, innermost first."""
    frames = [line.strip() for line in lines if line.startswith('  File "')]
    libraries = (f"{os.sep}site-packages{os.sep}", f"{os.sep}tpufit{os.sep}", f"{os.sep}lib{os.sep}python", "<frozen")
    for frame in frames:
        path, _, rest = frame.removeprefix('File "').partition('", line ')
        if not any(part in path for part in libraries):
            return f", at {os.path.basename(path)}:{rest.split(' ')[0]}"
    return ""
