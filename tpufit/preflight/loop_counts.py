"""`Loops`: counts how often each computation of an XLA program runs, where the loops' counters can be evaluated.

The compiler's figures count the body of a loop only once, so the estimate for a net with loops would be too low.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .hlo import find_end_of_type

_BEGINS = re.compile(r"^(?:ENTRY )?%?(\S+) \(.*\{$")
_LINE = re.compile(r"^\s+(?:ROOT )?%(\S+) = (.*)")
_INTEGER = re.compile(r"^\(*(?:([su])(\d+)|(pred))\[\]")
_OPERAND = re.compile(r"%([\w.-]+)")
_CALLED = re.compile(r"\b(?:body|condition|calls|to_apply|\w+_computations?)=\{?((?:%[\w.-]+(?:, )?)+)")
_LOOP = re.compile(r"condition=%([\w.-]+), body=%([\w.-]+)")
_MAX_ITERATIONS = 1 << 16  # the most iterations that are evaluated
_PASSED_ON = ("copy", "copy-start", "copy-done", "bitcast", "bitcast-convert", "convert", "reshape")
_COMPARED = {
    "EQ": operator.eq, "NE": operator.ne, "LT": operator.lt, "LE": operator.le, "GT": operator.gt, "GE": operator.ge,
}  # fmt: skip
_COMPUTED: dict[str, Callable[..., int]] = {
    "add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "negate": operator.neg, "minimum": min,
    "maximum": max, "and": operator.and_, "or": operator.or_, "xor": operator.xor, "not": operator.invert,
    "select": lambda chosen, a, b: a if chosen else b,
}  # fmt: skip

_Arguments = Callable[[int], "int | None"]  # returns an argument of a computation by its position


@dataclass(frozen=True)
class _Instruction:
    """A line of a program: its type, its operation, the names of its operands, and its attributes."""

    type: str
    kind: str
    operands: tuple[str, ...]
    rest: str

    @classmethod
    def of(cls, text: str) -> _Instruction:
        end = find_end_of_type(text, 0)
        kind, _, rest = text[end + 1 :].partition("(")
        operands, _, rest = rest.partition(")")
        # The operand of a constant is its value, and of a parameter its position.
        return cls(text[:end], kind, tuple(_OPERAND.findall(operands)), f"{operands}){rest}")


class Loops:
    """The loops of a program."""

    def __init__(self, text: str) -> None:
        self.run_counts: dict[str, int] = {}  # how often each computation runs, by its name, if not once
        self.bodies: dict[str, str] = {}  # the computation that contains each loop, by the loop's body
        self.unknown = 0  # the number of loops whose iterations can't be counted; they count as one
        self._computations: dict[str, dict[str, str]] = {}
        self._roots: dict[str, str] = {}
        # By a loop's body: the computation that contains the loop, and the loop's initial state.
        self._initial: dict[str, tuple[str, str]] = {}
        if " while(" in text:
            self._read(text)
            self._count()

    def _read(self, text: str) -> None:
        lines: dict[str, str] = {}
        computation = ""
        for line in text.splitlines():
            begins = _BEGINS.match(line)
            if begins:
                computation = begins[1]
                lines = self._computations[computation] = {}
                continue
            match = _LINE.match(line)
            if match:
                lines[match[1]] = match[2]
                if line.lstrip().startswith("ROOT "):
                    self._roots[computation] = match[1]

    def _count(self) -> None:
        # A computation precedes its callers in the text.
        *_, entry = self._computations
        times = {entry: 1}
        for computation in reversed(self._computations):
            for line in self._computations[computation].values():
                called = [name for names in _CALLED.findall(line) for name in _OPERAND.findall(names)]
                runs = times.get(computation, 1)
                if " while(" in line:
                    runs *= self._count_iterations(computation, _Instruction.of(line))
                for name in called:
                    times[name] = max(runs, times.get(name, 0))
        self.run_counts = {computation: count for computation, count in times.items() if count != 1}

    def _count_iterations(self, computation: str, line: _Instruction) -> int:
        """Count the iterations of a loop."""
        match = _LOOP.search(line.rest)
        assert match, line.rest
        condition, body = match.groups()
        self.bodies[body] = computation
        self._initial[body] = computation, line.operands[0]
        end = _Instruction.of(self._computations[body][self._roots[body]]).operands
        # The parts of the loop's state on which its condition depends.
        needed: set[int] = set()
        new = self._find_dependencies(condition, self._roots[condition])
        while new:
            needed |= new
            new = set().union(*(self._find_dependencies(body, end[i]) for i in new if i < len(end))) - needed
        state: dict[int, int | None] = {i: self._evaluate_initial(body, i) for i in needed}
        for iteration in range(_MAX_ITERATIONS):
            continues = self._evaluate(condition, self._roots[condition], state.get)
            if continues is None:
                break
            if not continues:
                return iteration
            state = {i: self._evaluate(body, end[i], state.get) for i in needed}
        self.unknown += 1
        return 1

    def _find_dependencies(self, computation: str, name: str) -> set[int]:
        """Return the positions of the arguments on which a value of a computation depends."""
        positions: set[int] = set()

        def note(position: int) -> int:
            positions.add(position)
            return 0

        self._evaluate(computation, name, note)
        return positions

    def _evaluate_initial(self, body: str, position: int) -> int | None:
        """Return the initial value of a part of a loop's state."""
        computation, name = self._initial[body]
        begin = _Instruction.of(self._computations[computation][name])
        if begin.kind != "tuple" or position >= len(begin.operands):
            return None
        return self._evaluate(computation, begin.operands[position], lambda i: self._evaluate_constant(computation, i))

    def _evaluate_constant(self, body: str, position: int) -> int | None:
        """Return a part of a loop's state that no iteration changes; None if it changes."""
        if body not in self._initial:
            return None
        name = _Instruction.of(self._computations[body][self._roots[body]]).operands[position]
        line = _Instruction.of(self._computations[body][name])
        while line.kind == "copy":
            line = _Instruction.of(self._computations[body][line.operands[0]])
        same = line.kind == "get-tuple-element" and f"index={position}" in re.split(r"[,\s]+", line.rest)
        return self._evaluate_initial(body, position) if same else None

    def _evaluate(self, computation: str, name: str, arguments: _Arguments) -> int | None:
        """Evaluate a value of a computation; None if it isn't an integer, or depends on an unknown value."""
        line = _Instruction.of(self._computations[computation][name])
        type_of = _INTEGER.match(line.type)
        if type_of is None:
            return None
        if line.kind == "constant":
            value = line.rest.partition(")")[0]
            return {"true": 1, "false": 0}[value] if type_of[3] else int(value)
        if line.kind == "parameter":
            return arguments(int(line.rest.partition(")")[0]))
        if line.kind == "get-tuple-element":
            index = re.search(r"index=(\d+)", line.rest)
            source = _Instruction.of(self._computations[computation][line.operands[0]])
            return arguments(int(index[1])) if index and source.kind == "parameter" else None
        values = [self._evaluate(computation, operand, arguments) for operand in line.operands]
        if line.kind == "fusion":  # a separate computation, whose parameters are the operands
            (called,) = re.findall(r"calls=%([\w.-]+)", line.rest)
            return self._evaluate(called, self._roots[called], lambda i: values[i])
        known = [value for value in values if value is not None]
        if len(known) < len(values):
            return None
        if line.kind == "compare":
            direction = re.search(r"direction=(\w+)", line.rest)
            return int(_COMPARED[direction[1]](*known)) if direction else None
        if line.kind in _PASSED_ON:
            return _wrap(known[0], type_of)
        return _wrap(_COMPUTED[line.kind](*known), type_of) if line.kind in _COMPUTED else None

    def count_repeats(self, costs: Mapping[str, Mapping[str, float]], figure: str) -> float:
        """Return the part of a figure that the compiler omits, because it counts each loop's body once.

        Args:
            costs: The figures of one iteration of each loop, by its body.
            figure: The name of the figure, e.g. `"flops"`.
        """
        return sum(
            (self.run_counts.get(body, 1) - self.run_counts.get(computation, 1)) * costs[body][figure]
            for body, computation in self.bodies.items()
        )


def _wrap(value: int, type_of: re.Match[str]) -> int:
    """Wrap a number to the range of an integer type."""
    sign, bits, is_bool = type_of.groups()
    if is_bool:
        return value & 1
    value &= (1 << int(bits)) - 1
    return value - (1 << int(bits)) if sign == "s" and value >> (int(bits) - 1) else value
