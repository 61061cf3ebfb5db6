"""`child_python`: another Python process, which imports this very tpufit and ends when this process does."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_SET_PDEATHSIG = 1  # of prctl(2): the signal that Linux sends a process when its parent ends, also by kill -9
# It outlives exec. A parent that ended before it was set is found out by its id.
_LEASH = f"""
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl({_SET_PDEATHSIG}, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


def child_python(command: Sequence[str], environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Arguments of `subprocess.Popen` for a Python process that imports this very tpufit and ends with this process.

    It also ends with the thread that starts it, which so has to wait for it. The command is the words after `python`.

    Example:
        >>> import subprocess
        >>> python = child_python(["-c", "import tpufit; print('here')"])
        >>> subprocess.run(**python, capture_output=True, text=True).stdout
        'here\\n'
    """
    here = str(Path(__file__).resolve().parents[2])  # of tpufit, from wherever it was imported
    path = os.pathsep.join([here, *sys.path, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    args = [sys.executable, "-IS", "-c", _LEASH, str(os.getpid()), *command]
    return {"args": args, "env": {**os.environ, "PYTHONPATH": path, **(environ or {})}}
