"""`GroupNumbers`: numbers in an optimizer's groups that its steps change, as schedule-free optimizers do.

They stay Python numbers. Only while a step is traced they are `Traced` numbers, whose computations a `Course` records.
A number that enters a tensor is an input of the graph. A replay computes the course again with the current numbers. If
a comparison then has another outcome, the step takes another course and is traced.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..backend import Placement
from ..runtime import to_device
from .device_rates import DeviceRates
from .rates import RUNNING, runs_numbers
from .traced import Traced

_Place = tuple[int, int, int, str]  # where a number is: the step, the optimizer, the group, the key
Attached = Sequence[tuple[Optimizer, DeviceRates]]
"""The optimizers with rates on the device, and these rates."""


class Course:
    """A record of what the Python of some steps computes from the groups' numbers, and of its comparisons."""

    def __init__(self) -> None:
        self._lines: list[tuple[Any, ...]] = []
        self._known: dict[Hashable, int] = {}
        self.values: list[Any] = []
        self.used: dict[int, Tensor] = {}  # the numbers that entered tensors, as inputs of the graph, in order
        self.results: dict[_Place, int] = {}  # the groups' final numbers
        self.enter: Callable[[int], Tensor] = lambda index: self.used[index]  # makes a number an input

    def number(self, source: Any, value: float) -> Traced:
        """Record a number of a group, whose source is its place, or a constant, whose source is its value."""
        return Traced(self, self._line((None, type(source), source, None), lambda: value))

    def compute(self, function: Callable[[Any, Any], Any], *operands: Any) -> Traced:
        """Compute and record a function of two numbers."""
        at = [self._index(operand) for operand in operands]
        left, right = (self.values[i] for i in at)
        try:
            return Traced(self, self._line((function, None, *at), lambda: function(left, right)))
        except ArithmeticError:  # recorded, because the optimizer may catch it
            self._check((function, ArithmeticError, *at))
            raise

    def compare(self, function: Callable[[Any, Any], bool], *operands: Any) -> bool:
        """Compare two numbers and record the outcome; with another outcome, steps take another course."""
        left, right = (self._index(operand) for operand in operands)
        outcome = function(self.values[left], self.values[right])
        self._check((function, outcome, left, right))
        return outcome

    def recompute(self, numbers: dict[_Place, float]) -> list[Any] | None:
        """Compute the course with other numbers; None if these take another course."""
        values: list[Any] = []
        for function, kind, left, right in self._lines:
            if function is None:
                values.append(numbers[left] if kind is tuple else left)
                continue
            try:
                result = function(values[left], values[right])
            except ArithmeticError:
                if kind is not ArithmeticError:
                    return None
                continue
            if kind is None:
                values.append(result)
            elif result is not kind:
                return None
        return values

    def _index(self, operand: Any) -> int:
        return operand.index if isinstance(operand, Traced) else self.number(operand, operand).index

    def _check(self, line: tuple[Any, ...]) -> None:
        if line not in self._known:
            self._known[line] = -1  # no value
            self._lines.append(line)

    def _line(self, line: tuple[Any, ...], value: Callable[[], Any]) -> int:
        if line not in self._known:
            self.values.append(value())
            self._known[line] = len(self.values) - 1
            self._lines.append(line)
        return self._known[line]


class GroupNumbers:
    """The numbers that optimizers' steps change in their groups, and the courses that steps have taken so far."""

    def __init__(self) -> None:
        self._courses: dict[Hashable, list[Course]] = {}
        self._numbers: dict[_Place, float] = {}
        self._course = Course()  # of the last trace
        self._running: list[tuple[int, Optimizer, DeviceRates]] = []
        # Of the next steps.
        self._base: Hashable = None
        self._at = 0  # the number of their course
        self._sent: list[float] = []  # the numbers that were sent for this course
        self._results: dict[_Place, float] = {}
        self._inputs: list[Tensor] = []
        self._first = 0  # the first of the inputs that are numbers

    def find(self, key: Hashable, attached: Attached, placement: Placement) -> tuple[tuple[int, ...], list[Tensor]]:
        """Find the course that the next steps take.

        Returns:
            The course's part of the graph's key, and the inputs that it adds: none before its first trace, which adds
            the inputs itself.
        """
        self._running = [(i, *pair) for i, pair in enumerate(attached) if runs_numbers(pair[0])]
        self._placement = placement
        if not self._running:
            return (), []
        self._numbers = {
            (0, i, j, name): group[name]
            for i, optimizer, _ in self._running
            for j, group in enumerate(optimizer.param_groups)
            for name in RUNNING
            if name in group
        }
        for i, _, rates in self._running:
            for step, row in enumerate(rates.sent):
                self._numbers |= {(step, i, j, "lr"): rate for j, rate in enumerate(row)}
        self._base = key
        courses = self._courses.setdefault(key, [])
        for self._at, course in enumerate(courses):
            values = course.recompute(self._numbers)
            if values is not None:
                self._results = {place: values[index] for place, index in course.results.items()}
                self._sent = [values[index] for index in course.used]
                return (self._at,), to_device([torch.tensor(float(v)) for v in self._sent], placement)
        self._at = len(courses)
        self._sent = []
        return (self._at,), []

    @contextmanager
    def in_steps(self, inputs: list[Tensor]) -> Iterator[Callable[[int], None]]:
        """A context for tracing steps, at whose end the groups get their numbers back.

        The graph's `inputs` end with the inputs of the course. The context yields a function to call with the number
        of each step before it runs.
        """
        if not self._running:
            yield lambda step: None
            return
        self._course = course = Course()
        self._inputs = inputs
        self._first = len(inputs) - len(self._sent)
        course.enter = self._enter
        groups = [(i, j, group) for i, o, _ in self._running for j, group in enumerate(o.param_groups)]
        before = [dict(group) for *_, group in groups]

        def use(step: int) -> None:
            for i, j, group in groups:
                group["lr"] = course.number((step, i, j, "lr"), self._numbers[step, i, j, "lr"])

        for i, j, group in groups:
            for name in RUNNING:
                if name in group:
                    group[name] = course.number((0, i, j, name), group[name])
        try:
            yield use
            for i, j, group in groups:
                course.results |= {
                    (0, i, j, name): value.index
                    for name, value in group.items()
                    if isinstance(value, Traced) and name != "lr"
                }
        finally:
            for (*_, group), values in zip(groups, before, strict=True):
                group.update(values)

    def _enter(self, index: int) -> Tensor:
        """Return a number of the course as an input of the graph."""
        course = self._course
        at = len(self._course.used)
        if index not in course.used:
            value = course.values[index]
            if at < len(self._sent) and self._sent[at] == value:
                course.used[index] = self._inputs[self._first + at]
            else:
                (course.used[index],) = to_device([torch.tensor(float(value))], self._placement)
                self._inputs.append(course.used[index])
        return course.used[index]

    def note_trace(self) -> None:
        """Note that the steps have been traced and run: give the groups their new numbers."""
        if self._running:
            course = self._course
            courses = self._courses[self._base]
            courses[self._at :] = [course, *courses[self._at + 1 :]]
            self._results = {place: course.values[index] for place, index in course.results.items()}
            self.note_replay()

    def note_replay(self) -> None:
        """Note that the steps have run without their Python: give the groups the numbers that it would have set."""
        for i, optimizer, _ in self._running:
            for j, group in enumerate(optimizer.param_groups):
                group.update({n: value for (_, o, g, n), value in self._results.items() if (o, g) == (i, j)})
