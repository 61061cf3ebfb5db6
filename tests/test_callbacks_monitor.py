"""Which of two values is better, decided from lists of numbers."""

import json
import math

import numpy as np
import pytest

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


def test_the_metric_knows_better_than_the_name():
    monitor = Monitor("accuracy")
    monitor.settle(False)
    assert observed(monitor, 0.5, 0.6, 0.4) == [True, False, True]
    monitor.reset()
    monitor.settle(None)
    assert observed(monitor, 0.5, 0.6, 0.4) == [True, True, False]


@pytest.mark.parametrize("name", ["score", "val_score", "accelerations", "miss"])
def test_where_nothing_says_what_is_better_it_is_asked_for(name):
    with pytest.raises(ArgumentError, match=f"neither a metric nor the name of '{name}' says.*mode='max' or"):
        Monitor(name).settle(None)
    Monitor(name).settle(True)
    Monitor(name, "min").settle(None)


@pytest.mark.parametrize(("mode", "expected"), [("min", [True, False, True]), ("max", [True, True, False])])
def test_a_mode_that_was_asked_for_outranks_the_metric(mode, expected):
    monitor = Monitor("accuracy" if mode == "min" else "loss", mode)
    monitor.settle(mode == "min")
    assert observed(monitor, 0.5, 0.6, 0.4) == expected


def test_an_unknown_mode_is_an_error():
    with pytest.raises(ArgumentError, match=r"'auto', 'min' or 'max', got 'lowest'"):
        Monitor("loss", "lowest")


@pytest.mark.parametrize("min_delta", [0.1, -0.1])
@pytest.mark.parametrize(("mode", "values"), [("min", (1.0, 0.95, 0.85)), ("max", (1.0, 1.05, 1.15))])
def test_a_change_below_min_delta_is_none(mode, values, min_delta):
    assert observed(Monitor("x", mode, min_delta), *values) == [True, False, True]


@pytest.mark.parametrize(("mode", "values"), [("min", (1.0, 0.5, 0.25)), ("max", (0.0, 0.5, 0.75))])
def test_a_change_of_just_min_delta_is_none_and_small_ones_add_up(mode, values):
    assert observed(Monitor("x", mode, 0.5), *values) == [True, False, True]


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_never_better(mode, odd):
    monitor = Monitor("loss", mode)
    assert observed(monitor, odd, 0.5, odd) == [False, True, False]
    assert monitor.best == 0.5


def test_wait_begins_anew_only_above_best_and_baseline():
    monitor = Monitor("accuracy", baseline=0.8)
    waits = []
    for value in (0.6, 0.7, 0.85, 0.82, 0.9):
        monitor.observe(value)
        waits.append(monitor.wait)
    assert waits == [1, 2, 0, 1, 0]
    assert monitor.best == 0.9


def test_a_first_best_must_be_beaten():
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
    assert monitor.read({"loss": 1.0}, "EarlyStopping") is None  # no second warning: it would be an error here
    assert monitor.read({"val_loss": np.float32(0.5)}, "EarlyStopping") == 0.5


def test_an_array_cant_be_followed():
    with pytest.raises(ArgumentError, match="single number only, and 'recall'"):
        Monitor("recall").read({"recall": np.zeros(3)}, "EarlyStopping")


def test_a_typing_error_is_answered_with_the_nearest_log():
    logs = {"loss": 1.0, "accuracy": 0.5, "val_accuracy": 0.5}
    with pytest.warns(UserWarning, match=r"Did you mean 'val_accuracy'\? Available: accuracy, loss, val_accuracy\."):
        Monitor("val_acuracy", "max").read(logs, "EarlyStopping")
    with pytest.raises(ArgumentError, match=r"'val_accurcy' says.* Did you mean 'val_accuracy'\? The logs are"):
        Monitor("val_accurcy").settle(None, ["loss", "accuracy"])
    with pytest.warns(UserWarning, match=r"without it\. Available: loss\."):  # what is missing is the validation
        Monitor("val_loss").read({"loss": 1.0}, "EarlyStopping")
