"""Tests tpufit on copies of Kaggle's and Colab's images: `python tests/images.py`, or `python tests/images.py kaggle`.

For each image it creates an environment in `.images/` with the image's Python and the versions on which tpufit depends,
and proves by pip's report that installing tpufit changes none of these versions. Then it runs the doctor, a preflight,
the image's notebook and the quick tests there, on virtual cores. The environments are kept; each takes 9 GB.

Another image has TorchTPU, on the plugin of `pod/as_tpu.cc`. There it runs the doctor, the README's first program, a
training that is killed, a notebook, tests of several cores and hosts, and the quick tests for the installed packages
(`RUNTIMES` in `conftest.py`).

The images are tested in parallel, each with its share of the processes, so that one downloads while another computes.
If the disk has no room for all environments, they are tested one after another, and each is removed afterwards.

Some tests run only in `make test`. Tests of the checkout (pages, imports, the test harness) don't depend on Python. If
an image has the same release of torch as `make test`, tests of the numbers that PyTorch and XLA compute are skipped
there; on the other image, tests of the host alone, such as tables and the wheel.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from time import perf_counter

import plugins
from pages import ROOT, SITE, Page

PLACE = ROOT / ".images"
NOTEBOOK = "tests/test_examples.py::test_a_notebook_runs_without_a_warning"
QUICK = ("-m", "not slow and not soak")
OF_THE_CHECKOUT = ("docs", "floors", "harness", "house")
# Tests of the host, which don't depend on the release of torch. They run on the newest Python.
OF_THE_HOST = (
    *("cache", "cache_fingerprint", "images", "plots", "prefetch", "remote", "tables", "tensorboard_server", "texts"),
    *("tracebacks", "wheel"),
)
# Files that also run on four cores of TorchTPU, which refuses steps that read a value.
ON_SEVERAL = ("flash", "last_batch", "predictions", "state")
OF_TORCH = (
    *("accumulation", "augment", "averages", "callbacks_tracker_callback", "class_weight", "dropout", "ema", "flash"),
    *("goldens", "graph_hash", "group_numbers", "kernels", "last_batch", "linear_algebra", "losses"),
    *("losses_by_output", "masks", "metrics", "metrics_by_output", "named_schedules", "norms", "operation_count"),
    *("optimizer_steps", "optimizers", "parameter_groups", "parity", "precision"),
    *("recompute", "schedules", "sharding", "shared_counters", "uneven_rows", "weight_packing"),
)


@dataclass(frozen=True)
class Image:
    """An image as of 2026-11, or another environment of a user.

    Attributes:
        python: Its version of Python.
        versions: The packages that an installation must not change.
        libraries: Further packages that its notebook imports, of any version.
        extras: The extras of tpufit that a user may install there.
        size: The disk space of its environment, in bytes.
        left_out: Test files that are skipped, because `make test` covers them.
        weight: Its share of the processes, relative to the others' 1.
    """

    python: str
    versions: Mapping[str, str]
    libraries: tuple[str, ...] = ()
    extras: tuple[str, ...] = ("", "[xla]", "[preflight]")
    size: int = 10 << 30
    left_out: tuple[str, ...] = OF_THE_CHECKOUT
    weight: int = 1


# From users' reports and the images' repositories. Kaggle's JAX is the version that torch_xla 2.8.0 requires.
IMAGES = {
    "kaggle": Image(
        "3.12",
        {
            "torch": "2.8.0",
            "torch_xla": "2.8.0",
            "torchvision": "0.23.0",
            "libtpu": "0.0.17",
            "jax": "0.6.2",
            "jaxlib": "0.6.2",
        },
        libraries=("timm",),
        left_out=OF_THE_CHECKOUT + OF_THE_HOST,
    ),
    "colab": Image(
        "3.13",
        {
            "torch": "2.9.0",
            "torch_xla": "2.9.0",
            "torchvision": "0.24.0",
            "libtpu": "0.0.21.1",
            "jax": "0.7.2",
            "jaxlib": "0.7.2",
        },
        libraries=("transformers", "peft"),
        left_out=OF_THE_CHECKOUT + OF_TORCH,
    ),
    "torchtpu": Image(
        "3.11",
        # The index may offer a build of PyTorch for CPUs.
        {"torch": "2.13.0", "torch_tpu": "0.2.0", "libtpu": "0.0.51"},
        libraries=("transformers", "jax==0.10.2", "jaxlib==0.10.2"),  # flash attention needs JAX
        extras=("", "[tpu]"),
        # `remote` runs, because its training writes to a bucket.
        left_out=(*OF_THE_CHECKOUT, *(file for file in OF_THE_HOST if file != "remote")),
        size=4 << 30,
        weight=2,  # it has the most tests, and its traces take longest
    ),
}


def pythons(version: str) -> Iterator[str]:
    """Yield the Pythons of a version on this machine: on the path, or installed by pyenv, uv or conda."""
    yield from filter(None, [shutil.which(f"python{version}"), sys.executable])
    home = Path.home()
    for pattern in (
        f".pyenv/versions/{version}.*/bin/python",
        f".local/share/uv/python/cpython-{version}.*/bin/python",
        "*conda*/envs/*/bin/python",
        "miniforge*/envs/*/bin/python",
    ):
        yield from map(str, sorted(home.glob(pattern)))


def python_of(version: str) -> str | None:
    """Return a Python of a version, or None. Candidates may have another version, or be broken links."""
    ask = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
    for candidate in pythons(version):
        answer = subprocess.run([candidate, "-c", ask], capture_output=True, text=True)
        if answer.stdout.strip() == version:
            return candidate
    return None


def run(*command: object, **environ: str) -> None:
    """Run a command in the checkout, and exit if it fails."""
    print("$", *command, flush=True)
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PJRT_DEVICE")}
    status = subprocess.run([str(word) for word in command], cwd=ROOT, env={**kept, **environ}).returncode
    if status:
        raise SystemExit(f"the command ended with status {status}")


def create(name: str, image: Image, python: str) -> Path:
    """Return the Python of an image's environment; create it unless one with the same versions exists."""
    folder = PLACE / name
    interpreter, ready = folder / "bin" / "python", folder / "ready"
    versions = json.dumps([image.python, dict(image.versions)])
    if not ready.exists() or ready.read_text() != versions:
        shutil.rmtree(folder, ignore_errors=True)
        run(python, "-m", "venv", folder)
        # Upgraded, because older versions of pip lack --report.
        run(interpreter, "-m", "pip", "install", "--quiet", "--upgrade", "pip")
        run(*_install(interpreter), *(f"{package}=={number}" for package, number in image.versions.items()))
        ready.write_text(versions)
    return interpreter


def _install(interpreter: Path) -> tuple[object, ...]:
    # Python compiles torch's thousands of modules only when they are imported.
    return interpreter, "-m", "pip", "install", "--quiet", "--no-compile"


def prove_nothing_changes(interpreter: Path, image: Image, checkout: Path) -> None:
    """Check by pip's report that installing tpufit would change no package of the image."""
    with tempfile.TemporaryDirectory() as folder:
        for extra in image.extras:
            report = Path(folder, "report.json")
            package = f"{checkout}{extra}"
            run(interpreter, "-m", "pip", "install", "--quiet", "--dry-run", "--report", report, package)
            packages = [one["metadata"] for one in json.loads(report.read_text())["install"]]
            names = {one["name"].lower().replace("-", "_"): one["version"] for one in packages}
            changed = {one: names[one] for one in (*image.versions, "numpy") if one in names}
            if changed:
                raise SystemExit(f"pip install '.{extra}' would change {changed}")
            print(f"pip install '.{extra}' changes none of {', '.join(image.versions)} and numpy", flush=True)


def install(name: str, image: Image, python: str) -> Path:
    """Install the current tpufit into an image's environment, and return its Python."""
    interpreter = create(name, image, python)
    with tempfile.TemporaryDirectory() as folder:
        # A copy, because pip writes into the folder from which it installs.
        checkout = Path(folder, "checkout")
        shutil.copytree(ROOT, checkout, symlinks=True, ignore=shutil.ignore_patterns(".*", "*.egg-info", "build"))
        prove_nothing_changes(interpreter, image, checkout)
        fixed = Path(folder, "fixed.txt")
        fixed.write_text("".join(f"{package}=={number}\n" for package, number in image.versions.items()))
        libraries = (f"{checkout}[test,examples]", *image.libraries)
        run(*_install(interpreter), "--constraint", fixed, *libraries)
    return interpreter


def try_out(name: str, image: Image, own: Path, jobs: str) -> None:
    """Run the tests in an image's environment, the quick ones in `jobs` processes (a number, or "auto")."""
    tests = (own, "-m", "pytest", "-p", "no:cacheprovider")
    parallel = (*tests, "--numprocesses", jobs, "--maxprocesses", "4")
    if "torch_tpu" in image.versions:
        plugin = plugins.as_tpu()
        run(own, "-m", "tpufit", "doctor", **plugin)
        with tempfile.TemporaryDirectory() as folder:
            first = Path(folder, "first.py")
            first.write_text(Page(ROOT / "README.md").program.replace("cores=8", "cores=1"))
            run(own, "-W", "error", "-W", "ignore:the device waited for data", first, **plugin)
        run(own, "tests/faults/kill_at_random.py", "3", **plugin)
        run(own, "tests/faults/kill_at_random.py", "2", "--cores", "2", "--signals", "KILL", "OTHER", **plugin)
        several = [f"tests/test_{file}.py" for file in ON_SEVERAL]
        cores = [f"tests/test_torchtpu_{file}.py" for file in ("cores", "sharding", "notebook", "hosts")]
        run(*parallel, "-m", "not soak", *cores, "tests/test_compile_cache.py", "tests/test_pod_faults.py")
        run(*parallel, "-k", "cores4", "-m", "slow and not soak", *several)
        run(*parallel, "-k", "cores1 or keeps_and_restores", "-m", "slow and not soak", "tests/test_aliases.py")
        notebook = "text"
    else:
        run(own, "-m", "tpufit", "doctor")
        with tempfile.TemporaryDirectory() as folder:
            train = Path(folder, "train.py")
            train.write_text(Page(SITE / "guides" / "preflight.md").files["train.py"])
            run(own, "-W", "error", "-m", "tpufit", "preflight", "--tpu", "v5e-8", train)
        notebook = name
    run(*tests, f"{NOTEBOOK}[{notebook}.ipynb]", WARM_IMPORTS="")  # in a kernel without prior imports
    left_out = [f"--ignore=tests/test_{file}.py" for file in image.left_out]
    run(*parallel, *QUICK, *left_out)


def try_image(name: str, jobs: str) -> None:
    """Create an image's environment and test it, or print why not."""
    image, began = IMAGES[name], perf_counter()
    python = python_of(image.python)
    if python is None:
        print(f"not tested, because this machine has no Python {image.python}", flush=True)
        return
    interpreter = install(name, image, python)
    try_out(name, image, interpreter, jobs)
    print(f"tpufit works there; it took {perf_counter() - began:.0f} s", flush=True)


def try_in_parallel(names: Sequence[str], jobs: str) -> None:
    """Test each image in a separate process, and print their output with their names."""
    cpus = min(len(os.sched_getaffinity(0)), 4) if jobs == "auto" else int(jobs)
    weights = sum(IMAGES[name].weight for name in names)

    def status_of(name: str) -> int:
        share = -(-cpus * IMAGES[name].weight // weights)
        command = [sys.executable, __file__, "--jobs", str(share), name]
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        with subprocess.Popen(command, **output) as process:
            for line in process.stdout:
                print(f"{name}: {line}", end="", flush=True)
        return process.returncode

    with ThreadPoolExecutor(len(names)) as threads:
        statuses = list(threads.map(status_of, names))
    if any(statuses):
        raise SystemExit(f"the images ended with {dict(zip(names, statuses, strict=True))}")


def without_room(names: Sequence[str]) -> list[str]:
    """Return the images without an environment, for which the disk has no room."""
    missing = [name for name in names if not (PLACE / name / "ready").exists()]
    room = shutil.disk_usage(ROOT).free - (5 << 30)
    taken = accumulate(IMAGES[name].size for name in missing)
    return [name for name, so_far in zip(missing, taken, strict=True) if so_far > room]


def try_in_turn(names: Sequence[str], jobs: str, removes: bool) -> None:
    """Test the images one after another; existing environments first, because removing them makes room."""
    for name in sorted(names, key=lambda name: not (PLACE / name / "ready").exists()):
        if without_room([name]):
            print(f"{name}: not tested, because it needs {IMAGES[name].size >> 30} GiB of disk", flush=True)
            continue
        try_image(name, jobs)
        if removes:
            shutil.rmtree(PLACE / name, ignore_errors=True)  # it doesn't exist if its Python is missing


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("image", nargs="*", choices=[*IMAGES, []], help="default: all")
    parser.add_argument("--jobs", default="auto", help="the processes of the quick tests (default: one a CPU)")
    chosen = parser.parse_args()
    names = chosen.image or list(IMAGES)
    lacking = len(without_room(names))
    if len(names) > 1 and not lacking:
        try_in_parallel(names, chosen.jobs)
    else:
        try_in_turn(names, chosen.jobs, removes=bool(lacking))
