"""Out of memory: parses the compiler's or runtime's error, and suggests remedies in the order to try.

Imports no torch, since the preflight uses it.
"""

import re
from dataclasses import dataclass

from .text import format_bytes

_PATTERNS = (
    re.compile(r"Used (?P<needed>[\d.]+[KMGT]?) of (?P<available>[\d.]+[KMGT]?) hbm"),
    re.compile(r"HLO temporaries \((?P<needed>[\d.]+[KMGT]?)\) exceeds available HBM \((?P<available>[\d.]+[KMGT]?)\)"),
    re.compile(r"Allocation \(size=(?P<needed>\d+)\) would exceed memory \(size=(?P<available>\d+)\)"),
    re.compile(r"allocating (?P<requested>\d+) bytes"),
    re.compile(
        r"Attempting to (?:allocate|reserve) (?P<requested>[\d.]+[KMGT]?)\b.*?There are (?P<free>[\d.]+[KMGT]?) free",
        re.DOTALL,
    ),
    re.compile(r"Tried to allocate (?P<requested>[\d.]+ \w+)\. GPU \d+ has .*? of which (?P<free>[\d.]+ \w+) is free"),
)

# A remedy is suggested only if it concerns at least 1 / _WORTH of a step's memory.
_WORTH = 16


@dataclass(frozen=True)
class Shortage:
    """The sizes in an out-of-memory error, as written there: `"21.95G"`, or bytes. Each error has only some."""

    needed: str = ""  # of the program, or only its largest array
    available: str = ""  # of the device
    requested: str = ""  # requested in addition to the memory in use
    free: str = ""


def parse_shortage(message: str) -> Shortage:
    """Parse an out-of-memory error of XLA, libtpu or CUDA, from the compilation or an allocation.

    Example:
        >>> parse_shortage("Ran out of memory in memory space hbm. Used 21.95G of 15.48G hbm.")
        Shortage(needed='21.95G', available='15.48G', requested='', free='')
        >>> parse_shortage("the total memory required for HLO temporaries (145.76G) exceeds available HBM (94.74G).")
        Shortage(needed='145.76G', available='94.74G', requested='', free='')
        >>> parse_shortage("Out of memory allocating 4096 bytes.")
        Shortage(needed='', available='', requested='4096', free='')
    """
    match = next(filter(None, (pattern.search(message) for pattern in _PATTERNS)), None)
    return Shortage() if match is None else Shortage(**match.groupdict())


def list_remedies(state: int, needed: int, rows: int, cores: int, split: bool, remat: bool) -> list[str]:
    """List remedies that make a training step smaller, the cheapest first.

    `state` is the bytes of weights, gradients and optimizer state on a core, `needed` all bytes on a core, and `rows` a
    core's rows. The state may be `split` over the cores already, and blocks may already keep only their inputs
    (`remat`).

    Example:
        >>> list_remedies(8 << 30, 20 << 30, rows=8, cores=8, split=False, remat=True)
        ["compile(shard='fsdp'), with 1 GiB instead of 8 GiB of state on a core", 'a smaller batch_size (4) with \
compile(accumulate_steps=2)']
    """
    advice = []
    if not split and cores > 1 and state * _WORTH >= needed:
        least = format_bytes(state / cores)
        advice.append(f"compile(shard='fsdp'), with {least} instead of {format_bytes(state)} of state on a core")
    if not remat and (needed - state) * _WORTH >= needed:
        advice.append(
            "compile(remat=True), which keeps less of the activations (preflight(remat='auto') finds out whether a "
            "cheaper policy suffices)"
        )
    if rows > 1:
        advice.append(f"a smaller batch_size ({rows // 2}) with compile(accumulate_steps=2)")
    return advice
