"""XLA's output in the user's terminal: only errors, unless the user requests more."""

import math

import pytest
import torch

# Whether the data come fast enough depends on the machine.
FIT = """
import warnings; warnings.filterwarnings("ignore", "the device waited for data")
import numpy as np, torch, tpufit
model = tpufit.Model(torch.nn.Linear(4, 3))
model.compile("adamw", "mse")
model.fit(np.ones((64, 4), "f4"), np.ones((64, 3), "f4"), batch_size=4, verbose=0, cores=8)
"""

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("first", ["import tpufit", pytest.param("import torch_xla", marks=pytest.mark.soak)])
def test_a_script_is_quiet(run_python, first):
    ended = run_python(first + FIT)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_an_error_in_a_step_is_the_only_output(run_python):
    failing = """
class Failing(tpufit.Model):
    def train_step(self, batch):
        super().train_step(batch)
        raise ValueError("no")
model.__class__ = Failing
try:
    model.fit(np.ones((64, 4), "f4"), np.ones((64, 3), "f4"), verbose=0)
except ValueError as error:
    print(error)
"""
    ended = run_python(FIT.rpartition("model.fit")[0] + failing)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "no\n", "")


def test_a_variable_shows_all_messages_of_xla(run_python):
    assert " external/xla/" in run_python(FIT, env={"TF_CPP_MIN_LOG_LEVEL": "0"}).stderr


def test_fatal_errors_are_shown(run_python):
    ended = run_python(FIT, env={"XLA_FLAGS": "--xla_no_such_flag=1"})
    assert ended.returncode < 0 and "Unknown flag in XLA_FLAGS: --xla_no_such_flag=1" in ended.stderr


@pytest.mark.runtime("torch_xla")
@pytest.mark.parametrize(("flags", "largest"), [("", math.nan), ("--xla_cpu_enable_fast_min_max=true", 1.0)])
def test_the_users_xla_flags_prevail_over_those_for_cpus(run_python, flags, largest):
    code = """
import torch
from tpufit import runtime
place = runtime.make_placement(runtime.start(1, "a test"))
print(place.send([torch.tensor([1.0, float("nan")])])[0].max().item())
"""
    ended = run_python(code, env={"XLA_FLAGS": flags})
    torch.testing.assert_close(float(ended.stdout), largest, equal_nan=True)
