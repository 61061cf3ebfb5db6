"""Counters of the device, which the runtime counts, added to the process's counters."""

from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter

from ..utils.counters import Counts, note_compiled, totals
from .driver import driver


def counts() -> Counts:
    """Return the current counters; subtract two results to count what happened in between."""
    fallbacks = count_fallbacks()
    return replace(
        totals(),
        host_reads=fallbacks.pop("aten::_local_scalar_dense", 0),
        fallbacks=fallbacks,
        executing=driver().get_seconds_executing(),
    )


def count_fallbacks() -> Counter[str]:
    """Return how often each operation has run on the host, including reads of a value."""
    return driver().count_fallbacks()


def count_live_tensors() -> int:
    """Return the number of tensors on the device that Python or a pending graph still references."""
    return driver().count_live_tensors()


def metrics_report() -> str:
    """Return the runtime's report of its counters and timers since the process began."""
    return driver().metrics_report()


@contextmanager
def role(name: str, cause: str = "") -> Iterator[None]:
    """A context in which compiled graphs count for one of the `ROLES`, with their cause."""
    before = driver().count_compiled()
    began = perf_counter()
    try:
        yield
    finally:
        new = driver().count_compiled() - before
        if new:
            note_compiled(name, cause, new, perf_counter() - began)


def count_reads() -> Hashable:
    """Return a value that changes with each execution and read. A change during a trace means that it was split."""
    return driver().count_reads()
