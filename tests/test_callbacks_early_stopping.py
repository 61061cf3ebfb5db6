"""EarlyStopping, with lists of losses and no training."""

import math

import pytest
import torch
from fake_model import FakeModel

from tpufit.callbacks import EarlyStopping
from tpufit.errors import ArgumentError


def train(stopping, values, name="val_loss", model=None, stop_at=None):
    """Pass one value for each epoch; the weight is the epoch's number. Return the number of trained epochs."""
    stopping.set_model(model or FakeModel())
    stopping.model.stop_training = False
    stopping.on_train_begin({})
    epoch = -1
    for epoch, value in enumerate(values):
        stopping.model.weight = epoch
        stopping.on_epoch_end(epoch, {name: value})
        if stopping.model.stop_training or epoch == stop_at:
            break
    stopping.on_train_end({})
    return epoch + 1


@pytest.mark.parametrize(("patience", "epochs"), [(0, 4), (1, 4), (2, 5), (3, 6), (9, 9)])
def test_training_stops_after_patience_epochs(patience, epochs):
    stopping = EarlyStopping("loss", patience=patience)
    assert train(stopping, [10.0, 9.0, 8.0, 9.0, 8.9, 8.8, 8.7, 8.6, 8.5], "loss") == epochs
    assert stopping.stopped_epoch == (epochs - 1 if patience < 9 else 0)
    assert (stopping.best, stopping.best_epoch) == (8.0, 2)


def test_a_better_value_resets_patience():
    assert train(EarlyStopping(patience=2), [5, 6, 4, 5, 3, 4, 5, 1]) == 7


def test_changes_below_min_delta_dont_count():
    values = [1.0, 0.95, 0.91, 0.85, 0.8]
    assert train(EarlyStopping(patience=2), values) == 5
    assert train(EarlyStopping(patience=2, min_delta=0.1), values) == 3


def test_a_value_equal_to_the_best_is_not_better():
    stopping = EarlyStopping(patience=2, restore_best_weights=True)
    assert train(stopping, [0.5, 0.5, 0.5, 0.4]) == 3
    assert (stopping.best_epoch, stopping.model.weight) == (0, 0)


def test_min_delta_and_baseline_where_higher_is_better():
    assert train(EarlyStopping("accuracy", min_delta=0.1, patience=1), [0.5, 0.65, 0.7, 0.9], "accuracy") == 3
    assert train(EarlyStopping("accuracy", min_delta=-0.1, patience=1), [0.5, 0.65, 0.7, 0.9], "accuracy") == 3
    assert train(EarlyStopping("accuracy", baseline=0.8, patience=2), [0.6, 0.7, 0.7, 0.9], "accuracy") == 3
    assert train(EarlyStopping("accuracy", baseline=0.6, patience=2), [0.6, 0.7, 0.65, 0.6, 0.9], "accuracy") == 4


@pytest.mark.parametrize(
    ("monitor", "mode", "directions", "epochs"),
    [
        ("val_loss", "auto", {}, 2),
        ("val_accuracy", "auto", {}, 3),
        ("val_loss", "max", {}, 3),
        ("val_accuracy", "min", {}, 2),
        ("val_perplexity", "auto", {"perplexity": False}, 2),
        ("val_likelihood", "auto", {"likelihood": True}, 3),
    ],
)
def test_mode_decides_whether_rising_values_stop_training(monitor, mode, directions, epochs):
    """Rising values: training stops at the second if lower is better, else it runs to the end."""
    stopping = EarlyStopping(monitor, mode=mode)
    assert train(stopping, [1, 2, 3], monitor, FakeModel(directions)) == epochs


def test_only_beating_the_baseline_starts_patience_again():
    assert train(EarlyStopping(patience=5, baseline=0.5), [0.9, 0.8, 0.7, 0.71, 0.72, 0.73]) == 5
    assert train(EarlyStopping(patience=3, baseline=0.5), [0.9, 0.8, 0.4, 0.6, 0.55, 0.5, 0.1]) == 6
    assert train(EarlyStopping(baseline=0.5), [0.9, 0.8, 0.7, 0.7, 0.6]) == 4


def test_training_continues_while_it_improves_below_the_baseline():
    stopping = EarlyStopping(patience=2, baseline=0.55, restore_best_weights=True)
    assert train(stopping, [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.6, 0.7, 0.8, 0.9]) == 8  # as in Keras 3
    assert (stopping.best, stopping.best_epoch, stopping.model.weight) == (0.5, 5, 5)
    stopping = EarlyStopping(patience=3, baseline=0.1)
    assert train(stopping, [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.6, 0.7, 0.8, 0.9]) == 7
    assert (stopping.wait, stopping.stopped_epoch) == (7, 6)


def test_a_resumed_training_ends_where_it_would_have_ended():
    stopping = EarlyStopping(patience=3, baseline=0.1)
    assert train(stopping, [1.0, 0.9, 0.8, 0.7]) == 4
    resumed = EarlyStopping(patience=3, baseline=0.1)
    resumed.set_model(FakeModel())
    resumed.on_train_begin({})
    resumed.load_state_dict(stopping.state_dict())
    resumed.on_epoch_end(4, {"val_loss": 0.6})
    assert (resumed.wait, resumed.model.stop_training) == (5, False)
    resumed.on_epoch_end(5, {"val_loss": 0.6})
    assert (resumed.stopped_epoch, resumed.best_epoch, resumed.model.stop_training) == (5, 4, True)


@pytest.mark.parametrize(("baseline", "stop_at", "epochs"), [(None, None, 5), (None, 3, 4), (0.05, None, 4)])
def test_the_best_weights_are_restored_after_any_end(baseline, stop_at, epochs):
    stopping = EarlyStopping(patience=3 if baseline else 2, baseline=baseline, restore_best_weights=True)
    assert train(stopping, [0.2, 0.15, 0.1, 0.11, 0.12, 0.13], stop_at=stop_at) == epochs
    assert stopping.model.weight == stopping.best_epoch == 2


def test_the_best_weights_are_restored_after_a_full_training():
    stopping = EarlyStopping(patience=10, restore_best_weights=True)
    assert train(stopping, [0.2, 0.1, 0.3]) == 3
    assert (stopping.stopped_epoch, stopping.model.weight) == (0, 1)


def test_buffers_that_arent_persistent_are_restored_too():
    stopping, resumed = (EarlyStopping(patience=10, restore_best_weights=True) for _ in range(2))
    model = FakeModel()
    for name in ("seen", "rows"):
        model.module.register_buffer(name, torch.tensor(5), persistent=False)
    stopping.set_model(model)
    stopping.on_train_begin()
    stopping.on_epoch_end(0, {"val_loss": 0.1})
    model.module.seen.fill_(6)
    model.module.rows = torch.zeros(2)  # of another shape, so it stays
    stopping.on_epoch_end(1, {"val_loss": 0.2})
    resumed.set_model(model)
    resumed.on_train_begin()
    resumed.load_state_dict(stopping.state_dict())
    for callback in (stopping, resumed):
        callback.on_train_end()
        assert (model.module.seen, model.module.rows.tolist()) == (5, [0, 0])
        model.module.seen.fill_(7)


def test_weights_stay_if_no_epoch_was_compared():
    stopping = EarlyStopping(start_from_epoch=5, restore_best_weights=True)
    assert train(stopping, [0.1, 0.2, 0.3]) == 3
    assert (stopping.best, stopping.model.weight) == (None, 2)


def test_weights_stay_without_restore_best_weights():
    stopping = EarlyStopping(patience=1)
    train(stopping, [0.1, 0.2])
    assert stopping.model.weight == 1
    assert stopping.best_weights is None


def test_start_from_epoch():
    values = [0.1, 0.9, 0.8, 0.9, 0.9]
    assert train(EarlyStopping(), values) == 2
    stopping = EarlyStopping(start_from_epoch=2, restore_best_weights=True)
    assert train(stopping, values) == 4
    assert (stopping.best, stopping.best_epoch, stopping.model.weight) == (0.8, 2, 2)
    assert train(EarlyStopping(start_from_epoch=2, patience=2), values) == 5  # patience starts there
    assert train(EarlyStopping(start_from_epoch=9), values) == 5


def test_nan_is_not_better_and_exhausts_patience():
    stopping = EarlyStopping(patience=2, restore_best_weights=True)
    assert train(stopping, [math.nan, 0.5, math.nan, math.nan, 0.1]) == 4
    assert (stopping.best, stopping.model.weight) == (0.5, 1)


def test_training_stops_if_all_values_are_nan():
    assert train(EarlyStopping(), [math.nan] * 5) == 2


def test_a_missing_log_warns_once_and_never_stops():
    stopping = EarlyStopping()
    with pytest.warns(UserWarning, match="can't find 'val_loss'.*Available: loss") as warned:
        assert train(stopping, [1, 2, 3], "loss") == 3
    assert len(warned) == 1


def test_each_fit_starts_fresh():
    stopping = EarlyStopping(patience=2, restore_best_weights=True)
    assert train(stopping, [0.1, 0.2, 0.3]) == 3
    assert train(stopping, [0.9, 0.8, 0.7, 0.6]) == 4
    assert (stopping.stopped_epoch, stopping.best, stopping.model.weight) == (0, 0.6, 3)
    model = FakeModel()
    assert train(stopping, [math.nan, math.nan], model=model) == 2
    assert model.weight == 0  # the weights of this fit's first epoch, not of the previous fit


def test_another_model_starts_fresh():
    stopping = EarlyStopping("val_score", patience=1)
    assert train(stopping, [0.9, 0.8, 0.85], "val_score", FakeModel({"score": False})) == 3
    assert train(stopping, [0.1, 0.2, 0.15], "val_score", FakeModel({"score": True})) == 3
    assert stopping.best == 0.2


def test_verbose_prints_each_action(capsys):
    train(EarlyStopping(verbose=0, restore_best_weights=True), [1, 2])
    assert capsys.readouterr().out == ""
    train(EarlyStopping(verbose=1, restore_best_weights=True), [1, 2])
    assert capsys.readouterr().out == "Epoch 2: early stopping\nRestoring the weights of the best epoch: 1\n"


def test_attributes_are_keras_and_can_be_set():
    stopping = EarlyStopping("loss", -0.5, 3, baseline=0.8)
    assert (stopping.monitor, stopping.mode, stopping.min_delta, stopping.baseline) == ("loss", "auto", 0.5, 0.8)
    stopping.best, stopping.wait, stopping.stopped_epoch, stopping.best_epoch = 0.1, 3, 5, 5
    seen = []
    model = FakeModel()
    stopping.set_model(model)
    stopping.on_train_begin({})
    for epoch, loss in enumerate([2.0, 1.0, 1.5, 1.4]):
        seen.append((stopping.best, stopping.wait, stopping.best_epoch, model.stop_training))
        stopping.on_epoch_end(epoch, {"loss": loss})
    assert seen == [(None, 0, 0, False), (2.0, 1, 0, False), (1.0, 2, 1, False), (1.0, 3, 1, True)]
    stopping.on_train_end({})
    assert (stopping.best, stopping.wait, stopping.stopped_epoch, stopping.best_epoch) == (1.0, 4, 3, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "lowest"}, "got 'lowest'"),
        ({"patience": -1}, "patience .* got -1"),
        ({"start_from_epoch": -2}, "start_from_epoch .* got -2"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        EarlyStopping(**arguments)
