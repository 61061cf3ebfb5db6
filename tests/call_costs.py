"""The cost of a call by the library's counters: graphs, waits, host reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tpufit import runtime
from tpufit.utils.counters import Counts

Result = TypeVar("Result")


def spent(function: Callable[[], Result]) -> tuple[Result, Counts]:
    """Return the result of a function, and the counts of its call."""
    before = runtime.counts()
    result = function()
    return result, runtime.counts() - before
