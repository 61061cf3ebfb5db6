"""Runs the tests with the newest packages that setup.cfg allows: `make newest`.

`make test` uses the versions in `tests/constraints.txt`. This program installs the newest into `.venv-newest/` and runs
the same tests there. It finds the release that broke each failed test: it puts ever smaller groups of packages back.
`--soak` does the same with the packages and tests of `make soak`, compared with `.venv-soak/`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Set
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACE = ROOT / ".venv-newest"
GATE = "test,examples,preflight"
SOAK = f"{GATE},libraries,docs"
# Runs instead of tests if pytest can't even collect them.
COLLECTION = "--collect-only"


def installed(python: Path) -> dict[str, str]:
    """The version of each package, by name, except tpufit's own."""
    listed = subprocess.run([python, "-m", "pip", "list", "--format=json"], capture_output=True, check=True, text=True)
    versions = {package["name"].lower(): package["version"] for package in json.loads(listed.stdout)}
    return {name: version for name, version in versions.items() if name not in {"pip", "tpufit"}}


def move(python: Path, before: dict[str, str], after: dict[str, str]) -> None:
    """Change the installed packages from `before` to `after`, and nothing else."""
    new = [f"{name}=={version}" for name, version in after.items() if before.get(name) != version]
    gone = sorted(before.keys() - after.keys())
    if gone:
        subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", *gone], check=True)
    if new:
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", *new], check=True)


def failures(python: Path, options: list[str], tests: Set[str] = frozenset(), root: Path = ROOT) -> set[str]:
    """The ids of the failed tests, of all tests that the options choose, or of the named tests."""
    command = [python, "-m", "pytest", "--cache-clear", *options, *sorted(tests)]
    code = subprocess.run(command, cwd=root).returncode
    found = root / ".pytest_cache" / "v" / "cache" / "lastfailed"
    failed = set(json.loads(found.read_text())) if found.exists() else set()
    return failed or (set(tests) or {COLLECTION} if code else set())


def blamed(tests: Set[str], packages: int, fails: Callable[[int, Set[str]], Set[str]]) -> dict[str, int | None]:
    """For each test that fails with the newest packages, the index of the package that broke it.

    Args:
        tests: The tests.
        packages: The number of packages.
        fails: Returns which of some tests fail with the first so many packages put back.

    Returns:
        The index by test: with the packages before it put back, the test fails; with it put back too, the test passes.
        None for a test that passes when it runs again, or that fails with all packages put back.
    """

    def narrow(failing: int, passing: int, tests: Set[str]) -> dict[str, int | None]:
        if not tests or passing - failing == 1:
            return dict.fromkeys(tests, failing)
        middle = (failing + passing) // 2
        still = fails(middle, tests)
        return narrow(failing, middle, tests - still) | narrow(middle, passing, still)

    again = fails(0, tests) if tests else set()
    always = fails(packages, again) if again else set()
    return dict.fromkeys(tests, None) | narrow(0, packages, again - always)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=3, help="processes of tests")
    parser.add_argument("--soak", action="store_true", help="the packages and tests of `make soak`")
    arguments = parser.parse_args()
    locked = installed(ROOT / (".venv-soak" if arguments.soak else ".venv") / "bin" / "python")
    subprocess.run([sys.executable, "-m", "venv", "--clear", PLACE], check=True)
    python = PLACE / "bin" / "python"
    extras = SOAK if arguments.soak else GATE
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--editable", f".[{extras}]"], cwd=ROOT, check=True)
    newest = installed(python)
    changed = sorted(name for name in locked if newest.get(name) != locked[name])
    print("\n".join(f"{name}: {locked[name]} -> {newest.get(name, 'none')}" for name in changed), flush=True)
    if not changed:
        print("tests/constraints.txt already has the newest releases.")
        return 0

    parallel = ["--numprocesses", str(arguments.jobs), "--maxprocesses", "4"]
    doctests = [*parallel, "--doctest-modules", "--override-ini", "testpaths=tpufit"]
    now = newest

    def fails(options: list[str], count: int, tests: Set[str]) -> set[str]:
        nonlocal now
        wanted = newest | {name: locked[name] for name in changed[:count]}
        move(python, now, wanted)
        now = wanted
        return failures(python, options, tests)

    sentences = []
    for options in [[*parallel, "-m", "soak"]] if arguments.soak else [doctests, [*parallel, "-m", "not soak"]]:
        found = blamed(fails(options, 0, frozenset()), len(changed), partial(fails, options))
        for test, index in sorted(found.items()):
            if index is None:
                sentences.append(f"{test} failed, but no release broke it: see whether `make test` passes")
            else:
                name = changed[index]
                sentences.append(f"{test} passes with {name} {locked[name]}, not with {newest.get(name, 'none')}")
    print("\n".join(sentences or ["All tests pass with the newest packages."]))
    return 1 if sentences else 0


if __name__ == "__main__":
    sys.exit(main())
