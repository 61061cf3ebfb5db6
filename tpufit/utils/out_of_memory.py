"""A step that has no room: what the compiler or the runtime says of it, and what makes it fit, in the order to try.

No torch here: a preflight says it too.
"""

import re
from dataclasses import dataclass

from .text import size

_SAID = (
    re.compile(r"Used (?P<needs>[\d.]+[KMGT]?) of (?P<has>[\d.]+[KMGT]?) hbm"),
    re.compile(r"Allocation \(size=(?P<needs>\d+)\) would exceed memory \(size=(?P<has>\d+)\)"),
    re.compile(r"allocating (?P<more>\d+) bytes"),
    re.compile(
        r"Attempting to (?:allocate|reserve) (?P<more>[\d.]+[KMGT]?)\b.*?There are (?P<free>[\d.]+[KMGT]?) free",
        re.DOTALL,
    ),
)

# The part of a step's memory that is worth a measure against it.
_WORTH = 16


@dataclass(frozen=True)
class Shortage:
    """The sizes in an error for a full memory, as it writes them: `"21.95G"`, or bytes. Only some are in each."""

    needs: str = ""  # of the program, or its largest array alone
    has: str = ""  # of the device
    more: str = ""  # that was asked for besides what was taken
    free: str = ""


def shortage(words: str) -> Shortage:
    """Read an error of XLA's or libtpu's for a full memory: at compile time, or when something is allocated.

    Example:
        >>> shortage("Ran out of memory in memory space hbm. Used 21.95G of 15.48G hbm.")
        Shortage(needs='21.95G', has='15.48G', more='', free='')
        >>> shortage("Out of memory allocating 4096 bytes.")
        Shortage(needs='', has='', more='4096', free='')
    """
    found = next(filter(None, (pattern.search(words) for pattern in _SAID)), None)
    return Shortage() if found is None else Shortage(**found.groupdict())


def remedies(state: int, needs: int, rows: int, cores: int, split: bool, remat: bool) -> list[str]:
    """Name what makes a training step smaller, what costs the least first.

    The state is weights, gradients and optimizer state. It and `needs` are bytes on a core, and rows are those of a
    core. It may be `split` over the cores already, and blocks may keep their inputs alone (`remat`).

    Example:
        >>> remedies(8 << 30, 20 << 30, rows=8, cores=8, split=False, remat=True)
        ["compile(shard='fsdp'), with 1 GiB instead of 8 GiB of state on a core", 'a smaller batch_size (4) with \
compile(accumulate_steps=2)']
    """
    found = []
    if not split and cores > 1 and state * _WORTH >= needs:
        least = size(state / cores)
        found.append(f"compile(shard='fsdp'), with {least} instead of {size(state)} of state on a core")
    if not remat and (needs - state) * _WORTH >= needs:
        found.append(
            "compile(remat=True), which keeps less of the activations (preflight(remat='auto') finds out whether a "
            "policy that costs less does)"
        )
    if rows > 1:
        found.append(f"a smaller batch_size ({rows // 2}) with compile(accumulate_steps=2)")
    return found
