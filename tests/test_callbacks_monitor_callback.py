"""Comparison of monitored values, from lists of numbers."""

import json
import math

import numpy as np
import pytest
import torch
from fake_model import FakeModel

import tpufit
from tpufit.callbacks import EarlyStopping, ModelCheckpoint, MonitorCallback
from tpufit.callbacks._support.monitor import Monitor
from tpufit.errors import ArgumentError


def observed(monitor, *values):
    return [monitor.observe(value) for value in values]


@pytest.mark.parametrize(
    ("name", "rising"),
    [
        ("loss", False),
        ("val_loss", False),
        ("accuracy", True),
        ("val_accuracy", True),
        ("top_5_accuracy", True),
        ("acc", True),
        ("val_auroc", True),
        ("f1_score", True),
        ("multiclass_jaccard_index", True),
        ("multiclass_precision", True),
        ("r2_score", True),
        ("recall", True),
        ("mean_squared_error", False),
        ("mse", False),
        ("recall_loss", False),
        ("accuracy_error", False),
        ("accelerations", False),
    ],
)
def test_direction_by_name(name, rising):
    assert observed(Monitor(name), 0.5, 0.6, 0.4) == [True, rising, not rising]


def test_the_metrics_direction_overrides_the_names():
    monitor = Monitor("accuracy")
    monitor.choose_direction(False)
    assert observed(monitor, 0.5, 0.6, 0.4) == [True, False, True]
    monitor.reset()
    monitor.choose_direction(None)
    assert observed(monitor, 0.5, 0.6, 0.4) == [True, True, False]


@pytest.mark.parametrize("name", ["score", "val_score", "accelerations", "miss"])
def test_an_unknown_direction_requires_a_mode(name):
    with pytest.raises(ArgumentError, match=f"neither a metric nor the name of '{name}' says.*mode='max' or"):
        Monitor(name).choose_direction(None)
    Monitor(name).choose_direction(True)
    Monitor(name, "min").choose_direction(None)


@pytest.mark.parametrize(("mode", "expected"), [("min", [True, False, True]), ("max", [True, True, False])])
def test_an_explicit_mode_overrides_the_metric(mode, expected):
    monitor = Monitor("accuracy" if mode == "min" else "loss", mode)
    monitor.choose_direction(mode == "min")
    assert observed(monitor, 0.5, 0.6, 0.4) == expected


def test_an_unknown_mode_is_an_error():
    with pytest.raises(ArgumentError, match=r"'auto', 'min' or 'max', got 'lowest'"):
        Monitor("loss", "lowest")


@pytest.mark.parametrize("min_delta", [0.1, -0.1])
@pytest.mark.parametrize(("mode", "values"), [("min", (1.0, 0.95, 0.85)), ("max", (1.0, 1.05, 1.15))])
def test_a_change_below_min_delta_is_ignored(mode, values, min_delta):
    assert observed(Monitor("x", mode, min_delta), *values) == [True, False, True]


@pytest.mark.parametrize(("mode", "values"), [("min", (1.0, 0.5, 0.25)), ("max", (0.0, 0.5, 0.75))])
def test_min_delta_must_be_exceeded_and_small_improvements_add_up(mode, values):
    assert observed(Monitor("x", mode, 0.5), *values) == [True, False, True]


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_value_that_isnt_finite_is_never_better(mode, odd):
    monitor = Monitor("loss", mode)
    assert observed(monitor, odd, 0.5, odd) == [False, True, False]
    assert monitor.best == 0.5


def test_wait_resets_only_above_best_and_baseline():
    monitor = Monitor("accuracy", baseline=0.8)
    waits = []
    for value in (0.6, 0.7, 0.85, 0.82, 0.9):
        monitor.observe(value)
        waits.append(monitor.wait)
    assert waits == [1, 2, 0, 1, 0]
    assert monitor.best == 0.9


def test_an_initial_best_value_must_be_beaten():
    assert observed(Monitor("loss", best=0.5), 0.6, 0.5, 0.4) == [False, False, True]


def test_state_goes_through_json():
    first, second = Monitor("loss"), Monitor("loss")
    observed(first, 0.5, 0.6)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert observed(first, 0.55, 0.4) == observed(second, 0.55, 0.4) == [False, True]
    assert (second.best, second.wait) == (0.4, 0)


def test_a_missing_log_is_one_warning_that_lists_the_others():
    monitor = Monitor("val_loss")
    with pytest.warns(UserWarning, match=r"EarlyStopping can't find 'val_loss'.*Available: accuracy, loss\."):
        assert monitor.read({"loss": 1.0, "accuracy": 0.5}, "EarlyStopping") is None
    assert monitor.read({"loss": 1.0}, "EarlyStopping") is None  # a second warning would raise an error here
    assert monitor.read({"val_loss": np.float32(0.5)}, "EarlyStopping") == 0.5


def test_an_array_cannot_be_monitored():
    with pytest.raises(ArgumentError, match="single numbers only, and 'recall'"):
        Monitor("recall").read({"recall": np.zeros(3)}, "EarlyStopping")


def test_a_typo_is_answered_with_the_nearest_log():
    logs = {"loss": 1.0, "accuracy": 0.5, "val_accuracy": 0.5}
    with pytest.warns(UserWarning, match=r"Did you mean 'val_accuracy'\? Available: accuracy, loss, val_accuracy\."):
        Monitor("val_acuracy", "max").read(logs, "EarlyStopping")
    with pytest.raises(ArgumentError, match=r"'val_accurcy' says.* Did you mean 'val_accuracy'\? The logs are"):
        Monitor("val_accurcy").choose_direction(None, ["loss", "accuracy"])
    with pytest.warns(UserWarning, match=r"without it\. Available: loss\."):  # the validation is missing
        Monitor("val_loss").read({"loss": 1.0}, "EarlyStopping")


class StopBelow(MonitorCallback):
    """A subclass as written for Keras's class."""

    def __init__(self, *args, patience=1, **how):
        super().__init__(*args, **how)
        self.patience = patience
        self.wait = 0
        self.better = []

    def on_train_begin(self, logs=None): ...

    def on_epoch_end(self, epoch, logs=None):
        if self.monitor_op is None:
            self._set_monitor_op()
        value = logs.get(self.monitor)
        self.wait += 1
        if self._is_improvement(value, self.best):
            self.best, self.wait = value, 0
            self.better.append(epoch)
        if self.wait >= self.patience:
            self.model.stop_training = True


@pytest.mark.parametrize(
    ("given", "how", "better"),
    [
        (("score", "max"), {}, [0, 1, 3]),
        (("score", "min", 0.65), {}, [0, 4]),
        (("score", "max", None, 0.15), {}, [0, 1]),
        (("score",), {"baseline": 0.55}, [1, 3]),
    ],
)
def test_a_subclass_of_keras_monitor_callback(given, how, better):
    callback = StopBelow(*given, patience=2, **how)
    assert callback.monitor_op is None and callback.best == how.get("baseline", (*given, None, None)[2])
    callback.set_model(FakeModel({"score": True}))
    callback.on_train_begin()
    for epoch, value in enumerate([0.5, 0.7, 0.6, 0.71, 0.4]):
        callback.on_epoch_end(epoch, {"score": value})
    assert callback.better == better
    assert callback.monitor_op(2, 1) is (callback.mode != "min")


def test_the_monitor_can_be_set():
    callback = MonitorCallback("val_loss")
    callback.monitor, callback.mode, callback.min_delta, callback.best = "score", "max", -0.2, 1.0
    assert (callback.monitor, callback.mode, callback.min_delta, callback.best) == ("score", "max", 0.2, 1.0)
    callback.set_model(FakeModel())
    callback.on_train_begin()
    assert callback.get_monitor_value({"score": 2}) == 2.0 and callback.monitor_op(2, 1)
    with pytest.raises(ArgumentError, match="mode must be"):
        callback.mode = "up"
    with pytest.warns(UserWarning, match="MonitorCallback can't find 'score'"):
        assert callback.get_monitor_value({"loss": 1.0}) is None


def test_early_stopping_reads_by_a_method_that_a_subclass_may_change():
    class OfSum(EarlyStopping):
        def get_monitor_value(self, logs):
            return logs["a"] + logs["b"]

    stopping = OfSum("a", mode="max", patience=1)
    stopping.set_model(FakeModel())
    stopping.on_train_begin()
    for epoch, b in enumerate([0.0, 1.0, 0.5]):
        stopping.on_epoch_end(epoch, {"a": 0.0, "b": b})
    assert (stopping.best, stopping.stopped_epoch) == (1.0, 2)


@pytest.mark.cores(1)
def test_a_resumed_fit_keeps_the_best_value(cores, tmp_path):
    x = torch.ones(4, 1)
    counted = []
    for epochs in (1, 2):
        callback = StopBelow("loss", patience=9)
        model = tpufit.Model(torch.nn.Linear(1, 1))
        model.compile("sgd", "mse", run_eagerly=True)
        model.fit(x, x, epochs=epochs, verbose=0, resume=True, callbacks=[ModelCheckpoint(tmp_path / "run"), callback])
        counted.append((callback.better, callback.best))
    assert counted[1][0] == [0, 1] and counted[1][1] < counted[0][1]
