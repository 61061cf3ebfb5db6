"""A run of `fit` as a real TensorBoard server shows it over HTTP."""

import gzip
import json
import re
import signal
import subprocess
import sys
import time
import urllib.request

import numpy as np
import pytest
from fake_model import FakeModel
from torch import nn

from tpufit.callbacks import TensorBoard

FIT = """
import numpy as np, tpufit, torch
from tpufit.callbacks import Callback, TensorBoard

class Halve(Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.model.optimizer.param_groups[0]["lr"] = 0.1 / 2**epoch

rng = np.random.default_rng(0)
x, y = rng.normal(size=(100, 4)).astype("float32"), rng.integers(0, 3, 100)
model = tpufit.Model(torch.nn.Linear(4, 3))
model.compile("sgd", "cross_entropy", metrics=["accuracy"])
history = model.fit(x, y, batch_size=4, epochs=3, cores=8, verbose=0, validation_data=(x[:30], y[:30]),
                    callbacks=[Halve(), TensorBoard("logs/a", 1, update_freq=2, profile_batch=(3, 5),
                                                    hparams={"rate": 0.1, "net": "linear"})])
import json
print(json.dumps(history.history))
"""

# Killed in the third epoch, after a checkpoint at the end of the second; and its continuation.
CUT_OFF = """
import json, os, signal, sys
import numpy as np, tpufit, torch
from tpufit.callbacks import Callback, TensorBoard

class Kill(Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            json.dump(board.state_dict(), open("state.json", "w"))
    def on_train_batch_end(self, batch, logs=None):
        board.writer().flush()
        if board.steps == 11:
            os.kill(os.getpid(), signal.SIGKILL)

resumed = os.path.exists("state.json")
x, y = np.ones((100, 4), "float32"), np.zeros(100, int)
model = tpufit.Model(torch.nn.Linear(4, 3))
model.compile("sgd", "cross_entropy")
board = TensorBoard("logs/b", update_freq="batch")
if resumed:
    board.load_state_dict(json.load(open("state.json")))
model.fit(x, y, batch_size=4, epochs=4, cores=8, verbose=0, initial_epoch=2 if resumed else 0,
          callbacks=[board] if resumed else [board, Kill()])
"""


@pytest.fixture
def server(tmp_path):
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(tmp_path / "logs"), "--host", "127.0.0.1"]
    log = tmp_path / "server.log"
    with log.open("w") as written:
        process = subprocess.Popen([*command, "--port", "0"], stdout=written, stderr=subprocess.STDOUT)

    def get(path, body, read):
        # The server chooses its port, and says so when it listens.
        address = re.search(r"http://127\.0\.0\.1:\d+/", log.read_text())
        if address is None:
            raise OSError("it is still starting")
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{address[0]}data/plugin/{path}", data)
        if data is not None:
            request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=20) as answer:
            return read(answer.read())

    def ask(path, until=bool, body=None, timeout=90, read=json.loads):
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            assert process.poll() is None, log.read_text()
            try:
                answer = get(path, body, read)
                if until(answer):
                    return answer
            except OSError:  # urllib's errors, and a connection that is cut
                pass  # it is still starting, or hasn't read all files
            time.sleep(0.3)
        pytest.fail(f"the server had no answer to {path} in {timeout} s: {log.read_text()}")

    yield ask
    process.kill()
    process.wait()


@pytest.mark.slow
def test_a_fit_over_http(run_python, server, tmp_path):
    process = run_python(FIT)
    assert process.returncode == 0, process.stderr
    history = json.loads(process.stdout.splitlines()[-1])
    expected_tags = {
        "a/train": {"epoch_loss", "epoch_accuracy", "epoch_learning_rate", "batch_loss", "batch_learning_rate"},
        "a/validation": {"epoch_loss", "epoch_accuracy"},
    }
    server(
        "scalars/tags",
        until=lambda answer: all(tags <= set(answer.get(run, ())) for run, tags in expected_tags.items()),
    )

    def points(run, tag, count=3):
        """The server reads a run in pieces: query it until it has all points that were written."""
        answer = server(f"scalars/scalars?run=a/{run}&tag={tag}", until=lambda found: len(found) >= count)
        return [(step, value) for _, step, value in answer]

    for run, prefix in (("train", ""), ("validation", "val_")):
        for name in ("loss", "accuracy"):
            expected = list(enumerate(history[prefix + name]))
            assert points(run, f"epoch_{name}") == [(i, pytest.approx(value)) for i, value in expected]
    assert points("train", "epoch_learning_rate") == [(i, pytest.approx(0.1 / 2**i)) for i in range(3)]
    steps = [step for step, _ in points("train", "batch_loss", count=6)]
    assert len(steps) == 6 and steps == sorted(set(steps))  # 3 epochs of 4 steps, every second step

    for tag, size in (("weights/weight", 12), ("weights/bias", 3)):
        query = f"histograms/histograms?run=a/train&tag={tag}"
        histograms = server(query, until=lambda found: len(found) == 3)
        assert [step for _, step, _ in histograms] == [0, 1, 2]
        assert all(sum(count for _, _, count in bins) == size for _, _, bins in histograms)

    (summary,) = server("text/text?run=a/train&tag=summary/text_summary")
    assert "<pre><code>" in summary["text"] and "15 parameters" in summary["text"]

    wanted = {"allowedStatuses": ["STATUS_UNKNOWN", "STATUS_SUCCESS", "STATUS_FAILURE", "STATUS_RUNNING"]}
    metric = {"name": {"group": "validation", "tag": "epoch_accuracy"}, "order": "ORDER_UNSPECIFIED"}
    columns = [{"hparam": "rate"}, {"hparam": "net"}, {"metric": metric["name"]}]
    body = wanted | {"startIndex": 0, "sliceSize": 10, "colParams": columns, "experimentName": ""}
    groups = server("hparams/session_groups", until=lambda found: found.get("sessionGroups"), body=body)
    (group,) = groups["sessionGroups"]
    assert group["hparams"] == {"rate": 0.1, "net": "linear"}
    values = {(v["name"]["group"], v["name"]["tag"]): v["value"] for v in group["metricValues"]}
    assert values["validation", "epoch_accuracy"] == pytest.approx(history["val_accuracy"][-1])

    (trace,) = (tmp_path / "logs/a/train/plugins/profile").glob("*/*.trace.json.gz")
    names = {event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert "PjRtCpuExecutable::ExecuteHelper" in names  # the steps; the operations in them are shown too


@pytest.mark.slow
def test_the_projector_shows_the_embeddings(server, tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "words.tsv").write_text("a\nb\nc\n")
    model = FakeModel()
    model.module = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 1))
    board = TensorBoard(logs, embeddings_freq=1, embeddings_metadata={"0": "words.tsv"})
    board.set_model(model)
    board.on_train_begin({})
    board.on_epoch_end(0, {"loss": 1.0})
    board.on_train_end({})
    assert server("projector/runs", timeout=60) == ["train"]
    config = server("projector/info?run=train")
    assert [(one["tensorName"], one["tensorShape"]) for one in config["embeddings"]] == [("0", [3, 2])]
    assert server("projector/metadata?run=train&name=0", read=bytes.splitlines) == [b"a", b"b", b"c"]
    shown = server("projector/tensor?run=train&name=0", read=lambda data: np.frombuffer(data, "float32").tolist())
    assert shown == model.module[0].weight.flatten().tolist()


@pytest.mark.soak
def test_a_server_that_is_open_shows_no_step_twice_after_a_crash(run_python, server):
    def steps(tag, until):
        found = server(f"scalars/scalars?run=b/train&tag={tag}", lambda found: until([step for _, step, _ in found]))
        return [step for _, step, _ in found]

    killed = run_python(CUT_OFF)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert steps("batch_loss", lambda found: len(found) == 11) == list(range(1, 12))  # 4 in each epoch
    assert steps("epoch_loss", bool) == [0, 1]
    resumed = run_python(CUT_OFF)
    assert resumed.returncode == 0, resumed.stderr
    assert steps("batch_loss", lambda found: found[-1] == 16) == list(range(1, 17))
    assert steps("epoch_loss", lambda found: found[-1] == 3) == [0, 1, 2, 3]
