"""`fold`: hides tpufit's frames in a notebook's tracebacks, which then show the user's lines and the message."""

import sys
from traceback import walk_tb
from types import FrameType

from .user_code import belongs_to_user

_PACKAGE = __name__.partition(".")[0]


def fold(error: BaseException) -> None:
    """Mark tpufit's frames in the tracebacks of an error and its causes, if IPython will show them.

    IPython omits frames with `__tracebackhide__`, except the last one, and reports how many. Library frames between two
    of ours are marked, too; the user's never are. Nothing is removed: Python's `traceback` shows all frames.
    """
    if not _in_ipython():
        return
    seen = set[int]()
    causes = [error]
    while causes:
        current = causes.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        causes += [cause for cause in (current.__cause__, current.__context__) if cause is not None]
        _mark([frame for frame, _ in walk_tb(current.__traceback__)])


def _mark(frames: list[FrameType]) -> None:
    between: list[FrameType] = []
    inside = False  # after a frame of ours, with no user's frame since
    for frame in frames:
        if str(frame.f_globals.get("__name__")).partition(".")[0] == _PACKAGE:
            for hidden in [*between, frame]:
                hidden.f_locals["__tracebackhide__"] = True
            between = []
            inside = True
        elif belongs_to_user(frame.f_code.co_filename):
            between = []
            inside = False
        elif inside:
            between.append(frame)


def _in_ipython() -> bool:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return shell is not None and shell() is not None
