"""The contract of every callback of the package, on one model, on 1 and on 8 cores. Each callback must be listed."""

import gc
import json
import os
import signal
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import tpufit
from tpufit import callbacks, runtime
from tpufit.callbacks import Callback
from tpufit.errors import CallbackError

# The warning is SQLAlchemy's, of MLflow.
pytestmark = [pytest.mark.cores(1, 8), pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")]

X = np.random.default_rng(0).normal(size=(40, 4)).astype("float32")  # five batches of 8
Y = np.random.default_rng(1).integers(0, 3, 40)
EPOCHS = 2


def tracker(package, kind, **options):
    """Return a tracker's callback, if its package is installed."""
    pytest.importorskip(package)
    return getattr(callbacks, kind)(**options)


# The factories of callbacks, with a folder for each, and a server that accepts all requests.
FACTORIES = {
    "BackupAndRestore": lambda folder, url: callbacks.BackupAndRestore(folder / "backup"),
    "CallbackList": lambda folder, url: callbacks.CallbackList([callbacks.EarlyStopping(patience=9)]),
    "CometLogger": lambda folder, url: tracker(
        "comet_ml", "CometLogger", online=False, offline_directory=str(folder / "comet")
    ),
    "CSVLogger": lambda folder, url: callbacks.CSVLogger(folder / "log.csv", append=True),
    "ConfusionMatrix": lambda folder, url: callbacks.ConfusionMatrix(
        callbacks.TensorBoard(folder / "logs"), log="val_accuracy", freq=99
    ),
    "Diagnostics": lambda folder, url: callbacks.Diagnostics(),
    "EarlyStopping": lambda folder, url: callbacks.EarlyStopping(patience=9, restore_best_weights=True),
    "Freeze": lambda folder, url: callbacks.Freeze("bias", since=9),
    "History": lambda folder, url: callbacks.History(),
    "LRScheduler": lambda folder, url: callbacks.LRScheduler(partial(lr_scheduler.StepLR, step_size=1), "step"),
    "LambdaCallback": lambda folder, url: callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: None),
    "LearningRateScheduler": lambda folder, url: callbacks.LearningRateScheduler(lambda epoch, lr: lr / 2),
    "MLflowLogger": lambda folder, url: callbacks.MLflowLogger(tracking_uri=f"sqlite:///{folder}/mlflow.db"),
    "ModelCheckpoint": lambda folder, url: callbacks.ModelCheckpoint(folder / "{epoch}.safetensors"),
    "MonitorCallback": lambda folder, url: callbacks.MonitorCallback("val_accuracy"),
    "OneCycle": lambda folder, url: callbacks.OneCycle(0.1, cycle_momentum=False),
    "ProgbarLogger": lambda folder, url: callbacks.ProgbarLogger(),
    "ReduceLROnPlateau": lambda folder, url: callbacks.ReduceLROnPlateau(patience=1),
    "RemoteMonitor": lambda folder, url: callbacks.RemoteMonitor(url),
    "SwapEMAWeights": lambda folder, url: callbacks.SwapEMAWeights(),
    "TensorBoard": lambda folder, url: callbacks.TensorBoard(folder / "logs"),
    "TerminateOnNaN": lambda folder, url: callbacks.TerminateOnNaN(),
    "TrackioLogger": lambda folder, url: tracker("trackio", "TrackioLogger", name=folder.name),
    "WandbLogger": lambda folder, url: tracker("wandb", "WandbLogger", mode="offline", dir=str(folder)),
}
EVERY = sorted(
    name
    for name in callbacks.__all__
    if isinstance(kind := getattr(callbacks, name), type) and issubclass(kind, Callback) and kind is not Callback
)


def test_every_callback_has_a_factory(cores):
    assert sorted(FACTORIES) == EVERY, "give each callback of tpufit.callbacks a factory here"


class Answer(BaseHTTPRequestHandler):
    posts: ClassVar = []

    def do_POST(self):
        self.posts.append(self.path)
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args): ...


@pytest.fixture(scope="module")
def url():
    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


class Job:
    """One model for all, so that its graphs are compiled once; `start` resets it."""

    def __init__(self, cores, shard):
        torch.manual_seed(0)
        self.cores, self.model = cores, tpufit.Model(nn.Linear(4, 3))
        sgd, options = partial(torch.optim.SGD, lr=0.1), {"scale_lr": None, "use_ema": True, "shard": shard}
        self.model.compile(sgd, "cross_entropy", metrics=["accuracy"], **options)
        self.first = self.model.get_weights()
        self.fit()
        self.model.evaluate(X, Y, 8 // cores, verbose=0)
        self.model.predict(X, 8 // cores, verbose=0)

    def start(self):
        self.model.set_weights(self.first)
        self.model.learning_rate = 0.1
        return self.model

    def fit(self, *given, **options):
        """Train. Return the history and the counts."""
        before = runtime.counts()
        data = {"batch_size": 8 // self.cores, "validation_data": (X, Y), "cores": self.cores}
        history = self.model.fit(X, Y, epochs=EPOCHS, verbose=0, callbacks=list(given), **data, **options)
        return history, runtime.counts() - before


@pytest.fixture(scope="module")
def job(cores):
    # On several cores the weights are split: what holds for split weights holds for whole weights.
    return Job(cores, {"weight": 1} if cores > 1 else None)


class Recorder(Callback):
    reads_weights = False

    def __init__(self):
        self.ended = []

    def on_train_end(self, logs=None):
        self.ended.append(sorted(logs))


class Raising(Callback):
    """Raises in the first epoch's second batch, or in the second epoch's validation."""

    reads_weights = False

    def __init__(self, where):
        setattr(self, where, self._raise)
        self._calls = 0

    def _raise(self, *args):
        self._calls += 1
        if self._calls == 2:
            raise ValueError("on purpose")


# The extra `libraries` has their packages, except MLflow's, which starts a server and takes long. The code that they
# share has its tests in test_callbacks_tracker_callback.py.
TRACKERS = {"CometLogger", "MLflowLogger", "TrackioLogger", "WandbLogger"}


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.soak] * (name in TRACKERS)) for name in EVERY])
def make(request, tmp_path, url):
    return partial(FACTORIES[request.param], tmp_path, url)


@pytest.mark.soak_on(8)
def test_fit_evaluate_predict_and_fit_again(job, make):
    callback, other = make(), Recorder()
    model = job.start()
    for _ in range(2):
        history, counts = job.fit(callback, other)
        assert history.epoch == list(range(EPOCHS))
        assert {"loss", "accuracy", "val_loss", "val_accuracy"} <= set(history.history)
        assert all(np.isfinite(values).all() for values in history.history.values())
        # One wait for each epoch and each validation, and none in a step; plus one for saved or kept weights.
        assert counts.waits["logs"] == 2 * EPOCHS and counts.waits["state"] <= EPOCHS + 1
        assert "batch logs" not in counts.waits and counts.host_reads == 0
        assert not counts.graphs and not counts.fallbacks
    assert all("val_loss" in logs for logs in other.ended) and len(other.ended) == 2
    size = 8 // job.cores
    plain = model.evaluate(X, Y, size, verbose=0), model.predict(X, size, verbose=0)
    assert model.evaluate(X, Y, size, verbose=0, callbacks=[callback]) == pytest.approx(plain[0], abs=0.1)
    outputs = model.predict(X, size, verbose=0, callbacks=[callback])
    assert outputs.shape == plain[1].shape
    assert model.evaluate(X, Y, size, verbose=0) == plain[0]  # the model is unchanged


@pytest.mark.soak_on(8)
@pytest.mark.parametrize("where", ["on_train_batch_end", pytest.param("on_test_begin", marks=pytest.mark.soak)])
def test_another_callbacks_error_ends_it_and_the_next_fit_works(job, make, where):
    callback, other = make(), Recorder()
    job.start()
    with pytest.raises(CallbackError, match=f"Raising.{where} raised ValueError: on purpose"):
        job.fit(callback, Raising(where), other)
    assert other.ended == [[]]
    gc.collect()  # a file that was left open raises an error here
    history, counts = job.fit(callback)
    assert history.epoch == list(range(EPOCHS)) and not counts.graphs


@pytest.mark.soak_on(8)
def test_a_callbacks_state_goes_through_json_into_another_object(job, make):
    """The state in a checkpoint: weights as tensors, everything else as JSON."""
    callback = make()
    job.start()
    job.fit(callback)
    if not hasattr(callback, "state_dict"):
        return
    state = callback.state_dict()
    weights = state.pop("best_weights", None)
    plain = json.loads(json.dumps(state)) | ({} if weights is None else {"best_weights": weights})

    class Loading(Callback):
        reads_weights = False

        def on_train_begin(self, logs=None):
            again.load_state_dict(plain)

    again = make()
    states = []
    after = callbacks.LambdaCallback(on_train_begin=lambda logs: states.append(again.state_dict()))
    job.fit(again, Loading(), after)
    loaded = states[0]
    loaded_weights = loaded.pop("best_weights", None)
    if not isinstance(again, callbacks.OneCycle):  # finds its position by the epoch, where the steps are known
        assert json.loads(json.dumps(loaded)) == json.loads(json.dumps(state))
    assert (weights is None) == (loaded_weights is None)


def test_fit_accepts_a_callback_list_as_keras_does(job, capsys):
    model, size, own, other = job.start(), 8 // job.cores, Recorder(), callbacks.History()
    history = model.fit(X, Y, size, verbose=2, callbacks=callbacks.CallbackList([own, other]))
    assert other.history == history.history and own.ended == [["accuracy", "loss"]]
    keras = {"epochs": 1, "steps": 5, "verbose": 2}
    ours = {"updates": 5, "max_steps": None, "total_steps": 5, "validates": False}
    assert (own.model, own.params) == (model, keras | ours)
    assert "Epoch" not in capsys.readouterr().out  # its progress bar shows it
    shown = callbacks.CallbackList([own], add_progbar=True)
    history = model.fit(X, Y, size, 2, verbose=2, callbacks=[shown])
    assert history.epoch == [0, 1] and capsys.readouterr().out.count("Epoch") == 2


# The attributes of Keras 3.15's callbacks before any `fit`, with the required arguments. Keras sets `best_epoch` and
# History's `epoch` only when training begins. Not listed: `monitor_op`, a function of Keras's tensors, and the open
# files of CSVLogger.
UNUSED = {
    "BackupAndRestore": {"save_freq": "epoch", "double_checkpoint": False, "delete_checkpoint": True},
    "CSVLogger": {"sep": ",", "append": True},
    "EarlyStopping": {
        "monitor": "val_loss",
        "mode": "auto",
        "min_delta": 0,
        "patience": 9,
        "verbose": 0,
        "baseline": None,
        "restore_best_weights": True,
        "start_from_epoch": 0,
        "best": None,
        "wait": 0,
        "stopped_epoch": 0,
        "best_epoch": 0,
        "best_weights": None,
    },
    "History": {"history": {}, "epoch": []},
    "LearningRateScheduler": {"verbose": 0},
    "ModelCheckpoint": {
        "monitor": "val_loss",
        "mode": "auto",
        "min_delta": 0,
        "verbose": 0,
        "save_best_only": False,
        "save_freq": "epoch",
        "best": None,
    },
    "ProgbarLogger": {"verbose": 1, "epochs": 1, "target": None, "seen": 0},
    "ReduceLROnPlateau": {
        "monitor": "val_loss",
        "mode": "auto",
        "min_delta": 1e-4,
        "factor": 0.1,
        "min_lr": 0,
        "patience": 1,
        "verbose": 0,
        "cooldown": 0,
        "best": None,
        "wait": 0,
        "cooldown_counter": 0,
    },
    "RemoteMonitor": {"path": "/publish/epoch/end/", "field": "data", "headers": None, "send_as_json": False},
    "SwapEMAWeights": {"swap_on_epoch": False},
    "TensorBoard": {
        "histogram_freq": 0,
        "write_graph": True,
        "write_images": False,
        "write_steps_per_second": False,
        "update_freq": "epoch",
        "embeddings_freq": 0,
        "embeddings_metadata": None,
    },
    "TerminateOnNaN": {"raise_error": False},
}


@pytest.mark.parametrize("name", UNUSED)
def test_an_unused_callback_has_keras_attributes(cores, name, tmp_path, url):
    callback = FACTORIES[name](tmp_path, url)
    assert {attribute: getattr(callback, attribute) for attribute in UNUSED[name]} == UNUSED[name]
    assert callback.model is None and callback.params is None


def test_a_passed_progress_bar_replaces_the_default(job, capsys):
    model, size = job.start(), 8 // job.cores
    model.fit(X, Y, size, verbose=2, callbacks=[callbacks.ProgbarLogger()])
    assert capsys.readouterr().out.count("Epoch 1/1") == 1
    model.evaluate(X, Y, size, verbose=2, callbacks=callbacks.ProgbarLogger())
    assert capsys.readouterr().out.count("Evaluate") == 1


class Ending(Callback):
    """Sends SIGTERM to the process, as a cloud does, in the fourth batch of the second epoch."""

    reads_weights = False

    def on_train_batch_begin(self, batch, logs=None):
        self.batches = getattr(self, "batches", 0) + 1
        if self.batches == 9:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.soak_on(8)
def test_a_terminated_training_ends_as_a_complete_one(job, make, tmp_path):
    begin, run = tmp_path / "begin", tmp_path / "run"
    model = job.start()
    model.save(begin)
    expected, _ = job.fit(make(), resume=begin)
    weights = model.get_weights()
    with pytest.raises(SystemExit):
        job.fit(make(), callbacks.ModelCheckpoint(run), Ending(), resume=begin)
    job.start()
    history, counts = job.fit(make(), callbacks.ModelCheckpoint(run), resume=True)
    assert history.history == expected.history and history.epoch == expected.epoch
    assert all(np.array_equal(one, other) for one, other in zip(model.get_weights(), weights, strict=True))
    assert not counts.graphs
