"""The output of `fit` in a terminal, in a pipe and in a notebook."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pseudo_terminal import in_a_terminal, on_screen

ROOT = Path(__file__).resolve().parent.parent
FIT = """
import numpy as np, torch, tpufit
rng = np.random.default_rng(0)
x, y = rng.normal(size=(100, 4)).astype("float32"), rng.integers(0, 3, 100)
model = tpufit.Model(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3)))
model.compile("adamw", "cross_entropy", metrics=["accuracy"])
class Printing(tpufit.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        print("printed", epoch)
history = model.fit(x, y, batch_size=4, epochs=2, cores=8, validation_data=(x[:30], y[:30]), callbacks=[Printing()])
result = model.evaluate(x, y, batch_size=4)
"""
HEAD = "8 cores (XLA:CPU, virtual) | batch 4 x 8 = 32 | lr 0.001 x 8 = 0.008 (linear) | fp32"
BAR = "━" * 20
LOGS = "loss: N - accuracy: N"
ALL_LOGS = "loss: N - accuracy: N - val_loss: N - val_accuracy: N"

pytestmark = pytest.mark.slow


def without_numbers(line):
    """Replace what differs from run to run: times are T, speeds S and logs N."""
    line = re.sub(r" - waited for data: \d+%$", "", line)  # as a busy machine may
    line = re.sub(r"\d+ samples/s", "S samples/s", line)
    line = re.sub(r"(: )[\d.]+(e-\d+)?", r"\1N", line)
    return re.sub(r"\b(\d+\.\d+s|\d+:\d\d)", "T", line)


def environment(**more):
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


# On any machine the step's Python, which runs during compilation, ends only after the message was drawn.
HELD = """
import os, time, torch
class Held(torch.nn.Tanh):
    def forward(self, x):
        late = time.monotonic() + 100
        while x.device.type == "xla" and not os.path.exists(os.environ["DRAWN"]):
            assert time.monotonic() < late, "the bar never said that the step is compiled"
            time.sleep(0.01)
        return super().forward(x)
torch.nn.Tanh = Held
"""


def test_a_terminal_shows_bars_and_compilations(tmp_path):
    drawn = tmp_path / "drawn"

    def watch(out):
        if re.search(rf"Epoch 1/2 {BAR} 0/4 compiling\.\.\. \d\.\ds", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out)):
            drawn.touch()

    out = in_a_terminal(HELD + FIT, watch, DRAWN=str(drawn), TERM="xterm-256color", COLUMNS="110")
    assert [without_numbers(line) for line in on_screen(out)] == [
        HEAD,
        "printed 0",
        f"Epoch 1/2 {BAR} 4/4 T - S samples/s - {ALL_LOGS}",
        "printed 1",
        f"Epoch 2/2 {BAR} 4/4 T - S samples/s - {ALL_LOGS}",
        f"Evaluate {BAR} 4/4 T - S samples/s - {LOGS}",
    ]


def test_a_pipe_gets_one_line_per_epoch(run_python):
    done = run_python(FIT)
    assert done.returncode == 0, done.stderr
    assert [without_numbers(line) for line in done.stdout.splitlines()] == [
        HEAD,
        "printed 0",
        f"Epoch 1/2 - T - 4 steps - S samples/s - {ALL_LOGS}",
        "printed 1",
        f"Epoch 2/2 - T - 4 steps - S samples/s - {ALL_LOGS}",
        f"Evaluate - T - 4 steps - S samples/s - {LOGS}",
    ]


# By files, because a kernel's ports are chosen before it binds them, and another process may get them meanwhile.
NOTEBOOK = """
import json, nbclient, nbformat, sys
from traitlets.config import Config
cell = nbformat.v4.new_code_cell(sys.argv[1])
notebook = nbformat.v4.new_notebook(cells=[cell])
by_files = Config(KernelManager={"transport": "ipc"})
nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", config=by_files).execute()
print(json.dumps(cell.outputs))
"""


def run_cell(code, folder):
    """Run a cell in a notebook's kernel, and return its outputs."""
    done = subprocess.run(
        [sys.executable, "-c", NOTEBOOK, code],
        capture_output=True,
        text=True,
        timeout=180,
        cwd=folder,
        env=environment(IPYTHONDIR=str(folder)),
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.soak
def test_a_notebook_keeps_one_output_per_bar(tmp_path):
    """Each bar is one output that is redrawn, of plain HTML and text: no widgets, and no empty lines remain."""
    outputs = [o for o in run_cell(FIT, tmp_path) if o.get("name") != "stderr"]
    shown = [o["text"] if o["output_type"] == "stream" else o["data"]["text/plain"] for o in outputs]
    assert [without_numbers(text) for text in "".join(f"{text.strip()}\n" for text in shown).splitlines()] == [
        HEAD,
        f"Epoch 1/2 {BAR} 4/4 T - S samples/s - {ALL_LOGS}",
        "printed 0",
        f"Epoch 2/2 {BAR} 4/4 T - S samples/s - {ALL_LOGS}",
        "printed 1",
        f"Evaluate {BAR} 4/4 T - S samples/s - {LOGS}",
    ]
    bars = [o["data"] for o in outputs if o["output_type"] == "display_data"]
    assert all(set(bar) == {"text/plain", "text/html"} for bar in bars) and len(bars) == 3
    assert all(bar["text/html"].startswith("<pre") and "samples/s" in bar["text/html"] for bar in bars)
