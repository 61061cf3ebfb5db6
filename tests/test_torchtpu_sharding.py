"""Weights that are split over several TorchTPU cores: checkpoints, memory, and what user code sees of them."""

import json

import pytest

pytestmark = [pytest.mark.runtime("torch_tpu"), pytest.mark.slow]

TRAINED = """
import json, os, subprocess, sys
import torch, tpufit
from torch import nn
from tpufit.callbacks import Callback, ModelCheckpoint

X, Y = torch.randn(61, 30, generator=torch.Generator().manual_seed(0)), torch.arange(61) % 4

def made(shard):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(30, 304), nn.LayerNorm(304), nn.ReLU(), nn.Linear(304, 4))
    model = tpufit.Model(net)
    model.compile("adamw", "cross_entropy", metrics=["accuracy"], scale_lr=None, shard=shard)
    return model

def trained(cores, shard, epochs, folder, **options):
    model = made(shard)
    callbacks = [ModelCheckpoint(folder)]
    options = {"shuffle": False, "verbose": 0, "callbacks": callbacks, "cores": cores} | options
    history = model.fit(X, Y, 16 // cores, epochs, **options).history
    outputs = torch.as_tensor(model.predict(X, verbose=0)).double()
    numbers = [*history["loss"][-2:], *model.evaluate(X, Y, verbose=0), float(outputs.square().mean())]
    shapes = [list(p.shape) for p in model.module.parameters()]
    state = {name: value.double().sum().item() for name, value in model.state_dict().items()}
    print(json.dumps([numbers, shapes, state]))
"""


def run(run_python, code, **env):
    process = run_python(TRAINED + code, env=env, timeout=250)
    assert process.returncode == 0, process.stderr
    return [json.loads(line) for line in process.stdout.splitlines()]


def test_a_checkpoint_of_split_weights_resumes_on_any_number_of_cores(run_python):
    (split, resumed) = run(
        run_python,
        """
trained(4, "fsdp", 4, "whole run")
trained(4, "fsdp", 2, "run")
trained(4, "fsdp", 4, "run", resume=True)
""",
    )[::2]
    assert resumed == split  # to the bit
    (whole,) = run(run_python, 'trained(1, None, 4, "on one core")')
    (fewer,) = run(
        run_python,
        """
import shutil
sys.stdout, said = open(os.devnull, "w"), sys.stdout
trained(2, {"*.weight": 0}, 2, "on two cores")
sys.stdout = said
trained(2, {"0.weight": 1}, 4, "on two cores", resume=True)
""",
    )
    for other in (split, fewer):
        assert other[0] == pytest.approx(whole[0], rel=1e-4)
        assert other[1] == whole[1] == [[304, 30], [304], [304], [304], [4, 304], [4]]
        assert other[2] == pytest.approx(whole[2], rel=1e-4, abs=1e-3)


@pytest.mark.soak
def test_a_core_needs_a_fraction_of_the_memory_of_whole_weights(run_python, tmp_path):
    """Run it on idle cores: else XLA's threads keep memory of their own, which hides the difference."""
    code = """
def used():
    found = subprocess.run(["pgrep", "-P", str(os.getpid()), "-f", "core_process"], capture_output=True, text=True)
    lines = [line for pid in found.stdout.split() for line in open(f"/proc/{pid}/status") if line.startswith("RssAnon")]
    return [int(line.split()[1]) >> 10 for line in lines]  # in MiB

def grown(width, shard):
    torch.manual_seed(0)
    model = tpufit.Model(nn.Sequential(*[nn.Linear(width, width) for _ in range(6)]))
    model.compile("adamw", "mse", scale_lr=None, shard=shard)
    rows = torch.randn(16, width)
    before = used()
    model.fit(rows, rows, 4, 2, verbose=0, cores=4)
    return model, [after - one for one, after in zip(before, used(), strict=True)]

tpufit.init(cores=4)
grown(64, None)
split = grown(1024, "fsdp")
whole = grown(1024, None)
for model, growth in (split, whole):
    print(json.dumps(growth))
"""
    # The compiler needs more memory than the weights do. So the second run counts, which loads compiled programs.
    for _ in range(2):
        split, whole = run(run_python, code, TPUFIT_COMPILE_CACHE=None, XDG_CACHE_HOME=str(tmp_path))
    # Weights and AdamW's numbers take 72 MiB, or 18 MiB on each core; the rest is what a step needs for a while.
    assert len(split) == len(whole) == 3
    assert max(split) < min(whole) / 2, (split, whole)


def test_user_code_reads_split_weights_by_state_dict_and_loads_others(run_python):
    (one, split) = run(
        run_python,
        """
class Halves(Callback):
    def on_epoch_end(self, epoch, logs=None):
        state = self.model.state_dict()
        self.model.load_state_dict({name: value / 2 for name, value in state.items()})
        weight = self.model.module[0].weight
        assert torch.equal(weight.detach().cpu(), state["0.weight"] / 2)

trained(2, None, 2, "whole run", callbacks=[Halves()])
trained(2, "fsdp", 2, "run", callbacks=[Halves()])
""",
    )
    assert split[0] == pytest.approx(one[0], rel=1e-4)
    assert split[1] == one[1]
