"""The built wheel holds every module once, and works away from the checkout."""

import shutil
import sys
import zipfile
from pathlib import Path

import processes
import pytest

ROOT = Path(__file__).resolve().parent.parent


def pip(*arguments):
    """Run pip with nothing to download: the build backend is the one installed."""
    command = [sys.executable, "-m", "pip", *map(str, arguments), "--no-deps", "--no-index", "--quiet"]
    result = processes.run(command, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    # A copy, because setuptools leaves a build/ behind, and puts what an older one holds into the wheel.
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("tpufit", "callbacks"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", copy, "--no-build-isolation", "--wheel-dir", folder)
    [built] = folder.iterdir()
    return built


def test_the_wheel_holds_every_module_once(wheel):
    modules = [path.relative_to(ROOT) for path in (ROOT / "tpufit").rglob("*.py")]
    modules += ["tpufit" / path.relative_to(ROOT) for path in (ROOT / "callbacks").rglob("*.py")]
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    files = [name for name in names if ".dist-info/" not in name]
    assert sorted(files) == sorted(["tpufit/py.typed", *map(str, modules)])
    assert [name for name in names if name.endswith("/LICENSE")]


def test_the_wheel_works_elsewhere(wheel, tmp_path, run_python):
    target = tmp_path / "site"
    pip("install", wheel, "--target", target)
    result = run_python(
        """
        import tpufit, tpufit.callbacks
        print(tpufit.__file__, tpufit.callbacks.__file__, tpufit.__version__, sep="\\n")
        """,
        env={"PYTHONPATH": str(target)},
    )
    assert result.returncode == 0, result.stderr
    *files, version = result.stdout.splitlines()
    assert files == [str(target / "tpufit" / "__init__.py"), str(target / "tpufit" / "callbacks" / "__init__.py")]
    assert wheel.name.startswith(f"tpufit-{version}-")
