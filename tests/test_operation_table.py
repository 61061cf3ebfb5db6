"""The operations of PyTorch's own table, on the device: see `operation_table.py`."""

import json
import textwrap
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("operation_table.py")
PARTS = 10


@pytest.mark.slow
@pytest.mark.runtime("torch_xla")
@pytest.mark.parametrize("part", [1, *(pytest.param(i, marks=pytest.mark.soak) for i in range(2, PARTS + 1))])
@pytest.mark.parametrize("cores", [1, pytest.param(8, marks=pytest.mark.soak)])
def test_no_operation_differs_from_pytorch_without_an_error(run_python, cores, part):
    arguments = [str(SCRIPT), "--cores", str(cores), "--part", f"{part}/{PARTS}"]
    code = f"""
        import runpy, sys
        sys.argv = {arguments}
        runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
    """
    done = run_python(textwrap.dedent(code), timeout=900)
    assert done.returncode == 0, done.stderr
    verdicts = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(verdicts) > 30 and sum(row["samples"] for row in verdicts) > 60
    silent = {
        row["operation"]: [fault for fault in row["faults"] if fault.startswith(("wrong", "ended"))] for row in verdicts
    }
    assert {name: faults for name, faults in silent.items() if faults} == {}
