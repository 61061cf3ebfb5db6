"""The fingerprint of a transform or a source: the changes that it includes, and the changes that it ignores."""

import functools
import importlib.util
import linecache
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

from tpufit.data.cache import fingerprint


@pytest.fixture
def pair(tmp_path, monkeypatch):
    """Return the descriptions of `f` in two modules with these texts."""
    # Otherwise the bytecode of one text would be used for the next, which has the same length and time.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def describe_both(*texts):
        descriptions = []
        for name, text in zip(("first_module", "second_module"), texts, strict=True):
            (tmp_path / f"{name}.py").write_text(text)
            spec = importlib.util.spec_from_file_location(name, tmp_path / f"{name}.py")
            module = importlib.util.module_from_spec(spec)
            monkeypatch.setitem(sys.modules, name, module)
            spec.loader.exec_module(module)
            descriptions.append(fingerprint(module.f))
        linecache.clearcache()  # the next texts are as long and as old as these
        return descriptions

    return describe_both


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("def f(x):\n    return x + 1", "def f(x):\n    return x + 2"),
        ("def f(x, by=1):\n    return x", "def f(x, by=2):\n    return x"),
        ("f = lambda x: x + 1", "f = lambda x: x + 2"),
        ("def g(n):\n    return lambda x: x + n\nf = g(1)", "def g(n):\n    return lambda x: x + n\nf = g(2)"),
        ("def g(x):\n    return x\nf = [g, 1]", "def g(x):\n    return x\nf = [g, 2]"),
        ("class F:\n    size = 1\n    __call__ = abs\nf = F()", "class F:\n    size = 2\n    __call__ = abs\nf = F()"),
        (
            "class F:\n    def m(s, x):\n        return x\nf = F().m",
            "class F:\n    def m(s, x):\n        return -x\nf = F().m",
        ),
    ],
)
def test_different_code_is_a_different_transform(pair, first, second):
    one, other = pair(first, second)
    assert one != other and one.split()[0] == other.split()[0]
    assert len(set(pair(first, first))) == 1


def test_code_next_to_a_lambda_is_ignored(pair):
    one, other = pair("f = [lambda x: x + 1, 3][0]", "\n\nf = (lambda   x:  x+1)  # the same")
    assert one == other


class Resize:
    def __init__(self, size, means=(), root="", files=()):
        self.size, self.means, self.root, self.files = size, torch.tensor(means), root, files
        self._calls = np.random.rand()

    def __call__(self, sample):
        return sample


class Compose:
    def __init__(self, *parts):
        self.parts = parts
        self.itself = self

    def __call__(self, sample):
        return sample


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Resize(96), Resize(64)),
        (Resize(96, [0.5]), Resize(96, [0.4])),
        (Resize(96, root="a"), Resize(96, root="b")),
        (Compose(Resize(96), abs), Compose(Resize(64), abs)),
        (
            Compose(lambda x: x),
            Compose(lambda x: -x),
        ),
        (functools.partial(Resize(96), 1), functools.partial(Resize(96), 2)),
        (functools.partial(Resize(96), a={1: 2}), functools.partial(Resize(96), a={1: 3})),
        (nn.Sequential(nn.Dropout(0.1)), nn.Sequential(nn.Dropout(0.2))),
        (nn.Flatten(), nn.Identity()),
        (Subset([], [1, 2]), Subset([], [1, 3])),
        (TensorDataset(torch.zeros(3, 200)), TensorDataset(torch.zeros(3, 201))),
        (Resize, Compose),
        (Compose(abs), Compose(len)),
        (Compose(np.abs), Compose(np.negative)),
        (Compose(torch.abs), Compose(torch.neg)),
        (Resize(torch.uint8), Resize(torch.int8)),
        (Resize({"a"}), Resize({"b"})),
    ],
)
def test_different_settings_are_a_different_transform(one, other):
    assert fingerprint(one) != fingerprint(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Resize(96), Resize(96)),
        (Resize(96, root="/kaggle/input"), Resize(96, root="/mnt/data")),
        (Resize(96, files=list(range(200))), Resize(96, files=list(range(1, 201)))),  # checked by the samples instead
        (Compose(object()), Compose(object())),
        (nn.Linear(2, 2), nn.Linear(2, 2)),
    ],
)
def test_ignored_differences(one, other):
    assert fingerprint(one) == fingerprint(other)


def test_the_fingerprint_is_the_same_in_another_process(run_python):
    code = """
        import enum, functools
        from tpufit.data.cache import fingerprint
        class Kind(enum.Enum):
            A = "a"
        print(fingerprint(functools.partial(sorted, key=len, kinds=[Kind.A, {"x", "y", "z"}, object(), print])))
    """
    first, second = (run_python(code, env={"PYTHONHASHSEED": seed}) for seed in ("1", "2"))
    assert first.stdout == second.stdout and first.returncode == 0, first.stderr


def test_the_methods_of_a_class_from_a_notebook_count(run_python):
    code = """
        import linecache
        from tpufit.data.cache import fingerprint
        def cell(number, text):
            name = f"<cell {number}>"
            linecache.cache[name] = (len(text), None, text.splitlines(True), name)
            exec(compile(text, name, "exec"), globals())
            return fingerprint(F())
        text = "class F:\\n    def __call__(self, x):\\n        return x"
        print(cell(1, text) == cell(2, text) != cell(3, text + "+ 1"))
    """
    result = run_python(code)
    assert result.stdout == "True\n", result.stderr
