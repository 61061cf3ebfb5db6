"""`narrow_indices`: rewrites the text of a graph so that gathers and scatters take 32-bit indices, for several cores.

XLA's partitioner pads indices that can't be divided evenly with a 32-bit number, and crashes if the indices have 64
bits. `drivers/xla/narrow_indices.py` does the same before the graph is built.
"""

import re

_INDEXED = re.compile(r'( *)%\S+ = "stablehlo\.(gather|dynamic_gather|scatter)"\(([^)]*)\)')
_TYPES = re.compile(r" : \((.*?)\) -> ")


def narrow_indices(text: str) -> str:
    """Insert a conversion before each operation that takes 64-bit indices.

    Example:
        >>> text = '%1 = "stablehlo.gather"(%0, %i) <{}> : (tensor<9xf32>, tensor<4x1xi64>) -> tensor<4xf32>'
        >>> print(narrow_indices(text))
        %narrow_0 = stablehlo.convert %i : (tensor<4x1xi64>) -> tensor<4x1xi32>
        %1 = "stablehlo.gather"(%0, %narrow_0) <{}> : (tensor<9xf32>, tensor<4x1xi32>) -> tensor<4xf32>
    """
    lines = text.split("\n")
    before: dict[int, str] = {}
    for i, line in enumerate(lines):
        match = _INDEXED.match(line)
        if match is None:
            continue
        indent, name, arguments = match.groups()
        operands = arguments.split(", ")
        at = (
            (len(operands) - 1) // 2 if name == "scatter" else 1
        )  # the indices follow the tensors that are read or written
        region = f"{indent}}}"  # the end of the operation's region, if it has one; the types follow it
        ends = (j for j in range(i, len(lines)) if j == i or lines[j].startswith(region))
        end = next(j for j in ends if _TYPES.search(lines[j]))
        types = _TYPES.search(lines[end])
        assert types is not None
        kinds = types[1].split(", ")
        wide = kinds[at]
        if not wide.endswith("i64>"):
            continue
        kinds[at] = wide.replace("i64>", "i32>")
        new = f"%narrow_{len(before)}"
        before[i] = f"{indent}{new} = stablehlo.convert {operands[at]} : ({wide}) -> {kinds[at]}"
        operands[at] = new
        lines[i] = f"{line[: match.start(3)]}{', '.join(operands)}{line[match.end(3) :]}"
        lines[end] = lines[end].replace(types[1], ", ".join(kinds), 1)
    return "\n".join(f"{before[i]}\n{line}" if i in before else line for i, line in enumerate(lines))
