"""The versions that the tests install."""

import configparser
from collections.abc import Iterator

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from pages import ROOT

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
    for requirement in requirements("test", "examples", "preflight", "libraries", "docs"):
        if requirement.marker is None or requirement.marker.evaluate(environment):
            name = requirement.name.replace("_", "-").lower()
            assert name in versions, f"tests/constraints.txt lacks {name}: run `make lock`"
            assert requirement.specifier.contains(versions[name]), f"{requirement}: run `make lock`"
