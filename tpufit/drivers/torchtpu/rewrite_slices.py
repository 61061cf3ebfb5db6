"""`slice_before_merging`: rewrites the text of a graph so that slices take tensors before dimensions were merged.

To select e.g. the first token of each text, TorchTPU merges the dimension of tokens with the next one, and slices the
merged dimension. XLA then copies the whole tensor. If it merges the dimension of rows, which is split over the cores,
the cores exchange rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from .graph_shapes import Reshape, find_merged_dimensions, replace_shape, shape_of, track_reshapes

_SLICED = re.compile(
    r"(\s*)(%\w+) = stablehlo\.slice (%[\w#]+) \[([\d:, ]*)\] : \((tensor<[^>]*>)\) -> (tensor<[^>]*>)$"
)


def slice_before_merging(text: str) -> str:
    """Rewrite a text so that its slices take the tensors before their dimensions were merged.

    Example:
        >>> text = "%0 = stablehlo.reshape %a : (tensor<4x8x3xf32>) -> tensor<4x24xf32>"
        >>> text += "\\n%1 = stablehlo.slice %0 [0:4, 6:9] : (tensor<4x24xf32>) -> tensor<4x3xf32>"
        >>> for line in slice_before_merging(text).splitlines()[1:]:
        ...     print(line)
        %slice_0 = stablehlo.slice %a [0:4, 2:3, 0:3] : (tensor<4x8x3xf32>) -> tensor<4x1x3xf32>
        %1 = stablehlo.reshape %slice_0 : (tensor<4x1x3xf32>) -> tensor<4x3xf32>
    """
    lines = []
    count = 0
    for line, reshapes in track_reshapes(text):
        match = _SLICED.match(line)
        maker = reshapes.get(match[3]) if match else None
        if match and maker and maker.operation == "reshape":
            rewritten = _rewrite(match, maker, f"%slice_{count}")
            count += rewritten is not None
            line = rewritten or line
        lines.append(line)
    return "\n".join(lines)


def _rewrite(match: re.Match[str], merged: Reshape, new: str) -> str | None:
    """Return the lines of a slice of the tensor before its dimensions were merged; None if it isn't a slice there."""
    indent, name, _, ranges, kind, result = match.groups()
    before = shape_of(merged.kind)
    after = shape_of(kind)
    groups = find_merged_dimensions(before, after)
    if groups is None or len(before) == len(after) or 0 in before:
        return None
    cuts = [f"0:{size}" for size in before]
    shape = list(before)
    for group, size, text in zip(groups, after, ranges.split(", "), strict=True):
        first, last, *step = map(int, text.split(":"))
        if (first, last) == (0, size) and not step:
            continue
        if len(group) == 1:
            (at,) = group
            cuts[at] = text
            shape[at] = -(-(last - first) // (step or [1])[0])
            continue
        box = None if step or not group else _box([before[i] for i in group], first, last)
        if box is None:
            return None
        for at, (start, end) in zip(group, box, strict=True):
            cuts[at] = f"{start}:{end}"
            shape[at] = end - start
    whole = replace_shape(result, shape)
    return (
        f"{indent}{new} = stablehlo.slice {merged.source} [{', '.join(cuts)}] : ({merged.kind}) -> {whole}\n"
        f"{indent}{name} = stablehlo.reshape {new} : ({whole}) -> {result}"
    )


def _box(sizes: Sequence[int], first: int, last: int) -> list[tuple[int, int]] | None:
    """Return the range in each dimension of a range of their merged dimension; None if it isn't a range in each.

    Example:
        >>> _box([4, 8], 16, 24), _box([4, 8], 18, 20), _box([4, 8], 6, 10)
        ([(2, 3), (0, 8)], [(2, 3), (2, 4)], None)
    """
    block = math.prod(sizes[1:])
    if first % block == last % block == 0:  # whole blocks: all later dimensions are taken as a whole
        return [(first // block, last // block), *((0, size) for size in sizes[1:])]
    at = first // block
    if last > (at + 1) * block:
        return None
    later = _box(sizes[1:], first - at * block, last - at * block)
    return None if later is None else [(at, at + 1), *later]
