"""How a graph's tensors are split over the cores: `layout_of`, and marks for tensors in the middle of a graph.

TorchTPU has no operation that lays out a tensor. So a trace puts the tensor behind a barrier, together with an empty
tensor, the mark, whose shape encodes the split dimension. `write_layouts` replaces the barrier in the graph's text.
"""

import re
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

_MARK = re.compile(r"( *)(%\S+):2 = stablehlo\.optimization_barrier (%[^,\s]+), %[^,\s]+ : (.+), tensor<0x(\d+)x0xi8>$")
_RESULT = re.compile(r"(%\w+)#0\b")


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


def mark_of(axis: int | None) -> Tensor:
    """Return the empty tensor that marks a split dimension; None marks a whole tensor."""
    return torch.zeros((0, 0 if axis is None else axis + 1, 0), dtype=torch.int8, device="tpu")


def write_layouts(text: str, cores: int) -> str:
    """Return the text with a layout instead of each barrier with a mark.

    Example:
        >>> text = "%1:2 = stablehlo.optimization_barrier %0, %c : tensor<8xi1>, tensor<0x0x0xi8>"
        >>> print(write_layouts(f"{text}\\nreturn %1#0 : tensor<8xi1>", 4))
        %laid_0 = stablehlo.custom_call @Sharding(%0) {mhlo.sharding = "{replicated}"} : (tensor<8xi1>) -> tensor<8xi1>
        return %laid_0 : tensor<8xi1>
    """
    lines = text.split("\n")
    laid: dict[str, str] = {}  # the replacements of the function's results, by name
    count = 0
    for i, line in enumerate(lines):
        if "func.func" in line:
            laid = {}
        if laid and "#" in line:
            line = _RESULT.sub(partial(_result_of, laid), line)
        match = _MARK.match(line)
        if match is not None:
            indent, name, tensor, kind, axis = match.groups()
            layout = layout_of(kind, int(axis) - 1 if axis != "0" else None, cores)
            laid[name] = f"%laid_{count}"
            line = f"{indent}{laid[name]} = stablehlo.custom_call @Sharding({tensor}) {{{layout}}} : ({kind}) -> {kind}"
            count += 1
        lines[i] = line
    return "\n".join(lines)


def _result_of(laid: Mapping[str, str], match: re.Match[str]) -> str:
    """Return the replacement of an operation's first result."""
    return laid.get(match[1], match[0])
