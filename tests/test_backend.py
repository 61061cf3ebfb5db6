"""The device's package fulfils its written protocol, and nothing outside uses any other name of it."""

import ast
import inspect

import pytest
from test_floors import SOURCES, strings

from tpufit import runtime
from tpufit.runtime.backend import Backend

VERBS = {name: verb for name, verb in vars(Backend).items() if inspect.isfunction(verb) and not name.startswith("_")}
TYPES = set(Backend.__annotations__)


def outside():
    return {name: source for name, source in SOURCES.items() if not f"{name}.".startswith("tpufit.runtime.")}


def names_used(tree):
    """The names that a file imports from the runtime, or from one of its modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and "runtime" in (node.module or "").split("."):
            yield from (f"{node.module}.{alias.name}".partition("runtime.")[2] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ("(the module itself)" for alias in node.names if alias.name == "runtime")


def arguments(function):
    given = inspect.signature(function).parameters.values()
    return [(one.name, one.kind, one.default is inspect.Parameter.empty) for one in given]


@pytest.mark.parametrize("name", VERBS)
def test_each_verb_is_there_with_the_arguments_of_the_protocol(name):
    _, *wanted = inspect.signature(VERBS[name]).parameters.values()  # without self
    given = inspect.signature(getattr(runtime, name)).parameters.values()
    empty = inspect.Parameter.empty
    assert [(p.name, p.kind, p.default is empty) for p in wanted] == [
        (p.name, p.kind, p.default is empty) for p in given
    ]


def test_each_verb_says_in_one_line_what_it_does():
    assert [name for name, verb in VERBS.items() if len((verb.__doc__ or "").splitlines()) != 1] == []


def test_each_type_is_there_and_explained():
    assert [name for name in TYPES if not hasattr(runtime, name)] == []
    explained = inspect.getdoc(Backend)  # Python 3.13 indents no docstring
    assert [name for name in TYPES if f"    {name}: " not in explained] == []


def test_nothing_else_of_the_package_is_used_outside():
    used = {(file, name) for file, (_, tree) in outside().items() for name in names_used(tree)}
    assert sorted((file, name) for file, name in used if name not in VERBS.keys() | TYPES) == []
    assert sorted((VERBS.keys() | TYPES) - {name for _, name in used}) == []  # nor is anything there in vain


def test_no_dispatch_key_and_no_device_type_is_named_outside():
    keys = ("XLA", "AutogradXLA", "CompositeExplicitAutograd", "CompositeImplicitAutograd", "xla")
    assert [(file, line) for file, (_, tree) in outside().items() for text, line in strings(tree) if text in keys] == []
