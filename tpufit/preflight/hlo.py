"""`parse_operations`: parses the text of an XLA program.

A line is `%name = type operation(operands), attributes, metadata={op_name="..."}, backend_config={...}`. A type such as
`f32[128,10]{1,0:T(8,128)}` has a layout with tiles, to which the dimensions are padded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..runtime import KernelWork, find_kernel_work

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_LINE = re.compile(r"^\s+(?:ROOT )?%(\S+) = ")
_COMPUTATION = re.compile(r"^(ENTRY )?%?(\S+) \(.*\{$")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](?:\{([\d,]*)(?::((?:[^{}])*))?\})?")
_OPERAND = re.compile(r"%([\w.-]+)")
_UNKNOWN = 2**63 - 1  # the cycles of an operation for which the compiler has no estimate
_SCOPE = re.compile(r"~(\w+)\|([^|~]*)\|(\d+)~")


@dataclass(frozen=True)
class Array:
    """The type of an array."""

    dtype: str  # XLA's name, e.g. "bf16"
    shape: tuple[int, ...]
    nbytes: int
    padded: int  # its size in memory in bytes, padded to whole tiles

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Operation:
    """A line of a program."""

    name: str
    kind: str  # e.g. "fusion"
    arrays: tuple[Array, ...]  # the types of its results
    phase: str  # "forward", "backward" or "optimizer"; "" if unknown
    layer: str  # the user's layer
    line: int | None  # the index of the user's line
    cycles: int  # the compiler's estimate; 0 if it has none
    channel: int | None  # the number of the channel for communication between cores
    operands: tuple[str, ...]  # the names of its operands
    kernel: KernelWork | None = None  # the work of the kernel that it calls, if the kernel declares it
    computation: str = ""  # the name of the computation that contains it

    @property
    def nbytes(self) -> int:
        """The size of its results in bytes, without padding."""
        return sum(array.nbytes for array in self.arrays)


def parse_arrays(text: str) -> list[Array]:
    """Read the array types in a text.

    Example:
        >>> (array,) = parse_arrays("f32[100,10]{1,0:T(8,128)}")
        >>> str(array), array.nbytes, array.padded
        ('f32[100,10]', 4000, 53248)
    """
    arrays = []
    for dtype, dimensions, order, tiles in _ARRAY.findall(text):
        digits = re.search(r"\d+", dtype)
        bits = int(digits[0]) if digits else 8  # a predicate takes a byte
        shape = tuple(int(n) for n in dimensions.split(",") if n)
        minor = [int(n) for n in order.split(",") if n]  # the dimensions from minor to major
        tile = re.match(r"T\(([\d,]+)\)", tiles)
        sizes = [int(n) for n in tile[1].split(",")] if tile else []
        stored = list(shape) or [1]
        for dimension, size in zip(minor or [0], reversed(sizes), strict=False):
            stored[dimension] = math.ceil(stored[dimension] / size) * size
        arrays.append(Array(dtype, shape, math.prod(shape) * bits // 8, math.prod(stored) * bits // 8))
    return arrays


def parse_operations(text: str) -> Iterator[tuple[Operation, bool]]:
    """Read the operations of a program, each with True if it belongs to the entry computation."""
    entry = False
    computation = ""
    for line in text.splitlines():
        start = _LINE.match(line)
        if start is None:
            begins = _COMPUTATION.match(line)
            entry, computation = (bool(begins[1]), begins[2]) if begins else (entry, computation)
            continue
        end = find_end_of_type(line, start.end())
        kind, _, rest = line[end + 1 :].partition("(")
        scopes = parse_scopes(rest)
        phase, layer, index = scopes[-1] if scopes else ("", "", None)
        estimate = re.search(r'"estimated_cycles":"(\d+)"', rest)
        cycles = int(estimate[1]) if estimate else 0
        channel = re.search(r"channel_id=(\d+)", rest)
        yield (
            Operation(
                name=start[1],
                kind=kind.strip(),
                arrays=tuple(parse_arrays(line[start.end() : end])),
                phase=phase,
                layer=layer,
                line=None if index is None else int(index),
                cycles=cycles if cycles < _UNKNOWN else 0,
                channel=int(channel[1]) if channel else None,
                operands=tuple(_OPERAND.findall(rest.partition(")")[0])),
                kernel=find_kernel_work(rest) if kind.strip() == "custom-call" else None,
                computation=computation,
            ),
            entry,
        )


def find_products(traced: Iterable[Operation]) -> list[tuple[Operation, str]]:
    """Return the matrix products of a traced program, each with the dtype of its factors.

    For factors that were widened for the product, so that its sums aren't rounded, it is the dtype before widening, in
    which a TPU multiplies.
    """
    by_name = {operation.name: operation for operation in traced}
    products = []
    for operation in by_name.values():
        if operation.kind in ("dot", "convolution"):
            dtypes = {
                _find_dtype_before_widening(by_name[name], by_name) for name in operation.operands if name in by_name
            }
            products.append((operation, dtypes.pop() if len(dtypes) == 1 else operation.arrays[0].dtype))
    return products


def _find_dtype_before_widening(operation: Operation, by_name: dict[str, Operation]) -> str:
    source = by_name[operation.operands[0]] if operation.kind == "convert" else operation
    return min(source, operation, key=lambda candidate: candidate.arrays[0].nbytes).arrays[0].dtype


def parse_scopes(text: str) -> list[tuple[str, str, str]]:
    """Return the scopes in a text, the innermost last: phase, layer, and the index of a line. `Scopes` writes them."""
    found: list[tuple[str, str, str]] = _SCOPE.findall(text)
    return found


def parse_arguments(text: str) -> list[Array]:
    """Read the types of a program's arguments, with their layouts."""
    head = text.partition("\n")[0].partition("entry_computation_layout={(")[2]
    depth = 1
    for end, letter in enumerate(head):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return parse_arrays(head[:end])
    return []


def find_end_of_type(line: str, start: int) -> int:
    """Return the index of the space after a type, which may be a tuple of types."""
    depth = 0
    for i in range(start, len(line)):
        depth += (line[i] in "({[") - (line[i] in ")}]")
        if line[i] == " " and not depth:
            return i
    return len(line)
