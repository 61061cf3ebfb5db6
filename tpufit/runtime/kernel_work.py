"""`KernelWork`: what a kernel of ours computes and moves, which no compiler counts. It is written into its name.

XLA keeps the name of an operation to the end, so the work can be read in a program before and after it is compiled.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_MARK = re.compile(r"kernels\[([^\]]*)\]")
_CALL = re.compile(r'custom_call_target="tpu_custom_call".*op_name="([^"]*)"')


@dataclass(frozen=True)
class KernelWork:
    """What a kernel computes and moves each time that it runs, on one core."""

    name: str  # with which its name in the program begins
    operations: int  # of its matrix products: two for a product and a sum
    width: int  # the length of what products add up, which a TPU fills up to the side of its matrix units
    nbytes: int  # read and written in the core's memory
    shared: bool = False  # by both halves of a device with two of them

    def __str__(self) -> str:
        return f"{self.name}={self.operations}/{self.width}/{self.nbytes}/{self.shared:d}"


def mark(kernels: Iterable[KernelWork]) -> str:
    """The name of a scope in which kernels are called.

    Example:
        >>> mark([KernelWork("fwd", 4000, 64, 100)])
        'kernels[fwd=4000/64/100/0]'
    """
    return f"kernels[{';'.join(map(str, kernels))}]"


def work_in(line: str) -> KernelWork | None:
    """The work of the kernel that a line of a program calls; None if it calls none that says it.

    Example:
        >>> work_in('call(%q), custom_call_target="tpu_custom_call", metadata={op_name="kernels[a=8/2/3/1]/a_b"}')
        KernelWork(name='a', operations=8, width=2, nbytes=3, shared=True)
        >>> work_in("%y = f32[8] add(%a, %b)") is None
        True
    """
    call = _CALL.search(line)
    found = call and _MARK.search(call[1])
    if not call or not found:
        return None
    for one in found[1].split(";"):
        name, _, numbers = one.partition("=")
        if f"/{name}" in call[1][found.end() :]:
            operations, width, nbytes, shared = map(int, numbers.split("/"))
            return KernelWork(name, operations, width, nbytes, bool(shared))
    return None
