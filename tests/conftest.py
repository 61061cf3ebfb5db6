"""What every test may use: `run_python`, and `@pytest.mark.cores(1, 8)` with the fixtures `cores` and `place`.

A test marked `cores` runs once for each number of XLA cores, in a process for it (see `on_cores.py`). To debug one
in this process: `pytest tests/test_x.py -k test_y --on-cores 8 --pdb`. No other test may start the device, and none
does unnoticed.
"""

from __future__ import annotations

import gc
import multiprocessing.spawn
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import on_cores
import processes
import pytest
import xla_flags

if TYPE_CHECKING:
    from tpufit.backend import Placement

ROOT = Path(__file__).resolve().parent.parent
# What takes longest comes first, in this order, so that no core is left with one of them at the end.
LONGEST = [
    "test_examples.py",
    "test_pod_faults.py",
    "test_goldens.py",
    "test_verification.py",
    "test_preflight_programs.py",
    "test_docs.py",
    "test_pod.py",
    "test_cache_faults.py",
    "test_kills.py",
]
# They compile with the TPU's compiler, and the JAX that belongs to it is made for Python 3.11 and later.
collect_ignore = [
    "test_flash.py",
    "test_flash_programs.py",
    "test_preflight.py",
    "test_preflight_programs.py",
    "test_tpu_peers.py",
]
collect_ignore += ["faults/test_preflight_faults.py"]
collect_ignore = collect_ignore if sys.version_info < (3, 11) else []
# A shell starts what it runs in the background with SIGINT ignored, and so would every process be that a test starts:
# those that are interrupted would never end.
signal.signal(signal.SIGINT, signal.default_int_handler)


class RunPython(Protocol):
    def __call__(
        self, code: str, *, timeout: float = 120, env: dict[str, str | None] | None = None, fresh: bool = False
    ) -> subprocess.CompletedProcess[str]: ...


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("cores")
    group.addoption("--on-cores", type=int, metavar="N", help="run only the tests for N XLA cores, right here")
    group.addoption("--journal", help="where a process started by another pytest writes what it did")


def pytest_configure(config: pytest.Config) -> None:
    # Also for the processes that tests start. The library itself says how many virtual cores there are, and keeps XLA
    # quiet.
    os.environ["PJRT_DEVICE"] = "CPU"
    # PyTorch's threads sleep when there is nothing to do, and leave the processors to the tests beside this one.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    for name in ("CPU_NUM_DEVICES", "TF_CPP_MIN_LOG_LEVEL"):
        os.environ.pop(name, None)
    if not config.getoption("--journal"):  # a child has what its parent gives it
        xla_flags.compile_quickly()
    half = on_cores.Parent if config.getoption("--on-cores") is None else on_cores.Child
    config.pluginmanager.register(half(config), "on-cores")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("cores")
    if marker:
        if "cores" not in metafunc.fixturenames:  # the test doesn't ask for the number
            metafunc.fixturenames.append("cores")
        # `make check` runs on one core, but for the files that ask for all or for none.
        most = {None: 1, True: max(marker.args), False: 0}[marker.kwargs.get("quick")]
        alone = "-alone" if marker.kwargs.get("alone") else ""
        counts = []
        for count in marker.args:
            counts.append(pytest.param(count, id=f"cores{count}{alone}", marks=[pytest.mark.slow] * (count > most)))
        metafunc.parametrize("cores", counts, indirect=True, scope="module")


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(on_cores.count_of(item) in marker.args for marker in item.iter_markers("soak_on")):
            item.add_marker(pytest.mark.soak)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """With `pytest -n 2`, one worker gets all tests of a bundle: they share a process."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return bundles[nodeid]

        def schedule(self) -> None:
            bundles.update(on_cores.bundles_of(next(iter(self.registered_collections.values()))))
            super().schedule()

        def _assign_work_unit(self, node: object) -> None:
            self.workqueue.move_to_end(min(self.workqueue, key=_turn), last=False)
            super()._assign_work_unit(node)

    bundles: dict[str, str] = {}
    return Scheduling(config, log)


def _turn(bundle: str) -> int:
    name = Path(bundle.partition(" ")[0]).name
    return LONGEST.index(name) if name in LONGEST else len(LONGEST)


def pytest_collection_finish(session: pytest.Session) -> None:
    if "torch_xla" in sys.modules and session.config.getoption("--on-cores") is None:
        raise pytest.UsageError("collecting the tests imported torch_xla: import it inside the tests that need it")


@pytest.fixture(scope="module")
def cores(request: pytest.FixtureRequest) -> int:
    """The number of XLA cores that this process is for."""
    try:
        return request.param
    except AttributeError:
        pytest.fail("a test that uses `cores` is marked with the numbers: @pytest.mark.cores(1, 8)")


@pytest.fixture
def place(cores: int) -> Placement:
    """The cores that this process is for, as a place to run steps at."""
    from tpufit import runtime

    return runtime.placement_on(runtime.start(cores, "test"))


@pytest.fixture(autouse=True)
def _off_the_device(request: pytest.FixtureRequest) -> Iterator[None]:
    before = "torch_xla" in sys.modules
    yield
    if request.config.getoption("--on-cores") is None and not before and "torch_xla" in sys.modules:
        pytest.fail("this test imported torch_xla into pytest's own process: mark it `cores`, or use `run_python`")


@pytest.fixture(autouse=True, scope="module")
def _apart(request: pytest.FixtureRequest) -> Iterator[None]:
    """Hide what there is before a file's first test from the garbage collector, and end with nothing left to collect.

    Whoever asks the collector for all objects (each capture of a step does) is then not given those of torch and of
    other files, which are half a million, and looking at them takes a quarter of a second.
    """
    if request.config.getoption("--on-cores") is None:
        yield
        return
    import torch_xla  # noqa: F401 - most of them are its own

    gc.freeze()
    yield
    gc.collect()


@pytest.fixture(autouse=True)
def _still_apart(request: pytest.FixtureRequest, _apart: None) -> None:
    """Hide them again after a test that started workers, for which tpufit freezes and unfreezes, or imported much."""
    if request.config.getoption("--on-cores") is not None and len(gc.get_objects()) > 100_000:
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="module")
def warm_children() -> Iterator[None]:
    """Let the processes that the library starts be forks, too, and those of `multiprocessing`; see `warm.py`."""
    before, python = multiprocessing.spawn.get_executable(), processes.SERVER.python()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", python)
        multiprocessing.set_executable(python)
        yield
    multiprocessing.set_executable(before)


@pytest.fixture
def run_python(tmp_path: Path) -> RunPython:
    """Run code in a Python of its own, in `tmp_path`, with the checkout's tpufit.

    Args:
        timeout: Seconds; a process that takes longer is killed with all that it started, and the test fails.
        env: Changes to the environment; None removes a variable.
        fresh: True for a test of what a new Python does: what it imports, how long that takes, what memory it needs.

    Returns:
        The finished process with its output as text, whatever its exit code is.
    """

    def run(
        code: str, *, timeout: float = 120, env: dict[str, str | None] | None = None, fresh: bool = False
    ) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        changed = {**os.environ, "PYTHONPATH": path, **(env or {})}
        command = [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(code)]
        try:
            return processes.run(
                command,
                timeout=timeout,
                fresh=fresh,
                cwd=tmp_path,
                env={k: v for k, v in changed.items() if v is not None},
            )
        except subprocess.TimeoutExpired as expired:
            pytest.fail(f"the process was still running after {timeout:g} s\n{expired.output}\n{expired.stderr}")

    return run
