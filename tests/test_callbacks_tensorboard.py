"""TensorBoard: what it writes, read back as TensorBoard reads it."""

import time

import numpy as np
import pytest
from fake_model import FakeModel

from tpufit.callbacks import TensorBoard
from tpufit.errors import ArgumentError

EVERY = {"loss": 0.5, "accuracy": 0.75}


def fit(board, epochs=2, steps=5, validate=True, model=None):
    board.set_model(model or FakeModel(lr=0.25))
    board.on_train_begin({})
    for epoch in range(epochs):
        board.on_epoch_begin(epoch, {})
        for batch in range(steps):
            board.on_train_batch_end(batch, {"loss": epoch + batch / 10})
        logs = {name: value + epoch for name, value in EVERY.items()}
        if validate:
            board.on_test_begin({})
            board.on_test_end({"loss": 10.0 + epoch})
            logs["val_loss"] = 10.0 + epoch
        board.on_epoch_end(epoch, logs)
    board.on_train_end(logs)


def read(folder):
    """Every run's scalars: `{"train": {"epoch_loss": [(step, value), ...]}}`."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    runs = {}
    for run in sorted(folder.iterdir()):
        events = EventAccumulator(str(run)).Reload()
        runs[run.name] = {
            tag: [(e.step, round(e.value, 5)) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]
        }
    return runs


def test_epochs_are_laid_out_as_in_keras(tmp_path):
    fit(TensorBoard(tmp_path))
    assert read(tmp_path) == {
        "train": {
            "epoch_loss": [(0, 0.5), (1, 1.5)],
            "epoch_accuracy": [(0, 0.75), (1, 1.75)],
            "epoch_learning_rate": [(0, 0.25), (1, 0.25)],
        },
        "validation": {
            "epoch_loss": [(0, 10.0), (1, 11.0)],
            "evaluation_loss_vs_iterations": [(5, 10.0), (10, 11.0)],
        },
    }


@pytest.mark.parametrize(
    ("update_freq", "expected"),
    [("batch", [(step, (step - 1) // 5 + (step - 1) % 5 / 10) for step in range(1, 11)]), (4, [(4, 0.3), (8, 1.2)])],
)
def test_batches_are_by_step(tmp_path, update_freq, expected):
    fit(TensorBoard(tmp_path, update_freq=update_freq), validate=False)
    train = read(tmp_path)["train"]
    assert train["batch_loss"] == expected
    assert train["epoch_loss"] == [(0, 0.5), (1, 1.5)]


def test_without_validation_there_is_one_run(tmp_path):
    fit(TensorBoard(tmp_path), validate=False)
    assert list(read(tmp_path)) == ["train"]


class Counting(dict):
    reads = 0

    def items(self):
        Counting.reads += 1
        return super().items()


def test_logs_are_read_only_when_they_are_written(tmp_path):
    board = TensorBoard(tmp_path, update_freq=10)
    board.set_model(FakeModel())
    for batch in range(35):
        board.on_train_batch_end(batch, Counting(loss=0.5))
    board.on_train_end({})
    assert Counting.reads == 3


@pytest.mark.parametrize("validated_after", [(), (3,), (0, 1, 3)])
def test_speed_leaves_validation_out(tmp_path, monkeypatch, validated_after):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    board = TensorBoard(tmp_path, write_steps_per_second=True, update_freq=2)
    board.set_model(FakeModel())
    board.on_train_begin({})
    for epoch in range(2):
        board.on_epoch_begin(epoch, {})
        for batch in range(4):
            now[0] += (0.25, 0.25, 0.5, 1.0)[batch]
            board.on_train_batch_end(batch, {"loss": 1.0})
            if batch in validated_after:
                board.on_test_begin({})
                now[0] += 100
                board.on_test_end({"loss": 1.0})
        board.on_epoch_end(epoch, {"loss": 1.0})
    board.on_train_end({})
    train = read(tmp_path)["train"]
    assert train["epoch_steps_per_second"] == [(0, 2.0), (1, 2.0)]
    assert train["batch_steps_per_second"] == [(2, 4.0), (4, 1.33333), (6, 4.0), (8, 1.33333)]


def test_speed_is_not_written_unless_asked_for(tmp_path):
    fit(TensorBoard(tmp_path, update_freq="batch"))
    assert not [tag for tag in read(tmp_path)["train"] if "second" in tag]


def test_an_evaluation_alone_is_written_and_the_file_closed(tmp_path):
    board = TensorBoard(tmp_path)
    fit(board, epochs=1)
    board.on_test_begin({})
    board.on_test_end({"loss": 3.0})
    assert read(tmp_path)["validation"]["evaluation_loss_vs_iterations"] == [(5, 10.0), (5, 3.0)]
    assert board._writers == {}


def test_a_second_fit_goes_on_by_step(tmp_path):
    board = TensorBoard(tmp_path, update_freq=5)
    fit(board, epochs=1)
    fit(board, epochs=1)
    assert [step for step, _ in read(tmp_path)["train"]["batch_loss"]] == [5, 10]


def test_the_rate_is_the_one_of_the_epoch(tmp_path):
    board, model = TensorBoard(tmp_path), FakeModel(lr=0.5)
    board.set_model(model)
    for epoch in range(2):
        board.on_epoch_end(epoch, {"loss": 1.0})
        model.optimizer.param_groups[0]["lr"] /= 2
    board.on_train_end({})
    assert read(tmp_path)["train"]["epoch_learning_rate"] == [(0, 0.5), (1, 0.25)]


def test_without_an_optimizer_there_is_no_rate(tmp_path):
    model = FakeModel()
    model.optimizer = None
    fit(TensorBoard(tmp_path), model=model)
    assert "epoch_learning_rate" not in read(tmp_path)["train"]


def test_what_is_no_number_is_left_out(tmp_path):
    board = TensorBoard(tmp_path)
    board.set_model(FakeModel())
    board.on_epoch_end(0, {"loss": np.float32(1.0), "recall": np.zeros(3), "note": "text"})
    board.on_train_end({})
    assert set(read(tmp_path)["train"]) == {"epoch_loss", "epoch_learning_rate"}


def test_an_epoch_can_be_seen_before_training_ends(tmp_path):
    board = TensorBoard(tmp_path)
    board.set_model(FakeModel())
    for epoch in range(3):  # the first is written at once in any case
        board.on_epoch_end(epoch, {"loss": 1.0})
        assert len(read(tmp_path)["train"]["epoch_loss"]) == epoch + 1
    board.on_train_end({})


def test_an_object_that_is_not_used_makes_no_files(tmp_path):
    board = TensorBoard(tmp_path / "logs")
    board.set_model(FakeModel())
    board.on_train_begin({})
    board.on_train_end({})
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize("update_freq", [0, -1, 2.5, True, "step", None])
def test_wrong_update_freq(update_freq):
    with pytest.raises(ArgumentError, match="update_freq must be 'epoch', 'batch' or a number of batches"):
        TensorBoard(update_freq=update_freq)


def test_importing_the_callbacks_imports_no_tensorboard(run_python):
    done = run_python(
        """
        import sys, tpufit.callbacks
        print([name for name in ("tensorboard", "tensorflow", "torch_xla", "IPython") if name in sys.modules])
        """
    )
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr
