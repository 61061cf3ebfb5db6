"""Runs tests marked `@pytest.mark.cores(...)` in separate processes: the parent's half and the child's half.

A process can't change its number of XLA cores after its runtime has started, and the runtime may abort the process. A
process takes six seconds to start, so the selected tests for one number of cores are grouped into bundles of whole
files, and for each bundle the parent runs `python -m pytest <tests> --on-cores N` once:

    pytest reaches the first test of a bundle
        the parent starts a child with all tests of the bundle
        the child writes a journal: a line for each test's start, its reports (serialized by pytest) and its finish
        if the child dies or hangs, its current test fails with the cause, and a new child runs the remaining tests
    this test, and later the others of the bundle, read their reports from the journal
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import xla_flags
from processes import ends, process_group

TIMEOUT = 300.0  # seconds
PHASES = ("setup", "call", "teardown")
BUNDLE = 100  # the most tests in a bundle of several files: a process keeps every graph that it has compiled
EXCERPT = 5000  # the number of characters of a dead child's output that are shown from its beginning and its end


def count_of(item: pytest.Item) -> int | None:
    """Return the number of cores of a test; None for a test without a device."""
    return item.callspec.params["cores"] if item.get_closest_marker("cores") else None


def bundles_of(nodeids: Iterable[str]) -> dict[str, str]:
    """Return the bundle of each test. A bundle runs in one process; tests without a device are bundled by file.

    Example:
        >>> bundles_of(["test_a.py::test_it[cores8-adam]", "test_b.py::test_it[cores8]", "test_b.py::test_other"])
        {'test_a.py::test_it[cores8-adam]': 'test_a.py cores8', 'test_b.py::test_it[cores8]': 'test_a.py cores8', \
'test_b.py::test_other': 'test_b.py'}
    """
    groups: dict[tuple[str, str], list[str]] = {}  # (file, number of cores) -> tests
    for nodeid in nodeids:
        path, _, test = nodeid.partition("::")
        count = re.search(r"\bcores\d+(-alone)?\b", test.partition("[")[2])
        groups.setdefault((path, count[0] if count else ""), []).append(nodeid)
    bundles: dict[str, str] = {}
    filling: dict[str, tuple[str, int]] = {}  # number of cores -> the bundle that isn't full, and its number of tests
    for (path, count), tests in groups.items():
        name, size = filling.get(count, ("", BUNDLE))
        if not count or count.endswith("alone") or size + len(tests) > BUNDLE:
            name, size = f"{path} {count}".rstrip(), 0
        filling[count] = name, size + len(tests)
        bundles.update(dict.fromkeys(tests, name))
    return bundles


def timeout_of(item: pytest.Item) -> float:
    return item.get_closest_marker("cores").kwargs.get("timeout", TIMEOUT)


def environment_of(item: pytest.Item) -> dict[str, str]:
    """Return the environment of a test's process. A test that is alone may test XLA: it gets XLA's optimizations."""
    alone = item.get_closest_marker("cores").kwargs.get("alone")
    return {**os.environ, **({"XLA_FLAGS": xla_flags.as_users_have_it()} if alone else {})}


class Child:
    """Deselects the tests for other numbers of cores, and writes the journal."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.count: int = config.getoption("--on-cores")
        path = config.getoption("--journal")
        # Line buffered like stdout, so that no line is lost if this process is killed.
        self.journal = open(path, "w", buffering=1) if path else None  # noqa: SIM115 (open as long as the process)
        sys.__stdout__.reconfigure(line_buffering=True)  # type: ignore[union-attr]

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.config.hook.pytest_deselected(items=[item for item in items if count_of(item) != self.count])
        items[:] = [item for item in items if count_of(item) == self.count]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        # The position in the parent's file at which this test's output begins.
        self._write(start=nodeid, output=os.fstat(sys.__stdout__.fileno()).st_size)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._write(report=self.config.hook.pytest_report_to_serializable(config=self.config, report=report))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._write(finish=nodeid)

    def _write(self, **entry: Any) -> None:
        if self.journal:
            self.journal.write(json.dumps(entry, default=repr) + "\n")


class Parent:
    """Runs the children and reports their tests as its own."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.reports: dict[str, dict[str, pytest.TestReport]] = {}  # node id -> phase -> report
        self.bundles: dict[str, str] = {}  # node id -> bundle

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            if count_of(item) is not None:
                # Only the child creates the test's fixtures, because they may need the device.
                item.setup = partial(self._fetch, item)
                item.runtest = lambda: None

    # Outermost, because pytest's own wrapper would judge an expected failure a second time.
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        report = yield
        return self.reports.get(item.nodeid, {}).get(call.when, report)

    def _fetch(self, item: pytest.Item) -> None:
        if item.nodeid in self.reports:
            return
        self.bundles = self.bundles or bundles_of(other.nodeid for other in item.session.items)
        name = self.bundles[item.nodeid]
        remaining = [other for other in item.session.items if self.bundles[other.nodeid] == name]
        deaths: Counter[Path] = Counter()
        while remaining:
            dead = self._run(remaining)
            remaining = [other for other in remaining if other.nodeid not in self.reports]
            if dead is None or self.config.option.maxfail == 1:
                break
            deaths[dead.path] += 1
            if deaths[dead.path] == 2:
                for other in [other for other in remaining if other.path == dead.path]:
                    self._fail(other, "not run: two processes died in other tests of this file")
                    remaining.remove(other)
        if item in remaining:
            self._fail(item, "the process that should have run this test skipped it")

    def _run(self, items: list[pytest.Item]) -> pytest.Item | None:
        """Run tests in a child.

        Returns:
            The test that failed because the child died or was killed; None if the child ended normally.
        """
        with tempfile.TemporaryDirectory(prefix="on-cores-") as folder:
            journal = Journal(Path(folder, "journal"), items, self)
            output = Path(folder, "output")
            with (
                output.open("wb") as out,
                process_group(
                    self._command(items, journal.path),
                    cwd=self.config.rootpath,
                    env=environment_of(items[0]),
                    stdout=out,
                    stderr=out,
                ) as child,
            ):
                ended = ends(child, journal.deadline)
            journal.read()
            code = child.returncode
            if ended and code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and not journal.current:
                return None
            if not ended:
                cause = f"it wrote nothing for {journal.limit:g} s, and was killed"
            elif code < 0:
                cause = f"it died of {signal.Signals(-code).name}"
            else:
                cause = f"it ended with exit code {code}"
            item = journal.current or next((i for i in items if i.nodeid not in self.reports), items[-1])
            where = "in this test" if journal.current else "outside of a test"
            text = output.read_bytes()[journal.output :].decode(errors="replace")
            self._fail(item, f"the process ({count_of(item)} cores) ended {where}: {cause}", excerpt(text))
            return item

    def _command(self, items: list[pytest.Item], journal: Path) -> list[str]:
        option = self.config.option
        command = [sys.executable, "-m", "pytest", f"--on-cores={count_of(items[0])}", f"--journal={journal}"]
        command += [f"--rootdir={self.config.rootpath}", "-p", "no:cacheprovider"]
        # The child is a fork of a process that has already imported plugins of pytest (see `fork_server.py`).
        command += ["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]
        # Hypothesis's summary imports all of Hypothesis, also for tests that don't use it.
        command += ["-p", "no:hypothesispytest"]
        # The output file also gets the output of native code, and of a test that dies.
        command += ["--capture=tee-sys"]
        command += [f"-c={self.config.inipath}"] if self.config.inipath else []
        if option.maxfail:
            command += [f"--maxfail={option.maxfail - items[0].session.testsfailed}"]
        command += [f"--tb={option.tbstyle}", *["--showlocals"] * option.showlocals, *["-v"] * option.verbose]
        command += [f"-o={setting}" for setting in option.override_ini or ()]
        command += [f"-W={warning}" for warning in option.pythonwarnings or ()]
        return [*command, *(item.nodeid for item in items)]

    def _fail(self, item: pytest.Item, message: str, output: str = "") -> None:
        reports = self.reports.setdefault(item.nodeid, {})
        phase = next((phase for phase in PHASES if phase not in reports), PHASES[-1])
        sections = [("Output of the process since the start of the test", output)] if output else []
        reports[phase] = pytest.TestReport(
            item.nodeid, item.location, dict.fromkeys(item.keywords, 1), "failed", message, phase, sections
        )


def excerpt(output: str) -> str:
    """Return the beginning and the end of an output."""
    # faulthandler's list of all extension modules would hide the stacks above it.
    output = re.sub(r"^Extension modules: .*\n", "", output, flags=re.MULTILINE)
    if len(output) <= 2 * EXCERPT:
        return output
    return f"{output[:EXCERPT]}\n[...]\n{output[-EXCERPT:]}"


class Journal:
    """Reads the journal of a child."""

    def __init__(self, path: Path, items: list[pytest.Item], parent: Parent) -> None:
        self.path = path
        self.items = {item.nodeid: item for item in items}
        self.parent = parent
        self.current: pytest.Item | None = None  # the child's current test
        self.output = 0  # the position in the child's output at which the last test began
        self.limit = timeout_of(items[0])
        self.heard = time.monotonic()
        path.touch()
        self._offset = 0

    def deadline(self) -> float:
        self.read()
        return self.heard + self.limit

    def read(self) -> None:
        with self.path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                self.heard = time.monotonic()
                self._take(**json.loads(line))

    def _take(self, start: str = "", output: int = 0, report: dict[str, Any] | None = None, finish: str = "") -> None:
        if start:
            self.current = self.items[start]
            self.output = output
            self.limit = timeout_of(self.current)
        elif report:
            read = self.parent.config.hook.pytest_report_from_serializable(config=self.parent.config, data=report)
            if isinstance(read.longrepr, list):  # a skip's (path, line, reason); JSON knows no tuples
                read.longrepr = tuple(read.longrepr)
            self.parent.reports.setdefault(read.nodeid, {})[read.when] = read
        elif finish:
            self.current = None
