"""Several TorchTPU cores from the cells of a notebook, in a real kernel."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = [pytest.mark.runtime("torch_tpu"), pytest.mark.slow]

# A kernel's interrupt goes to its whole group of processes, as a notebook's stop button sends it.
KERNEL = """
import json, sys, time
from jupyter_client import KernelManager

manager = KernelManager(kernel_name="python3", transport="ipc")  # a port could be taken before the kernel binds it
manager.start_kernel()
client = manager.client()
client.start_channels()
client.wait_for_ready(timeout=100)

def run(code, interrupts=()):
    said, waiting = "", list(interrupts)
    asked = client.execute(code)
    while True:
        message = client.get_iopub_msg(timeout=200)
        if message["parent_header"].get("msg_id") != asked:
            continue
        kind, content = message["header"]["msg_type"], message["content"]
        if kind == "stream" and content["name"] == "stdout":
            said += content["text"]
        if kind == "error":
            said += f"{content['ename']}: {content['evalue']}\\n"
        if kind == "status" and content["execution_state"] == "idle":
            return said
        if waiting and waiting[0] in said:
            waiting.pop(0)
            manager.interrupt_kernel()

try:
    print(json.dumps([run(*cell) for cell in json.loads(sys.argv[1])]))
finally:
    client.stop_channels()
    manager.shutdown_kernel(now=True)
"""

FIRST = """
import os, subprocess
import torch, tpufit
from torch import nn
from tpufit.callbacks import LambdaCallback

X, Y = torch.randn(61, 3, generator=torch.Generator().manual_seed(0)), torch.arange(61) % 4
told = LambdaCallback(on_epoch_end=lambda epoch, logs: print("epoch", epoch, flush=True))

def fit(epochs, cores=4):
    torch.manual_seed(0)
    model = tpufit.Model(nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)))
    model.compile("sgd", "cross_entropy", scale_lr=None)
    return model.fit(X, Y, 4, epochs, shuffle=False, verbose=0, cores=cores, callbacks=[told] * (epochs > 3))

def others():
    found = subprocess.run(["pgrep", "-P", str(os.getpid()), "-f", "core_process"], capture_output=True, text=True)
    return found.stdout.split()

print("starts", flush=True)
"""
SHOW = "print([round(x, 4) for x in fit(3).history['loss']], len(others()), others() == before)"


def test_cells_train_on_four_cores_also_after_interrupts(tmp_path):
    cells = [
        [f"{FIRST}fit(3)", ["starts"]],  # while the cores start
        ["fit(100_000)", ["epoch 2"]],
        ["before = others()"],
        [SHOW],
        ["fit(100_000)", ["epoch 5"]],
        [SHOW],
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "IPYTHONDIR": str(tmp_path)}
    command = [sys.executable, "-c", KERNEL, json.dumps(cells)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    starting, first, _, trained, second, again = json.loads(done.stdout)
    assert starting == "starts\nKeyboardInterrupt: \n"
    for said in (first, second):
        assert said.startswith("epoch 0\n") and said.endswith("\nKeyboardInterrupt: \n")
    assert trained == again
    assert trained.endswith("] 3 True\n")
