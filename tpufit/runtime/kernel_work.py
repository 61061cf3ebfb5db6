"""`KernelWork`: the operations and bytes of tpufit's kernels, which no compiler counts, written into their names.

XLA keeps the names of operations, so the work can be read from a program before and after it is compiled.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_MARK = re.compile(r"kernels\[([^\]]*)\]")
# In HLO, and in StableHLO.
_CALL = re.compile(
    r'(?:custom_call_target="tpu_custom_call".*op_name=|custom_call @tpu_custom_call\(.* loc\()"([^"]*)"'
)


@dataclass(frozen=True)
class KernelWork:
    """The work of one run of a kernel on one core."""

    name: str  # the beginning of its name in the program
    operations: int  # of its matrix products; a product and a sum are two
    width: int  # the contracted length of products, which a TPU pads to the side of its matrix units
    nbytes: int  # read from and written to the core's memory
    shared: bool = False  # True if both halves of a device with two share the work

    def __str__(self) -> str:
        return f"{self.name}={self.operations}/{self.width}/{self.nbytes}/{self.shared:d}"


def mark(kernels: Iterable[KernelWork]) -> str:
    """Return the name of the scope of calls of kernels.

    Example:
        >>> mark([KernelWork("fwd", 4000, 64, 100)])
        'kernels[fwd=4000/64/100/0]'
    """
    return f"kernels[{';'.join(map(str, kernels))}]"


def find_mark(text: str) -> str:
    """Return the first mark in the text of a program, or "".

    Example:
        >>> find_mark('jit(f)/kernels[fwd=4000/64/100/0]/jit(g)')
        'kernels[fwd=4000/64/100/0]'
    """
    found = _MARK.search(text)
    return found[0] if found else ""


def find_kernel_work(line: str) -> KernelWork | None:
    """Return the work of the kernel that a line of a program calls; None if it calls no marked kernel.

    Example:
        >>> call = 'call(%q), custom_call_target="tpu_custom_call", metadata={op_name="kernels[a=8/2/3/1]/a_b"}'
        >>> find_kernel_work(call)
        KernelWork(name='a', operations=8, width=2, nbytes=3, shared=True)
        >>> find_kernel_work("%y = f32[8] add(%a, %b)") is None
        True
    """
    call = _CALL.search(line)
    marks = call and _MARK.search(call[1])
    if not call or not marks:
        return None
    for kernel in marks[1].split(";"):
        name, _, numbers = kernel.partition("=")
        if f"/{name}" in call[1][marks.end() :]:
            operations, width, nbytes, shared = map(int, numbers.split("/"))
            return KernelWork(name, operations, width, nbytes, bool(shared))
    return None
