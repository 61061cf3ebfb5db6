"""Numbers that an optimizer's steps change in its groups: their arithmetic equals Python's, in every branch."""

import pytest

from tpufit.optimizers.group_numbers import Course


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


def course_of(numbers):
    course = Course()
    given = [course.number((0, 0, 0, str(i)), value) for i, value in enumerate(numbers)]
    return course, averaged(*given)


def again(course, found, numbers):
    values = course.recompute({(0, 0, 0, str(i)): value for i, value in enumerate(numbers)})
    return values and tuple(values[number.index] if hasattr(number, "index") else number for number in found)


def test_arithmetic_equals_pythons_bit_for_bit():
    numbers = 0, 0.05, -1.0, 0.0
    course, found = course_of(numbers)
    assert again(course, found, numbers) == averaged(*numbers)
    later = 1, 0.07, 0.02, 0.3
    assert again(course, found, later) == averaged(*later)
    assert [type(value) for value in again(course, found, later)] == [int, *[float] * 5]


@pytest.mark.parametrize(
    "numbers",
    [(3, 0.05, 0.02, 0.3), (1, 0.05, 0.2, 0.3), (0, 0.0, -1.0, 0.0)],
    ids=["after the warm-up", "with a smaller rate", "with a rate of 0"],
)
def test_another_branch_is_another_course(numbers):
    course, found = course_of((0, 0.05, -1.0, 0.0))
    assert again(course, found, numbers) is None
    other, found = course_of(numbers)
    assert again(other, found, numbers)[:3] == averaged(*numbers)[:3]
    assert other.recompute({(0, 0, 0, str(i)): value for i, value in enumerate((1, 0.07, 0.02, 0.3))}) is None


@pytest.mark.parametrize("read", [float, int, hash, lambda number: {number: 0}])
def test_a_number_that_is_read_belongs_to_the_course(read):
    course = Course()
    read(course.number((0, 0, 0, "k"), 2))
    assert course.recompute({(0, 0, 0, "k"): 2}) == [2, 2]
    assert course.recompute({(0, 0, 0, "k"): 3}) is None
