"""Shapes in the text of a graph, and the operations that have changed them."""

import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_DEFINED = re.compile(r"\s*(%\w+)(?::\d+)? = ")  # the name of an operation's result
_RESHAPED = re.compile(
    r"\s*(%\w+) = stablehlo\.(reshape|transpose) (%[\w#]+)(?:, dims = \[([\d, ]*)\])? : \((.*?)\) -> "
)
_KIND = re.compile(r"tensor<((?:\d+x)*)(\w+)>")


class Reshape(NamedTuple):
    """The operation that reshaped or transposed a tensor."""

    operation: str
    source: str
    order: str | None  # the order of the dimensions after a transposition
    kind: str  # the type of the source


def track_reshapes(text: str) -> Iterator[tuple[str, dict[str, Reshape]]]:
    """Yield each line, and the reshaped or transposed tensors that it can use, by name. The dict changes afterwards."""
    reshapes: dict[str, Reshape] = {}
    for line in text.split("\n"):
        if "func.func " in line:  # each function numbers its values from 0
            reshapes.clear()
        yield line, reshapes
        if match := _DEFINED.match(line):  # each region of operations may use the names of an earlier region again
            reshapes.pop(match[1], None)
        if match := _RESHAPED.match(line):
            reshapes[match[1]] = Reshape(match[2], match[3], match[4], match[5])


def shape_of(kind: str) -> tuple[int, ...]:
    """Return the shape in a type such as `"tensor<8x3xf32>"`."""
    match = _KIND.fullmatch(kind)
    assert match is not None
    return tuple(int(size) for size in match[1].split("x") if size)


def replace_shape(kind: str, shape: Sequence[int]) -> str:
    """Replace the shape in a type."""
    return _KIND.sub(lambda match: f"tensor<{''.join(f'{size}x' for size in shape)}{match[2]}>", kind)


def find_merged_dimensions(before: tuple[int, ...], after: tuple[int, ...]) -> list[list[int]] | None:
    """Return the dimensions that a reshape merges into each new dimension; None if it splits a dimension."""
    groups: list[list[int]] = []
    at = 0
    for size in after:
        group: list[int] = []
        while math.prod(before[i] for i in group) < size and at < len(before):
            group.append(at)
            at += 1
        if math.prod(before[i] for i in group) != size:
            return None
        groups.append(group)
    return groups  # the remaining dimensions have size one
