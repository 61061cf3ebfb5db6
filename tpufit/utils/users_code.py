"""The line of the user's code that has led here: named in messages, and the place of every warning."""

import os
import sys
import threading
import warnings
from traceback import walk_tb
from types import FrameType

_LIBRARIES = (
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
    os.path.dirname(os.__file__) + os.sep,
    "<frozen ",
)

NOBODYS = "a library's code"  # in place of a line, where no user's code is on the stack


def users_line() -> str:
    """The innermost line of the stack that is neither tpufit's nor a library's, e.g. `train.py:12`."""
    frame = _users_frame(sys._getframe(1))
    return NOBODYS if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def line_of(thread: int) -> str:
    """The line of the user's that a thread, given by its identity, has come to."""
    frame = _users_frame(sys._current_frames().get(thread))
    return NOBODYS if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def calling_lines() -> str:
    """The user's line, and before it the line of the library that it has called, e.g. `timm/x.py:9, called at a.py:12`.

    PyTorch's modules, which stand between all others, are not named; its optimizers are.
    """
    library = ""
    frame = _users_frame(sys._getframe(1))
    inner: FrameType | None = sys._getframe(1)
    while not library and inner is not None and inner is not frame:
        _, is_a_librarys, path = inner.f_code.co_filename.rpartition(f"{os.sep}site-packages{os.sep}")
        if is_a_librarys and (path.startswith("torch/optim/") or not path.startswith(("torch/", "tpufit/"))):
            library = f"{path}:{inner.f_lineno}"
        inner = inner.f_back
    line = users_line()
    return f"{library}, called at {line}" if library and line != NOBODYS else library or line


def raising_line(error: BaseException) -> str:
    """The innermost line of the user's in an error's traceback, or in that of its cause; nothing if there is none."""
    causes = [one for one in (error, error.__cause__) if one is not None]
    places = [(frame.f_code.co_filename, line) for one in causes for frame, line in walk_tb(one.__traceback__)]
    users = [f"{os.path.basename(path)}:{line}" for path, line in places if is_users(path)]
    return users[-1] if users else ""


def warn(message: str, again: bool = False) -> None:
    """Warn at the user's line: of `fit`, or of their own step, callback or data set. All of tpufit warns in this way.

    A line that has warned in the same words before does so `again` only if asked.
    """
    frame = _users_frame(sys._getframe(1))
    if frame is None:  # a thread of ours: the main one has called `fit`, but for a few programs
        frame = _users_frame(sys._current_frames().get(threading.main_thread().ident or 0))
    if frame is None:
        warnings.warn(message, stacklevel=2)
        return
    # What `warnings.warn` does, which from Python 3.12 on has `skip_file_prefixes`.
    registry = {} if again else frame.f_globals.setdefault("__warningregistry__", {})
    place = frame.f_code.co_filename, frame.f_lineno
    warnings.warn_explicit(message, UserWarning, *place, frame.f_globals.get("__name__"), registry)


def _users_frame(frame: FrameType | None) -> FrameType | None:
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return frame
        frame = frame.f_back
    return None


def is_users(path: str) -> bool:
    """True if a file is neither tpufit's nor a library's."""
    return not path.startswith(_LIBRARIES) and f"{os.sep}site-packages{os.sep}" not in path


def is_users_module(name: str | None) -> bool:
    """True if a module of this name is the user's own code."""
    path = getattr(sys.modules.get(name or ""), "__file__", None)
    return name != "builtins" and (path is None or is_users(path))
