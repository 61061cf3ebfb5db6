"""The operations and the modules of PyTorch's own tables, on the device: see `operation_table.py`."""

import json
import textwrap
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("operation_table.py")
PARTS = 10


def cases():
    for dtype in ("float32", "complex64", "bfloat16"):
        for cores in (1, 8):
            for part in range(1, PARTS + 1):
                quick = (dtype, cores, part) == ("float32", 1, 1)
                yield pytest.param(dtype, cores, part, marks=[] if quick else pytest.mark.soak)


def find_differences(run_python, *options):
    """Run a table, and return the faults without an error by operation."""
    arguments = [str(SCRIPT), *options]
    code = f"""
        import runpy, sys
        sys.argv = {arguments}
        runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
    """
    done = run_python(textwrap.dedent(code), timeout=900)
    assert done.returncode == 0, done.stderr
    verdicts = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(verdicts) >= 20 and sum(row["samples"] for row in verdicts) > 40
    silent = {
        row["operation"]: [fault for fault in row["faults"] if fault.startswith(("ended", "not judged", "wrong"))]
        for row in verdicts
    }
    return {name: faults for name, faults in silent.items() if faults}


@pytest.mark.slow
@pytest.mark.runtime("torch_xla")
@pytest.mark.parametrize(("dtype", "cores", "part"), list(cases()))
def test_no_operation_differs_from_pytorch_without_an_error(run_python, dtype, cores, part):
    options = ("--dtype", dtype, "--cores", str(cores), "--part", f"{part}/{PARTS}")
    assert find_differences(run_python, *options) == {}


@pytest.mark.soak
@pytest.mark.runtime("torch_xla")
@pytest.mark.parametrize("part", range(1, PARTS + 1))
def test_no_second_derivative_differs_from_pytorch_without_an_error(run_python, part):
    assert find_differences(run_python, "--order", "2", "--part", f"{part}/{PARTS}") == {}


@pytest.mark.soak
@pytest.mark.runtime("torch_xla")
@pytest.mark.parametrize("part", range(1, 5))
@pytest.mark.parametrize(("dtype", "cores"), [("float32", 1), ("float32", 8), ("bfloat16", 1)])
def test_no_module_differs_from_pytorch_without_an_error(run_python, dtype, cores, part):
    options = ("--modules", "--dtype", dtype, "--cores", str(cores), "--part", f"{part}/4")
    assert find_differences(run_python, *options) == {}
