"""A training step by tpufit, by hand and by Keras on JAX does the same work, as counted by the TPU's compiler."""

import importlib.util
import json
import subprocess

import pytest
from conftest import ROOT

from tpufit.utils.child_python import child_python

pytestmark = pytest.mark.slow

BENCHMARK = ROOT / "tests" / "benchmarks" / "tpu_programs.py"
FILES = {"tpufit": "tpu_programs.json", "by hand": "tpu_by_hand.json"}
if importlib.util.find_spec("keras"):
    FILES["Keras"] = "tpu_keras.json"


@pytest.mark.soak
def test_an_mlps_step_is_the_same_work_everywhere(tmp_path):
    found = {}
    for name, file in FILES.items():
        command = [str(BENCHMARK), "--only", "MLP 2 x 2048", "--contender", name, "--out", str(tmp_path)]
        done = subprocess.run(**child_python(command, {"XLA_FLAGS": ""}), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        (found[name],) = json.loads((tmp_path / file).read_text())["programs"]
    ours = found["tpufit"]
    for one in found.values():
        assert one["fits"] and one["rows"] == ours["rows"] == 8 * 128
        assert one["traced_flops"] == pytest.approx(ours["traced_flops"], rel=0.02)
        assert one["between_cores"]["all-reduce"]["bytes"] == pytest.approx(11_649_060, rel=0.001)  # of gradients
    table = (tmp_path / "tpu_peers.md").read_text()
    assert [table.count(f"| {name} |") for name in FILES] == [1] * len(FILES)
