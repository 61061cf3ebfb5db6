"""The versions that the tests install, and the search for a release that breaks a test."""

import configparser
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from newest import COLLECTION, ROOT, SOAK, blamed, failures
from packaging.markers import default_environment
from packaging.requirements import Requirement

CONSTRAINTS = [
    Requirement(line)
    for line in (ROOT / "tests" / "constraints.txt").read_text().splitlines()
    if not line.startswith("#")
]


def requirements(*extras: str) -> Iterator[Requirement]:
    """What setup.cfg requires, with the extras that an extra names."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lists = [setup["options"]["install_requires"], *(setup["options.extras_require"][extra] for extra in extras)]
    for line in "\n".join(lists).splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            yield from requirements(*requirement.extras) if requirement.name == "tpufit" else [requirement]


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13"])
def test_each_package_of_the_tests_has_one_version(python):
    environment = {**default_environment(), "python_version": python, "python_full_version": f"{python}.0"}
    versions = {}
    for constraint in CONSTRAINTS:
        if constraint.marker is None or constraint.marker.evaluate(environment):
            assert constraint.name not in versions
            versions[constraint.name] = str(constraint.specifier).removeprefix("==")
    for requirement in requirements(*SOAK.split(",")):
        if requirement.marker is None or requirement.marker.evaluate(environment):
            name = requirement.name.replace("_", "-").lower()
            assert name in versions, f"tests/constraints.txt lacks {name}: run `make lock`"
            assert requirement.specifier.contains(versions[name]), f"{requirement}: run `make lock`"


def test_the_release_that_broke_each_test_is_found():
    broken_by = {"a": 0, "b": 6, "c": 3, "d": 3}
    runs = []

    def fails(count: int, tests: set[str]) -> set[str]:
        runs.append(count)
        if count == 0:
            return tests - {"passes the second time"}
        return {test for test in tests if broken_by.get(test, 99) >= count}

    tests = {*broken_by, "passes the second time", "fails with all put back"}
    expected = {**broken_by, "passes the second time": None, "fails with all put back": None}
    assert blamed(tests, 7, fails) == expected
    assert len(runs) <= 8, runs


def test_failed_tests_are_named(tmp_path):
    file = tmp_path / "test_three.py"
    file.write_text(
        "import pytest\n@pytest.mark.parametrize('text', ['a b', 'c'])\ndef test_a(text): assert text == 'c'\n"
        "def test_b(): pass\n"
    )
    options = [f"--rootdir={tmp_path}", str(file)]
    assert failures(Path(sys.executable), options, root=tmp_path) == {"test_three.py::test_a[a b]"}
    file.write_text("def test_b(): pass\n")
    assert failures(Path(sys.executable), options, root=tmp_path) == set()


def test_tests_that_do_not_start_are_one_failure(tmp_path):
    assert failures(Path(sys.executable), ["--no-such-option"], root=tmp_path) == {COLLECTION}
