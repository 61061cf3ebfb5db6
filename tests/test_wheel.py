"""The built wheel contains every module once, and works outside the checkout. The sdist gives the same wheel."""

import email
import os
import re
import runpy
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

import processes
import pytest

ROOT = Path(__file__).resolve().parent.parent


def built(kind, source, folder):
    """Build a wheel or an sdist with the installed build backend, without warnings."""
    build = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(folder)!r}))"
    # With PYTHONDONTWRITEBYTECODE, setuptools warns that it compiles nothing.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    process = processes.run([sys.executable, "-c", build], timeout=120, fresh=True, cwd=source, env=environment)
    output = process.stdout + process.stderr
    assert process.returncode == 0, output
    assert not re.search(r"warn|deprecat", output, re.I), output
    return folder / process.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    # A copy, because setuptools leaves a build/ folder, and puts the content of an old one into the wheel.
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("setup.cfg", "setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("tpufit", "callbacks"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "tests").mkdir()
    shutil.copy(__file__, copy / "tests")
    return copy


@pytest.fixture(scope="module")
def wheel(checkout, tmp_path_factory):
    return built("wheel", checkout, tmp_path_factory.mktemp("wheel"))


def test_the_wheel_contains_every_module_once(wheel):
    modules = [path.relative_to(ROOT) for path in (ROOT / "tpufit").rglob("*.py")]
    modules += ["tpufit" / path.relative_to(ROOT) for path in (ROOT / "callbacks").rglob("*.py")]
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    files = [name for name in names if ".dist-info/" not in name]
    assert sorted(files) == sorted(["tpufit/py.typed", *map(str, modules)])
    assert [name for name in names if name.endswith("/LICENSE")]


def test_the_wheel_works_elsewhere(wheel, tmp_path, run_python):
    target = tmp_path / "site"
    command = ["-m", "pip", "install", str(wheel), "--target", str(target), "--no-deps", "--no-index", "--quiet"]
    installed = processes.run([sys.executable, *command], timeout=120)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    result = run_python(
        """
        import tpufit, tpufit.callbacks
        print(tpufit.__file__, tpufit.callbacks.__file__, tpufit.__version__, sep="\\n")
        """,
        env={"PYTHONPATH": str(target)},
        fresh=True,
    )
    assert result.returncode == 0, result.stderr
    *files, version = result.stdout.splitlines()
    assert files == [str(target / "tpufit" / "__init__.py"), str(target / "tpufit" / "callbacks" / "__init__.py")]
    assert wheel.name.startswith(f"tpufit-{version}-")


@pytest.mark.slow
def test_the_sdist_gives_the_same_wheel(checkout, wheel, tmp_path):
    sdist = built("sdist", checkout, tmp_path)
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    unpacked = tmp_path / sdist.name.removesuffix(".tar.gz")
    assert not (unpacked / "tests").exists()
    again = built("wheel", unpacked, tmp_path)
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(again) as other:
        files = [name for name in one.namelist() if ".dist-info/" not in name]
        assert files == [name for name in other.namelist() if ".dist-info/" not in name]
        assert all(one.read(name) == other.read(name) for name in files)


def elsewhere(text):
    """Return links and pictures in a text that aren't full addresses."""
    targets = re.findall(r"\]\(([^)]+)\)", text) + re.findall(r'\b(?:src|srcset|href)="([^"]+)"', text)
    return [target for target in targets if not target.startswith(("https://", "#"))]


def test_the_wheels_description_needs_no_other_file(wheel):
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        about = email.message_from_bytes(archive.read(name))
    text = about.get_payload()
    assert about["Description-Content-Type"] == "text/markdown"
    assert text.startswith("# tpufit\n") and "model.fit(images" in text and "\n## Install\n" in text
    assert elsewhere(text) == [] and "<picture>" not in text and "make demo" not in text


def test_the_wheels_description_links_to_the_repository():
    readme = (ROOT / "README.md").read_text()
    text = runpy.run_path(str(ROOT / "setup.py"))["description"](readme, "https://example.org/tpufit", "1.2.3")
    assert elsewhere(readme) and elsewhere(text) == []
    assert "](https://example.org/tpufit/blob/v1.2.3/docs/pages/index.md)" in text
    assert 'src="https://example.org/tpufit/raw/v1.2.3/docs/pages/pictures/bar-light.svg"' in text
    assert text.count("\n") == readme.count("\n")
