"""The definition of a check: its processes, the figures that it yields, and their bounds."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..backend import Cores

# The cores that a process needs.
NONE = -1  # no device
ONE = 1
ALL = 0  # all cores of a TPU; on a CPU, 8 virtual cores

Value = float | str


@dataclass(frozen=True)
class Figure:
    """A measured value, and its bounds.

    Attributes:
        name: What was measured, e.g. `"fp32, highest"`.
        value: The number, or a text for information only.
        at_most: The largest correct value (default: no bound).
        at_least: The smallest correct value (default: no bound).
        unit: The unit (default: none).
        on_tpu: True if the bounds are for a TPU only (default False).
    """

    name: str
    value: Value
    at_most: float | None = None
    at_least: float | None = None
    unit: str = ""
    on_tpu: bool = False

    @property
    def bounded(self) -> bool:
        """True if there is a bound."""
        return self.at_most is not None or self.at_least is not None

    @property
    def holds(self) -> bool:
        """True if the value is within its bounds; NaN is within none.

        Example:
            >>> Figure("difference", 1e-6, at_most=1e-5).holds, Figure("difference", math.nan, at_most=1e-5).holds
            (True, False)
        """
        if not self.bounded or isinstance(self.value, str):
            return not self.bounded
        low = -math.inf if self.at_least is None else self.at_least
        high = math.inf if self.at_most is None else self.at_most
        return low <= self.value <= high

    def __str__(self) -> str:
        value = self.value if isinstance(self.value, str) else f"{self.value:.3g}"
        text = f"{self.name}: {value}{self.unit and ' ' + self.unit}"
        if self.at_least is not None:
            text += f" (at least {self.at_least:g})"
        return text if self.at_most is None else f"{text} (at most {self.at_most:g})"


@dataclass(frozen=True)
class Setting:
    """The argument of a part of a check."""

    cores: Cores | None  # of the process; None for a part without a device
    folder: Path  # the check's folder, where its parts leave files for each other
    artifacts: Path  # the folder next to the report, for files to keep

    @property
    def count(self) -> int:
        """The number of cores."""
        return self.cores.count if self.cores else 0

    @property
    def on_tpu(self) -> bool:
        """True on a TPU."""
        return self.cores is not None and self.cores.platform == "TPU"


class Part(Protocol):
    """A function that one process runs; it yields the figures of a check."""

    __module__: str
    __qualname__: str

    def __call__(self, setting: Setting) -> Iterable[Figure]:
        """Run it."""


@dataclass(frozen=True)
class Process:
    """A process of a check."""

    part: Part
    cores: int = ALL  # `NONE`, `ONE` or `ALL`
    ends: int = 0  # the expected exit status; a signal if negative


@dataclass(frozen=True)
class Check:
    """A property to verify."""

    name: str  # what is true if it passes, in a few words
    processes: tuple[Process, ...]  # run one after the other
    seconds: float = 120.0  # the time limit of each process
    only_tpu: bool = False  # only a TPU can decide it; on a CPU it runs, but doesn't count
    runs_on_cpu: bool = True  # False if it can't run on a CPU
    several: bool = False  # needs more than one core
    one_host: bool = False  # the hosts of a pod can't run it together, because one may end before the others
    quick: bool = False  # also runs with `--quick`

    @property
    def on_pods(self) -> bool:
        """True if a pod can run it: the hosts compute together, and on all cores."""
        return not self.one_host and all(process.cores != ONE for process in self.processes)
