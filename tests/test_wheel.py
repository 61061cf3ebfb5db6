"""The built wheel holds every module once, and works away from the checkout. The sdist makes the same wheel."""

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
def checkout(tmp_path_factory):
    # A copy, because setuptools leaves a build/ behind, and puts what an older one holds into the wheel.
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("tpufit", "callbacks"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def wheel_of(source, folder):
    pip("wheel", source, "--no-build-isolation", "--wheel-dir", folder)
    [built] = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(checkout, tmp_path_factory):
    return wheel_of(checkout, tmp_path_factory.mktemp("wheel"))


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


@pytest.mark.slow
def test_the_sdist_makes_the_same_wheel(checkout, wheel, tmp_path):
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    process = processes.run([sys.executable, "-c", build], timeout=120, cwd=checkout)
    assert process.returncode == 0, process.stderr
    [sdist] = tmp_path.iterdir()
    again = wheel_of(sdist, tmp_path / "wheel")
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(again) as other:
        files = [name for name in one.namelist() if ".dist-info/" not in name]
        assert files == [name for name in other.namelist() if ".dist-info/" not in name]
        assert all(one.read(name) == other.read(name) for name in files)
