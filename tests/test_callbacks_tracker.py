"""Tracker and its loggers: what is logged at which step, and that TensorBoard can read it."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from tpufit.callbacks import CSVFile, LearningRateMonitor, Logger, TensorBoardRun, Tracker
from tpufit.callbacks.step_count import StepCount
from tpufit.errors import ArgumentError


class Noting:
    def __init__(self):
        self.calls = []

    def log_hyperparameters(self, values):
        self.calls.append(dict(values))

    def log_metrics(self, step, metrics):
        self.calls.append((step, dict(metrics)))

    def close(self):
        self.calls.append("closed")


def train(callback, epochs, batches, first=(0, 0), joined=1):
    """Call the hooks as `fit` does, from (epoch, batch) on."""
    for epoch in range(first[0], epochs):
        start = first[1] if epoch == first[0] else 0
        for batch in range(start + joined - 1, batches, joined):
            callback.on_train_batch_end(batch, {"loss": float(batch)})
        callback.on_epoch_end(epoch, {"loss": 0.5, "recall": np.zeros(3)})


def begun(logger, **arguments):
    tracker = Tracker(logger, **arguments)
    tracker.set_params({"epochs": 2, "steps": None, "verbose": 0})
    tracker.on_train_begin()
    return tracker


def test_epochs_by_steps():
    logger = Noting()
    tracker = begun(logger, hyperparameters={"lr": 0.1})
    train(tracker, epochs=2, batches=3)
    tracker.on_train_end()
    assert logger.calls == [
        {"lr": 0.1, "epochs": 2},
        (3, {"epoch": 0.0, "loss": 0.5}),
        (6, {"epoch": 1.0, "loss": 0.5}),
        "closed",
    ]


@pytest.mark.parametrize(
    ("update_freq", "joined", "steps"), [("batch", 1, [1, 2, 3, 4]), (2, 1, [2, 4]), (2, 2, [2, 4]), (3, 2, [4])]
)
def test_batches_too(update_freq, joined, steps):
    logger = Noting()
    train(begun(logger, update_freq=update_freq), epochs=1, batches=4, joined=joined)
    assert logger.calls[1:-1] == [(step, {"batch_loss": step - 1.0}) for step in steps]


def test_steps_go_on_in_the_next_fit():
    logger = Noting()
    tracker = begun(logger)
    train(tracker, epochs=1, batches=5)
    tracker.on_train_begin()
    train(tracker, epochs=1, batches=5)
    assert [call[0] for call in logger.calls if isinstance(call, tuple)] == [5, 10]


@pytest.mark.parametrize("first", [(1, 0), (1, 2)], ids=["between epochs", "in an epoch"])
@pytest.mark.parametrize("kind", [Tracker, LearningRateMonitor])
def test_steps_are_resumed(kind, first):
    def make(logger):
        if kind is Tracker:
            return begun(logger, update_freq=2)
        monitor = LearningRateMonitor(2)
        monitor.set_model(SimpleNamespace(optimizer=SimpleNamespace(param_groups=[{"lr": 0.1}])))
        monitor.on_train_begin()
        return monitor

    whole, part, rest = make(Noting()), make(Noting()), make(Noting())
    train(whole, epochs=3, batches=5)
    train(part, epochs=1, batches=5)
    for batch in range(first[1]):
        part.on_train_batch_end(batch, {})
    rest.load_state_dict(json.loads(json.dumps(part.state_dict())))
    train(rest, epochs=3, batches=5, first=first)
    assert rest.state_dict() == whole.state_dict() == {"steps": 15, "last": 4}


def test_a_training_that_was_broken_off_leaves_no_batch_behind():
    count = StepCount(0)
    count.advance(2)
    count.begin()
    count.advance(3)  # four steps as one
    assert count.steps == 7


@pytest.mark.parametrize("logger", [Noting, object(), None, "csv"])
def test_a_logger_has_three_methods(logger):
    with pytest.raises(ArgumentError, match="logger must be an object with log_hyperparameters, log_metrics and close"):
        Tracker(logger)


def test_the_built_in_loggers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for logger in (CSVFile(tmp_path / "log.csv"), TensorBoardRun(tmp_path / "run")):
        assert isinstance(logger, Logger)
        tracker = begun(logger, hyperparameters={"lr": 0.1, "optimizer": "adamw", "ema": False, "sizes": (1, 2)})
        train(tracker, epochs=2, batches=3)
        tracker.on_train_end()
        tracker.on_train_end()  # a second time does no harm
    assert (tmp_path / "log.csv").read_text() == "step,epoch,loss\n3,0.0,0.5\n6,1.0,0.5\n"
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(3, 0.5), (6, 0.5)]
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    hparams = HParamsPluginData.FromString(content).session_start_info.hparams
    assert (hparams["lr"].number_value, hparams["optimizer"].string_value) == (0.1, "adamw")
    assert hparams["ema"].bool_value is False and hparams["sizes"].string_value == "(1, 2)"
