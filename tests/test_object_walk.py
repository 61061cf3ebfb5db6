"""The walks over users' objects, for checkpoints and for audits, visit each object once and miss none."""

from collections import UserDict
from functools import partial
from types import SimpleNamespace

import pytest

from tpufit.utils.python_state import list_values
from tpufit.utils.saved_attributes import SavedAttributes


class Counter:
    def __init__(self):
        self.calls = 0

    def count(self, by):
        self.calls += by


@pytest.fixture
def counters():
    return [Counter() for _ in range(3)]


@pytest.fixture
def hooks(counters):
    """Partials, of which a walk makes temporary containers: one must not be taken for another at the same address."""
    return SimpleNamespace(**{f"hook{i}": partial(counter.count, 1) for i, counter in enumerate(counters)})


def test_the_objects_of_several_partials_are_all_kept(counters, hooks):
    saved = SavedAttributes({"hooks": hooks})
    for counter in counters:
        counter.count(2)
    assert saved.state_dict() == {f"hooks.hook{i}[0]": {"calls": 2} for i in range(3)}


def test_the_values_of_several_partials_are_all_compared(counters, hooks):
    before = list_values({"hooks": hooks})
    counters[2].count(1)
    changed = dict(set(list_values({"hooks": hooks}).items()) - set(before.items()))
    assert changed == {"hooks.hook2[0].calls": 1}


def test_an_object_is_visited_once_and_a_cycle_ends(counters):
    counter = counters[0]
    counter.itself, counter.twins = counter, [counter, counter]
    assert [name for name in list_values({"counter": counter}) if name.endswith("calls")] == ["counter.calls"]


class Counts(UserDict): ...


def test_a_users_own_mapping_is_kept_by_its_attributes():
    counts = Counts(epochs=0)
    saved = SavedAttributes({"counts": counts})
    counts["epochs"] += 1
    assert saved.state_dict() == {"counts": {"data": {"dict": ["epochs", 1]}}}
