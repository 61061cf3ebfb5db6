"""CSVLogger: Keras's rows, columns that appear late, each epoch once."""

import csv
import json
import math
import os
from itertools import permutations

import numpy as np
import pytest
import torch
from fake_model import FakeModel

from tpufit.callbacks import CallbackList, CSVLogger, LearningRateScheduler
from tpufit.callbacks.base import RateCallback
from tpufit.errors import ArgumentError


def train(logger, *logs, first=0, state=None):
    """Pass the logs of each epoch to the callback, as `fit` does; with a state, as in a resumed `fit`."""
    if state is not None:
        logger.load_state_dict(json.loads(json.dumps(state)))
    logger.on_train_begin({})
    for epoch, epoch_logs in enumerate(logs, first):
        logger.on_epoch_begin(epoch, {})
        logger.on_epoch_end(epoch, epoch_logs)
    logger.on_train_end({})


def rows(path, separator=","):
    with open(path, newline="") as file:
        return [*csv.DictReader(file, delimiter=separator)]


def epochs(path):
    return [int(row["epoch"]) for row in rows(path)]


def losses(*values):
    return [{"loss": value} for value in values]


@pytest.mark.parametrize("separator", [",", "\t", ";"])
def test_a_row_for_each_epoch_under_sorted_names(tmp_path, separator):
    path = tmp_path / "new" / "log.csv"
    train(CSVLogger(path, separator), {"loss": 0.5, "accuracy": 0.75}, {"loss": 0.25, "accuracy": 1.0})
    expected = "epoch,accuracy,loss\n0,0.75,0.5\n1,1.0,0.25\n"
    assert path.read_text() == expected.replace(",", separator)


def test_a_file_is_replaced_unless_appended_to(tmp_path):
    path = tmp_path / "log.csv"
    for append, expected in [(False, [0, 1]), (False, [0, 1]), (True, [0, 1, 0, 1])]:
        train(CSVLogger(path, append=append), *losses(0.5, 0.25))
        assert epochs(path) == expected
    assert path.read_text().count("epoch") == 1


@pytest.mark.parametrize("append", [False, True])
def test_one_object_for_two_calls_of_fit(tmp_path, append):
    path = tmp_path / "log.csv"
    logger = CSVLogger(path, append=append)
    train(logger, *losses(0.5, 0.4))
    train(logger, *losses(0.3))
    assert epochs(path) == ([0, 1, 0] if append else [0])


def test_appending_to_nothing_and_to_an_empty_file(tmp_path):
    (tmp_path / "empty.csv").touch()
    for name in ("empty.csv", "missing.csv"):
        train(CSVLogger(tmp_path / name, append=True), *losses(0.5))
        assert (tmp_path / name).read_text() == "epoch,loss\n0,0.5\n"


def test_appending_keeps_the_columns_of_the_file(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("epoch,loss,accuracy\r\n0,0.5,0.75\r\n")  # as another program has written it
    train(CSVLogger(path, append=True), {"accuracy": 1.0, "loss": 0.25}, first=1)
    assert rows(path)[1] == {"epoch": "1", "loss": "0.25", "accuracy": "1.0"}


def test_validation_logs_of_epochs_without_validation_are_na(tmp_path):
    path = tmp_path / "log.csv"
    train(CSVLogger(path), *losses(0.5, 0.4), {"loss": 0.3, "val_loss": 0.6}, *losses(0.2))
    assert [row["val_loss"] for row in rows(path)] == ["NA", "NA", "0.6", "NA"]


def test_nan_arrays_and_texts(tmp_path):
    path = tmp_path / "log.csv"
    logs = {"loss": math.nan, "recall": np.array([0.5, 1.0]), "rows": torch.tensor(3), "note": 'a,"b"'}
    train(CSVLogger(path), logs)
    assert rows(path) == [{"epoch": "0", "loss": "nan", "recall": "[0.5, 1.0]", "rows": "3", "note": 'a,"b"'}]


@pytest.mark.parametrize("append", [False, True])
@pytest.mark.parametrize("killed_while_writing", [False, True])
def test_a_resumed_training_has_each_epoch_once(tmp_path, append, killed_while_writing):
    path = tmp_path / "log.csv"
    train(CSVLogger(path), *losses(0.9, 0.8, 0.7))  # an earlier training, whose rows stay when appending
    logger = CSVLogger(path, append=append)
    train(logger, *losses(0.5, 0.4))
    state = logger.state_dict()
    train_on = [0.3, 0.2]
    for epoch, loss in enumerate(train_on, 2):  # and is killed, after epochs without a checkpoint
        logger.on_epoch_end(epoch, {"loss": loss})
    if killed_while_writing:
        with open(path, "a") as file:
            file.write("4")
    train(CSVLogger(path, append=append), *losses(0.31, 0.21), first=2, state=state)
    before = [0, 1, 2] if append else []
    assert epochs(path) == [*before, 0, 1, 2, 3]
    assert [row["loss"] for row in rows(path)][len(before) :] == ["0.5", "0.4", "0.31", "0.21"]


@pytest.mark.parametrize("first", [True, False])
def test_the_rate_is_logged_in_any_order_of_callbacks(tmp_path, first):
    logger, schedule = CSVLogger(tmp_path / "log.csv"), LearningRateScheduler(lambda epoch, rate: rate / 2)
    model = FakeModel()
    model.learning_rate = 0.5
    hooks = CallbackList([logger, schedule] if first else [schedule, logger], model=model)
    hooks.on_train_begin()
    for epoch in range(2):
        hooks.on_epoch_begin(epoch)
        hooks.on_epoch_end(epoch, {"loss": 1.0})
    assert (tmp_path / "log.csv").read_text() == "epoch,learning_rate,loss\n0,0.25,1.0\n1,0.125,1.0\n"


@pytest.mark.parametrize("order", [*permutations(range(3))])
def test_a_row_has_its_epochs_rate_in_any_order_of_callbacks(tmp_path, order):
    """Two callbacks set the next epoch's rate when an epoch ends; neither may change the rate in this row."""

    class Halving(RateCallback):
        def on_epoch_end(self, epoch, logs=None):
            super().on_epoch_end(epoch, logs)
            self.model.learning_rate /= 2

    model, given = FakeModel(lr=1.0), [CSVLogger(tmp_path / "log.csv"), Halving(), Halving()]
    hooks = CallbackList([given[i] for i in order], model=model)
    hooks.on_train_begin()
    for epoch in range(2):
        hooks.on_epoch_begin(epoch)
        hooks.on_epoch_end(epoch, {"loss": 1.0})
    assert (tmp_path / "log.csv").read_text() == "epoch,learning_rate,loss\n0,1.0,1.0\n1,0.25,1.0\n"


@pytest.mark.parametrize("text", ["epoch,loss\n0,0.5", "epoch,loss\r\n0,0.5"])
def test_a_last_line_without_newline_is_completed(tmp_path, text):
    path = tmp_path / "log.csv"
    path.write_bytes(text.encode())
    train(CSVLogger(path, append=True), *losses(0.4), first=1)
    assert path.read_bytes() == f"{text}\n1,0.4\n".encode()


def test_bytes_that_arent_utf8_stay(tmp_path):
    path = tmp_path / "log.csv"
    path.write_bytes(b"epoch,loss,note\n0,0.5,caf\xe9\n")
    train(CSVLogger(path, append=True), {"loss": 0.4, "more": 1}, first=1)
    assert path.read_bytes() == b"epoch,loss,note,more\n0,0.5,caf\xe9,NA\n1,0.4,NA,1\n"


@pytest.mark.parametrize("kind", ["device", "pipe", "folder", "link to a device"])
def test_a_path_that_isnt_a_file_is_refused(tmp_path, kind):
    path = tmp_path / "log.csv"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "link to a device":
        path.symlink_to(os.devnull)
    else:
        path = os.devnull
    before = os.lstat(path)
    with pytest.raises(ArgumentError, match=r"filename must be the path of a file, got '.*'"):
        CSVLogger(path)
    assert os.lstat(path).st_ino == before.st_ino


def test_a_file_that_becomes_a_pipe_is_an_error(tmp_path):
    path = tmp_path / "log.csv"
    logger = CSVLogger(path)
    os.mkfifo(path)
    with pytest.raises(FileExistsError, match="isn't a file"):
        train(logger, *losses(0.5))
    assert path.is_fifo()


def test_a_removed_file_is_created_again(tmp_path):
    path = tmp_path / "log.csv"
    logger = CSVLogger(path)
    logger.on_train_begin({})
    for epoch in (0, 1):
        logger.on_epoch_end(epoch, {"loss": 0.5})
        if not epoch:
            path.unlink()
    assert epochs(path) == [1]


def test_a_resumed_training_creates_a_missing_file(tmp_path):
    path = tmp_path / "log.csv"
    train(CSVLogger(path), *losses(0.4), first=5, state={"first_row": 3})
    assert epochs(path) == [5]


def test_the_fit_after_a_resumed_fit_starts_a_new_file(tmp_path):
    logger = CSVLogger(tmp_path / "log.csv")
    train(logger, *losses(0.5), first=3, state={"first_row": 0})
    train(logger, *losses(0.4))
    assert epochs(tmp_path / "log.csv") == [0]


@pytest.mark.parametrize("separator", ["", ", ", None])
def test_a_separator_is_one_character(tmp_path, separator):
    with pytest.raises(ArgumentError, match="separator must be one character"):
        CSVLogger(tmp_path / "log.csv", separator)
