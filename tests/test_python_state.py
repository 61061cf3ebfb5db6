"""A step that depends on state in Python, or on random numbers of the host, is traced and never replayed."""

import ctypes
import functools
import itertools
import random
import threading
import weakref
from array import array
from collections import deque
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum

import numpy as np
import pytest
import torch
from torch import nn

import tpufit
from tpufit.callbacks import Callback
from tpufit.utils import python_state

pytestmark = pytest.mark.cores(1, quick=False)

GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(64, 6)).astype("float32")
Y = GENERATOR.integers(0, 3, 64)


class Net(nn.Module):
    def __init__(self, extra):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.extra = extra

    def forward(self, x):
        return self.extra(self, self.layer(x))


def train(extra, callbacks=(), epochs=2, jit_compile="auto"):
    """Train eight steps per epoch. Return why they were traced, if they were, and their results."""
    torch.manual_seed(0)
    model = tpufit.Model(Net(extra))
    model.compile("adamw", "cross_entropy", jit_compile=jit_compile)
    torch.manual_seed(1)
    history = model.fit(X, Y, 8, epochs, verbose=0, callbacks=list(callbacks)).history
    return model.report().traced["train"], history


class Schedule:
    def __init__(self):
        self.step = 0


def in_an_object(net, h):
    net.schedule = getattr(net, "schedule", None) or Schedule()
    net.schedule.step += 1
    return net.schedule.step


def in_a_list(net, h):
    net.calls = [*getattr(net, "calls", []), 1]
    return len(net.calls)


def in_a_dict(net, h):
    net.calls = getattr(net, "calls", {"n": 0})
    net.calls["n"] += 1
    return net.calls["n"]


def in_a_host_tensor(net, h):
    net.calls = getattr(net, "calls", torch.tensor(0)) + 1
    return int(net.calls)


def in_an_array(net, h):
    net.calls = getattr(net, "calls", np.zeros(3, int))
    net.calls[1] += 1
    return net.calls[1]


def in_an_iterator(net, h):
    net.calls = getattr(net, "calls", itertools.count(1))
    return next(net.calls)


def in_a_generator(net, h):
    net.calls = getattr(net, "calls", (i for i in range(1, 1000)))
    return next(net.calls)


def in_a_decimal(net, h):
    net.calls = getattr(net, "calls", Decimal(0)) + 1
    return int(net.calls)


def in_a_bytearray(net, h):
    net.calls = getattr(net, "calls", bytearray())
    net.calls.append(0)
    return len(net.calls)


def in_a_global(net, h):
    global calls
    calls = calls + 1 if hasattr(net, "begun") else 1
    net.begun = True
    return calls


def in_a_closure():
    calls = 0

    def count(net, h):
        nonlocal calls
        calls += 1
        return calls

    return count


calls = 0
COUNTS = [in_an_object, in_a_list, in_a_dict, in_a_host_tensor, in_an_array, in_an_iterator, in_a_generator]
COUNTS += [in_a_decimal, in_a_bytearray]


class Seldom:
    """Doubles its input at every tenth call: a replay would continue like the first two calls."""

    def __init__(self, count):
        self.count = count

    def __call__(self, net, h):
        return h * 2 if self.count(net, h) % 10 == 0 else h


@pytest.mark.parametrize("count", [*COUNTS, in_a_global, in_a_closure], ids=lambda count: count.__name__)
@pytest.mark.filterwarnings("ignore:the train step is traced again")
def test_a_count_is_detected_in_any_place(count):
    def run(jit_compile):
        return train(Seldom(count() if count is in_a_closure else count), jit_compile=jit_compile)

    (cause, history), (_, traced) = run("auto"), run(False)
    assert "its Python changes" in cause
    assert history == traced


def numpys_own(net):
    return np.random.rand()


def numpys_choice(net):
    return np.random.choice([0.1, 0.2, 0.3, 0.9])


def pythons_choice(net):
    return random.choice([0.1, 0.2, 0.3, 0.9])


def torchs_on_the_host(net):
    return float(torch.rand(()))


def a_generator_of_ones_own(net):
    net.generator = getattr(net, "generator", np.random.default_rng(0))
    return net.generator.random()


DRAWS = [numpys_own, numpys_choice, pythons_choice, torchs_on_the_host, a_generator_of_ones_own]


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.filterwarnings("ignore:the train step is traced again")
def test_a_branch_on_a_random_number_of_the_host_is_detected(draw):
    def seldom(net, h):
        return h * 2 if draw(net) > 0.85 else h

    def run(jit_compile):
        random.seed(3)
        np.random.seed(3)
        return train(seldom, jit_compile=jit_compile)

    (cause, history), (_, traced) = run("auto"), run(False)
    assert "Net.generator" in cause if draw is a_generator_of_ones_own else "test_python_state.py:" in cause
    assert history == traced


@pytest.mark.filterwarnings("ignore:the train step is traced again")
def test_random_draws_of_data_arent_the_steps():
    class Noisy:
        def __iter__(self):
            for _ in range(200):
                yield X[:8] + np.random.rand() + random.random(), Y[:8]

    model = tpufit.Model(Net(lambda net, h: h))
    model.compile("sgd", "cross_entropy", jit_compile=True)
    model.fit(Noisy(), epochs=2, verbose=0)
    assert not model.report().traced["train"]


def test_numpys_functions_are_restored():
    before = np.random.rand, np.random.shuffle
    train(lambda net, h: h, epochs=1)
    assert (np.random.rand, np.random.shuffle) == before


class Anneal(Callback):
    """Changes a value that the module keeps in a dict."""

    def on_epoch_begin(self, epoch, logs=None):
        self.model.module.options = {"scale": 1 - epoch / 10}


def test_a_callbacks_change_in_a_dict_takes_effect():
    def scaling(net, h):
        return h * net.options["scale"]

    with pytest.warns(UserWarning, match=r"compiled 4 times because Net.options\['scale'\] changed"):
        cause, history = train(scaling, [Anneal()], epochs=6)
    assert not cause
    assert history == train(scaling, [Anneal()], epochs=6, jit_compile=False)[1]


class Slotted:
    __slots__ = ("inner", "value")

    def __init__(self, value):
        self.value, self.inner = value, self  # itself: an endless nest


class Point(ctypes.Structure):
    _fields_ = (("x", ctypes.c_int), ("y", ctypes.c_int))


class Color(Enum):
    RED, BLUE = 1, 2


def a_function(x, factor=2):
    return x * LEVEL


LEVEL = 3


def values_of(value):
    return python_state.list_values({"it": value})


def drawn_from(generator):
    generator.random()
    return generator


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 2),
        (float("nan"), 0.0),
        ([1, 2], [1, 3]),
        ([None] * 200, [None] * 201),
        ({"a": {"b": [1]}}, {"a": {"b": [2]}}),
        ({1, 2}, {1, 3}),
        (deque([1]), deque([2])),
        (Slotted(1), Slotted(2)),
        (torch.tensor([1.0]), torch.tensor([2.0])),
        (torch.zeros(500), torch.zeros(500)),
        (np.arange(3), np.arange(1, 4)),
        (np.float32(1), np.float32(2)),
        (random.Random(0), drawn_from(random.Random(0))),
        (np.random.default_rng(0), drawn_from(np.random.default_rng(0))),
        (np.random.RandomState(0), np.random.RandomState(1)),
        (torch.Generator().manual_seed(0), torch.Generator().manual_seed(1)),
        (itertools.count(1), itertools.count(2)),
        (iter([1, 2]), iter([1])),
        (functools.partial(max, 1), functools.partial(max, 2)),
        (Schedule().__init__, [1]),
        (Decimal(1), Decimal(2)),
        (1j, 2j),
        (bytearray(b"a"), bytearray(b"b")),
        (bytearray(100_000), bytearray(100_001)),
        (memoryview(b"a"), memoryview(b"b")),
        (array("l", [1]), array("l", [2])),
        (timedelta(1), timedelta(2)),
        (datetime(2020, 1, 1), datetime(2020, 1, 2)),
        (date(2020, 1, 1), date(2020, 1, 2)),
        (time(1), time(2)),
        (range(3), range(4)),
        (slice(3), slice(4)),
        (ctypes.c_int(1), ctypes.c_int(2)),
        (Point(1, 2), Point(1, 3)),
        (Color.RED, Color.BLUE),
    ],
    ids=lambda value: type(value).__name__,
)
def test_facts_differ_if_values_differ(one, other):
    assert values_of(one) != values_of(other)
    assert values_of(one) == values_of(one)  # inspecting changes nothing
    hash(tuple(values_of(one).items()))


def test_locks_and_similar_objects_have_no_facts():
    for value in (threading.Lock(), memoryview, object(), weakref.ref(Schedule)):
        assert values_of(value) == {}


def test_facts_of_equal_native_values_are_equal():
    for make in (
        lambda: Decimal(3),
        lambda: Point(1, 2),
        lambda: bytearray(b"a"),
        lambda: slice(Schedule(), Schedule()),
    ):
        assert values_of(make()) == values_of(make()) != {}


def test_facts_of_a_whole_data_set_are_few():
    assert len(values_of([[[i] * 99 for i in range(99)] for _ in range(99)])) == 10_000


def test_facts_of_functions_and_classes_are_their_globals(monkeypatch):
    name = f"{__name__}.LEVEL"
    users = type("Users", (), {"method": a_function})
    assert values_of(a_function)[name] == values_of(users())[name] == 3
    monkeypatch.setitem(globals(), "LEVEL", 4)
    assert values_of(a_function)[name] == values_of(users())[name] == 4
    function = torch.nn.functional.cross_entropy
    assert (
        values_of(function) == {"it": function.__code__} and values_of(nn.Linear) == {}
    )  # a library's own globals are ignored


def test_a_users_module_named_like_a_library():
    for module, seen in (("torch_utils", True), ("torch.nn.modules.linear", False), ("torchmetrics.mean", False)):
        assert bool(python_state.list_values({"it": type("Own", (), {"__module__": module, "scale": 2})})) == seen
