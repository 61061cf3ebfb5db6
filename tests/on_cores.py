"""Tests marked `@pytest.mark.cores(...)` run in processes of their own; this is the parent's half and the child's.

How many XLA cores a process has is settled when its runtime starts, and the runtime may abort the process. A process
takes six seconds to begin with, so the selected tests for one number of cores are put into bundles of whole files, and
for each bundle the parent runs `python -m pytest <tests> --on-cores N`, once:

    the first test of the bundle comes up
        start a child with all the bundle's tests
        the child writes a journal: a line for each test's start, reports (as pytest itself serialises them) and finish
        if the child dies or hangs, the test it was in fails with the cause, and another child does the rest
    that test, and later the others, take their reports from the journal
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
BUNDLE = 100  # tests, unless one file has more: a process keeps every graph that it compiled, and so bundles end
EXCERPT = 5000  # characters of a dead child's output that are shown from each end


def count_of(item: pytest.Item) -> int | None:
    """The number of cores that a test is for; None for a test that needs no device."""
    return item.callspec.params["cores"] if item.get_closest_marker("cores") else None


def bundles_of(nodeids: Iterable[str]) -> dict[str, str]:
    """Which tests run in one process: the name of each one's bundle. Those that need no device go by their file.

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
    filling: dict[str, tuple[str, int]] = {}  # number of cores -> the bundle that is not full yet, and its tests
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
    """The environment of a test's process. One that is alone may be about what XLA does: it isn't compiled quickly."""
    alone = item.get_closest_marker("cores").kwargs.get("alone")
    return {**os.environ, **({"XLA_FLAGS": xla_flags.as_users_have_it()} if alone else {})}


class Child:
    """Leaves out the tests for other numbers of cores, and writes the journal."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.count: int = config.getoption("--on-cores")
        path = config.getoption("--journal")
        # Line buffered: whatever kills this process, the lines are with the system by then.
        self.journal = open(path, "w", buffering=1) if path else None  # noqa: SIM115 (open as long as the process)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.config.hook.pytest_deselected(items=[item for item in items if count_of(item) != self.count])
        items[:] = [item for item in items if count_of(item) == self.count]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        # The file that the parent gave, where this test's part begins.
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
                # The test's fixtures are made in the child only: they may want the device.
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
        waiting = [other for other in item.session.items if self.bundles[other.nodeid] == name]
        deaths: Counter[Path] = Counter()
        while waiting:
            dead = self._run(waiting)
            waiting = [other for other in waiting if other.nodeid not in self.reports]
            if dead is None or self.config.option.maxfail == 1:
                break
            deaths[dead.path] += 1
            if deaths[dead.path] == 2:
                for other in [other for other in waiting if other.path == dead.path]:
                    self._fail(other, "not run: two processes died with other tests of this file")
                    waiting.remove(other)
        if item in waiting:
            self._fail(item, "the process that was to run this test left it out")

    def _run(self, items: list[pytest.Item]) -> pytest.Item | None:
        """Run tests in a child.

        Returns:
            The test that has failed because the child died or had to be killed; None if it ended well.
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
                cause = f"nothing was heard from it for {journal.limit:g} s, and it was killed"
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
        command = [sys.executable, "-u", "-m", "pytest", f"--on-cores={count_of(items[0])}", f"--journal={journal}"]
        command += [f"--rootdir={self.config.rootpath}", "-p", "no:cacheprovider"]
        # It is a fork of a process that has imported plugins of pytest by the way (see `warm.py`).
        command += ["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]
        # Its summary imports all of Hypothesis, also for tests that don't use it.
        command += ["-p", "no:hypothesispytest"]
        # What native code writes, and what a test printed before it died, goes to the output as well.
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
        sections = [("What the process wrote from the start of the test", output)] if output else []
        reports[phase] = pytest.TestReport(
            item.nodeid, item.location, dict.fromkeys(item.keywords, 1), "failed", message, phase, sections
        )


def excerpt(output: str) -> str:
    # faulthandler's list of all extension modules would hide the stacks above it.
    output = re.sub(r"^Extension modules: .*\n", "", output, flags=re.MULTILINE)
    if len(output) <= 2 * EXCERPT:
        return output
    return f"{output[:EXCERPT]}\n[...]\n{output[-EXCERPT:]}"


class Journal:
    """What a child has written so far."""

    def __init__(self, path: Path, items: list[pytest.Item], parent: Parent) -> None:
        self.path = path
        self.items = {item.nodeid: item for item in items}
        self.parent = parent
        self.current: pytest.Item | None = None  # the test that the child is in
        self.output = 0  # where in the child's output the last test began
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
