"""Two compiled programs side by side, by the kind of their operations: `tpu_operations.py ONE OTHER [--largest N]`.

Both are texts that `tpu_programs.py --texts DIR` has written, for tpufit and for Keras (`--contender Keras`):

    python tests/benchmarks/tpu_operations.py DIR/tpufit-GPT-4-x-512-v5e-8.txt DIR/Keras-GPT-4-x-512-v5e-8.txt

Bytes are those of operands and results, without padding. If an operation reads a part of an array, the whole array
counts, so the sums are close to the compiler's, but not equal. A core's fast memory and main memory are listed
separately. "Live" is the peak of main memory, without arguments and results.
"""

from __future__ import annotations

import argparse
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tpufit.preflight.hlo import COLLECTIVES, Operation, parse_arrays, parse_operations

_HEAD = re.compile(r"^(ENTRY )?%(\S+) \(.*\{$")
_TYPE = re.compile(r"[a-z]\w*\[[\d,]*\](?:\{[^{}]*\})?")
_PLACES = {  # kinds by the names of scopes and of source files; the first that matches any fused operation counts
    "optimizer": r"~optimizer\||optimizers/|adam_w",
    "norms": r"ops/norms\.py|norm|Norm",
    "loss and metrics": r"~loss and metrics|crossentropy|losses/|metrics/|op_name=\"jit\(step\)/[a-z_]+\"",
    "attention": r"ops/attention\.py|multi_head_attention|softmax",
}
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "partition-id"}
_UNITS = {"count": 1.0, "1,000 cycles": 1e3, "MB, main": 1e6, "MB, fast": 1e6}
_WHOLE = {"s32", "u32", "s64", "u64", "pred"}
_MOVES = {"copy", "transpose", "reshape", "convert", "slice", "concatenate", "pad", "dynamic-slice", "broadcast"}


@dataclass(frozen=True)
class Line:
    """An operation, with the text of its line and the types of its results, with their layouts."""

    made: Operation
    text: str
    types: tuple[str, ...]

    @property
    def calls(self) -> str:
        """The computation that the operation calls: fused operations, or a loop's body."""
        found = re.search(r"\b(?:calls|body)=%([\w.-]+)", self.text)
        return found[1] if found else ""

    @property
    def place(self) -> str:
        """The operation's innermost scope and its source file."""
        return f"~{self.made.layer} {self.text.partition('metadata=')[2].rpartition('~')[2]} ~{self.made.phase}|"


class Text:
    """A program, read from its text."""

    def __init__(self, path: Path) -> None:
        self.parts: dict[str, list[Line]] = {}
        name = self.entry = ""
        for text in path.read_text().splitlines():
            if head := _HEAD.match(text):
                name = head[2]
                self.entry = name if head[1] else self.entry
                self.parts[name] = []
            for made, _ in parse_operations(text):
                types = _TYPE.findall(text.partition(" = ")[2].partition(f" {made.kind}(")[0])
                # For an asynchronous copy, the copy itself.
                types = (
                    types[made.kind == "slice-start" :][:1] if made.kind.startswith(("copy-s", "slice-s")) else types
                )
                self.parts[name].append(Line(made, text, tuple(types)))
        self.made = {line.made.name: line for lines in self.parts.values() for line in lines}
        state = [one.made.arrays[0] for one in self.parts[self.entry] if one.made.kind == "parameter"]
        self.weights = {math.prod(array.shape) for array in state if array.dtype == "f32" and len(array.shape) > 1}

    def own(self, part: str) -> Iterator[Line]:
        """Return the operations of a part, and of its loops' bodies, that compute or move anything."""
        for line in self.parts[part]:
            if line.made.kind == "while":
                yield from self.own(line.calls)
            elif not (line.made.kind in _FREE or line.made.kind.endswith("-done") or "ConcatBitcast" in line.text):
                yield line

    def inner(self, line: Line) -> list[Line]:
        """Return the operations that are fused in an operation, or the operation itself."""
        return [deep for one in self.parts.get(line.calls, ()) for deep in self.inner(one)] or [line]

    def kind(self, line: Line) -> str:
        """Return the kind of an operation's work."""
        kind, inner = line.made.kind.removesuffix("-start"), self.inner(line)
        if kind in COLLECTIVES:
            return "sums between cores"
        for product in (one.made for one in inner if one.made.kind in ("dot", "convolution")):
            sizes = [math.prod(self.made[name].made.arrays[0].shape) for name in (product.name, *product.operands)]
            known = [size in self.weights for size in sizes]
            if known[0]:
                return "products for gradients of weights"
            backward = "~backward|" in line.text or "transpose(jvp" in line.text
            return f"products {'backward' if backward else 'forward'}" if any(known) else "products of activations"
        if kind in ("copy", "slice") or {one.made.kind for one in inner} <= _MOVES | _FREE:
            return "copies, slices and casts"
        # Sums of autograd are in the loss's scope, so only the operation itself identifies the loss.
        places = " ".join(one.place for one in (line, *inner)).replace("~loss and metrics", "") + line.place
        return next((kind for kind, words in _PLACES.items() if re.search(words, places)), "sums for biases, and other")

    def nbytes(self, line: Line) -> Counter[str]:
        """Return the bytes that an operation reads and writes, by memory."""
        operands = [one for name in line.made.operands if name in self.made for one in self.made[name].types]
        if line.made.kind == "slice-start":
            operands = [one.replace("S(1)", "") for one in line.types]
        sums: Counter[str] = Counter()
        for one in (*line.types, *operands):
            sums["MB, fast" if "S(1)" in one else "MB, main"] += sum(array.nbytes for array in parse_arrays(one))
        return sums

    def of_indices(self) -> tuple[int, int]:
        """Return the cycles and the number of operations with only integer results: indices, ranges, random bits."""
        lines = [line for line in self.own(self.entry) if {array.dtype for array in line.made.arrays} <= _WHOLE]
        found = [line.made.cycles for line in lines if any(array.nbytes > 64 for array in line.made.arrays)]
        return sum(found), len(found)

    def fullest(self) -> Counter[str]:
        """Return the bytes in main memory at the program's peak, by the arrays' types."""
        source: dict[str, set[str]] = {}  # the operations whose results a name refers to
        last: dict[str, int] = {}
        lines = self.parts[self.entry]
        for i, line in enumerate(lines):
            found = set().union(*(source.get(name, ()) for name in line.made.operands))
            passes = line.made.kind in ("tuple", "get-tuple-element", "bitcast") or line.made.kind.endswith("-done")
            source[line.made.name] = found if passes else set() if line.made.kind in _FREE else {line.made.name}
            last |= dict.fromkeys(found, i)
        live, most = Counter[str](), Counter[str]()
        ends: dict[int, list[Counter[str]]] = {}
        for i, line in enumerate(lines):
            if source[line.made.name] == {line.made.name} and last.get(line.made.name, len(lines)) < len(lines) - 1:
                arrays = [array for one in line.types if "S(" not in one for array in parse_arrays(one)]
                own = sum((Counter({str(array): array.padded}) for array in arrays), Counter[str]())
                ends.setdefault(last[line.made.name], []).append(own)
                live += own
            most = max(most, live.copy(), key=Counter.total)
            for own in ends.pop(i, ()):
                live -= own
        return most


def compared(texts: Mapping[str, Text]) -> list[list[str]]:
    """Return the operations of both programs by kind, as the rows of a table."""
    sums: dict[str, dict[str, Counter[str]]] = {}
    for name, text in texts.items():
        for line in text.own(text.entry):
            for kind in (text.kind(line), "~all"):
                both = sums.setdefault(kind, {name: Counter() for name in texts})
                both[name].update(text.nbytes(line) + Counter({"count": 1, "1,000 cycles": line.made.cycles}))
    rows = [["operations", *(f"{what}, {name}" for what in _UNITS for name in texts)]]
    for kind, both in sorted(sums.items()):
        cells = [f"{both[name][key] / unit:,.0f}" for key, unit in _UNITS.items() for name in texts]
        rows.append([kind.strip("~"), *cells])
    return rows


def largest(text: Text, count: int) -> list[list[str]]:
    """Return a program's operations that read and write most, as the rows of a table."""
    rows = [["operation", "kind", "of", *list(_UNITS)[1:], "results"]]
    for line in sorted(text.own(text.entry), key=lambda line: -text.nbytes(line).total())[:count]:
        name, sums = re.search(r'op_name="([^"]*)"', line.text), text.nbytes(line)
        sums["1,000 cycles"] = line.made.cycles
        cells = [f"{sums[key] / unit:,.1f}" for key, unit in list(_UNITS.items())[1:]]
        results = ", ".join(str(array) for one in line.types for array in parse_arrays(one))
        rows.append([line.made.name, text.kind(line), name[1].replace("|", " ") if name else "", *cells, results])
    return rows


def show(rows: list[list[str]]) -> None:
    """Print rows as a Markdown table; the first row is the head."""
    for row in [rows[0], ["---"] * len(rows[0]), *rows[1:]]:
        print(f"| {' | '.join(row)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("texts", nargs=2, type=Path)
    parser.add_argument("--largest", type=int, default=0, metavar="N", help="also the N operations with most bytes")
    args = parser.parse_args()
    names = [path.stem.partition("-")[0] for path in args.texts]
    if len({*names}) < len(names):
        names = [path.stem for path in args.texts]
    texts = {name: Text(path) for name, path in zip(names, args.texts, strict=True)}
    show(compared(texts))
    for name, text in texts.items():
        live = text.fullest()
        most = ", ".join(f"{array} {nbytes / 1e6:,.1f}" for array, nbytes in live.most_common(8))
        print(f"\n{name}: {live.total() / 1e6:,.1f} MB live at the fullest moment: {most}\n")
        cycles, count = text.of_indices()
        share = cycles / sum(line.made.cycles for line in text.own(text.entry))
        print(
            f"{name}: {count} operations make whole numbers alone, in {cycles / 1e3:,.0f} thousand cycles ({share:.2%})"
        )
        if args.largest:
            show(largest(text, args.largest))


if __name__ == "__main__":
    main()
