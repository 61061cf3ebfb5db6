"""The trackers' callbacks with the trackers' packages, offline: logs are read from the trackers' files."""

import json
import os
import random
import sqlite3
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import tpufit
from tpufit import runtime
from tpufit.callbacks import Callback, CometLogger, MLflowLogger, ModelCheckpoint, TrackioLogger, WandbLogger
from tpufit.errors import ArgumentError, CallbackError, TrackerError

# Warnings of the packages themselves.
pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning")]

X = np.random.default_rng(0).normal(size=(48, 4)).astype("float32")  # six batches of 8
Y = np.random.default_rng(1).integers(0, 3, 48)
PICTURE = (np.arange(3 * 4 * 5).reshape(3, 4, 5) * 4).astype("uint8")
NOWHERE = "http://127.0.0.1:9"


class MLflow:
    package, kind, missing = "mlflow", MLflowLogger, "pip install mlflow"
    unreachable = {"tracking_uri": NOWHERE}

    @staticmethod
    def make(folder, **options):
        return MLflowLogger("digits", tracking_uri=f"sqlite:///{folder}/mlflow.db", **options)

    @staticmethod
    def read(folder, run_id):
        import mlflow

        client = mlflow.MlflowClient(f"sqlite:///{folder}/mlflow.db")
        (experiment,) = [one for one in client.search_experiments() if one.name == "digits"]
        (run,) = client.search_runs([experiment.experiment_id])
        assert run.info.run_id == run_id
        points = {
            name: [(point.step, point.value) for point in client.get_metric_history(run_id, name)]
            for name in run.data.metrics
        }
        root = Path(run.info.artifact_uri.removeprefix("file://"))
        saved = sorted(path.name for path in root.glob("checkpoints/*"))
        assert all((root / "checkpoints" / name / "model.safetensors").is_file() for name in saved)
        return run.data.params, points, len(list(root.glob("images/*.png"))), saved


class Wandb:
    package, kind, missing = "wandb", WandbLogger, "pip install wandb"
    unreachable = {"settings": {"base_url": NOWHERE}}

    @staticmethod
    def make(folder, **options):
        return WandbLogger("digits", mode="offline", dir=str(folder), **options)

    @classmethod
    def read(cls, folder, run_id):
        config, points, saved = {}, {}, []
        for file in sorted(Path(folder, "wandb").glob(f"offline-run-*-{run_id}*/*.wandb"), key=os.path.getmtime):
            for record in cls.ended(file):
                config |= {item.key: str(json.loads(item.value_json)) for item in record.config.update}
                row = {"/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
                for name, value in row.items():
                    points.setdefault(name, []).append((row["step"], value))
                saved += [alias for alias in record.artifact.aliases if alias != "latest"]
        assert all(file.stem == f"run-{run_id}" for file in Path(folder, "wandb").glob("*/*.wandb"))
        return config, points, len(points.get("picture/path", [])), saved

    @classmethod
    def ended(cls, file):
        """Return the records of an offline run once all are written, which W&B's process does after the run's end."""
        deadline = time.monotonic() + 60
        while not any(record.HasField("exit") for record in cls.records(file)):
            assert time.monotonic() < deadline, f"the end of the run was never written to {file}"
            time.sleep(0.05)
        return cls.records(file)

    @staticmethod
    def records(file):
        """Return the records of an offline run: protocol buffers in the format of LevelDB's log."""
        from wandb.proto.wandb_internal_pb2 import Record

        data, at, whole = file.read_bytes(), 7, b""
        while at + 7 <= len(data):
            left = 32768 - at % 32768
            if left < 7:
                at += left
                continue
            size, form = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
            if at + 7 + size > len(data):  # it is still being written
                return
            whole += data[at + 7 : at + 7 + size]
            at += 7 + size
            if form in (1, 4):  # a whole record, or the end of a record
                yield Record.FromString(whole)
                whole = b""


class Comet:
    package, kind, missing = "comet_ml", CometLogger, "pip install comet-ml"
    unreachable = {"api_key": "a" * 25}

    @staticmethod
    def make(folder, **options):
        return CometLogger("digits", online=False, offline_directory=str(folder), **options)

    @staticmethod
    def read(folder, run_id):
        config, points, pictures, saved = {}, {}, 0, []
        archives = sorted(Path(folder).glob("*.zip"), key=os.path.getmtime)
        assert archives and all(archive.name.startswith(run_id) for archive in archives)
        for archive in archives:
            with zipfile.ZipFile(archive) as file:
                messages = [json.loads(line) for line in file.read("messages.json").splitlines() if line.strip()]
            for message in messages:
                own = message["payload"]
                if message["type"] == "parameter_msg":
                    config[own["param"]["paramName"]] = str(own["param"]["paramValue"])
                elif message["type"] == "metric_msg":
                    point = own["metric"]
                    points.setdefault(point["metricName"], []).append((point["step"], point["metricValue"]))
                elif message["type"] == "file_upload":
                    pictures += own["upload_type"] == "visualization"
                    name = own["additional_params"].get("groupingName")
                    saved += [name] if name and name not in saved else []
        return config, points, pictures, saved


class Trackio:
    package, kind, missing = "trackio", TrackioLogger, "pip install trackio"
    unreachable = {"server_url": f"{NOWHERE}?write_token=a"}

    @staticmethod
    def make(folder, **options):
        return TrackioLogger(f"digits-{abs(hash(str(folder)))}", **options)

    @staticmethod
    def read(folder, run_id):
        import trackio

        project = f"digits-{abs(hash(str(folder)))}"
        (run,) = trackio.Api().runs(project)
        assert run.name == run_id
        config = {name: str(value) for name, value in run.config.items()}
        points, pictures = {}, 0
        with sqlite3.connect(Path(os.environ["TRACKIO_DIR"], f"{project}.db")) as base:
            for step, text in base.execute("SELECT step, metrics FROM metrics ORDER BY id"):
                row = json.loads(text)
                pictures += "picture" in row
                for name, value in row.items():
                    points.setdefault(name, []).append((step, value))
            aliases = [name for (name,) in base.execute("SELECT alias FROM artifact_aliases")]
        return config, points, pictures, sorted(name for name in aliases if name != "latest")


OTHERS = [pytest.param(kind, marks=pytest.mark.soak) for kind in (Wandb, Comet, Trackio)]
soaked = pytest.mark.parametrize("tracker", [MLflow, *OTHERS], ids=lambda kind: kind.__name__)


def model():
    torch.manual_seed(0)
    made = tpufit.Model(nn.Linear(4, 3))
    made.compile("adamw", "cross_entropy", metrics=["accuracy"])
    return made


class Ending(Callback):
    reads_weights = False

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise RuntimeError("on purpose")


class Pictures(Callback):
    reads_weights = False

    def __init__(self, logger):
        self.logger = logger

    def on_epoch_end(self, epoch, logs=None):
        self.logger.add_image("picture", PICTURE)


@pytest.mark.cores(1, 8)
@pytest.mark.soak_on(8)
@soaked
def test_an_interrupted_run_is_resumed(cores, tracker, tmp_path, monkeypatch):
    pytest.importorskip(tracker.package)
    monkeypatch.chdir(tmp_path)
    how = {"batch_size": 8 // cores, "verbose": 0, "cores": cores, "validation_data": (X, Y)}
    first = tracker.make(tmp_path, config={"width": 4}, log_checkpoints=True, update_freq=4)
    before = model()
    keeps = ModelCheckpoint(tmp_path / "run")
    with pytest.raises(CallbackError, match="on purpose"):
        before.fit(X, Y, epochs=3, callbacks=[keeps, first, Pictures(first), Ending()], **how)
    second, after = tracker.make(tmp_path, config={"width": 4}, log_checkpoints=True, update_freq=4), model()
    keeps = ModelCheckpoint(tmp_path / "run")
    history = after.fit(X, Y, epochs=3, callbacks=[keeps, second, Pictures(second)], resume=True, **how).history
    assert second.run_id == first.run_id
    tested = after.evaluate(X, Y, 8 // cores, verbose=0, callbacks=[second], return_dict=True)
    config, points, pictures, saved = tracker.read(tmp_path, first.run_id)
    assert {"width": "4", "module": "Linear", "optimizer": "AdamW", "epochs": "3", "parameters": "15"}.items() <= (
        config.items()
    )
    assert [step for step, _ in points["loss"]] == [6, 12, 18]
    assert [value for _, value in points["epoch"]] == [0, 1, 2]
    assert [value for _, value in points["loss"]] == pytest.approx(history["loss"])
    assert points["val_accuracy"][-1] == (18, pytest.approx(history["val_accuracy"][-1]))
    assert points["learning_rate"][-1][1] == pytest.approx(after.learning_rate)
    assert [step for step, _ in points["batch_loss"]] == [4, 8, 12, 16]
    assert points["test_loss"] == [(18, pytest.approx(tested["loss"]))]
    # The log of step 12 was still being written when training was interrupted.
    assert pictures == 3 and saved == [f"step-{step:010d}" for step in (6, 18)]


@pytest.mark.cores(1)
@soaked
def test_an_unreachable_server_is_an_error_before_compiling(cores, tracker, tmp_path, monkeypatch):
    pytest.importorskip(tracker.package)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COMET_URL_OVERRIDE", f"{NOWHERE}/clientlib/")
    before = runtime.counts()
    with pytest.raises(CallbackError, match=r"TrackerError: .* can't be reached at http://127.0.0.1:9"):
        model().fit(X, Y, verbose=0, callbacks=[tracker.kind(**tracker.unreachable)])
    assert not (runtime.counts() - before).graphs


@pytest.mark.soak
def test_an_unreachable_space_and_an_invalid_config(monkeypatch):
    pytest.importorskip("trackio")
    monkeypatch.setenv("HF_ENDPOINT", NOWHERE)
    with pytest.raises(TrackerError, match="Trackio's space can't be reached at .* Without space_id it logs on this"):
        TrackioLogger("digits", space_id="me/digits").open_run(None)
    with pytest.raises(ArgumentError, match=r"config must be a dict of hyperparameters by name, got \[1\]"):
        TrackioLogger("digits", config=[1])
    with pytest.raises(ArgumentError, match="this TrackioLogger has no run yet: pass it to fit or evaluate"):
        TrackioLogger("digits").add_image("a", np.zeros((3, 4, 4)))


@pytest.mark.parametrize("tracker", [MLflow, Wandb, Comet, Trackio], ids=lambda kind: kind.__name__)
def test_a_missing_package(tracker, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, tracker.package, None)
    with pytest.raises(ArgumentError, match=f"{tracker.kind.__name__} needs .*{tracker.missing}"):
        tracker.kind()


def test_trackers_are_imported_only_if_used(run_python):
    result = run_python("""
        import sys, tpufit.callbacks
        print({"mlflow", "wandb", "comet_ml", "trackio"} & set(sys.modules))
    """)
    assert result.stdout == "set()\n", result.stderr


@pytest.mark.cores(1)
def test_the_users_run_is_used_and_left_open(cores, tmp_path, monkeypatch):
    import mlflow

    monkeypatch.chdir(tmp_path)
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/own.db")
    try:
        with mlflow.start_run() as own:
            mlflow.log_param("epochs", "as I say")
            logger = MLflowLogger()
            model().fit(X, Y, 8, verbose=0, callbacks=[logger])
            found = mlflow.get_run(own.info.run_id)
            assert logger.run_id == own.info.run_id and found.info.status == "RUNNING"
            assert found.data.params["epochs"] == "as I say" and found.data.params["module"] == "Linear"
            assert "loss" in found.data.metrics
    finally:
        mlflow.set_tracking_uri(before)


@pytest.mark.cores(1)
def test_a_failed_run_is_marked_and_a_lost_run_is_tolerated(cores, tmp_path, monkeypatch):
    import mlflow

    monkeypatch.chdir(tmp_path)
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    failed = MLflow.make(tmp_path)
    random.seed(3)
    drawn = random.getstate()
    with pytest.raises(CallbackError, match="on purpose"):
        model().fit(X, Y, epochs=3, verbose=0, callbacks=[failed, Ending()])
    assert client.get_run(failed.run_id).info.status == "FAILED"
    assert random.getstate() == drawn  # the run's random name differs
    lost = MLflow.make(tmp_path)

    class Deleting(Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                client.delete_run(lost.run_id)

    with pytest.warns(UserWarning, match="MLflowLogger could not log to run") as told:
        history = model().fit(X, Y, epochs=3, verbose=0, callbacks=[lost, Deleting()])
    assert history.epoch == [0, 1, 2] and len(told) == 1


@pytest.mark.parametrize(
    ("image", "dataformats", "said"),
    [
        (np.zeros((3, 4, 5)), "WHC", "dataformats must be one of HW, HWC"),
        (np.zeros((4, 5)), "CHW", "has 3 dimensions, got .4, 5."),
        (np.zeros((2, 5, 3)), "CHW", "1, 3 or 4 channels, got 2"),
    ],
)
def test_a_picture_of_an_invalid_shape(image, dataformats, said, tmp_path):
    from tpufit.callbacks._support.pictures import to_pixels

    with pytest.raises(ArgumentError, match=said):
        to_pixels(image, dataformats)


def test_a_figure_becomes_a_picture():
    from matplotlib.figure import Figure

    from tpufit.callbacks._support.pictures import draw_figure

    figure = Figure(figsize=(2, 1), dpi=50)
    figure.add_subplot().plot([1, 2])
    picture = draw_figure(figure)
    assert picture.shape == (50, 100, 3) and picture.dtype == np.uint8 and picture.min() < picture.max()
