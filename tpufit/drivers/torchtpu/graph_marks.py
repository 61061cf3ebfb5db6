"""Marks: what a trace can't record as an operation of TorchTPU, and the graph's text gets afterwards.

A trace puts the operands behind a barrier, together with a mark: an empty tensor whose shape encodes what belongs here.
`replace_marked` replaces the barrier in the graph's text.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial

import torch
from torch import Tensor

_MARKED = re.compile(
    r"( *)(%[^\s:]+):\d+ = stablehlo\.optimization_barrier (.+) : (.+), tensor<0x(\d+)x(\d+)x0xi8>(?: loc\(.*\))?$"
)
_MARK = re.compile(r" *%\S+ = stablehlo\.constant \S+ : tensor<0x(\d+)x\d+x0xi8>(?: loc\(.*\))?$")
_RESULT = re.compile(r"(%\w+)#(\d+)\b")


class Kind(IntEnum):
    """What belongs in place of a marked barrier."""

    LAYOUT = 0  # a layout of the first operand: the number is the split dimension plus one, or 0 for a whole tensor
    TO_CORE = 1  # each core's rows of the first operand; the second operand has the shape of the result
    FROM_CORE = 2  # the rows of all cores from each core's rows; the second operand has the shape of the result
    CALL = 3  # a call of the function with this number, whose results have the shapes of the last operands


@dataclass(frozen=True)
class Marked:
    """A marked barrier in a graph's text.

    Attributes:
        kind: What belongs in its place.
        number: A number that belongs to the kind.
        operands: The names of the operands, without the mark.
        types: Their types.
        new: A new name, and the beginning of more names.
    """

    kind: Kind
    number: int
    operands: list[str]
    types: list[str]
    new: str


Replacement = tuple[Sequence[str], Sequence[str]]
"""New lines, and a name for each result of the barrier."""


def mark_of(kind: Kind, number: int = 0) -> Tensor:
    """Return the empty tensor that marks a barrier."""
    return torch.zeros((0, kind, number, 0), dtype=torch.int8, device="tpu")


def replace_marked(text: str, prefix: str, replace: Callable[[Marked], Replacement | None]) -> str:
    """Return the text with other lines in place of marked barriers, unless `replace` returns None.

    New names begin with `prefix`. The marks are removed, because the numbers of functions differ between processes.

    Example:
        >>> text = "%c = stablehlo.constant dense<0> : tensor<0x0x2x0xi8>"
        >>> text += "\\n%1:2 = stablehlo.optimization_barrier %0, %c : tensor<8xi1>, tensor<0x0x2x0xi8>"
        >>> text += "\\nreturn %1#0 : tensor<8xi1>"
        >>> print(replace_marked(text, "new", lambda marked: ([f"{marked.new} = ..."], [marked.new])))
        %new_0 = ...
        return %new_0 : tensor<8xi1>
    """
    lines: list[str] = []
    replaced = set[Kind]()
    results: dict[str, Sequence[str]] = {}  # of replaced barriers of this function, by the barrier's name
    count = 0
    for line in text.split("\n"):
        if "func.func" in line:
            results = {}
        if results and "#" in line:
            line = _RESULT.sub(partial(_result_of, results), line)
        match = _MARKED.match(line)
        replacement = None
        if match is not None:
            indent, name, operands, types, kind, number = match.groups()
            names = operands.split(", ")[:-1]
            marked = Marked(Kind(int(kind)), int(number), names, types.split(", "), f"%{prefix}_{count}")
            replacement = replace(marked)
        if replacement is None:
            lines.append(line)
        else:
            new, results[name] = replacement
            replaced.add(marked.kind)
            lines += [f"{indent}{one}" for one in new]
            count += 1
    return "\n".join(line for line in lines if not ((mark := _MARK.match(line)) and int(mark[1]) in replaced))


def _result_of(results: dict[str, Sequence[str]], match: re.Match[str]) -> str:
    """Return the replacement of a barrier's result."""
    found = results.get(match[1])
    return match[0] if found is None else found[int(match[2])]
