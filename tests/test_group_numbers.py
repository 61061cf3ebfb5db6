"""Numbers that an optimizer's steps change in its groups: their arithmetic equals Python's, in every branch."""

import math

import pytest
import torch

from tpufit.optimizers.group_numbers import NumberTrace


def averaged(k, rate, largest, total):
    """The numbers of schedule-free AdamW."""
    rate = rate * ((k + 1) / 3 if k < 3 else 1.0)
    largest = max(rate, largest)
    weight = ((k + 1) ** 0.5) * largest**2
    total = total + weight
    try:
        share = weight / total
    except ZeroDivisionError:
        share = 0
    return k + 1, largest, total, share, rate * (0.9 * (1 - share) - 1), 1 - 0.999 ** (k + 1)


def trace_of(numbers):
    trace = NumberTrace()
    given = [trace.record_number((0, 0, 0, str(i)), value) for i, value in enumerate(numbers)]
    return trace, averaged(*given)


def again(trace, found, numbers):
    values = trace.recompute({(0, 0, 0, str(i)): value for i, value in enumerate(numbers)})
    return values and tuple(values[number.index] if hasattr(number, "index") else number for number in found)


def test_arithmetic_equals_pythons_bit_for_bit():
    numbers = 0, 0.05, -1.0, 0.0
    trace, found = trace_of(numbers)
    assert again(trace, found, numbers) == averaged(*numbers)
    later = 1, 0.07, 0.02, 0.3
    assert again(trace, found, later) == averaged(*later)
    assert [type(value) for value in again(trace, found, later)] == [int, *[float] * 5]


@pytest.mark.parametrize(
    "numbers",
    [(3, 0.05, 0.02, 0.3), (1, 0.05, 0.2, 0.3), (0, 0.0, -1.0, 0.0)],
    ids=["after the warm-up", "with a smaller rate", "with a rate of 0"],
)
def test_numbers_that_take_another_branch_need_another_trace(numbers):
    trace, found = trace_of((0, 0.05, -1.0, 0.0))
    assert again(trace, found, numbers) is None
    other, found = trace_of(numbers)
    assert again(other, found, numbers)[:3] == averaged(*numbers)[:3]
    assert other.recompute({(0, 0, 0, str(i)): value for i, value in enumerate((1, 0.07, 0.02, 0.3))}) is None


@pytest.mark.parametrize("read", [float, int, hash, lambda number: {number: 0}])
def test_a_number_that_is_read_belongs_to_the_trace(read):
    trace = NumberTrace()
    read(trace.record_number((0, 0, 0, "k"), 2))
    assert trace.recompute({(0, 0, 0, "k"): 2}) == [2, 2]
    assert trace.recompute({(0, 0, 0, "k"): 3}) is None


X = torch.ones(3)
# Functions of PyTorch, and whether they take a tensor for the number, so that it doesn't become a part of the trace.
USES = {
    "x * number": (lambda number: X * number, True),
    "number - x": (lambda number: number - X, True),
    "number ** x": (lambda number: number**X, True),
    "where": (lambda number: torch.where(X > 0, number, X), True),
    "assignment": (lambda number: torch.ones(3).index_put((X > 0,), torch.zeros(3) + number), True),
    "lerp": (lambda number: torch.lerp(X, 2 * X, number), True),
    "add with alpha": (lambda number: torch.add(X, X, alpha=number), False),
    "addcmul with value": (lambda number: torch.addcmul(X, X, X, value=number), False),
    "clamp by it and a number": (lambda number: torch.clamp(3 * X, number, 5.0), False),
    "dropout": (lambda number: torch.nn.functional.dropout(X, number, False), False),
    "math.sqrt": (lambda number: X * math.sqrt(number), False),
    "abs": (lambda number: X * abs(number), True),
    "a format": (lambda number: X * float(f"{number:.2f}"), False),
}


@pytest.mark.parametrize("use", USES)
def test_pytorch_computes_with_it_as_with_a_number(use):
    function, takes_tensor = USES[use]
    trace = NumberTrace()
    trace.enter = lambda index: torch.tensor(trace.values[index])
    found = function(trace.record_number((0, 0, 0, "a"), 0.75))
    torch.testing.assert_close(found, function(0.75))
    assert (trace.recompute({(0, 0, 0, "a"): 0.5}) is not None) == takes_tensor


def test_math_sqrt_of_a_number_is_part_of_the_trace():
    trace = NumberTrace()
    assert math.sqrt(trace.record_number((0, 0, 0, "a"), 0.25)) == 0.5
    assert trace.recompute({(0, 0, 0, "a"): 0.25}) and trace.recompute({(0, 0, 0, "a"): 0.5}) is None
