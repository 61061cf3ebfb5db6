"""`child_python`: a Python process that imports this tpufit and ends when this process does."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_SET_PDEATHSIG = 1  # of prctl(2): the signal that Linux sends a process when its parent ends, even by kill -9
# The setting survives exec. The parent's id reveals a parent that ended before it was set.
_LEASH = f"""
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl({_SET_PDEATHSIG}, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


def child_python(command: Sequence[str], environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return arguments of `subprocess.Popen` for a Python process that imports this tpufit and ends with this process.

    It also ends with the thread that starts it, which must therefore wait for it. `command` is the words after
    `python`.

    Example:
        >>> import subprocess
        >>> python = child_python(["-c", "import tpufit; print('here')"])
        >>> subprocess.run(**python, capture_output=True, text=True).stdout
        'here\\n'
    """
    here = str(Path(__file__).resolve().parents[2])  # the folder that this tpufit was imported from
    path = os.pathsep.join([here, *sys.path, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    args = [sys.executable, "-IS", "-c", _LEASH, str(os.getpid()), *command]
    return {"args": args, "env": {**os.environ, "PYTHONPATH": path, **(environ or {})}}
