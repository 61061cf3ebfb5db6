"""A forked process has the runtime's memory, but none of its threads: what waits for one of them would wait for ever.

So the device is refused to a process that was forked once it had started, and with it PyTorch's own operations that
copy to it or from it. Workers of a `DataLoader`, which only read data, go on.
"""

import atexit
import ctypes
import os
import sys
from typing import Any, NoReturn

import torch

from ..errors import ForkedError

# The operations of the device that wait for its threads. All others are only noted.
_COPIES = ("_copy_from", "_copy_from_and_resize", "_local_scalar_dense", "_to_copy", "copy_", "equal", "nonzero")

_forked = False  # from a process whose runtime had started
_libraries: list[torch.library.Library] = []


def refuse_fork() -> None:
    """Raise an error in a forked process.

    Raises:
        ForkedError: The runtime was started in the process that this one comes from.
    """
    if _forked:
        _refuse()


def guard_forks() -> None:
    """Refuse the device to the processes that are forked from this one from now on."""
    os.register_at_fork(after_in_child=_cut_off)


def _cut_off() -> None:
    global _forked
    _forked = True
    torch_xla = sys.modules["torch_xla"]
    # Two ends that wait for the device: torch_xla's, and that of its C++ objects, before which the process leaves.
    atexit.unregister(torch_xla._prepare_to_exit)
    libc = ctypes.CDLL(None)
    libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)  # it ends with the object
    for name in _COPIES:
        library.impl(name, _refuse, "XLA")


def _refuse(*args: Any, **named: Any) -> NoReturn:
    raise ForkedError(
        "this process was forked from one that had started the device, and has none of its threads: use the device in "
        "the process that started it, or start this one by 'spawn' or 'forkserver', as multiprocessing.get_context does"
    )
