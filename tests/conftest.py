"""Fixtures for all tests: `run_python`, and `@pytest.mark.cores(1, 8)` with `cores`, `place` and `compiles_anew`.

A test marked `cores` runs once for each number of XLA cores, in a separate process (see `on_cores.py`). To debug a test
in this process: `pytest tests/test_x.py -k test_y --on-cores 8 --pdb`. Other tests must not start the device; they fail
if they do.
"""

from __future__ import annotations

import functools
import gc
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from uuid import uuid4

import on_cores
import processes
import pytest
import xla_flags

if TYPE_CHECKING:
    from tpufit.backend import Placement

ROOT = Path(__file__).resolve().parent.parent
# The longest files run first, in this order, so that no processor runs one of them alone at the end.
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
# These files use the TPU's compiler, whose version of JAX needs Python 3.11.
collect_ignore = [
    "test_flash.py",
    "test_flash_programs.py",
    "test_preflight.py",
    "test_preflight_programs.py",
    "test_tpu_peers.py",
]
collect_ignore += ["faults/test_preflight_faults.py"]
collect_ignore = collect_ignore if sys.version_info < (3, 11) else []
# The runtimes for tests marked `cores`, with their most cores. Without a runtime these tests are skipped.
RUNTIMES = {"torch_xla": sys.maxsize, "torch_tpu": 4}
# A shell starts background processes with SIGINT ignored, which the tests' processes would inherit: tests that
# interrupt a process would hang.
signal.signal(signal.SIGINT, signal.default_int_handler)


_installed = functools.cache(lambda name: find_spec(name) is not None)


class RunPython(Protocol):
    def __call__(
        self, code: str, *, timeout: float = 120, env: dict[str, str | None] | None = None, fresh: bool = False
    ) -> subprocess.CompletedProcess[str]: ...


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("cores")
    group.addoption("--on-cores", type=int, metavar="N", help="run only the tests for N XLA cores, right here")
    group.addoption("--journal", help="the file in which a child of pytest records its tests")


def pytest_configure(config: pytest.Config) -> None:
    # The processes that tests start inherit these variables. tpufit itself sets the number of virtual cores, and XLA's
    # log level.
    os.environ["PJRT_DEVICE"] = "CPU"
    # Idle threads of PyTorch sleep, and leave the processors to other tests.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    for name in ("CPU_NUM_DEVICES", "TF_CPP_MIN_LOG_LEVEL"):
        os.environ.pop(name, None)
    # Trackio reads it once, during its import, and creates the folder only when it writes.
    trackio = os.environ["TRACKIO_DIR"] = os.path.join(tempfile.gettempdir(), f"trackio-{uuid4().hex}")
    config.add_cleanup(functools.partial(shutil.rmtree, trackio, ignore_errors=True))
    if not config.getoption("--journal"):  # a child inherits them from its parent
        xla_flags.compile_quickly()
        _choose_examples(random=_is_soak(config))
        if _installed("torch_tpu"):
            import plugins

            os.environ.update(plugins.as_tpu())
    half = on_cores.Parent if config.getoption("--on-cores") is None else on_cores.Child
    config.pluginmanager.register(half(config), "on-cores")


def _is_soak(config: pytest.Config) -> bool:
    return bool(config.option.markexpr == "soak")


def _choose_examples(random: bool) -> None:
    """Set what Hypothesis draws: the same examples in each run, or random ones in `make soak`."""
    from hypothesis import settings

    # Before the tests' files are imported, whose own `settings` are based on the profile of that moment.
    settings.register_profile("same examples", deadline=None, derandomize=True, database=None)
    settings.register_profile("random examples", deadline=None)
    settings.load_profile("random examples" if random else "same examples")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("cores")
    if marker:
        if "cores" not in metafunc.fixturenames:  # the test doesn't use the number
            metafunc.fixturenames.append("cores")
        # `make check` runs on one core only, because processes take long to start; `quick` changes this for a file.
        most = {None: 1, True: max(marker.args), False: 0}[marker.kwargs.get("quick")]
        most = min(most, 1) if _installed("torch_tpu") else most
        alone = "-alone" if marker.kwargs.get("alone") else ""
        counts = []
        for count in _counts(marker.args):
            counts.append(pytest.param(count, id=f"cores{count}{alone}", marks=[pytest.mark.slow] * (count > most)))
        metafunc.parametrize("cores", counts, indirect=True, scope="module")


def _most_cores() -> int:
    return max((most for name, most in RUNTIMES.items() if _installed(name)), default=0)


def _counts(counts: Iterable[int]) -> list[int]:
    """Limit numbers of cores to the most that the installed runtime supports."""
    return list(dict.fromkeys(min(count, _most_cores() or count) for count in counts))


def _runs_here(item: pytest.Item) -> bool:
    """True if the runtimes that a test needs are installed, and have enough cores."""
    needed = [name for marker in item.iter_markers("runtime") for name in marker.args]
    count = on_cores.count_of(item) or 0
    return all(map(_installed, needed)) and count <= _most_cores()


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.hook.pytest_deselected(items=[item for item in items if not _runs_here(item)])
    items[:] = [item for item in items if _runs_here(item)]
    for item in items:
        if any(on_cores.count_of(item) in _counts(marker.args) for marker in item.iter_markers("soak_on")):
            item.add_marker(pytest.mark.soak)
        if _is_soak(config) and getattr(getattr(item, "function", None), "is_hypothesis_test", False):
            item.add_marker(pytest.mark.soak)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """With `pytest -n 2`, one worker gets all tests of a bundle, because they share a process."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return bundles[nodeid]

        def schedule(self) -> None:
            bundles.update(on_cores.bundles_of(next(iter(self.registered_collections.values()))))
            super().schedule()

        def _assign_work_unit(self, node: object) -> None:
            first = min(self.workqueue, key=_turn)
            self.workqueue.move_to_end(first, last=False)
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
    """The number of XLA cores of this process."""
    try:
        return request.param
    except AttributeError:
        pytest.fail("a test that uses `cores` needs a mark with the numbers: @pytest.mark.cores(1, 8)")


@pytest.fixture
def place(cores: int) -> Placement:
    """The placement on this process's cores."""
    from tpufit import runtime

    return runtime.make_placement(runtime.start(cores, "test"))


_numbers = itertools.count()


@pytest.fixture
def compiles_anew() -> Iterator[None]:
    """Hide the programs that this process has compiled for other tests: a test counts its own graphs, in any order.

    torch_xla can't forget a program, but it compiles a graph again if what `lowering` adds to the graph's hash differs.
    """
    if not _installed("torch_xla"):
        from tpufit.runtime.driver import driver

        driver()._programs.clear()
        yield
        return
    from tpufit.drivers.xla import graph_hash

    given, number = graph_hash.variables, next(_numbers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph_hash, "variables", lambda: (*given(), f"test={number}"))
        yield


@pytest.fixture(autouse=True)
def _without_device(request: pytest.FixtureRequest) -> Iterator[None]:
    before = "torch_xla" in sys.modules
    yield
    if request.config.getoption("--on-cores") is None and not before and "torch_xla" in sys.modules:
        pytest.fail("this test imported torch_xla into pytest's process: mark it `cores`, or use `run_python`")


@pytest.fixture(autouse=True, scope="module")
def _frozen(request: pytest.FixtureRequest) -> Iterator[None]:
    """Freeze the objects that exist before a file's first test, and collect garbage after its last test.

    Each capture of a step asks the garbage collector for all objects. Half a million objects of torch and of other
    files would take a quarter of a second; frozen objects aren't listed.
    """
    if request.config.getoption("--on-cores") is None:
        yield
        return
    if _installed("torch_xla"):
        import torch_xla  # noqa: F401 - most objects are torch_xla's

    gc.freeze()
    yield
    gc.collect()


@pytest.fixture(autouse=True)
def _still_frozen(request: pytest.FixtureRequest, _frozen: None) -> None:
    """Freeze objects again after a test with many imports, or with workers, for which tpufit unfreezes all objects."""
    if request.config.getoption("--on-cores") is not None and len(gc.get_objects()) > 100_000:
        gc.collect()
        gc.freeze()


@pytest.fixture
def run_python(tmp_path: Path) -> RunPython:
    """Run code in a separate Python process, in `tmp_path`, with the checkout's tpufit.

    Args:
        timeout: Seconds; after this time the process and its descendants are killed, and the test fails.
        env: Changes to the environment; None removes a variable.
        fresh: True for a test of a new Python: of its imports, their duration, or its memory.

    Returns:
        The finished process with its output as text, also if its exit code isn't 0.
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
