"""Tries a release before it is published: `python tests/release.py python3.10 python3.12`, or any other Pythons.

It builds the sdist and the wheel as `python -m build` does (`pip install build`), installs each of them into a fresh
environment of each Python, with all that they require, and runs there what a user tries first, away from the checkout.
For each environment pip fetches torch: gigabytes and minutes, so this is done by hand.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from pages import ROOT, Page

FIRST = [Page(ROOT / "docs" / "pages" / name).program for name in ("index.md", "guides/callbacks.md")]
NEEDS = ["scikit-learn"]  # for the data of these programs


def run(*command: object, folder: Path) -> str:
    """Run a command as on a machine with nothing set, and return what it prints."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PJRT_DEVICE", "XLA_FLAGS")}
    done = subprocess.run([str(word) for word in command], cwd=folder, env=kept, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def tried(python: str, distribution: Path, folder: Path) -> str:
    """Install a distribution into a fresh environment, use it, and return a line about that."""
    folder.mkdir()
    run(python, "-m", "venv", "env", folder=folder)
    own = folder / "env" / "bin" / "python"
    run(own, "-m", "pip", "install", "--quiet", distribution, *NEEDS, folder=folder)
    where = "import sys, tpufit; print(sys.version.split()[0], tpufit.__version__, tpufit.__file__)"
    version, release, file = run(own, "-c", where, folder=folder).split()
    assert Path(file).is_relative_to(folder), file
    for program in FIRST:
        run(own, "-c", program, folder=folder)
    run(own, "-m", "tpufit", "doctor", folder=folder)
    return f"Python {version}: {distribution.name} is installed, and tpufit {release} trains"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", nargs="+", help="a Python, e.g. python3.12")
    parser.add_argument("--only", choices=("wheel", "sdist"), help="try one of the two")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        run(sys.executable, "-m", "build", "--outdir", place / "dist", ROOT, folder=place)
        suffixes = {"wheel": ".whl", "sdist": ".gz"}
        wanted = [suffix for kind, suffix in suffixes.items() if chosen.only in (None, kind)]
        built = [path for path in sorted((place / "dist").iterdir()) if path.suffix in wanted]
        for number, python in enumerate(chosen.python):
            for distribution in built:
                print(tried(python, distribution, place / f"{number}{distribution.suffix}"), flush=True)
