"""`GroupNumbers`: numbers in an optimizer's groups that change between steps, as the momentum does with `OneCycle`.

Callbacks change them, or the optimizer's steps, as in schedule-free optimizers. They stay Python numbers. Only while a
step is traced are they `Traced` numbers, whose computations a `NumberTrace` records. A number that enters a tensor is
an input of the graph. A replay computes the trace again with the current numbers. If a comparison then has another
outcome, the step needs another trace of the numbers, and so another graph.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from ..backend import Placement
from ..errors import ArgumentError
from ..runtime import to_device
from .device_rates import DeviceRates
from .group_options import Options, find_constants, find_inputs, has_inputs, is_numeric, let_vary, runs_numbers
from .traced_number import Traced

# Where a number is: the step, the optimizer, the group, the option, and the position in an option of several numbers.
_Place = tuple[int, int, int, str, int]
Attached = Sequence[tuple[Optimizer, DeviceRates]]
"""The optimizers with rates on the device, and these rates."""


class Number(NamedTuple):
    """An instruction of a trace: take the group's number at a place."""

    place: _Place


class Constant(NamedTuple):
    """An instruction of a trace: take a number that isn't a group's."""

    value: float
    kind: type  # of the value: 1 and 1.0 are equal, but they are different constants


class Computation(NamedTuple):
    """An instruction of a trace: compute a function of two values."""

    function: Callable[[Any, Any], Any]
    left: int  # the index of the value
    right: int


class Check(NamedTuple):
    """An instruction of a trace: compute a function of two values, which must have the same outcome."""

    function: Callable[[Any, Any], Any]
    left: int  # the index of the value
    right: int
    outcome: bool | type[ArithmeticError]  # the class, if the function raises an error


class NumberTrace:
    """The arithmetic that the Python of some steps does on the groups' numbers, and the outcome of each comparison."""

    def __init__(self) -> None:
        self._instructions: list[Number | Constant | Computation | Check] = []
        self._known: dict[Hashable, int] = {}  # the index of each instruction's value; -1 for a check, which has none
        self.values: list[Any] = []
        self.used: dict[int, Tensor] = {}  # the numbers that entered tensors, as inputs of the graph, in order
        self.results: dict[tuple[int, int, str], Any] = {}  # by optimizer, group and name: what the steps have changed
        self.enter: Callable[[int], Tensor] = lambda index: self.used[index]  # makes a number an input

    def record_number(self, place: _Place, value: float) -> Traced:
        """Record a number of a group."""
        return Traced(self, self._record(Number(place), lambda: value))

    def compute(self, function: Callable[[Any, Any], Any], *operands: Any) -> Traced:
        """Compute and record a function of two numbers."""
        left, right = map(self._index, operands)
        try:
            value = partial(function, self.values[left], self.values[right])
            return Traced(self, self._record(Computation(function, left, right), value))
        except ArithmeticError:  # recorded, because the optimizer may catch it
            self._record_check(Check(function, left, right, ArithmeticError))
            raise

    def compare(self, function: Callable[[Any, Any], bool], *operands: Any) -> bool:
        """Compare two numbers and record the outcome; with another outcome, steps need another trace."""
        left, right = map(self._index, operands)
        outcome = function(self.values[left], self.values[right])
        self._record_check(Check(function, left, right, outcome))
        return outcome

    def recompute(self, numbers: dict[_Place, float]) -> list[Any] | None:
        """Compute the values with other numbers of the groups; None if these need another trace."""
        values: list[Any] = []
        for instruction in self._instructions:  # `isinstance`, because this runs at each step, and `match` is slow
            if isinstance(instruction, Computation):
                function, left, right = instruction
                try:
                    values.append(function(values[left], values[right]))
                except ArithmeticError:
                    return None
            elif isinstance(instruction, Check):
                function, left, right, outcome = instruction
                try:
                    result = function(values[left], values[right])
                except ArithmeticError:
                    result = ArithmeticError
                if result is not outcome:
                    return None
            elif isinstance(instruction, Number):
                values.append(numbers[instruction.place])
            else:
                values.append(instruction.value)
        return values

    def _index(self, operand: Any) -> int:
        """Return the index of an operand's value; an operand that isn't `Traced` is a constant."""
        if isinstance(operand, Traced):
            return operand.index
        return self._record(Constant(operand, type(operand)), lambda: operand)

    def _record(self, instruction: Number | Constant | Computation, value: Callable[[], Any]) -> int:
        if instruction not in self._known:
            self.values.append(value())
            self._known[instruction] = len(self.values) - 1
            self._instructions.append(instruction)
        return self._known[instruction]

    def _record_check(self, check: Check) -> None:
        if check not in self._known:
            self._known[check] = -1
            self._instructions.append(check)


class GroupNumbers:
    """The numbers in the optimizers' groups that change between steps, and the traces that steps have taken so far.

    Attributes:
        changed: The values before and after the last change that made an option an input, by the option's name.
    """

    def __init__(self) -> None:
        self.changed: dict[str, tuple[Any, Any]] = {}
        self._traces: dict[Hashable, list[NumberTrace]] = {}
        self._constants: dict[Optimizer, list[Options]] = {}  # for each group the options that are part of the graph
        self._steps: list[dict[Optimizer, list[Options]]] = []  # the others, for each step noted since the last `find`
        self._numbers: dict[_Place, float] = {}
        self._trace = NumberTrace()  # of the last trace
        self._varying: list[tuple[int, Optimizer, DeviceRates]] = []  # the optimizers with such numbers
        # Of the next steps.
        self._base: Hashable = None
        self._at = 0  # the number of their trace
        self._sent: list[float] = []  # the numbers that were sent for this trace
        self._results: dict[tuple[int, int, str], Any] = {}
        self._inputs: list[Tensor] = []
        self._first = 0  # the first of the inputs that are numbers

    def note_step(self, attached: Attached, joined: bool) -> None:
        """Note the options of the next step. A number that has changed is an input from now on.

        Args:
            attached: The optimizers.
            joined: True if the step is in one graph with the step that was noted before.

        Raises:
            ArgumentError: Another option has changed between two steps of one graph.
        """
        if not joined:
            self._steps = []
        for optimizer, _ in attached:
            constants = [find_constants(group) for group in optimizer.param_groups]
            before = self._constants.get(optimizer)
            if before is not None and before != constants:
                for at, (old, new) in enumerate(zip(before, constants, strict=False)):
                    self._note_changes(optimizer, at, old, new, joined)
                constants = [find_constants(group) for group in optimizer.param_groups]
            self._constants[optimizer] = constants
        self._steps.append(_read_inputs(attached))

    def _note_changes(self, optimizer: Optimizer, at: int, old: Options, new: Options, joined: bool) -> None:
        group = optimizer.param_groups[at]
        for name in old.keys() & new.keys():
            if old[name] == new[name]:
                continue
            if is_numeric(old[name]) and is_numeric(group[name]):
                self.changed[name] = old[name], new[name]
                let_vary(group, name)
                for step in self._steps:  # earlier steps had the old value
                    step[optimizer][at][name] = old[name]
            elif joined:
                raise ArgumentError(
                    f"{name} in the optimizer's param_groups has changed from {old[name]!r} to {new[name]!r} between "
                    "two steps that run as one graph, where only numbers may change: compile with "
                    "steps_per_execution=1, or change it between epochs"
                )

    def find(
        self, key: Hashable, attached: Attached, placement: Placement, steps: int
    ) -> tuple[tuple[int, ...], list[Tensor]]:
        """Find the trace that the next steps take.

        Returns:
            The trace's part of the graph's key, and the inputs that it adds: none before its first trace, which adds
            the inputs itself.
        """
        self._varying = [(i, *pair) for i, pair in enumerate(attached) if has_inputs(pair[0])]
        self._placement = placement
        noted, self._steps = self._steps, []
        if not self._varying:
            return (), []
        if len(noted) != steps:  # nothing has changed between them
            noted = [_read_inputs(attached)] * steps
        self._numbers = {}
        for i, optimizer, rates in self._varying:
            for step, options in enumerate(noted):
                for j, group in enumerate(options[optimizer]):
                    for name, option in group.items():
                        for part, number in enumerate(_list(option)):
                            self._numbers[step, i, j, name, part] = number
            if runs_numbers(optimizer):
                for step, row in enumerate(rates.sent):
                    self._numbers |= {(step, i, j, "lr", 0): rate for j, rate in enumerate(row)}
        self._base = key
        traces = self._traces.setdefault(key, [])
        for self._at, trace in enumerate(traces):
            values = trace.recompute(self._numbers)
            if values is not None:
                self._results = _evaluate(trace.results, values)
                self._sent = [values[index] for index in trace.used]
                return (self._at,), to_device([_as_tensor(value) for value in self._sent], placement)
        self._at = len(traces)
        self._sent = []
        return (self._at,), []

    @contextmanager
    def in_steps(self, inputs: list[Tensor]) -> Iterator[Callable[[int], None]]:
        """A context for tracing steps, at whose end the groups get their numbers back.

        The graph's `inputs` end with the inputs of the trace. The context yields a function to call with the number
        of each step before it runs.
        """
        if not self._varying:
            yield lambda step: None
            return
        self._trace = trace = NumberTrace()
        self._inputs = inputs
        self._first = len(inputs) - len(self._sent)
        trace.enter = self._enter
        groups = [
            (i, j, group, [*find_inputs(group), *(["lr"] if runs_numbers(optimizer) else [])])
            for i, optimizer, _ in self._varying
            for j, group in enumerate(optimizer.param_groups)
        ]
        before = [dict(group) for _, _, group, _ in groups]
        given: dict[tuple[int, int, str], Any] = {}

        def as_traced(place: tuple[int, int, int, str], option: Any) -> Any:
            places = [(*place, part) for part in range(len(_list(option)))]
            numbers = [trace.record_number(each, self._numbers[each]) for each in places]
            return type(option)(numbers) if isinstance(option, (tuple, list)) else numbers[0]

        def use(step: int) -> None:
            for (i, j, group, names), options in zip(groups, before, strict=True):
                for name in names:
                    # Keep the options that an earlier step has changed.
                    if name == "lr" or group[name] is given.get((i, j, name), group[name]):
                        given[i, j, name] = group[name] = as_traced((step, i, j, name), options[name])

        try:
            yield use
            for i, j, group, _ in groups:
                trace.results |= {
                    (i, j, name): value
                    for name, value in group.items()
                    if name != "lr" and value is not given.get((i, j, name)) and _holds_traced(value)
                }
        finally:
            for (_, _, group, names), values in zip(groups, before, strict=True):
                group.update({key: values.get(key) for key in group if key in names or _holds_traced(group[key])})

    def _enter(self, index: int) -> Tensor:
        """Return a number of the trace as an input of the graph."""
        trace = self._trace
        at = len(self._trace.used)
        if index not in trace.used:
            value = trace.values[index]
            if at < len(self._sent) and self._sent[at] == value:
                trace.used[index] = self._inputs[self._first + at]
            else:
                (trace.used[index],) = to_device([_as_tensor(value)], self._placement)
                self._inputs.append(trace.used[index])
        return trace.used[index]

    def note_trace(self) -> bool:
        """Note that the steps have been traced and run: give the groups their new numbers.

        Returns:
            True if the trace is new, and steps of the same key have taken another one before.
        """
        if not self._varying:
            return False
        trace = self._trace
        traces = self._traces[self._base]
        new = self._at == len(traces) > 0
        traces[self._at :] = [trace, *traces[self._at + 1 :]]
        self._results = _evaluate(trace.results, trace.values)
        self.note_replay()
        return new

    def note_replay(self) -> None:
        """Note that the steps have run without their Python: give the groups the numbers that it would have set."""
        for i, optimizer, _ in self._varying:
            for j, group in enumerate(optimizer.param_groups):
                group.update({name: value for (o, g, name), value in self._results.items() if (o, g) == (i, j)})


def _read_inputs(attached: Attached) -> dict[Optimizer, list[Options]]:
    return {optimizer: [find_inputs(group) for group in optimizer.param_groups] for optimizer, _ in attached}


def _as_tensor(number: float) -> Tensor:
    return torch.tensor(number, dtype=torch.float32)


def _list(option: Any) -> Sequence[float]:
    return option if isinstance(option, (tuple, list)) else [option]


def _holds_traced(value: Any) -> bool:
    return any(isinstance(part, Traced) for part in (value if isinstance(value, (tuple, list)) else [value]))


def _evaluate(results: Mapping[Any, Any], values: Sequence[Any]) -> dict[Any, Any]:
    """Return results with numbers for `Traced` numbers."""
    numbers: dict[Any, Any] = tree_map_only(Traced, lambda number: values[number.index], dict(results))
    return numbers
