"""The line of the user's code that has led here: named in messages, and the place of every warning."""

import os
import sys
import threading
import warnings
from types import FrameType

_LIBRARIES = (
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
    os.path.dirname(os.__file__) + os.sep,
    "<frozen ",
)


def users_line() -> str:
    """The innermost line of the stack that is neither tpufit's nor a library's, e.g. `train.py:12`."""
    frame = _users_frame(sys._getframe(1))
    return "a library's code" if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def warn(message: str) -> None:
    """Warn at the user's line: of `fit`, or of their own step, callback or data set. All of tpufit warns in this way.

    Args:
        message: The warning.
    """
    frame = _users_frame(sys._getframe(1))
    if frame is None:  # a thread of ours: the main one has called `fit`, but for a few programs
        frame = _users_frame(sys._current_frames().get(threading.main_thread().ident or 0))
    if frame is None:
        warnings.warn(message, stacklevel=2)
        return
    # What `warnings.warn` does, which from Python 3.12 on has `skip_file_prefixes`.
    names, registry = frame.f_globals, frame.f_globals.setdefault("__warningregistry__", {})
    place = frame.f_code.co_filename, frame.f_lineno
    warnings.warn_explicit(message, UserWarning, *place, names.get("__name__"), registry, names)


def _users_frame(frame: FrameType | None) -> FrameType | None:
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_LIBRARIES) and f"{os.sep}site-packages{os.sep}" not in path:
            return frame
        frame = frame.f_back
    return None
