"""The engine and the drivers implement their interfaces, and no other code uses their internal names.

mypy compares the types.
"""

import ast
import inspect
import re

import pytest
import torch
from test_floors import SOURCES, imports, strings

from tpufit import backend, runtime
from tpufit.backend import eager
from tpufit.backend.device_functions import Backend
from tpufit.drivers.torchtpu.driver import TorchTpuDriver
from tpufit.drivers.xla.driver import XlaDriver
from tpufit.metrics import PassMetrics
from tpufit.runtime.driver import Driver

VERBS = {name: verb for name, verb in vars(Backend).items() if inspect.isfunction(verb) and not name.startswith("_")}
TYPES = set(Backend.__annotations__)
CONTRACT = [backend.Placement, backend.DeviceState, backend.Program, backend.InFlight]
ASKED = {name: member for name, member in vars(Driver).items() if inspect.isfunction(member)}  # of a driver
DRIVERS = [XlaDriver, TorchTpuDriver]
KEYS = {
    *("XLA", "AutogradXLA", "PrivateUse1", "AutogradPrivateUse1", "xla"),
    *("CompositeExplicitAutograd", "CompositeImplicitAutograd"),
}


def outside():
    """Return the files that use a device only by the interface."""
    packages = ("tpufit.runtime.", "tpufit.backend.", "tpufit.drivers.")
    return {name: source for name, source in SOURCES.items() if not f"{name}.".startswith(packages)}


def form(function):
    """Return the kinds of a function's arguments, and whether they are optional."""
    empty = inspect.Parameter.empty
    return [(p.kind, p.default is empty) for p in inspect.signature(function).parameters.values()]


def page():
    return (SOURCES["tpufit"][0].parent.parent / "docs" / "backends.md").read_text()


def names_used(tree):
    """Return the names that a file imports from the runtime, or from one of its modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and "runtime" in (node.module or "").split("."):
            yield from (f"{node.module}.{alias.name}".partition("runtime.")[2] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ("(the module itself)" for alias in node.names if alias.name == "runtime")


@pytest.mark.parametrize("name", VERBS)
def test_each_function_has_the_arguments_of_the_interface(name):
    # mypy compares the types, but doesn't run in the images' environments.
    _, *wanted = inspect.signature(VERBS[name]).parameters.values()  # without self
    given = inspect.signature(getattr(runtime, name)).parameters.values()
    empty = inspect.Parameter.empty
    assert [(p.name, p.kind, p.default is empty) for p in wanted] == [
        (p.name, p.kind, p.default is empty) for p in given
    ]


def test_each_function_has_a_one_line_summary():
    assert [name for name, verb in VERBS.items() if len((verb.__doc__ or "").splitlines()) != 1] == []


def test_each_type_exists_and_has_a_docstring():
    assert [name for name in TYPES if not hasattr(runtime, name)] == []
    explained = inspect.getdoc(Backend)  # Python 3.13 strips the indentation of docstrings
    assert [name for name in TYPES if f"    {name}: " not in explained] == []


def test_only_the_interface_is_used_outside():
    used = {(file, name) for file, (_, tree) in outside().items() for name in names_used(tree)}
    assert sorted((file, name) for file, name in used if name not in VERBS.keys() | TYPES) == []
    assert sorted((VERBS.keys() | TYPES) - {name for _, name in used}) == []  # and no name is unused


def test_no_dispatch_key_and_no_device_type_is_named_outside():
    assert [(file, line) for file, (_, tree) in outside().items() for text, line in strings(tree) if text in KEYS] == []


def test_no_driver_is_imported_by_name():
    named = [
        (file, line)
        for file in SOURCES
        if not file.startswith("tpufit.drivers")
        for target, line in imports(file)
        if target.startswith("tpufit.drivers")
    ]
    assert named == []


@pytest.mark.parametrize("kind", DRIVERS, ids=lambda kind: kind.__name__)
def test_each_driver_has_exactly_the_interfaces_members(kind):
    own = {name: member for name, member in vars(kind).items() if not name.startswith("_")}
    assert sorted(own.keys() - ASKED.keys()) == sorted(Driver.__annotations__)  # its attributes
    assert not inspect.isabstract(kind)
    methods = [name for name in own if name in ASKED]
    assert [name for name in methods if form(own[name]) != form(ASKED[name])] == []


def test_the_engine_uses_every_member_of_a_driver():
    called = {
        node.attr
        for file, (_, tree) in SOURCES.items()
        if file.startswith("tpufit.runtime.")
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "driver()"
    }
    assert sorted(called) == sorted(ASKED.keys() | Driver.__annotations__.keys())


@pytest.mark.parametrize("kind", CONTRACT, ids=lambda kind: kind.__name__)
def test_backends_md_names_each_method(kind):
    members = [name for name in vars(kind) if not name.startswith("_")]
    assert [f"{kind.__name__}.{name}" for name in members if f"`{name}" not in page()] == []


def test_backends_md_names_each_function():
    assert [name for name in VERBS if f"`{name}" not in page()] == []


def test_backends_md_has_a_row_for_each_member_of_a_driver():
    part = page().partition("## `Driver`")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]*) \|", part, re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted([*ASKED, *Driver.__annotations__])


def test_plain_pytorch_runs_the_body_each_time_and_keeps_its_seed():
    before, sums = torch.get_rng_state(), PassMetrics([], backend.HOST)
    state = runtime.make_state(backend.HOST, [torch.zeros(2)])
    program = runtime.make_program(backend.HOST, "train", state, sums)
    assert (type(program), type(state)) == (eager.EagerProgram, eager.HostState)

    def body(inputs, seed):
        seed(0)
        return inputs[0] + torch.rand(())

    one, other = (program("key", [torch.zeros(())], [7], body) for _ in range(2))
    assert one == other and not program.prepare_replay("key") and not program.captures
    assert torch.equal(torch.get_rng_state(), before)
