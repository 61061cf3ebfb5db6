"""`run`: runs a Python program that may crash, be killed or take too long, and raises an error that explains how."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from ..errors import PreflightError
from ..utils import children
from ..utils.user_code import belongs_to_user


def run(
    command: Sequence[str], what: str, seconds: float, clock: bool = True, environ: Mapping[str, str] | None = None
) -> None:
    """Run a Python program in a new process, and wait for its end. For the arguments, see `utils.children.run`.

    Raises:
        PreflightError: The program failed, was ended by a signal, or took too long.
    """
    ended = children.run(command, what, seconds, clock, environ)
    if ended.status is None:
        raise PreflightError(f"{what} took longer than {seconds:g} s, and was stopped. Pass a larger timeout")
    if ended.status:
        raise PreflightError(f"{what} failed: {_explain_end(ended.status, ended.output)}")


def _explain_end(status: int, output: str) -> str:
    """Explain the end of a process by its exit status and its output."""
    if "buffer is null" in output:  # the program read a placeholder, and torch_xla aborted the process
        place = _find_user_place(output.splitlines())
        return f"the step reads a value from the device, or runs an operation on the host{place}"
    return children.explain_end(status, output)


def _find_user_place(lines: Sequence[str]) -> str:
    """Return the innermost line of user code in the stack that Python writes when a signal ends the process."""
    frames = [line.strip() for line in lines if line.startswith('  File "')]
    for frame in frames:
        path, _, rest = frame.removeprefix('File "').partition('", line ')
        if belongs_to_user(path):
            return f", at {os.path.basename(path)}:{rest.split(' ')[0]}"
    return ""
