"""Refuses the device to forked processes, which lack the runtime's threads and would wait for them forever.

In a process that was forked after the start of the runtime, the device and PyTorch's copies to and from it raise an
error. Workers of a `DataLoader`, which only read data, still work.
"""

import os
import warnings
from typing import Any, NoReturn

import torch

from ..errors import ForkedError
from .driver import driver

# The operations of the device that wait for its threads. All others are only recorded.
_COPIES = ("_copy_from", "_copy_from_and_resize", "_local_scalar_dense", "_to_copy", "copy_", "equal", "nonzero")

forked = False  # True if forked from a process whose runtime had started
_libraries: list[torch.library.Library] = []


def refuse_fork() -> None:
    """Raise an error in a process that was forked after the runtime's start.

    Raises:
        ForkedError: The runtime was started in the parent process.
    """
    if forked:
        _refuse()


def guard_forks() -> None:
    """Refuse the device to all processes forked from now on."""
    os.register_at_fork(after_in_child=_detach_forked_process)


def _detach_forked_process() -> None:
    global forked
    forked = True
    driver().detach_forked_process()
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)  # the registrations end with the object
    # Not `library.impl`, which refuses to replace the drivers' own kernels for some of these operations.
    registrations: Any = library.m
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that a kernel is replaced
        for name in _COPIES:
            registrations.impl(name, driver().dispatch_key, _refuse, False)


def _refuse(*args: Any, **named: Any) -> NoReturn:
    raise ForkedError(
        "this process was forked after the device had been started, and has none of its threads: use the device in the "
        "process that started it, or start this process by multiprocessing.get_context('spawn') or 'forkserver'"
    )
