"""`Loops`: how often each computation of an XLA program runs, as far as the counters of its loops can be computed.

The compiler's figures take the body of a loop once, however often it turns.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .hlo import end_of_type

_BEGINS = re.compile(r"^(?:ENTRY )?%?(\S+) \(.*\{$")
_LINE = re.compile(r"^\s+(?:ROOT )?%(\S+) = (.*)")
_INTEGER = re.compile(r"^\(*(?:([su])(\d+)|(pred))\[\]")
_OPERAND = re.compile(r"%([\w.-]+)")
_CALLED = re.compile(r"\b(?:body|condition|calls|to_apply|\w+_computations?)=\{?((?:%[\w.-]+(?:, )?)+)")
_LOOP = re.compile(r"condition=%([\w.-]+), body=%([\w.-]+)")
_MOST = 1 << 16  # turns that are tried
_PASSED_ON = ("copy", "copy-start", "copy-done", "bitcast", "bitcast-convert", "convert", "reshape")
_COMPARED = {
    "EQ": operator.eq, "NE": operator.ne, "LT": operator.lt, "LE": operator.le, "GT": operator.gt, "GE": operator.ge,
}  # fmt: skip
_COMPUTED: dict[str, Callable[..., int]] = {
    "add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "negate": operator.neg, "minimum": min,
    "maximum": max, "and": operator.and_, "or": operator.or_, "xor": operator.xor, "not": operator.invert,
    "select": lambda chosen, a, b: a if chosen else b,
}  # fmt: skip

_Given = Callable[[int], "int | None"]  # what a computation is given, by its place


@dataclass(frozen=True)
class _Instruction:
    """A line of a program: its type, its operation, the names of what it takes, and what follows."""

    type: str
    kind: str
    operands: tuple[str, ...]
    rest: str

    @classmethod
    def of(cls, text: str) -> _Instruction:
        end = end_of_type(text, 0)
        kind, _, rest = text[end + 1 :].partition("(")
        given, _, rest = rest.partition(")")
        # Of a constant or a parameter, what it is given is its value or its place.
        return cls(text[:end], kind, tuple(_OPERAND.findall(given)), f"{given}){rest}")


class Loops:
    """The loops of a program."""

    def __init__(self, text: str) -> None:
        # How often each computation runs in which there is a loop or that is in one, by its name.
        self.turns: dict[str, int] = {}
        self.bodies: dict[str, str] = {}  # of each loop, with the computation that the loop is in
        self.unknown = 0  # loops whose turns can't be computed, and are taken to be one
        self._computations: dict[str, dict[str, str]] = {}
        self._roots: dict[str, str] = {}
        # By its body: the computation that a loop is in, and what it begins with.
        self._begun: dict[str, tuple[str, str]] = {}
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
            found = _LINE.match(line)
            if found:
                lines[found[1]] = found[2]
                if line.lstrip().startswith("ROOT "):
                    self._roots[computation] = found[1]

    def _count(self) -> None:
        # A computation stands before those that call it.
        *_, entry = self._computations
        times = {entry: 1}
        for computation in reversed(self._computations):
            for line in self._computations[computation].values():
                called = [name for names in _CALLED.findall(line) for name in _OPERAND.findall(names)]
                own = times.get(computation, 1)
                if " while(" in line:
                    own *= self._turns(computation, _Instruction.of(line))
                for name in called:
                    times[name] = max(own, times.get(name, 0))
        self.turns = {computation: count for computation, count in times.items() if count != 1}

    def _turns(self, computation: str, line: _Instruction) -> int:
        """How often a loop turns each time that it begins."""
        found = _LOOP.search(line.rest)
        assert found, line.rest
        condition, body = found.groups()
        self.bodies[body] = computation
        self._begun[body] = computation, line.operands[0]
        end = _Instruction.of(self._computations[body][self._roots[body]]).operands
        # The places of the loop's state that its end depends on.
        needed: set[int] = set()
        new = self._asked(condition, self._roots[condition])
        while new:
            needed |= new
            new = set().union(*(self._asked(body, end[i]) for i in new if i < len(end))) - needed
        state: dict[int, int | None] = {i: self._first(body, i) for i in needed}
        for turn in range(_MOST):
            goes_on = self._value(condition, self._roots[condition], state.get)
            if goes_on is None:
                break
            if not goes_on:
                return turn
            state = {i: self._value(body, end[i], state.get) for i in needed}
        self.unknown += 1
        return 1

    def _asked(self, computation: str, name: str) -> set[int]:
        """The places of what a computation is given that a value of it depends on."""
        asked: set[int] = set()

        def given(place: int) -> int:
            asked.add(place)
            return 0

        self._value(computation, name, given)
        return asked

    def _first(self, body: str, place: int) -> int | None:
        """What a loop's state is at its first turn, at a place."""
        computation, name = self._begun[body]
        begin = _Instruction.of(self._computations[computation][name])
        if begin.kind != "tuple" or place >= len(begin.operands):
            return None
        return self._value(computation, begin.operands[place], lambda i: self._constant(computation, i))

    def _constant(self, body: str, place: int) -> int | None:
        """What a loop's state is at a place, if no turn changes it."""
        if body not in self._begun:
            return None
        name = _Instruction.of(self._computations[body][self._roots[body]]).operands[place]
        line = _Instruction.of(self._computations[body][name])
        while line.kind == "copy":
            line = _Instruction.of(self._computations[body][line.operands[0]])
        same = line.kind == "get-tuple-element" and f"index={place}" in re.split(r"[,\s]+", line.rest)
        return self._first(body, place) if same else None

    def _value(self, computation: str, name: str, given: _Given) -> int | None:
        """A number of a computation; None if it isn't a whole one, or depends on what isn't known."""
        line = _Instruction.of(self._computations[computation][name])
        type_of = _INTEGER.match(line.type)
        if type_of is None:
            return None
        if line.kind == "constant":
            value = line.rest.partition(")")[0]
            return {"true": 1, "false": 0}[value] if type_of[3] else int(value)
        if line.kind == "parameter":
            return given(int(line.rest.partition(")")[0]))
        if line.kind == "get-tuple-element":
            index = re.search(r"index=(\d+)", line.rest)
            of = _Instruction.of(self._computations[computation][line.operands[0]])
            return given(int(index[1])) if index and of.kind == "parameter" else None
        values = [self._value(computation, operand, given) for operand in line.operands]
        if line.kind == "fusion":  # a computation of its own, whose parameters are the operands
            (called,) = re.findall(r"calls=%([\w.-]+)", line.rest)
            return self._value(called, self._roots[called], lambda i: values[i])
        known = [value for value in values if value is not None]
        if len(known) < len(values):
            return None
        if line.kind == "compare":
            direction = re.search(r"direction=(\w+)", line.rest)
            return int(_COMPARED[direction[1]](*known)) if direction else None
        if line.kind in _PASSED_ON:
            return _fitted(known[0], type_of)
        return _fitted(_COMPUTED[line.kind](*known), type_of) if line.kind in _COMPUTED else None

    def beyond_once(self, costs: Mapping[str, Mapping[str, float]], figure: str) -> float:
        """What a figure of a program leaves out, which takes each body once; so do the costs of each body."""
        return sum(
            (self.turns.get(body, 1) - self.turns.get(computation, 1)) * costs[body][figure]
            for body, computation in self.bodies.items()
        )


def _fitted(value: int, type_of: re.Match[str]) -> int:
    """A number as it is in a type of so many bits."""
    sign, bits, is_bool = type_of.groups()
    if is_bool:
        return value & 1
    value &= (1 << int(bits)) - 1
    return value - (1 << int(bits)) if sign == "s" and value >> (int(bits) - 1) else value
