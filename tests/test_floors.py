"""The structure in CONTRIBUTING.md: imports point down, and only one package names torch_xla."""

import ast
import configparser
import importlib.util
import os
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# The entries of tpufit/, with their floors. A file imports from its own entry, and from lower floors.
FLOORS = {
    "errors": 0,
    "utils": 1,
    "hosts": 1,
    "backend": 2,
    "runtime": 3,
    "drivers": 4,
    "diagnostics": 4,
    "data": 5,
    "losses": 6,
    "optimizers": 6,
    "metrics": 7,
    "step": 8,
    "checkpoint": 9,
    "callbacks": 10,
    "trainer": 11,
    "preflight": 12,
    "model": 13,
    "pictures": 14,
    "checkup": 14,
    "verification": 15,
    "__init__": 16,
    "__main__": 16,
}


def module_of(path):
    """`callbacks/base.py` -> `tpufit.callbacks.base`; a package's `__init__.py` has the package's name."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "tpufit" else ("tpufit", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources():
    # pathlib doesn't follow links, so the files of callbacks/ are listed once.
    files = [path for folder in ("tpufit", "callbacks") for path in sorted((ROOT / folder).rglob("*.py"))]
    return {module_of(path): (path, ast.parse(path.read_text())) for path in files}


SOURCES = sources()


def imports(module):
    """Yield the modules of tpufit that a module's file imports anywhere, with the line: `(tpufit.errors, 9)`."""
    path, tree = SOURCES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            relative = "." * node.level + (node.module or "")
            start = importlib.util.resolve_name(relative, package)
            # `from . import loop` imports the module loop, not the package.
            names = [name if (name := f"{start}.{alias.name}") in SOURCES else start for alias in node.names]
        else:
            continue
        yield from ((name, node.lineno) for name in names if name.partition(".")[0] in ("tpufit", "callbacks"))


def entry_of(module):
    """Return the entry of tpufit/ to which a module belongs: `tpufit.step.runner` -> `step`."""
    return [*module.split("."), "__init__"][1]


def floor_of(module):
    """Return the floor, or None for an entry without a floor."""
    return FLOORS.get(entry_of(module))


def may_import(module, target):
    here, there = floor_of(module), floor_of(target)
    return None in (here, there) or there < here or entry_of(module) == entry_of(target)


def test_every_file_has_a_floor():
    homeless = [str(path.relative_to(ROOT)) for module, (path, _) in SOURCES.items() if floor_of(module) is None]
    assert not homeless, f"give these a floor, in CONTRIBUTING.md and in FLOORS of {Path(__file__).name}: {homeless}"


def test_imports_point_down():
    up = [
        f"{path.relative_to(ROOT)}:{line} imports {target}, which is not on a lower floor"
        for module, (path, _) in SOURCES.items()
        for target, line in imports(module)
        if not may_import(module, target)
    ]
    assert not up, "\n".join(up)


def test_no_file_imports_callbacks_by_its_folder():
    # `import callbacks` works at the root of a checkout, but creates a second copy of every class.
    wrong = [module for module in SOURCES for target, _ in imports(module) if target.startswith("callbacks")]
    assert not wrong, f"import tpufit.callbacks, not callbacks, in {wrong}"


def test_no_import_cycles():
    graph = {module: {target for target, _ in imports(module)} for module in SOURCES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("imports go round: " + " <- ".join(error.args[1]))


def strings(tree):
    """Yield every name and string in the code, with its line, except docstrings and other standalone strings."""
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) in alone:
            continue
        for _, value in ast.iter_fields(node):
            for text in value if isinstance(value, list) else [value]:
                if isinstance(text, str):
                    yield text, getattr(node, "lineno", 0)


# All except the first only in messages, and in the list of libraries whose objects aren't searched.
_NAMES_IT = (
    "tpufit.drivers",
    "tpufit.runtime.driver",
    "tpufit.errors",
    "tpufit.utils.releases",
    "tpufit.utils.python_state",
    "tpufit.checkup",
)


def test_only_its_driver_names_torch_xla():
    named = [
        f"{path.relative_to(ROOT)}:{line}"
        for module, (path, tree) in SOURCES.items()
        for text, line in strings(tree)
        if ("torch_xla" in text or "_XLAC" in text) and not module.startswith(_NAMES_IT)
    ]
    assert not named, (
        f"only tpufit/drivers/ may name torch_xla (and errors.py, utils/releases.py and checkup/ in messages): {named}"
    )


def test_the_import_starts_no_device_and_imports_no_tensorboard(run_python):
    code = """
        import sys, tpufit, tpufit.data, tpufit.callbacks
        print(*{"torch_xla", "_XLAC", "tensorflow", "jax", "tensorboard", "IPython"} & set(sys.modules))
    """
    result = run_python(code, fresh=True)
    assert (result.stdout.strip(), result.returncode) == ("", 0), result.stderr


@pytest.mark.parametrize("name", ["tpufit", "tpufit.callbacks", "tpufit.data"])
def test_public_names_exist(name):
    # ruff checks that each public import is listed, and their order (F401, RUF022).
    module = importlib.import_module(name)
    assert [public for public in module.__all__ if not hasattr(module, public)] == []
    assert len(set(module.__all__)) == len(module.__all__)


def test_every_package_is_shipped():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    folders = {path.parent for path, _ in SOURCES.values()}
    assert sorted(setup["options"]["packages"].split()) == sorted(
        module_of(folder / "__init__.py") for folder in folders
    )
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


def test_callbacks_is_linked_into_the_package():
    assert os.readlink(ROOT / "tpufit" / "callbacks") == os.path.join("..", "callbacks")
