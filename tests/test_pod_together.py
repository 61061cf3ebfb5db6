"""The hosts of a pod decide together, compare what must be equal, and write once."""

import json
import textwrap

import pytest
from pods import Pod

pytestmark = pytest.mark.slow

COMMON = """
import json, os, signal, sys, time
import torch
from torch import nn
import tpufit
from tpufit.callbacks import Callback, CSVLogger, EarlyStopping, ModelCheckpoint, TensorBoard
from tpufit.callbacks.tracker_callback import TrackerCallback
from tpufit.errors import HostError
import matplotlib
matplotlib.use("agg")
from matplotlib import pyplot

torch.manual_seed(5)
X, Y = torch.randn(64, 4), torch.randint(0, 2, (64,))
me = tpufit.process_index()

def compiled(**arguments):
    torch.manual_seed(6)
    model = tpufit.Model(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2)))
    model.compile("sgd", "cross_entropy", **arguments)
    return model

class Tracker(TrackerCallback):
    '''Notes what is sent to a tracker.'''
    def __init__(self, *given):
        super().__init__(*given)
        self.calls = []
    def open_run(self, run_id):
        self.calls.append("open")
        return "the run"
    def write_config(self, values):
        self.calls.append("config")
    def write(self, values, step):
        self.calls.append("loss" in values)
    def write_image(self, tag, image, step):
        self.calls.append(tag)
    def write_folder(self, folder, name, step):
        self.calls.append(name)
    def close_run(self, failed):
        self.calls.append("close")

class At(Callback):
    '''Does something at a step.'''
    def __init__(self, step, do):
        self.step, self.do = step, do
    def on_train_batch_end(self, batch, logs=None):
        if self.model.steps_taken == self.step:
            self.do(self.model)

def fit(model=None, *callbacks, **arguments):
    model = model or compiled()
    how = {"batch_size": 2, "epochs": 3, "verbose": 0} | arguments
    model.fit(X, Y, callbacks=list(callbacks), **how)
    return model
"""


def said(ended):
    return "\n".join(f"{host.out}\n{host.err}" for host in ended)


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """Return the output of each host after fits that end early, or begin with differences."""
    code = """
    import warnings
    told = {}

    def stop(model):
        model.stop_training = True

    told["stop"] = fit(None, At(5, stop if me == 1 else id)).steps_taken

    def late(model):
        time.sleep(5 * (me == 1))

    told["time"] = fit(None, At(6, late), max_time=5, epochs=400).steps_taken > 5

    class Poisoned(Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if self.model.steps_taken == 3:
                X[:] = float("nan")
    from tpufit.callbacks import TerminateOnNaN
    kept = X.clone()
    told["nan"] = fit(None, Poisoned(), TerminateOnNaN()).steps_taken
    X.copy_(kept)

    losses = compiled()
    torch.manual_seed(me)  # another seed, and so other weights
    other = tpufit.Model(nn.Linear(4, 2))
    other.compile("sgd", "cross_entropy")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        history = other.fit(X, Y, batch_size=2, verbose=0).history["loss"]
    told["warned"] = [str(one.message) for one in caught]
    told["weights"] = [history, *(value.tolist() for value in other.state_dict().values())]

    try:
        fit(batch_size=2 + me)
    except HostError as error:
        told["batch_size"] = str(error)

    class Mine(tpufit.Model):
        def train_step(self, batch):
            return super().train_step(batch)
    if me == 1:
        class Mine(tpufit.Model):
            def train_step(self, batch):
                return {"loss": super().train_step(batch)["loss"]}
    model = Mine(nn.Linear(4, 2))
    model.compile("sgd", "cross_entropy")
    try:
        model.fit(X, Y, verbose=0)
    except HostError as error:
        told["code"] = str(error)

    board, tracker = TensorBoard("board"), Tracker("json", None, "epoch", True)

    class Draws(Callback):
        def on_epoch_end(self, epoch, logs=None):
            for one in (board, tracker):
                one.add_image("a", torch.zeros(3, 4, 4))
            board.add_text("b", "c")
            board.add_figure("d", pyplot.figure())
            assert not pyplot.get_fignums()
            tracker.add_figure("d", pyplot.figure())
            pyplot.close("all")

    folder = "run"
    model = fit(None, ModelCheckpoint("run", monitor="loss"), CSVLogger("log.csv"), board, tracker, Draws(), verbose=2)
    told["tracker"] = tracker.calls
    model.save("saved")
    model.save_weights("weights.safetensors")
    json.dump(told, open(f"told{me}.json", "w"))

    batches = [(X[:4], Y[:4])] * (8 + 4 * me)
    model.fit(iter(batches), verbose=0)
    """
    folder = tmp_path_factory.mktemp("together")
    ended = Pod(2, 2, folder).run(COMMON + "\n" + textwrap.dedent(code))
    assert (folder / "told0.json").exists(), said(ended)
    return [json.loads((folder / f"told{host}.json").read_text()) for host in (0, 1)], ended, folder


@pytest.mark.parametrize("name", ["stop", "nan", "time"])
def test_all_hosts_end_after_the_same_step(together, name):
    (first, second), _, _ = together
    assert first[name] == second[name]
    assert name != "stop" or first[name] == 5


def test_all_hosts_use_process_0s_weights_and_seeds(together):
    (first, second), _, _ = together
    assert first["weights"] == second["weights"]
    for host in (first, second):
        assert any("the hosts had different seeds, and all use process 0's now" in text for text in host["warned"])
        assert any("2 tensors differed between the hosts, and all use process 0's" in text for text in host["warned"])


def test_differences_are_reported_before_the_first_step(together):
    (first, second), _, _ = together
    assert first["batch_size"] == second["batch_size"]
    assert "process 0 and process 1 must run the same step, but these differ: batches: " in first["batch_size"]
    assert "these differ: the code of the step" in first["code"] == second["code"]


def test_data_of_different_lengths_are_an_error_on_each_host(together):
    _, ended, _ = together
    for host, left in zip(ended, (0, 1), strict=True):
        assert host.code == 1
        assert f"after 2 batches of this pass (train of epoch 1) this host has {left} more" in host.err


def test_only_process_0_writes(together):
    _, ended, folder = together
    assert "Epoch 3/3" in ended[0].out and "Epoch" not in ended[1].out
    assert [line.split(",")[0] for line in (folder / "log.csv").read_text().splitlines()] == ["epoch", "0", "1", "2"]
    assert len(list((folder / "board" / "train").iterdir())) == 1
    assert (folder / "saved" / "manifest.json").is_file() and (folder / "weights.safetensors").is_file()
    assert len(list((folder / "run").glob("step-*"))) == 3
    (first, second), _, _ = together
    steps = [call for call in first["tracker"] if str(call).startswith("step-")]
    others = [call for call in first["tracker"] if call not in steps]
    assert others == ["open", "config", *([True, "a", "d"] * 3), "close"] and len(steps) == 3
    assert second["tracker"] == []


@pytest.mark.soak
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_to_one_host_ends_all_and_a_restart_resumes(tmp_path, name):
    train = """
    def struck(model):
        if me == 1:
            os.kill(os.getpid(), signal.NAME)

    model = fit(None, At(7, struck), ModelCheckpoint("run", monitor="loss"), resume=True, epochs=4)
    json.dump([model.steps_taken, [v.tolist() for v in model.state_dict().values()]], open(f"end{me}.json", "w"))
    """
    train = COMMON + textwrap.dedent(train).replace("NAME", name)
    pod = Pod(2, 2, tmp_path)
    ended = pod.run(train)
    assert [host.code for host in ended] == ([143, 143] if name == "SIGTERM" else [-2, -2]), said(ended)
    steps = sorted(int(path.name[5:]) for path in (tmp_path / "run").glob("step-*"))
    assert steps[-1] in (7, 8)
    ended = pod.run(train)
    assert [host.code for host in ended] == [0, 0], said(ended)
    ends = [json.loads((tmp_path / f"end{host}.json").read_text()) for host in (0, 1)]
    whole = tmp_path / "whole"
    whole.mkdir()
    assert [host.code for host in Pod(1, 4, whole).run(train)] == [0]
    assert ends == [json.loads((whole / "end0.json").read_text())] * 2


def test_an_error_on_one_host_ends_the_others_with_its_text(tmp_path):
    code = """
    from tpufit.hosts import heartbeat

    def fail(model):
        raise ValueError("no more of this")

    heartbeat._GRACE = 600  # on a busy machine the second host takes long to end, and the first would end with 75
    fit(None, At(4, fail if me == 1 else id))
    """
    ended = Pod(2, 2, tmp_path).run(COMMON + textwrap.dedent(code))
    assert [host.code for host in ended] == [1, 1], said(ended)
    assert "ValueError: no more of this" in ended[1].err
    assert (
        "HostError: the other hosts don't answer: process 1 has ended with CallbackError: At.on_train" in ended[0].err
    )


@pytest.mark.soak
def test_rows_that_each_host_pads_to_another_length_are_an_error(tmp_path):
    code = """
    def padded(samples):  # each host pads its own rows to the longest of them
        length = max(len(row) for row, _ in samples)
        rows = torch.stack([nn.functional.pad(row, (0, length - len(row))) for row, _ in samples])
        return rows, torch.tensor([label for _, label in samples])

    texts = [(torch.ones(4 if i < 12 else 4 + i % 8), i % 2) for i in range(16)]
    model = tpufit.Model(nn.Sequential(nn.AdaptiveAvgPool1d(4), nn.Linear(4, 2)))
    model.compile("sgd", "cross_entropy")
    model.fit(torch.utils.data.DataLoader(texts, batch_size=1, collate_fn=padded), verbose=0)
    """
    for host in Pod(2, 2, tmp_path).run(COMMON + "\n" + textwrap.dedent(code)):
        assert host.code == 1
        assert "batch 4 (train of epoch 1) has rows of other shapes on other hosts" in host.err
        assert "process 0: float32 (9,) and int64 (), process 1: float32 (11,) and int64 ()" in host.err


@pytest.mark.soak
def test_a_batch_that_is_larger_on_one_host_is_an_error(tmp_path):
    code = """
    fit(epochs=1)
    few = 4 + 4 * me
    compiled().fit(iter([(X[:4], Y[:4]), (X[:few], Y[:few])]), verbose=0)
    """
    for host, rows in zip(Pod(2, 2, tmp_path).run(COMMON + "\n" + textwrap.dedent(code)), (8, 12), strict=True):
        assert host.code == 1 and f"has {rows} rows on this host, but 8 to 12 across the hosts" in host.err
