"""The processes of tests: nested runs of pytest run small test files with this folder's harness."""

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import processes
import pytest

pytest_plugins = ["pytester"]

HERE = Path(__file__).resolve().parent


@pytest.fixture
def nested(pytester, monkeypatch):
    """Run pytest on a test file with this project's settings and harness."""
    tests = pytester.mkdir("tests")
    for name in ("conftest.py", "on_cores.py", "processes.py", "fork_server.py", "xla_flags.py"):
        shutil.copy(HERE / name, tests)
    shutil.copy(HERE.parent / "setup.cfg", pytester.path)
    pytester.makepyfile(torch_xla="")  # a stand-in, because the real package takes seconds
    monkeypatch.setenv("WARM_IMPORTS", "")

    def run(source, *arguments):
        (tests / "test_inner.py").write_text(f"import os, pathlib, signal, subprocess, sys, time, pytest\n\n{source}")
        # Plugins that these tests don't need, and that take a second to import.
        without = ["-p", "no:hypothesispytest", "-p", "no:anyio"]
        return pytester.runpytest_subprocess("-rA", *without, *arguments, timeout=280)

    return run


def dies(pid):
    """Wait until a process is gone, or a zombie (its adoptive parent may not reap it)."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state in "ZX":
            return True
        time.sleep(0.02)
    return False


NOTES = """
def note(name, cores):
    with open("notes", "a") as file:
        print(name, cores, os.getpid(), os.getppid(), file=file)

@pytest.mark.cores(1, 8)
@pytest.mark.parametrize("word", ["a b", "c::d[e]"])
def test_words(word, cores, tmp_path, capsys):
    note("words", cores)
    print(word)
    assert capsys.readouterr().out == word + "\\n"
    assert os.environ["PJRT_DEVICE"] == "CPU" and "CPU_NUM_DEVICES" not in os.environ

@pytest.fixture(scope="module")
def trained(cores):
    note("trained", cores)
    return cores

@pytest.mark.cores(8)
def test_trained(trained):
    assert trained == 8

@pytest.mark.cores(8)
def test_no_argument():
    note("no argument", 8)

def test_here():
    note("here", 0)
"""


def notes(path):
    """Return the notes of the test file above: (name, cores) pairs, and the process ids for each number of cores."""
    lines = [line.rsplit(maxsplit=3) for line in (path / "notes").read_text().splitlines()]
    pids = {}
    for _, cores, pid, _ in lines:
        pids.setdefault(int(cores), set()).add(int(pid))
    return [(name, int(cores)) for name, cores, _, _ in lines], pids


def test_each_number_of_cores_has_one_process(nested, pytester):
    nested(NOTES).assert_outcomes(passed=7)
    names, pids = notes(pytester.path)
    assert sorted(names) == sorted([("words", 1), ("words", 8)] * 2 + [("trained", 8), ("no argument", 8), ("here", 0)])
    assert {cores: len(of_it) for cores, of_it in pids.items()} == {0: 1, 1: 1, 8: 1}
    assert len(set.union(*pids.values())) == 3


def test_files_share_a_process_except_tests_that_are_alone(nested, pytester):
    other = """
import os, pytest
from test_inner import note
@pytest.mark.cores(8)
def test_shares(): note("shares", 8)
@pytest.mark.cores(8, alone=True)
def test_is_alone(cores): note("alone", cores + 1000)
"""
    (pytester.path / "tests/test_other.py").write_text(other)
    nested(NOTES).assert_outcomes(passed=9)
    names, pids = notes(pytester.path)
    assert ("shares", 8) in names and ("alone", 1008) in names
    assert {cores: len(of_it) for cores, of_it in pids.items()} == {0: 1, 1: 1, 8: 1, 1008: 1}
    assert len(set.union(*pids.values())) == 4


def rerun(pytester, source, *options):
    """Run `rerun_failed.py` on a test file."""
    pytester.makepyfile(test_inner=f"import pathlib, pytest\n\n{source}")
    without = ["-p", "no:hypothesispytest", "-p", "no:anyio", "-p", "no:cacheprovider"]
    return pytester.run(sys.executable, HERE / "rerun_failed.py", *without, *options)


# Each run of a test adds a line to a file named after the test.
RUNS = """
@pytest.fixture(autouse=True)
def run(request):
    with open(request.node.originalname, "a") as file:
        print("ran", file=file)
    return len(pathlib.Path(request.node.originalname).read_text().split())
"""


@pytest.mark.parametrize("parallel", [[], ["-n", "2"]], ids=["one process", "two processes"])
def test_a_test_that_passes_the_second_time_is_named(pytester, parallel):
    test = "@pytest.mark.parametrize('word', ['a - b::c[d]'])\ndef test_once(word, run): assert run == 2\n"
    result = rerun(pytester, f"{RUNS}{test}def test_passes(run): assert run == 1", *parallel)
    assert result.ret == 0
    assert result.outlines[-1] == (
        "flaky: test_inner.py::test_once[a - b::c[d]] failed beside other tests and passed alone"
    )
    assert (pytester.path / "test_once").read_text().split() == ["ran", "ran"]


def test_a_test_that_fails_twice_is_a_failure(pytester):
    result = rerun(pytester, f"{RUNS}def test_once(run): assert run == 2\ndef test_never(run): assert run == 3")
    assert result.ret == 1
    assert result.outlines[-2:] == [
        "flaky: test_inner.py::test_once failed beside other tests and passed alone",
        "FAILED twice: test_inner.py::test_never",
    ]


def test_more_than_ten_failed_tests_do_not_run_again(pytester):
    many = "@pytest.mark.parametrize('i', range(11))\ndef test_many(i, run): assert False\n"
    result = rerun(pytester, f"{RUNS}{many}")
    assert result.ret == 1 and "11 tests failed: more than 10" in result.outlines[-1]
    assert len((pytester.path / "test_many").read_text().split()) == 11


def test_a_file_that_cannot_be_collected_is_a_failure(pytester):
    result = rerun(pytester, "import absent_module")
    assert result.ret == 2 and "flaky" not in result.stdout.str()


@pytest.mark.slow
def test_soak_on_some_numbers_of_cores(nested, pytester):
    source = NOTES.replace("@pytest.mark.cores(1, 8)", "@pytest.mark.cores(1, 8)\n@pytest.mark.soak_on(8)")
    nested(source, "-m", "soak").assert_outcomes(passed=2, deselected=5)
    assert notes(pytester.path)[0] == [("words", 8)] * 2


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["-k", "words and cores8"], [("words", 8), ("words", 8)]),
        (["tests/test_inner.py::test_words[cores1-c::d[e]]"], [("words", 1)]),
        pytest.param(["tests/test_inner.py::test_no_argument"], [("no argument", 8)], marks=pytest.mark.slow),
    ],
)
def test_only_selected_tests_run(nested, pytester, arguments, expected):
    nested(NOTES, *arguments).assert_outcomes(passed=len(expected), deselected=7 - 2 if "-k" in arguments else 0)
    assert notes(pytester.path)[0] == expected


def test_on_cores_runs_tests_in_this_process(nested, pytester):
    nested(NOTES, "--on-cores=1").assert_outcomes(passed=2, deselected=5)
    assert set(notes(pytester.path)[1]) == {1}


def test_failures_show_the_traceback_and_the_output(nested):
    result = nested(
        """
@pytest.mark.cores(2)
def test_fails(cores):
    print("printed before")
    assert cores == 3, "the reason"

@pytest.fixture
def broken():
    raise RuntimeError("no fixture")

@pytest.mark.cores(2)
def test_errs(broken): pass

@pytest.mark.cores(2)
def test_skips(): pytest.skip("a skip's reason")

@pytest.mark.cores(2)
@pytest.mark.xfail(raises=ValueError, reason="known")
def test_known_failure(): raise ValueError

@pytest.mark.cores(2)
@pytest.mark.xfail(raises=ValueError, reason="known")
def test_other_failure(): raise KeyError("another")

@pytest.mark.cores(2)
@pytest.mark.xfail(reason="believed broken")
def test_repaired(): pass

@pytest.mark.cores(2)
@pytest.mark.skipif(True, reason="known before it starts")
def test_skipped(): pass
"""
    )
    result.assert_outcomes(failed=3, errors=1, skipped=2, xfailed=1)
    result.stdout.fnmatch_lines_random(
        [
            '>       assert cores == 3, "the reason"',
            "E       AssertionError: the reason",
            "printed before",
            "E       RuntimeError: no fixture",
            "E   KeyError: 'another'",
            "*XPASS(strict)*believed broken*",
            "SKIPPED *a skip's reason",
        ]
    )


@pytest.mark.soak
def test_a_hanging_test_is_killed_with_its_processes(nested, pytester):
    result = nested(
        """
children = []

@pytest.mark.cores(2)
def test_before():
    children.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1e6)"]))
    pathlib.Path("pid").write_text(str(children[0].pid))

@pytest.mark.cores(2, timeout=4)
def test_hangs():
    print("on the way")
    time.sleep(1e6)

@pytest.mark.cores(2)
def test_after(): pass
"""
    )
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*_ test_hangs?cores2? _*",
            "the process (2 cores) ended in this test: it wrote nothing for 4 s, and was killed",
            "*on the way*",
            '*test_inner.py", line *in test_hangs',
        ]
    )
    assert dies((pytester.path / "pid").read_text())


def test_a_dying_process_fails_only_its_current_test(nested):
    result = nested(
        """
@pytest.mark.cores(2)
def test_before(): pass

@pytest.mark.cores(2)
def test_aborts():
    os.write(2, b"written by native code\\n")
    os.abort()

@pytest.mark.cores(2)
def test_after(): pass
"""
    )
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*_ test_aborts?cores2? _*",
            "the process (2 cores) ended in this test: it died of SIGABRT",
            "*written by native code*",
            "Fatal Python error: Aborted",
        ]
    )


@pytest.mark.slow
@pytest.mark.parametrize(("leave", "cause"), [("os._exit(0)", "exit code 0"), ("pytest.exit('bye')", "exit code 2")])
def test_a_process_that_exits_early_is_a_failure(nested, leave, cause):
    result = nested(f"@pytest.mark.cores(2)\ndef test_leaves(): {leave}")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"*ended in this test: it ended with {cause}"])


@pytest.mark.slow
def test_no_third_process_is_started_for_a_file(nested, pytester):
    (pytester.path / "tests/test_other.py").write_text("import pytest\n@pytest.mark.cores(2)\ndef test_passes(): pass")
    source = "".join(
        f"@pytest.mark.cores(2)\ndef test_{name}(): {body}\n"
        for name, body in [("a", "os.abort()"), ("b", "os.abort()"), ("c", "pass")]
    )
    result = nested(source)
    result.assert_outcomes(failed=2, errors=1, passed=1)
    result.stdout.fnmatch_lines(["*_ ERROR at setup of test_c?cores2? _*", "not run: two processes died *"])


@pytest.mark.slow
def test_dying_outside_of_a_test_is_a_failure_too(nested):
    result = nested(
        """
@pytest.fixture(scope="session", autouse=True)
def crash_at_the_end():
    yield
    import atexit
    atexit.register(os.abort)

@pytest.mark.cores(2)
def test_passes(): pass
"""
    )
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["the process (2 cores) ended outside of a test: it died of SIGABRT"])


@pytest.mark.slow
def test_exitfirst_stops_both_processes(nested, pytester):
    result = nested(
        """
@pytest.mark.cores(2)
def test_fails(): assert False

@pytest.mark.cores(2)
def test_never(): pathlib.Path("ran").touch()
""",
        "-x",
    )
    result.assert_outcomes(failed=1)
    assert not (pytester.path / "ran").exists()


def test_importing_torch_xla_in_pytest_is_a_failure(nested):
    nested(
        """
def test_imports(): import torch_xla

@pytest.mark.cores(2)
def test_may_import(): import torch_xla
"""
    ).assert_outcomes(passed=2, errors=1)
    result = nested("import torch_xla\ndef test_nothing(): pass")
    result.stderr.fnmatch_lines(["*collecting the tests imported torch_xla*"])


@pytest.mark.slow
def test_cores_without_the_marker_is_explained(nested):
    result = nested("def test_forgot(cores): pass")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*needs a mark with the numbers: @pytest.mark.cores(1, 8)"])


def test_run_python(run_python, tmp_path):
    result = run_python(
        """
        import os, sys
        print(os.getcwd(), os.environ["WORD"], "PJRT_DEVICE" in os.environ)
        sys.exit("said on stderr")
        """,
        env={"WORD": "word", "PJRT_DEVICE": None},
    )
    assert (result.stdout, result.stderr) == (f"{tmp_path} word False\n", "said on stderr\n")
    assert result.returncode == 1


def test_run_python_kills_at_the_timeout(run_python, tmp_path, monkeypatch):
    class Clock:
        """Jumps once it has been read and the process has written a file: `run` reads it first for its deadline."""

        sleep = time.sleep
        reads = 0

        def monotonic(self):
            self.reads += 1
            return time.monotonic() + 1000 * (self.reads > 1 and (tmp_path / "ready").exists())

    monkeypatch.setattr(processes, "time", Clock())
    with pytest.raises(
        pytest.fail.Exception, match=r"(?s)still running after 500 s.*half a line.*most recent call first"
    ):
        run_python(
            """
            import pathlib, subprocess, sys, time
            # A grandchild that keeps the output open.
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1e6)"])
            pathlib.Path("pid").write_text(str(child.pid))
            print("half a line", end="", flush=True)
            pathlib.Path("ready").touch()
            time.sleep(1e6)
            """,
            timeout=500,
        )
    assert dies((tmp_path / "pid").read_text())


@pytest.mark.parametrize("fresh", [False, True])
def test_a_process_group_ends_with_its_block(tmp_path, fresh):
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with (
        (tmp_path / "output").open("wb") as output,
        processes.process_group(command, fresh=fresh, stdout=output, stderr=output) as process,
    ):
        assert process.poll() is None
    assert process.returncode == -signal.SIGKILL


WAITS = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
# Stands for pytest.
STARTS = f"""
import sys, time
sys.path.insert(0, {str(HERE)!r})
import processes
command = [sys.executable, "-c", {WAITS!r}]
with open("output", "wb") as output, processes.process_group(
    command, fresh=FRESH, stdout=output, stderr=output
) as process:
    time.sleep(600)
"""


@pytest.mark.parametrize("fresh", [False, True])
def test_a_killed_pytest_leaves_no_process(tmp_path, fresh, monkeypatch):
    monkeypatch.setenv("WARM_IMPORTS", "")
    output = tmp_path / "output"
    with subprocess.Popen([sys.executable, "-c", STARTS.replace("FRESH", str(fresh))], cwd=tmp_path) as stand_in:
        while not (output.exists() and output.read_text().endswith("\n")):
            assert stand_in.poll() is None
            time.sleep(0.02)
        stand_in.kill()
    assert dies(output.read_text().strip())
