"""ReduceLROnPlateau and LearningRateScheduler, with lists of numbers and no training."""

import inspect

import pytest
from fake_model import FakeModel

from tpufit import callbacks
from tpufit.callbacks import LearningRateScheduler, ReduceLROnPlateau
from tpufit.errors import ArgumentError


def rates(plateau, values, name="val_loss", model=None):
    """Pass one value for each epoch. Return the rate of each epoch."""
    plateau.set_model(model or FakeModel(lr=1.0))
    plateau.on_train_begin({})
    seen = []
    for epoch, value in enumerate(values):
        logs = {name: value}
        plateau.on_epoch_end(epoch, logs)
        seen.append(logs["learning_rate"])
    return seen


@pytest.mark.parametrize("cooldown", [0, 2])
def test_plateau_counts_as_keras_does(cooldown):
    """Compared with Keras's rule, which checks the cooldown before the value."""
    values = [1.0, 0.9, 0.9, 0.95, 0.9, 0.8, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9]
    model, plateau = FakeModel(lr=1.0), ReduceLROnPlateau("loss", 0.5, 2, cooldown=cooldown, min_lr=0.2)
    plateau.set_model(model)
    plateau.on_train_begin()
    rate, best, wait, cooling = 1.0, float("inf"), 0, 0
    for epoch, value in enumerate(values):
        logs = {"loss": value}
        plateau.on_epoch_end(epoch, logs)
        assert logs["learning_rate"] == rate
        if cooling:
            cooling, wait = cooling - 1, 0
        if value < best - 1e-4:
            best, wait = value, 0
        elif not cooling:
            wait += 1
            if wait >= 2 and rate > 0.2:
                rate, cooling, wait = max(rate * 0.5, 0.2), cooldown, 0
        assert model.learning_rate == rate
    assert rate < 1


@pytest.mark.parametrize(
    ("patience", "expected"), [(0, [1, 1, 0.5, 0.25, 0.125]), (1, [1, 1, 0.5, 0.25, 0.125]), (2, [1, 1, 1, 0.5, 0.5])]
)
def test_the_rate_is_reduced_after_patience_epochs(patience, expected):
    assert rates(ReduceLROnPlateau(factor=0.5, patience=patience), [1.0] * 5) == expected


def test_a_better_value_resets_patience():
    assert rates(ReduceLROnPlateau(factor=0.5, patience=2), [5, 6, 4, 5, 3, 4, 4, 4]) == [1] * 7 + [0.5]


def test_changes_below_min_delta_dont_count():
    values = [1.0, 0.95, 0.9, 0.85]
    assert rates(ReduceLROnPlateau(factor=0.5, patience=1, min_delta=0.01), values) == [1, 1, 1, 1]
    assert rates(ReduceLROnPlateau(factor=0.5, patience=1, min_delta=0.2), values) == [1, 1, 0.5, 0.25]


@pytest.mark.parametrize(
    ("monitor", "mode", "directions", "last"),
    [
        ("val_loss", "auto", {}, 0.25),
        ("val_accuracy", "auto", {}, 1),
        ("val_loss", "max", {}, 1),
        ("val_accuracy", "min", {}, 0.25),
        ("val_likelihood", "auto", {"likelihood": True}, 1),
    ],
)
def test_mode_decides_whether_rising_values_reduce_the_rate(monitor, mode, directions, last):
    """Rising values: reduced after the second and third if lower is better, else never."""
    plateau = ReduceLROnPlateau(monitor, 0.5, 1, mode=mode)
    assert rates(plateau, [1, 2, 3, 4], monitor, FakeModel(directions, lr=1.0))[-1] == last


def test_min_delta_where_higher_is_better():
    plateau = ReduceLROnPlateau("val_accuracy", 0.5, 1, min_delta=0.2)
    assert rates(plateau, [0.5, 0.625, 0.75, 0.875], "val_accuracy") == [1, 1, 0.5, 0.5]


def test_the_rate_stays_at_its_minimum():
    assert rates(ReduceLROnPlateau(factor=0.1, patience=1, min_lr=0.05), [1.0] * 5) == [1, 1, 0.1, 0.05, 0.05]


def test_no_reduction_follows_during_the_cooldown():
    expected = [1, 1, 0.5, 0.5, 0.25, 0.25]
    assert rates(ReduceLROnPlateau(factor=0.5, patience=1, cooldown=2), [1.0] * 6) == expected


def test_attributes_are_keras_and_can_be_set():
    plateau = ReduceLROnPlateau("loss", 0.5, 1, min_delta=-0.01, cooldown=2)
    plateau.best, plateau.wait, plateau.cooldown_counter = 0.5, 3, 2
    plateau.set_model(FakeModel(lr=1.0))
    plateau.on_train_begin({})
    seen = []
    for epoch, loss in enumerate([1.0, 1.0, 1.0, 1.0, 1.0, 0.5]):
        seen.append((plateau.best, plateau.wait, plateau.cooldown_counter, plateau.in_cooldown()))
        plateau.on_epoch_end(epoch, {"loss": loss})
    first, reduced = [(None, 0, 0, False), (1.0, 0, 0, False)], [(1.0, 0, 2, True), (1.0, 0, 1, True)]
    assert seen == [*first, *reduced, (1.0, 0, 2, True), (1.0, 0, 1, True)]
    assert (plateau.monitor, plateau.min_delta, plateau.best, plateau.cooldown_counter) == ("loss", 0.01, 0.5, 0)


def test_each_fit_starts_fresh_except_for_the_rate():
    plateau, model = ReduceLROnPlateau(factor=0.5, patience=1, cooldown=5), FakeModel(lr=1.0)
    assert rates(plateau, [1.0, 1.0, 1.0], model=model) == [1, 1, 0.5]
    assert rates(plateau, [9.0, 9.0, 9.0], model=model) == [0.5, 0.5, 0.25]


def test_a_missing_log_warns_once_and_reduces_nothing():
    with pytest.warns(UserWarning, match="ReduceLROnPlateau can't find 'val_loss'.*Available: learning_rate, loss"):
        assert rates(ReduceLROnPlateau(patience=1), [1, 1, 1], "loss") == [1, 1, 1]


def test_verbose_prints_each_reduction(capsys):
    rates(ReduceLROnPlateau(factor=0.5, patience=1), [1.0, 1.0])
    assert capsys.readouterr().out == ""
    rates(ReduceLROnPlateau(factor=0.5, patience=1, verbose=1), [1.0, 1.0])
    assert capsys.readouterr().out == "Epoch 2: ReduceLROnPlateau reduces the learning rate to 0.5\n"


def test_a_better_value_during_cooldown_counts():
    plateau = ReduceLROnPlateau(factor=0.5, patience=1, cooldown=3)
    assert rates(plateau, [1.0, 1.0, 0.5, 0.6, 0.6, 0.6]) == [1, 1, 0.5, 0.5, 0.5, 0.25]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"factor": 1.0}, "below 1"),
        ({"factor": -0.1}, "at least 0"),
        ({"mode": "lowest"}, "'auto', 'min' or 'max', got 'lowest'"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        ReduceLROnPlateau(**arguments)


def test_a_schedule_gets_the_current_rate():
    scheduler = LearningRateScheduler(lambda epoch, lr: lr / 2 if epoch else lr)
    scheduler.set_model(FakeModel(lr=1.0))
    for epoch, rate in enumerate([1, 0.5, 0.25]):
        scheduler.on_epoch_begin(epoch, {})
        assert scheduler.model.learning_rate == rate
    scheduler.model.learning_rate = 8.0  # as another callback may set it
    scheduler.on_epoch_begin(3, {})
    assert scheduler.model.learning_rate == 4.0


@pytest.mark.parametrize("returned", [None, "0.1", True, [0.1]])
def test_a_schedule_must_return_a_number(returned):
    scheduler = LearningRateScheduler(lambda epoch: returned)
    scheduler.set_model(FakeModel())
    with pytest.raises(ArgumentError, match="schedule must return a number, got .* for epoch 3"):
        scheduler.on_epoch_begin(3, {})


@pytest.mark.parametrize("schedule", [lambda epoch: 1 / (2 + epoch), lambda epoch, lr: 1 / (2 + epoch)])
def test_a_schedule_prints_rates_if_verbose(capsys, schedule):
    for verbose, said in [(0, ""), (1, "Epoch 1: learning rate 0.5\nEpoch 2: learning rate 0.333333\n")]:
        scheduler = LearningRateScheduler(schedule, verbose)
        scheduler.set_model(FakeModel())
        for epoch in range(2):
            logs = {"loss": 1.0}
            scheduler.on_epoch_begin(epoch, {})
            scheduler.on_epoch_end(epoch, logs)
        assert logs["learning_rate"] == scheduler.model.learning_rate == 1 / 3
        assert capsys.readouterr().out == said


NEEDED = inspect.Parameter.empty
# The arguments of Keras 3's callbacks in order, with their defaults.
KERAS = {
    "BackupAndRestore": {
        "backup_dir": NEEDED,
        "save_freq": "epoch",
        "double_checkpoint": False,
        "delete_checkpoint": True,
    },
    "CallbackList": {"callbacks": None, "add_history": False, "add_progbar": False, "model": None},
    "CSVLogger": {"filename": NEEDED, "separator": ",", "append": False},
    "EarlyStopping": {
        "monitor": "val_loss",
        "min_delta": 0,
        "patience": 0,
        "verbose": 0,
        "mode": "auto",
        "baseline": None,
        "restore_best_weights": False,
        "start_from_epoch": 0,
    },
    "History": {},
    "LambdaCallback": {
        "on_epoch_begin": None,
        "on_epoch_end": None,
        "on_train_begin": None,
        "on_train_end": None,
        "on_train_batch_begin": None,
        "on_train_batch_end": None,
        "kwargs": NEEDED,
    },
    "LearningRateScheduler": {"schedule": NEEDED, "verbose": 0},
    "ModelCheckpoint": {
        "filepath": NEEDED,
        "monitor": "val_loss",
        "verbose": 0,
        "save_best_only": False,
        "save_weights_only": False,
        "mode": "auto",
        "save_freq": "epoch",
        "initial_value_threshold": None,
    },
    "ReduceLROnPlateau": {
        "monitor": "val_loss",
        "factor": 0.1,
        "patience": 10,
        "verbose": 0,
        "mode": "auto",
        "min_delta": 0.0001,
        "cooldown": 0,
        "min_lr": 0.0,
    },
    "RemoteMonitor": {
        "root": "http://localhost:9000",
        "path": "/publish/epoch/end/",
        "field": "data",
        "headers": None,
        "send_as_json": False,
    },
    "SwapEMAWeights": {"swap_on_epoch": False},
    "TensorBoard": {
        "log_dir": "logs",
        "histogram_freq": 0,
        "write_graph": True,
        "write_images": False,
        "write_steps_per_second": False,
        "update_freq": "epoch",
        "profile_batch": 0,
        "embeddings_freq": 0,
        "embeddings_metadata": None,
    },
    "TerminateOnNaN": {"raise_error": False},
}


@pytest.mark.parametrize("name", KERAS)
def test_arguments_begin_as_keras_arguments_do(name):
    ours = [(p.name, p.default) for p in inspect.signature(getattr(callbacks, name)).parameters.values()]
    assert ours[: len(KERAS[name])] == list(KERAS[name].items())
