"""A run of `fit` as a real TensorBoard server shows it over HTTP."""

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

FIT = """
import numpy as np, tpufit, torch
from tpufit.callbacks import Callback, TensorBoard

class Halve(Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.model.optimizer.param_groups[0]["lr"] = 0.1 / 2**epoch

rng = np.random.default_rng(0)
x, y = rng.normal(size=(100, 4)).astype("float32"), rng.integers(0, 3, 100)
model = tpufit.Model(torch.nn.Linear(4, 3))
model.compile("sgd", "cross_entropy", ["accuracy"])
history = model.fit(x, y, batch_size=4, epochs=3, cores=8, verbose=0, validation_data=(x[:30], y[:30]),
                    callbacks=[Halve(), TensorBoard("logs", update_freq=2)])
import json
print(json.dumps(history.history))
"""


@pytest.fixture
def server(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(tmp_path / "logs"), "--port", str(port)]
    log = (tmp_path / "server.log").open("w+")
    process = subprocess.Popen([*command, "--host", "127.0.0.1"], stdout=log, stderr=subprocess.STDOUT)

    def get(path):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/data/plugin/scalars/{path}", timeout=20) as answer:
            return json.load(answer)

    def ask(path, until=bool, timeout=90):
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            assert process.poll() is None, (log.seek(0), log.read())[1]
            try:
                answer = get(path)
                if until(answer):
                    return answer
            except urllib.error.URLError:
                pass  # it is still starting
            time.sleep(0.3)
        pytest.fail(f"the server had no answer to {path} in {timeout} s: {(log.seek(0), log.read())[1]}")

    yield ask
    process.kill()
    process.wait()
    log.close()


def test_scalars_over_http(run_python, server):
    process = run_python(FIT)
    assert process.returncode == 0, process.stderr
    history = json.loads(process.stdout.splitlines()[-1])
    expected_tags = {
        "train": {"epoch_loss", "epoch_accuracy", "epoch_learning_rate", "batch_loss"},
        "validation": {"epoch_loss", "epoch_accuracy"},
    }
    server("tags", until=lambda answer: all(tags <= set(answer.get(run, ())) for run, tags in expected_tags.items()))

    def points(run, tag, count=3):
        """The server reads a run bit by bit: it is asked until it has as many points as were written."""
        answer = server(f"scalars?run={run}&tag={tag}", until=lambda found: len(found) >= count)
        return [(step, value) for _, step, value in answer]

    for run, prefix in (("train", ""), ("validation", "val_")):
        for name in ("loss", "accuracy"):
            expected = list(enumerate(history[prefix + name]))
            assert points(run, f"epoch_{name}") == [(i, pytest.approx(value)) for i, value in expected]
    assert points("train", "epoch_learning_rate") == [(i, pytest.approx(0.1 / 2**i)) for i in range(3)]
    steps = [step for step, _ in points("train", "batch_loss", count=6)]
    assert len(steps) == 6 and steps == sorted(set(steps))  # 3 epochs of 4 steps, every second of them
