"""The device's package says what it gives to the others, and nothing outside uses any other name of it."""

import ast

from test_floors import SOURCES, strings

from tpufit import runtime

_, TREE = SOURCES["tpufit.runtime"]
NAMES = {alias.name for node in TREE.body if isinstance(node, ast.ImportFrom) for alias in node.names}


def outside():
    return {name: source for name, source in SOURCES.items() if not f"{name}.".startswith("tpufit.runtime.")}


def names_used(tree):
    """The names that a file imports from the runtime, or from one of its modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and "runtime" in (node.module or "").split("."):
            yield from (f"{node.module}.{alias.name}".partition("runtime.")[2] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ("(the module itself)" for alias in node.names if alias.name == "runtime")


def test_each_name_is_explained():
    assert [name for name in NAMES if f"`{name}`" not in runtime.__doc__] == []


def test_nothing_else_of_the_package_is_used_outside():
    used = {(file, name) for file, (_, tree) in outside().items() for name in names_used(tree)}
    assert sorted((file, name) for file, name in used if name not in NAMES) == []
    assert sorted(NAMES - {name for _, name in used}) == []  # nor is anything there in vain


def test_no_dispatch_key_and_no_device_type_is_named_outside():
    keys = ("XLA", "AutogradXLA", "CompositeExplicitAutograd", "CompositeImplicitAutograd", "xla")
    assert [(file, line) for file, (_, tree) in outside().items() for text, line in strings(tree) if text in keys] == []
