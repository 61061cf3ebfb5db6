"""What a check is: the processes that it takes, the figures that it gives, and the bounds that they have to keep."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..backend import Cores

# The cores that a check needs.
NONE = -1  # no device at all
ONE = 1
ALL = 0  # every core of a TPU, and of a CPU 8 virtual ones

Value = float | str


@dataclass(frozen=True)
class Figure:
    """Something that was measured, and the bounds that it has to keep.

    Attributes:
        name: What it is of, e.g. `"fp32, highest"`.
        value: The number; a text if it is only to be read.
        at_most: The largest value that is right (default: any).
        at_least: The smallest value that is right (default: any).
        unit: Its unit (default: none).
        on_tpu: True if its bounds are those of a TPU, and say nothing about a CPU (default False).
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
        """True if the value keeps its bounds; NaN keeps none.

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
    """What a part of a check is given."""

    cores: Cores | None  # of its process; None for a part without a device
    folder: Path  # of the check's own, in which its parts leave files for each other
    kept: Path  # a folder whose files stay beside the report

    @property
    def count(self) -> int:
        """The number of cores."""
        return self.cores.count if self.cores else 0

    @property
    def on_tpu(self) -> bool:
        """True on a TPU."""
        return self.cores is not None and self.cores.platform == "TPU"


class Part(Protocol):
    """A function that one process runs: it gives the figures of a check, one after the other."""

    __module__: str
    __qualname__: str

    def __call__(self, setting: Setting) -> Iterable[Figure]:
        """Run it."""


@dataclass(frozen=True)
class Process:
    """A process of a check."""

    part: Part
    cores: int = ALL  # `NONE`, `ONE` or `ALL`
    ends: int = 0  # the exit status that is right; below 0 a signal


@dataclass(frozen=True)
class Check:
    """Something that is verified."""

    name: str  # what is right if it passes, in a few words
    processes: tuple[Process, ...]  # they run one after the other
    seconds: float = 120.0  # that each of them may take
    only_tpu: bool = False  # only a TPU can tell: on a CPU it runs, and counts for nothing
    runs_on_cpu: bool = True  # False if it can't even run there
    several: bool = False  # it takes more than one core
    one_host: bool = False  # the hosts of a pod can't run it together: one may end before the others
    quick: bool = False  # `--quick` has it too

    @property
    def on_pods(self) -> bool:
        """True if a pod can run it: its hosts compute together, and on all cores."""
        return not self.one_host and all(process.cores != ONE for process in self.processes)
