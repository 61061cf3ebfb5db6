"""History keeps the logs of every epoch."""

import re

import numpy as np

from tpufit.callbacks import History


def test_each_log_is_a_list():
    history = History()
    history.on_epoch_end(0, {"loss": 0.5})
    history.on_epoch_end(1, {"loss": 0.4, "val_loss": 0.6})
    assert history.history == {"loss": [0.5, 0.4], "val_loss": [0.6]}
    assert history.epoch == [0, 1]


def test_an_epoch_without_logs_counts():
    history = History()
    history.on_epoch_end(0, None)
    assert (history.epoch, history.history) == ([0], {})


def test_one_object_keeps_all_fits():
    """Keras's History resets its epochs and keeps their values, which then have no epochs."""
    history = History()
    for loss in (0.5, 0.25):
        history.on_train_begin({})
        history.on_epoch_end(0, {"loss": loss})
    assert (history.epoch, history.history) == ([0, 0], {"loss": [0.5, 0.25]})


def test_two_histories_share_nothing():
    first, second = History(), History()
    first.on_epoch_end(0, {"loss": 0.5})
    assert (second.history, second.epoch) == ({}, [])


def test_a_history_has_a_repr_and_a_table_for_notebooks():
    history = History()
    assert repr(history) == "History(0 epochs)"
    history.on_epoch_end(0, {"loss": 0.123456})
    assert repr(history) == "History(1 epoch: loss 0.1235)"
    history.on_epoch_end(1, {"loss": 0.0625, "val_<loss>": 2.0, "confusion_matrix": np.eye(3)})
    assert repr(history) == "History(2 epochs: loss 0.0625, val_<loss> 2)"
    shown = history._repr_html_()
    rows = [re.findall("<td>(.*?)</td>", row) for row in re.findall("<tr>(.*?)</tr>", shown)]
    assert rows == [["epoch", "loss", "val_&lt;loss&gt;"], ["1", "0.1235", ""], ["2", "0.0625", "2"]]
