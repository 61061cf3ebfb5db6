"""Tests a release before it is published: `python tests/release.py python3.10 python3.12`, or any other Pythons.

It builds the sdist and the wheel with `python -m build`, and checks them with `twine check --strict` (`pip install
build twine`). It installs each into a fresh environment of each Python, with all requirements, and runs a user's first
programs there, outside the checkout. Run it by hand, because pip downloads gigabytes for each environment. Afterwards
`dist/` contains the tested files.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from pages import ROOT, Page

PAGES = [ROOT / "README.md", ROOT / "docs" / "pages" / "index.md", ROOT / "docs" / "pages" / "guides" / "callbacks.md"]
NEEDS = ["scikit-learn"]  # for the data of these programs


def run(*command: object, folder: Path) -> str:
    """Run a command without environment variables of Python, and return its output."""
    unset = ("PYTHONPATH", "PJRT_DEVICE", "XLA_FLAGS", "PYTHONDONTWRITEBYTECODE")
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    done = subprocess.run([str(word) for word in command], cwd=folder, env=kept, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}")
    return done.stdout + done.stderr


def tried(python: str, distribution: Path, folder: Path) -> str:
    """Install a distribution into a fresh environment, use it, and return a line about the result."""
    folder.mkdir()
    run(python, "-m", "venv", "env", folder=folder)
    own = folder / "env" / "bin" / "python"
    run(own, "-m", "pip", "install", "--quiet", f"{distribution}[xla]", *NEEDS, folder=folder)
    where = "import sys, tpufit; print(sys.version.split()[0], tpufit.__version__, tpufit.__file__)"
    version, release, file = run(own, "-c", where, folder=folder).split()
    assert Path(file).is_relative_to(folder), file
    for page in PAGES:
        run(own, "-c", Page(page).program, folder=folder)
    run(own, "-m", "tpufit", "doctor", folder=folder)
    return f"Python {version}: {distribution.name} is installed, and tpufit {release} trains"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", nargs="+", help="a Python, e.g. python3.12")
    parser.add_argument("--only", choices=("wheel", "sdist"), help="try one of the two")
    chosen = parser.parse_args()
    target = ROOT / "dist"
    shutil.rmtree(target, ignore_errors=True)
    said = run(sys.executable, "-m", "build", "--outdir", target, ROOT, folder=ROOT)
    assert not re.search(r"warn|deprecat", said, re.I), said
    suffixes = {"wheel": ".whl", "sdist": ".gz"}
    wanted = [suffix for kind, suffix in suffixes.items() if chosen.only in (None, kind)]
    built = sorted(target.iterdir())
    print(run(sys.executable, "-m", "twine", "check", "--strict", *built, folder=ROOT), end="", flush=True)
    for page in PAGES:
        if "on PyPI" in page.read_text():
            print(f"{page.relative_to(ROOT)} still says that tpufit isn't on PyPI", flush=True)
    with tempfile.TemporaryDirectory() as name:
        for number, python in enumerate(chosen.python):
            for distribution in (path for path in built if path.suffix in wanted):
                print(tried(python, distribution, Path(name, f"{number}{distribution.suffix}")), flush=True)
