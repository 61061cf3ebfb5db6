"""Tries tpufit on copies of Kaggle's and Colab's images: `python tests/images.py`, or `python tests/images.py kaggle`.

For each it makes an environment in `.images/` with the image's Python and the versions that tpufit depends on, and
proves by pip's own report that installing tpufit changes none of them. Then it runs there, on virtual cores:
the doctor, a preflight, the image's notebook and the quick tests. The environments are kept; each takes 9 GB.

The images are tried side by side, each with its share of the processes: one downloads while another computes. Where
the disk hasn't room for both environments, they are tried one after another, and what was tried is removed.

Left to `make test` are tests of the checkout, which are the same with any Python: of its pages, of its imports and of
the tests' own harness, which all tests here run through. On an image with the release of torch that `make test` has,
so are those of the numbers that PyTorch and XLA compute in a step, which don't depend on Python either.
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
from pathlib import Path
from time import perf_counter

from pages import ROOT, SITE, Page

PLACE = ROOT / ".images"
SIZE = 10 << 30  # of an environment, in bytes
NOTEBOOK = "tests/test_examples.py::test_a_notebook_runs_without_a_warning"
QUICK = ("-m", "not slow and not soak")
OF_THE_CHECKOUT = ("docs", "floors", "harness", "house")
OF_TORCH = (
    *("accumulation", "augment", "class_weight", "dropout", "ema", "flash", "group_numbers", "kernels", "losses"),
    *("losses_by_output", "lowering", "masks", "metrics", "metrics_by_output", "named_schedules", "norms"),
    *("optimizer_steps", "optimizers", "packing", "parameter_groups", "parity", "precision", "recompute", "schedules"),
    *("sharding", "shared_counters"),
)


@dataclass(frozen=True)
class Image:
    """An image, as it was in 2026-11.

    Attributes:
        python: Its Python.
        versions: The packages that a user must not lose.
        libraries: What its notebook imports besides, of any version.
        left_out: Files of tests that `make test` runs, and that come to the same here.
    """

    python: str
    versions: Mapping[str, str]
    libraries: tuple[str, ...]
    left_out: tuple[str, ...] = OF_THE_CHECKOUT


# Users' reports and the images' own repositories. The JAX of Kaggle is the one that torch_xla 2.8.0 names.
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
        ("timm",),
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
        ("transformers", "peft"),
        OF_THE_CHECKOUT + OF_TORCH,
    ),
}


def pythons(version: str) -> Iterator[str]:
    """The Pythons of a version on this machine: on the path, or kept by pyenv, uv or conda."""
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
    """A Python of a version, or None. One that is found may be another, or a link that leads nowhere."""
    ask = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
    for candidate in pythons(version):
        said = subprocess.run([candidate, "-c", ask], capture_output=True, text=True)
        if said.stdout.strip() == version:
            return candidate
    return None


def run(*command: object, **environ: str) -> None:
    """Run a command in the checkout, and end with it if it fails."""
    print("$", *command, flush=True)
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PJRT_DEVICE")}
    status = subprocess.run([str(word) for word in command], cwd=ROOT, env={**kept, **environ}).returncode
    if status:
        raise SystemExit(f"it ended with status {status}")


def made(name: str, image: Image, python: str) -> Path:
    """The Python of an image's environment, which is made first unless there is one of the same versions."""
    folder = PLACE / name
    own, ready = folder / "bin" / "python", folder / "ready"
    wanted = json.dumps([image.python, dict(image.versions)])
    if not ready.exists() or ready.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        run(python, "-m", "venv", folder)
        # A pip that has --report.
        run(own, "-m", "pip", "install", "--quiet", "--upgrade", "pip")
        run(*_install(own), *(f"{one}=={number}" for one, number in image.versions.items()))
        ready.write_text(wanted)
    return own


def _install(own: Path) -> tuple[object, ...]:
    # Of torch's thousands of modules, those that are imported are compiled when they are.
    return own, "-m", "pip", "install", "--quiet", "--no-compile"


def prove_nothing_changes(own: Path, image: Image, checkout: Path) -> None:
    """Let pip say what installing tpufit would install: nothing that the image has."""
    with tempfile.TemporaryDirectory() as folder:
        for extra in ("", "[preflight]", "[tpu]"):
            report = Path(folder, "report.json")
            what = f"{checkout}{extra}"
            run(own, "-m", "pip", "install", "--quiet", "--dry-run", "--report", report, what)
            found = [one["metadata"] for one in json.loads(report.read_text())["install"]]
            names = {one["name"].lower().replace("-", "_"): one["version"] for one in found}
            changed = {one: names[one] for one in (*image.versions, "numpy") if one in names}
            if changed:
                raise SystemExit(f"pip install '.{extra}' would change {changed}")
            print(f"pip install '.{extra}' changes none of {', '.join(image.versions)} and numpy", flush=True)


def installed(name: str, image: Image, python: str) -> Path:
    """The Python of an image's environment with tpufit in it, as it is now."""
    own = made(name, image, python)
    with tempfile.TemporaryDirectory() as folder:
        # Of its own: pip writes into what it installs from.
        checkout = Path(folder, "checkout")
        shutil.copytree(ROOT, checkout, symlinks=True, ignore=shutil.ignore_patterns(".*", "*.egg-info", "build"))
        prove_nothing_changes(own, image, checkout)
        fixed = Path(folder, "fixed.txt")
        fixed.write_text("".join(f"{one}=={number}\n" for one, number in image.versions.items()))
        libraries = (f"{checkout}[test,examples]", *image.libraries)
        run(*_install(own), "--constraint", fixed, *libraries)
    return own


def try_out(name: str, image: Image, own: Path, jobs: str) -> None:
    """Use tpufit in an image's environment."""
    run(own, "-m", "tpufit", "doctor")
    with tempfile.TemporaryDirectory() as folder:
        train = Path(folder, "train.py")
        train.write_text(Page(SITE / "guides" / "preflight.md").files["train.py"])
        run(own, "-W", "error", "-m", "tpufit", "preflight", "--tpu", "v5e-8", train)
    tests = (own, "-m", "pytest", "-p", "no:cacheprovider")
    run(*tests, f"{NOTEBOOK}[{name}.ipynb]", WARM_IMPORTS="")  # in a kernel that has imported nothing yet
    left_out = [f"--ignore=tests/test_{file}.py" for file in image.left_out]
    run(*tests, "--numprocesses", jobs, "--maxprocesses", "4", *QUICK, *left_out)


def try_image(name: str, jobs: str, only_install: bool) -> None:
    """Make an image's environment and try it out, or say why not."""
    image, began = IMAGES[name], perf_counter()
    python = python_of(image.python)
    if python is None:
        print(f"not tried, for this machine has no Python {image.python}", flush=True)
        return
    own = installed(name, image, python)
    if not only_install:
        try_out(name, image, own, jobs)
        print(f"tpufit works there; it took {perf_counter() - began:.0f} s", flush=True)


def try_side_by_side(names: Sequence[str], jobs: str, only_install: bool) -> None:
    """Try each image in a process of its own, and show what they say as they say it, with their names."""
    cpus = min(len(os.sched_getaffinity(0)), 4) if jobs == "auto" else int(jobs)
    command = [sys.executable, __file__, "--jobs", str(-(-cpus // len(names))), *["--only-install"] * only_install]

    def status_of(name: str) -> int:
        said = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        with subprocess.Popen([*command, name], **said) as process:
            for line in process.stdout:
                print(f"{name}: {line}", end="", flush=True)
        return process.returncode

    with ThreadPoolExecutor(len(names)) as threads:
        statuses = list(threads.map(status_of, names))
    if any(statuses):
        raise SystemExit(f"they ended with {dict(zip(names, statuses, strict=True))}")


def without_room(names: Sequence[str]) -> list[str]:
    """The images whose environments are still to be made, and for which the disk has no room."""
    missing = [name for name in names if not (PLACE / name / "ready").exists()]
    room = (shutil.disk_usage(ROOT).free - SIZE // 2) // SIZE
    return missing[max(room, 0) :]


def try_in_turn(names: Sequence[str], jobs: str, only_install: bool, removes: bool) -> None:
    """Try each image after another: first those whose environment is there, which makes room if it is removed."""
    for name in sorted(names, key=lambda name: not (PLACE / name / "ready").exists()):
        if without_room([name]):
            print(f"{name}: not tried, for its environment takes {SIZE >> 30} GiB of disk", flush=True)
            continue
        try_image(name, jobs, only_install)
        if removes and not only_install:
            shutil.rmtree(PLACE / name, ignore_errors=True)  # there is none where its Python is missing


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("image", nargs="*", choices=[*IMAGES, []], help="default: all")
    parser.add_argument("--jobs", default="auto", help="the processes of the quick tests (default: one a CPU)")
    parser.add_argument("--only-install", action="store_true", help="make the environments, and try nothing out there")
    chosen = parser.parse_args()
    names = chosen.image or list(IMAGES)
    lacking = len(without_room(names))
    if len(names) > 1 and not lacking:
        try_side_by_side(names, chosen.jobs, chosen.only_install)
    else:
        try_in_turn(names, chosen.jobs, chosen.only_install, removes=bool(lacking))
