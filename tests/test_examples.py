"""The examples and the README's program, run as a user runs them."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run(run_python, script, *arguments):
    path = str(ROOT / script)
    code = f"import runpy, sys; sys.argv = {[path, *arguments]!r}; runpy.run_path({path!r}, run_name='__main__')"
    process = run_python(code, timeout=600)
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--bf16"]], ids=["fp32", "bf16"])
def test_digits_reach_97_percent(run_python, tmp_path, flags):
    output = run(run_python, "examples/digits.py", *flags)
    assert re.search(
        r"^8 cores \(XLA:CPU, virtual\) \| batch 8 x 8 = 64 \| lr 0.001 x 8 = 0.008 \(linear\)", output, re.M
    )
    assert float(re.search(r"accuracy ([\d.]+)%", output)[1]) >= 97
    assert (tmp_path / "runs/digits/best.safetensors").is_file()
    assert {folder.name for folder in (tmp_path / "runs/digits/logs").iterdir()} == {"train", "validation"}


def test_custom_callback(run_python):
    output = run(run_python, "examples/custom_callback.py")
    assert re.search(r"reached 9\d\.\d% after \d+ epochs", output) and "slowest epoch" in output


def test_the_programs_of_the_readme(run_python):
    text = (ROOT / "README.md").read_text()
    programs = re.findall(r"```python\n(.*?)```\n(?:\n[^\n]*prints[^\n]*\n\n```text\n(.*?)```)?", text, re.S)
    assert programs and programs[0][1]
    for program, printed in programs:
        process = run_python(program, timeout=300)
        assert process.returncode == 0, process.stderr
        blank = re.compile(r"\d+(\.\d+)?(e-\d+)?")  # times and the last digits differ from machine to machine
        shown = [blank.sub("N", line).strip() for line in process.stdout.strip().splitlines()]
        for line in printed.strip().splitlines():
            assert blank.sub("N", line).strip() in shown


def test_cached_images(run_python, tmp_path):
    output = run(run_python, "examples/cached_images.py", "--count", "96", "--epochs", "2")
    rates = re.search(r"^without the cache: ([\d,]+) samples/s\nwith the cache: ([\d,]+) samples/s", output, re.M)
    assert all(int(rate.replace(",", "")) > 0 for rate in rates.groups())
    assert re.search(r"^96 JPEGs of (8|12) classes", output)
    assert len(list((tmp_path / "runs/cached_images/photos-96").rglob("*.jpg"))) == 96
    assert (tmp_path / "runs/cached_images/cache-96").is_dir()
