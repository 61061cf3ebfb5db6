"""Tries tpufit on copies of Kaggle's and Colab's images: `python tests/images.py`, or `python tests/images.py kaggle`.

For each it makes an environment in `.images/` with the image's Python and the versions that tpufit depends on, and
proves by pip's own report that installing tpufit changes none of them. Then it runs there, on virtual cores:
the doctor, a preflight, the image's notebook and the quick tests. The environments are kept; each takes 9 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from pages import ROOT, SITE, Page

PLACE = ROOT / ".images"
SIZE = 10 << 30  # of an environment, in bytes
NOTEBOOK = "tests/test_examples.py::test_a_notebook_runs_without_a_warning"
QUICK = ("-m", "not slow and not soak")


@dataclass(frozen=True)
class Image:
    """An image, as it was in 2026-11.

    Attributes:
        python: Its Python.
        versions: The packages that a user must not lose.
        libraries: What its notebook imports besides, of any version.
    """

    python: str
    versions: Mapping[str, str]
    libraries: tuple[str, ...]


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
        run(own, "-m", "pip", "install", "--quiet", *(f"{one}=={number}" for one, number in image.versions.items()))
        ready.write_text(wanted)
    return own


def prove_nothing_changes(own: Path, image: Image) -> None:
    """Let pip say what installing tpufit would install: nothing that the image has."""
    with tempfile.TemporaryDirectory() as folder:
        for what in (".", ".[preflight]", ".[tpu]"):
            report = Path(folder, "report.json")
            run(own, "-m", "pip", "install", "--quiet", "--dry-run", "--report", report, what)
            found = [one["metadata"] for one in json.loads(report.read_text())["install"]]
            names = {one["name"].lower().replace("-", "_"): one["version"] for one in found}
            changed = {one: names[one] for one in (*image.versions, "numpy") if one in names}
            if changed:
                raise SystemExit(f"pip install '{what}' would change {changed}")
            print(f"pip install '{what}' changes none of {', '.join(image.versions)} and numpy", flush=True)


def try_out(name: str, image: Image, own: Path, jobs: str) -> None:
    """Install tpufit into an image's environment, and use it there."""
    with tempfile.TemporaryDirectory() as folder:
        fixed = Path(folder, "fixed.txt")
        fixed.write_text("".join(f"{one}=={number}\n" for one, number in image.versions.items()))
        libraries = ("--editable", ".[test,examples]", *image.libraries)
        run(own, "-m", "pip", "install", "--quiet", "--constraint", fixed, *libraries)
        run(own, "-m", "tpufit", "doctor")
        train = Path(folder, "train.py")
        train.write_text(Page(SITE / "guides" / "preflight.md").files["train.py"])
        run(own, "-W", "error", "-m", "tpufit", "preflight", "--tpu", "v5e-8", train)
    tests = (own, "-m", "pytest", "-p", "no:cacheprovider")
    run(*tests, f"{NOTEBOOK}[{name}.ipynb]")
    run(*tests, "--numprocesses", jobs, "--maxprocesses", "4", *QUICK)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("image", nargs="*", choices=[*IMAGES, []], help="default: all")
    parser.add_argument("--jobs", default="auto", help="the processes of the quick tests (default: one a CPU)")
    chosen = parser.parse_args()
    for name in chosen.image or IMAGES:
        image, began = IMAGES[name], perf_counter()
        python = python_of(image.python)
        if python is None:
            print(f"{name}: not tried, for this machine has no Python {image.python}", flush=True)
            continue
        if not (PLACE / name / "ready").exists() and shutil.disk_usage(ROOT).free < 1.5 * SIZE:
            print(f"{name}: not tried, for its environment takes {SIZE >> 30} GiB of disk", flush=True)
            continue
        own = made(name, image, python)
        prove_nothing_changes(own, image)
        try_out(name, image, own, chosen.jobs)
        print(f"{name}: tpufit works there; it took {perf_counter() - began:.0f} s", flush=True)
