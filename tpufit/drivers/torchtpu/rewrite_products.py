"""`unflatten_products`: rewrites the text of a graph so that products keep their dimensions.

TorchTPU multiplies matrices, or batches of matrices, and flattens tensors with more dimensions. XLA then copies tensors
to change their layout, and can't fuse a product with the next operation. XLA's product takes any number of dimensions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from .graph_shapes import Reshape, find_merged_dimensions, replace_shape, shape_of, track_reshapes

_PRODUCT = re.compile(
    r"(\s*)(%\w+) = stablehlo\.dot_general (%[\w#]+), (%[\w#]+)"
    r"(?:, batching_dims = \[([\d, ]*)\] x \[([\d, ]*)\])?, contracting_dims = \[([\d, ]*)\] x \[([\d, ]*)\]"
    r"(.*?) : \((tensor<[^>]*>), (tensor<[^>]*>)\) -> (tensor<[^>]*>)"
)


@dataclass(frozen=True)
class _Factor:
    """A tensor from which a factor of a product was reshaped.

    Attributes:
        name: The name of the tensor.
        shape: Its shape.
        groups: For each dimension of the factor, the dimensions of the tensor that were merged into it.
    """

    name: str
    shape: tuple[int, ...]
    groups: list[list[int]]

    def sizes(self, dim: int) -> list[int]:
        """Return the sizes of the dimensions that were merged into a dimension of the factor."""
        return [self.shape[i] for i in self.groups[dim] if self.shape[i] > 1]

    def in_order(self, used: Collection[int]) -> bool:
        """True if the dimensions that aren't `used` have the order of the tensor, which is the order of the result."""
        remaining = [i for dim, group in enumerate(self.groups) if dim not in used for i in group]
        return remaining == sorted(remaining)

    def join(self, dims: Collection[int]) -> _Factor | None:
        """Drop dimensions of size one, and merge the parts of each of `dims`; None if the parts aren't adjacent."""
        runs = [[i] for i, size in enumerate(self.shape) if size > 1]
        for dim in dims:
            parts = [i for i in self.groups[dim] if self.shape[i] > 1]
            if len(parts) > 1:
                ends = range(len(parts), len(runs) + 1)
                at = next(
                    (end - len(parts) for end in ends if runs[end - len(parts) : end] == [[i] for i in parts]), None
                )
                if at is None:
                    return None
                runs[at : at + len(parts)] = [parts]
        number = {i: at for at, run in enumerate(runs) for i in run}
        groups = [list(dict.fromkeys(number[i] for i in group if i in number)) for group in self.groups]
        return _Factor(self.name, tuple(math.prod(self.shape[i] for i in run) for run in runs), groups)


def unflatten_products(text: str) -> str:
    """Rewrite a text so that its products take the tensors before they were flattened.

    Example:
        >>> text = "%0 = stablehlo.reshape %a : (tensor<4x8x3xf32>) -> tensor<32x3xf32>"
        >>> text += "\\n%1 = stablehlo.dot_general %0, %w, contracting_dims = [1] x [0] : "
        >>> text += "(tensor<32x3xf32>, tensor<3x5xf32>) -> tensor<32x5xf32>"
        >>> for line in unflatten_products(text).splitlines()[1:]:
        ...     print(line.partition(" : ")[0])
        %flat_0 = stablehlo.dot_general %a, %w, contracting_dims = [2] x [0]
        %1 = stablehlo.reshape %flat_0
    """
    lines = []
    count = 0
    for line, reshapes in track_reshapes(text):
        if match := _PRODUCT.match(line):
            rewritten = _rewrite(match, reshapes, count)
            count += rewritten is not None
            line = rewritten or line
        lines.append(line)
    return "\n".join(lines)


def _rewrite(match: re.Match[str], reshapes: Mapping[str, Reshape], number: int) -> str | None:
    """Return the lines of a product of the tensors before they were flattened; None if nothing was flattened."""
    indent, name, a, b, batch_a, batch_b, inner_a, inner_b, options, *kinds, kind = match.groups()
    batch = list(zip(_numbers(batch_a), _numbers(batch_b), strict=True))
    inner = list(zip(_numbers(inner_a), _numbers(inner_b), strict=True))
    shapes = [shape_of(one) for one in kinds]
    chosen: tuple[_Factor, ...] = ()
    factors: tuple[_Factor, ...] = ()
    for chosen in product(_factors(a, shapes[0], reshapes), _factors(b, shapes[1], reshapes)):
        factors = _match(chosen, [*batch, *inner])
        if factors and all(f.in_order({pair[side] for pair in (*batch, *inner)}) for side, f in enumerate(factors)):
            break
    if all(len(f.shape) == sum(size > 1 for size in shape) for f, shape in zip(factors, shapes, strict=True)):
        return None
    lines = []
    names = []
    new_kinds = []
    for side, (factor, source) in enumerate(zip(factors, chosen, strict=True)):
        operand = factor.name
        new_kinds.append(replace_shape(kinds[side], factor.shape))
        if factor.shape != source.shape:
            operand = f"%flat_{number}_{side}"
            before = replace_shape(kinds[side], source.shape)
            lines.append(f"{indent}{operand} = stablehlo.reshape {factor.name} : ({before}) -> {new_kinds[side]}")
        names.append(operand)
    dims = {}
    for role, pairs in (("batching", batch), ("contracting", inner)):
        dims[role] = [[i for pair in pairs for i in f.groups[pair[side]]] for side, f in enumerate(factors)]
    shape = [factors[0].shape[i] for i in dims["batching"][0]]
    for side, factor in enumerate(factors):
        used = {pair[side] for pair in (*batch, *inner)}
        shape += [factor.shape[i] for dim, group in enumerate(factor.groups) if dim not in used for i in group]
    attributes = ", ".join(
        f"{role}_dims = {pair[0]} x {pair[1]}" for role, pair in dims.items() if pair[0] or role == "contracting"
    )
    whole = replace_shape(kind, shape)
    new = f"%flat_{number}"
    types = f"({', '.join(new_kinds)}) -> {whole}"
    lines.append(f"{indent}{new} = stablehlo.dot_general {', '.join(names)}, {attributes}{options} : {types}")
    lines.append(f"{indent}{name} = stablehlo.reshape {new} : ({whole}) -> {kind}")
    return "\n".join(lines)


def _match(factors: Sequence[_Factor], pairs: Sequence[tuple[int, int]]) -> tuple[_Factor, ...]:
    """Join dimensions until paired dimensions of both factors have equal parts; () if this isn't possible."""
    differ = [pair for pair in pairs if factors[0].sizes(pair[0]) != factors[1].sizes(pair[1])]
    joined = [factor.join([pair[side] for pair in differ]) for side, factor in enumerate(factors)]
    return () if None in joined else tuple(factor for factor in joined if factor is not None)


def _factors(name: str, shape: tuple[int, ...], reshapes: Mapping[str, Reshape]) -> list[_Factor]:
    """Return the tensors from which a factor was flattened or transposed, from the first to the factor itself."""
    factors = [_Factor(name, shape, [[i] for i in range(len(shape))])]
    while factors[0].name in reshapes:
        step = reshapes[factors[0].name]
        before = shape_of(step.kind)
        if step.operation == "reshape":
            parts = find_merged_dimensions(before, factors[0].shape)
        else:
            parts = [[i] for i in _numbers(step.order)]
        if parts is None:
            break
        groups = [[i for dim in group for i in parts[dim]] for group in factors[0].groups]
        factors.insert(0, _Factor(step.source, before, groups))
    return factors


def _numbers(text: str | None) -> list[int]:
    return [int(number) for number in (text or "").split(", ") if number]
