"""Programs that an earlier process has compiled with TorchTPU are loaded whole, from the user's own folder."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tpufit.utils.file_cache import FileCache

pytestmark = pytest.mark.runtime("torch_tpu")

TRAINING = """
import json
import torch, tpufit
from torch import nn
from tpufit.utils.counters import totals

torch.manual_seed(0)
X, Y = torch.randn(61, 3, generator=torch.Generator().manual_seed(0)), torch.arange(61) % 4

def trained(cores=1, precision="fp32", **options):
    net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 4))
    model = tpufit.Model(net)
    model.compile("adamw", "cross_entropy", metrics=["accuracy"], scale_lr=None, precision=precision)
    history = model.fit(X, Y, 16 // cores, epochs=2, verbose=0, cores=cores, validation_data=(X, Y), **options).history
    outputs = float(torch.as_tensor(model.predict(X, verbose=0)).double().square().sum())
    return [*history["loss"], *history["val_loss"], outputs]

def tell(losses):
    print(json.dumps({"losses": losses, "compiled": sum(totals().graphs.values())}))
"""
ONE = TRAINING + "tell(trained())"


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache" / "tpufit" / "programs"


@pytest.fixture
def run(run_python, tmp_path):
    """Run a training in a process with a cache, and return its report."""

    def run(code=ONE, **env):
        process = run_python(
            code, env={"TPUFIT_COMPILE_CACHE": None, "XDG_CACHE_HOME": str(tmp_path / "cache"), **env}, timeout=250
        )
        assert process.returncode == 0, process.stderr
        return json.loads(process.stdout.splitlines()[-1])

    return run


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_second_process_compiles_nothing(run, folder):
    first = run()
    kept = files(folder)
    assert first["compiled"] == len(kept) > 3
    second = run()
    assert second == {"losses": first["losses"], "compiled": 0}
    assert files(folder) == kept


FLASH = (
    TRAINING
    + """
from torch.nn import functional as F
from tpufit.runtime.trace_context import tracing_with

class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(9, 96)

    def forward(self, x):
        q, k, v = self.words(x).unflatten(-1, (3, 1, 32)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).mean((1, 2))

def attended(length):
    torch.manual_seed(0)
    model = tpufit.Model(Attends())
    model.compile("sgd", "cross_entropy", attention="flash")
    x = torch.arange(2 * length).view(2, -1) % 9
    with tracing_with(interprets_flash=True):
        return model.fit(x, torch.tensor([1, 2]), 2, verbose=0, cores=1).history["loss"]

"""
)


@pytest.mark.slow
def test_flash_attention_is_found_after_that_of_another_length(run, folder):
    pytest.importorskip("jax")
    first = run(FLASH + "tell(attended(128))")
    assert first["compiled"] == 1
    both = run(FLASH + "tell([attended(256), attended(128)][1])")
    assert both == {"losses": first["losses"], "compiled": 1}


@pytest.mark.slow
def test_damaged_and_foreign_programs_are_compiled_anew(run, folder):
    first = run()
    kept = sorted(folder.iterdir())
    kept[0].write_bytes(kept[0].read_bytes()[:-100])
    kept[1].write_bytes(kept[2].read_bytes())  # another program's
    kept[2].chmod(0o666)
    FileCache(folder, ".program", 1 << 30).write(kept[3].stem, b"whole, but no program")
    assert run() == {"losses": first["losses"], "compiled": 4}
    assert run() == {"losses": first["losses"], "compiled": 0}


@pytest.mark.slow
def test_two_processes_at_once_share_what_they_compile(run, folder, tmp_path):
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    del environ["TPUFIT_COMPILE_CACHE"]
    command = [sys.executable, "-c", ONE]
    both = [subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    told = [json.loads(process.communicate()[0].splitlines()[-1]) for process in both]
    assert told[0]["losses"] == told[1]["losses"]
    assert run() == {"losses": told[0]["losses"], "compiled": 0}


@pytest.mark.slow
def test_one_variable_turns_the_cache_off(run, folder):
    first = run(TPUFIT_COMPILE_CACHE="0")
    assert first["compiled"] > 3 and not folder.exists()


@pytest.mark.slow
def test_what_a_program_depends_on_is_part_of_its_name(run, folder):
    """An option, in whose context only some trainings run, and one of the environment."""
    code = """
tpufit.init(1)
from torch_tpu._internal.compiler_options import custom_compiler_options

with custom_compiler_options({"xla_backend_optimization_level": "0"}):
    tell(trained())
"""
    first = run()
    with_option = run(TRAINING + code)
    assert with_option["compiled"] == first["compiled"]
    assert len(files(folder)) == 2 * first["compiled"]
    assert run(TRAINING + code) == {"losses": with_option["losses"], "compiled": 0}
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_enable_fast_math=false"
    assert run(XLA_FLAGS=flags)["compiled"] == first["compiled"]
    assert run()["compiled"] == 0


@pytest.mark.slow
def test_a_folder_that_others_may_write_is_not_used_with_a_warning(folder, run_python, tmp_path):
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    env = {"TPUFIT_COMPILE_CACHE": None, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    process = run_python(ONE, env=env)
    assert process.stderr.count("compiled programs are neither kept nor loaded") == 1, process.stderr
    assert "chmod go-w" in process.stderr and not files(folder)


@pytest.mark.slow
def test_each_core_loads_its_own_program(run, folder):
    code = TRAINING + "tell(trained(cores=2, shuffle=False))"
    first = run(code)
    kept = files(folder)
    assert len(kept) == 2 * first["compiled"] > 6
    assert run(code) == {"losses": first["losses"], "compiled": 0}
    assert files(folder) == kept  # neither has compiled any, or it would have been written
    for name in list(kept)[::3]:
        (folder / name).unlink()  # some cores compile what others load
    assert run(code)["losses"] == first["losses"]
    assert files(folder).keys() == kept.keys()
