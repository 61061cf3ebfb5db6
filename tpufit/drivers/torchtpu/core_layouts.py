"""How a graph's tensors are split over the cores: `layout_of`, and `write_layouts` for tensors inside a graph.

TorchTPU has no operations for this, so a trace only marks these tensors, see `graph_marks`.
"""

import re
from functools import partial

from .graph_marks import Kind, Marked, Replacement, replace_marked

_MANUAL = 'mhlo.sharding = "{manual}"'  # each core has its own tensor


def layout_of(kind: str, axis: int | None, cores: int) -> str:
    """Return the attribute that describes how a tensor is split over the cores.

    Args:
        kind: The tensor's type in StableHLO.
        axis: The dimension along which the tensor is split; None: each core has the whole tensor.
        cores: The number of cores.

    Example:
        >>> layout_of("tensor<8x3xf32>", 0, 4)
        'mhlo.sharding = "{devices=[4,1]<=[4]}"'
    """
    if axis is None:
        return 'mhlo.sharding = "{replicated}"'
    tiles = ",".join(str(cores if i == axis else 1) for i in range(len(re.findall(r"\d+x", kind))))
    return f'mhlo.sharding = "{{devices=[{tiles}]<=[{cores}]}}"'


def write_layouts(text: str, cores: int) -> str:
    """Return the text with layouts in place of their marks.

    Example:
        >>> text = "%1:2 = stablehlo.optimization_barrier %0, %c : tensor<8xi1>, tensor<0x0x0x0xi8>"
        >>> print(write_layouts(f"{text}\\nreturn %1#0 : tensor<8xi1>", 4))
        %laid_0 = stablehlo.custom_call @Sharding(%0) {mhlo.sharding = "{replicated}"} : (tensor<8xi1>) -> tensor<8xi1>
        return %laid_0 : tensor<8xi1>
    """
    return replace_marked(text, "laid", partial(_write, cores))


def _write(cores: int, marked: Marked) -> Replacement | None:
    operand = marked.operands[0]
    before = marked.types[0]
    if marked.kind is Kind.LAYOUT:
        layout = layout_of(before, marked.number - 1 if marked.number else None, cores)
        return [_call(marked.new, "Sharding", layout, operand, before, before)], [marked.new]
    if marked.kind not in (Kind.TO_CORE, Kind.FROM_CORE):
        return None
    after = marked.types[1]
    step, last = f"{marked.new}_0", f"{marked.new}_1"
    if marked.kind is Kind.TO_CORE:
        steps = ("Sharding", layout_of(before, 0, cores)), ("SPMDFullToShardShape", _MANUAL)
    else:
        steps = ("Sharding", _MANUAL), ("SPMDShardToFullShape", layout_of(after, 0, cores))
    lines = [
        _call(step, *steps[0], operand=operand, before=before, after=before),
        _call(last, *steps[1], operand=step, before=before, after=after),
    ]
    return lines, [operand, last]


def _call(name: str, target: str, layout: str, operand: str, before: str, after: str) -> str:
    return f"{name} = stablehlo.custom_call @{target}({operand}) {{{layout}}} : ({before}) -> {after}"
