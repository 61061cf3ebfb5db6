"""Runs pytest, then each failed test a second time, alone: `python tests/rerun_failed.py [pytest's options]`.

A test that fails twice is a failure. A test that passes the second time is flaky: it is named in the last lines,
and its cause must be mended. If more than ten tests fail, none runs again.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

MOST = 10  # the most failed tests that run again


class FailedTests:
    """Collects the ids of failed tests, in order."""

    def __init__(self) -> None:
        self.ids: dict[str, None] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.ids[report.nodeid] = None


def passes_alone(test: str, options: list[str]) -> bool:
    command = [sys.executable, "-m", "pytest", *options, "--numprocesses", "0", test]
    return subprocess.run(command).returncode == pytest.ExitCode.OK


def main(options: list[str]) -> int:
    failed = FailedTests()
    code = pytest.main(options, plugins=[failed])
    if code != pytest.ExitCode.TESTS_FAILED or not failed.ids:
        return int(code)
    if len(failed.ids) > MOST:
        print(f"{len(failed.ids)} tests failed: more than {MOST}, so none of them runs a second time")
        return int(code)
    sys.stdout.flush()
    passed = {test: passes_alone(test, options) for test in failed.ids}
    print()
    for test, flaky in passed.items():
        print(f"flaky: {test} failed beside other tests and passed alone" if flaky else f"FAILED twice: {test}")
    return int(pytest.ExitCode.OK if all(passed.values()) else code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
