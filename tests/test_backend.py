"""The device's package fulfils the contract, and nothing outside uses any other name of it. mypy compares the types."""

import ast
import inspect

import pytest
import torch
from test_floors import SOURCES, strings

from tpufit import backend, runtime
from tpufit.backend import eager
from tpufit.backend.verbs import Backend
from tpufit.metrics import PassMetrics

VERBS = {name: verb for name, verb in vars(Backend).items() if inspect.isfunction(verb) and not name.startswith("_")}
TYPES = set(Backend.__annotations__)
CONTRACT = [backend.Placement, backend.DeviceState, backend.Program, backend.InFlight]


def outside():
    packages = ("tpufit.runtime.", "tpufit.backend.")
    return {name: source for name, source in SOURCES.items() if not f"{name}.".startswith(packages)}


def names_used(tree):
    """The names that a file imports from the runtime, or from one of its modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and "runtime" in (node.module or "").split("."):
            yield from (f"{node.module}.{alias.name}".partition("runtime.")[2] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ("(the module itself)" for alias in node.names if alias.name == "runtime")


@pytest.mark.parametrize("name", VERBS)
def test_each_verb_is_there_with_the_arguments_of_the_contract(name):
    # mypy compares the types, but not in the images' environments.
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


@pytest.mark.parametrize("kind", CONTRACT, ids=lambda kind: kind.__name__)
def test_the_page_for_maintainers_names_each_method(kind):
    page = (SOURCES["tpufit"][0].parent.parent / "docs" / "backends.md").read_text()
    members = [name for name in vars(kind) if not name.startswith("_")]
    assert [f"{kind.__name__}.{name}" for name in members if f"`{name}" not in page] == []


def test_the_page_for_maintainers_names_each_verb():
    page = (SOURCES["tpufit"][0].parent.parent / "docs" / "backends.md").read_text()
    assert [name for name in VERBS if f"`{name}" not in page] == []


def test_plain_pytorch_runs_the_body_each_time_and_leaves_pytorchs_random_numbers_alone():
    before, sums = torch.get_rng_state(), PassMetrics([], backend.HOST)
    state = runtime.state_at(backend.HOST, [torch.zeros(2)])
    program = runtime.program_at(backend.HOST, "train", state, sums)
    assert (type(program), type(state)) == (eager.EagerProgram, eager.HostState)

    def body(inputs, seed):
        seed(0)
        return inputs[0] + torch.rand(())

    one, other = (program("key", [torch.zeros(())], [7], body) for _ in range(2))
    assert one == other and not program.replays("key") and not program.captures
    assert torch.equal(torch.get_rng_state(), before)
