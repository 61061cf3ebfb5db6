"""Finds the user's line that led to tpufit's code, for messages and warnings."""

import os
import re
import sys
import threading
import warnings
from traceback import walk_tb
from types import FrameType

from .garbage_collector import collector

# A library's code is tpufit's, Python's, or an installed package's; Debian's Python and Colab have `dist-packages`.
_LIBRARIES = (
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
    os.path.dirname(os.__file__) + os.sep,
    "<frozen ",
)
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]")

LIBRARY_CODE = "a library's code"  # instead of a line, if there is no user code on the stack


def find_user_line() -> str:
    """Return the innermost line of the stack that is neither tpufit's nor a library's, e.g. `train.py:12`."""
    frame = _find_user_frame(sys._getframe(1))
    return LIBRARY_CODE if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def find_line_of_thread(thread: int) -> str:
    """Return the user's line that a thread, given by its identity, is executing."""
    frame = _find_frame_of_thread(thread)
    return LIBRARY_CODE if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def find_calling_lines() -> str:
    """Return the library's line that the user's line called, and the user's, e.g. `timm/x.py:9, called at a.py:12`.

    PyTorch's lines, which are between all others, are skipped, except its optimizers'.
    """
    library = ""
    frame = _find_user_frame(sys._getframe(1))
    inner: FrameType | None = sys._getframe(1)
    while not library and inner is not None and inner is not frame:
        *before, path = _INSTALLED.split(inner.f_code.co_filename)
        if before and (path.startswith("torch/optim/") or not path.startswith(("torch/", "tpufit/"))):
            library = f"{path}:{inner.f_lineno}"
        inner = inner.f_back
    line = find_user_line()
    return f"{library}, called at {line}" if library and line != LIBRARY_CODE else library or line


def find_raising_line(error: BaseException) -> str:
    """Return the user's innermost line in the traceback of an error, or of its cause; "" if there is none."""
    errors = [each for each in (error, error.__cause__) if each is not None]
    places = [(frame.f_code.co_filename, line) for each in errors for frame, line in walk_tb(each.__traceback__)]
    users = [f"{os.path.basename(path)}:{line}" for path, line in places if belongs_to_user(path)]
    return users[-1] if users else ""


def warn(message: str, again: bool = False) -> None:
    """Warn at the user's line: in the call of `fit`, or in their step, callback or data set.

    The same warning is repeated for a line only with `again`.
    """
    frame = _find_user_frame(sys._getframe(1))
    if frame is None:  # our thread: in most programs the main thread has called `fit`
        frame = _find_frame_of_thread(threading.main_thread().ident or 0)
    if frame is None:
        warnings.warn(message, stacklevel=2)
        return
    # As `warnings.warn` does, which has `skip_file_prefixes` since Python 3.12.
    registry = {} if again else frame.f_globals.setdefault("__warningregistry__", {})
    place = frame.f_code.co_filename, frame.f_lineno
    warnings.warn_explicit(message, UserWarning, *place, frame.f_globals.get("__name__"), registry)


def _find_frame_of_thread(thread: int) -> FrameType | None:
    with collector.pausing():
        return _find_user_frame(sys._current_frames().get(thread))


def _find_user_frame(frame: FrameType | None) -> FrameType | None:
    while frame is not None:
        if belongs_to_user(frame.f_code.co_filename):
            return frame
        frame = frame.f_back
    return None


def belongs_to_user(path: str) -> bool:
    """True if a file is the user's: neither tpufit's nor a library's."""
    return not path.startswith(_LIBRARIES) and _INSTALLED.search(path) is None


def is_user_module(name: str | None) -> bool:
    """True if a module of this name is the user's own code."""
    path = getattr(sys.modules.get(name or ""), "__file__", None)
    return name != "builtins" and (path is None or belongs_to_user(path))
