"""TensorBoard's files, read as TensorBoard reads them."""

import gzip
import json
import time

import numpy as np
import pytest
import torch
from fake_model import FakeModel
from torch import nn

from tpufit.callbacks import TensorBoard
from tpufit.callbacks._support.event_rewind import rewind
from tpufit.errors import ArgumentError

EVERY = {"loss": 0.5, "accuracy": 0.75}


def fit(board, epochs=2, steps=5, validate=True, model=None):
    board.set_model(model or FakeModel(lr=0.25))
    board.on_train_begin({})
    for epoch in range(epochs):
        board.on_epoch_begin(epoch, {})
        for batch in range(steps):
            board.model.steps_taken += 1
            board.on_train_batch_end(batch, {"loss": epoch + batch / 10})
        logs = {name: value + epoch for name, value in EVERY.items()}
        if validate:
            board.on_test_begin({})
            board.on_test_end({"loss": 10.0 + epoch})
            logs["val_loss"] = 10.0 + epoch
        board.on_epoch_end(epoch, logs)
    board.on_train_end(logs)


def run_of(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    everything = dict.fromkeys(
        ("scalars", "histograms", "images", "tensors"), 0
    )  # by default it would keep only a sample
    return EventAccumulator(str(folder), size_guidance=everything).Reload()


def read_run(folder):
    """Return the scalars of a run, `{"epoch_loss": [(step, value), ...]}`."""
    events = run_of(folder)
    return {tag: [(e.step, round(e.value, 5)) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def read(folder):
    """Return the scalars of every run, by its name."""
    return {run.name: read_run(run) for run in sorted(folder.iterdir()) if run.is_dir()}


def test_files_are_organized_as_in_keras(tmp_path):
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


EACH = [(step, (step - 1) // 5 + (step - 1) % 5 / 10) for step in range(1, 11)]


@pytest.mark.parametrize(("update_freq", "expected"), [("batch", EACH), (1, EACH), (4, [(4, 0.3), (8, 1.2)])])
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
    board.on_train_begin({})
    for batch in range(35):
        board.model.steps_taken += 1
        board.on_train_batch_end(batch, Counting(loss=0.5))
    board.on_train_end({})
    assert Counting.reads == 3


@pytest.mark.parametrize("validated_after", [(), (3,), (0, 1, 3)])
def test_speed_excludes_validation(tmp_path, monkeypatch, validated_after):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    board = TensorBoard(tmp_path, write_steps_per_second=True, update_freq=2)
    board.set_model(FakeModel())
    board.on_train_begin({})
    for epoch in range(2):
        board.on_epoch_begin(epoch, {})
        for batch in range(4):
            now[0] += (0.25, 0.25, 0.5, 1.0)[batch]
            board.model.steps_taken += 1
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
    assert board._files._writers == {}


def test_a_second_fit_continues_the_steps(tmp_path):
    board = TensorBoard(tmp_path, update_freq=5)
    fit(board, epochs=1)
    fit(board, epochs=1)
    assert [step for step, _ in read(tmp_path)["train"]["batch_loss"]] == [5, 10]


def test_the_logged_rate_is_the_rate_of_the_finished_epoch(tmp_path):
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


def test_logs_that_arent_numbers_are_omitted(tmp_path):
    board = TensorBoard(tmp_path)
    board.set_model(FakeModel())
    board.on_epoch_end(0, {"loss": np.float32(1.0), "recall": np.zeros(3), "note": "text"})
    board.on_train_end({})
    assert set(read(tmp_path)["train"]) == {"epoch_loss", "epoch_learning_rate"}


def test_an_epoch_is_visible_before_training_ends(tmp_path):
    board = TensorBoard(tmp_path)
    board.set_model(FakeModel())
    for epoch in range(3):  # the first is always written immediately
        board.on_epoch_end(epoch, {"loss": 1.0})
        assert len(read(tmp_path)["train"]["epoch_loss"]) == epoch + 1
    board.on_train_end({})


def test_joined_steps_are_counted_singly(tmp_path):
    board = TensorBoard(tmp_path, update_freq=4)
    board.set_model(FakeModel())
    board.model.steps_taken = 1000  # of an earlier fit, with another callback
    board.on_train_begin({})
    board.on_epoch_begin(0, {})
    for batch in (2, 5, 8, 11):
        board.model.steps_taken += 3
        board.on_train_batch_end(batch, {"loss": 1.0})
    board.on_train_end({})
    assert [step for step, _ in read(tmp_path)["train"]["batch_loss"]] == [6, 9, 12]


def test_histograms_of_weights(tmp_path):
    model = FakeModel()
    model.weight = 2.0
    fit(TensorBoard(tmp_path, histogram_freq=2), epochs=4, model=model)
    events = run_of(tmp_path / "train")
    assert sorted(events.Tags()["histograms"]) == ["weights/weight"]
    assert [e.step for e in events.Histograms("weights/weight")] == [0, 2]
    histogram = events.Histograms("weights/weight")[0].histogram_value
    assert (histogram.num, histogram.sum, histogram.min, histogram.max) == (1, 2.0, 2.0, 2.0)


def test_a_histogram_skips_nan_and_empty_tensors(tmp_path):
    model = FakeModel()
    state = {
        "some": torch.tensor([1.0, float("nan"), float("inf")]),
        "none": torch.tensor([float("nan")]),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "count": torch.tensor(3),
    }
    model.state_dict = lambda: state
    fit(TensorBoard(tmp_path, histogram_freq=1), epochs=1, model=model)
    events = run_of(tmp_path / "train")
    assert set(events.Tags()["histograms"]) == {"weights/some", "weights/half"}
    assert events.Histograms("weights/some")[0].histogram_value.num == 1


def test_weights_that_are_matrices_as_images(tmp_path):
    model = FakeModel()
    model.module = nn.Linear(5, 4)
    fit(TensorBoard(tmp_path, histogram_freq=1, write_images=True), epochs=1, model=model)
    events = run_of(tmp_path / "train")
    assert events.Tags()["images"] == ["weights/weight"]
    image = events.Images("weights/weight")[0]
    assert (image.height, image.width) == (4, 5)


def text_of(events, tag):
    return events.Tensors(tag)[0].tensor_proto.string_val[0].decode()


def test_the_summary_is_written_once_as_text(tmp_path):
    fit(TensorBoard(tmp_path), epochs=2)
    events = run_of(tmp_path / "train")
    assert [e.step for e in events.Tensors("summary/text_summary")] == [0]
    assert text_of(events, "summary/text_summary") == "    layer   type\n    module  Linear"
    fit(TensorBoard(tmp_path / "without", write_graph=False), epochs=1)
    assert run_of(tmp_path / "without/train").Tags()["tensors"] == []


def test_helpers_write_images_texts_and_figures(tmp_path):
    from matplotlib.figure import Figure

    class Looking(TensorBoard):
        def on_epoch_end(self, epoch, logs=None):
            super().on_epoch_end(epoch, logs)
            self.add_image("one", torch.rand(1, 6, 7))
            self.add_image("several", np.random.rand(4, 6, 7, 3), step=3, dataformats="NHWC")
            self.add_text("said", "**so**")
            figure = Figure()
            figure.subplots().plot([1, 2])
            self.add_figure("drawn", figure)
            self.writer("validation").add_scalar("own", 0.5, epoch)

    fit(Looking(tmp_path), epochs=1)
    events = run_of(tmp_path / "train")
    assert {tag: [e.step for e in events.Images(tag)] for tag in events.Tags()["images"]} == {
        "one": [5],
        "several": [3],
        "drawn": [5],
    }
    assert text_of(events, "said/text_summary") == "**so**"
    assert read(tmp_path)["validation"]["own"] == [(0, 0.5)]


def kill_in_the_third_epoch(folder, after):
    """A training that was saved after epoch 1 (10 steps), continued, and was killed. Return the state."""
    board = TensorBoard(folder, update_freq="batch", histogram_freq=1, hparams={"lr": 0.1})
    fit(board, epochs=2)
    state = json.loads(json.dumps(board.state_dict()))
    board.set_model(FakeModel())
    board.on_train_begin({})
    board.on_epoch_begin(2, {})
    for batch in range(after):
        board.model.steps_taken += 1
        board.on_train_batch_end(batch, {"loss": 99.0})
    if after == 5:
        board.on_epoch_end(2, {"loss": 99.0, "val_loss": 99.0})
    for writer in board._files._writers.values():
        writer.close()  # files of a killed process, which never reached on_train_end
    last = max((folder / "train").glob("*tfevents*"))
    last.write_bytes(last.read_bytes()[:-7])  # without half of its last record
    return state


@pytest.mark.parametrize("after", [3, 5])
def test_after_a_crash_no_step_occurs_twice(tmp_path, after):
    state = kill_in_the_third_epoch(tmp_path, after)
    board = TensorBoard(tmp_path, update_freq="batch", histogram_freq=1, hparams={"lr": 0.1})
    board.load_state_dict(state)
    board.set_model(FakeModel())
    board.model.steps_taken = 10
    board.on_train_begin({})
    board.on_epoch_begin(2, {})
    train = read(tmp_path)["train"]
    assert [step for step, _ in train["batch_loss"]] == list(range(1, 11))
    assert [step for step, _ in train["epoch_loss"]] == [0, 1]
    for batch in range(5):
        board.model.steps_taken += 1
        board.on_train_batch_end(batch, {"loss": 2.0})
    board.on_epoch_end(2, {"loss": 2.5, "val_loss": 12.0})
    board.on_train_end({})
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"train", "validation"}
    runs = {run: read_run(tmp_path / run) for run in ("train", "validation")}
    assert [step for step, _ in runs["train"]["batch_loss"]] == list(range(1, 16))
    assert runs["train"]["epoch_loss"] == [(0, 0.5), (1, 1.5), (2, 2.5)]
    assert runs["validation"]["epoch_loss"] == [(0, 10.0), (1, 11.0), (2, 12.0)]
    assert [step for step, _ in runs["validation"]["evaluation_loss_vs_iterations"]] == [5, 10]
    assert 99.0 not in [value for run in runs.values() for points in run.values() for _, value in points]
    events = run_of(tmp_path / "train")
    assert [e.step for e in events.Histograms("weights/weight")] == [0, 1, 2]
    assert len(events.Tensors("summary/text_summary")) == 1


def test_a_resume_in_the_middle_of_an_epoch(tmp_path):
    """Here the state is loaded after the epoch has begun."""
    kill_in_the_third_epoch(tmp_path, after=5)
    board = TensorBoard(tmp_path, update_freq="batch", histogram_freq=1)
    board.set_model(FakeModel())
    board.on_train_begin({})
    board.on_epoch_begin(2, {})
    board.model.steps_taken = 12
    board.load_state_dict({"steps": 12})
    board.model.steps_taken = 13
    board.on_train_batch_end(2, {"loss": 2.0})
    board.on_epoch_end(2, {"loss": 2.0})
    board.on_train_end({})
    train = read_run(tmp_path / "train")
    assert [value for _, value in train["batch_loss"]] == [*(e + b / 10 for e in (0, 1) for b in range(5)), 99, 99, 2]
    assert train["epoch_loss"] == [(0, 0.5), (1, 1.5), (2, 2.0)]
    assert board.state_dict() == {"steps": 13}


def test_an_interrupted_rewind_does_no_harm(tmp_path):
    fit(TensorBoard(tmp_path), epochs=3)
    (old,) = (tmp_path / "train").glob("*tfevents*")
    before = old.read_bytes()
    rewind(tmp_path / "train", lambda tag, step: step < 2)
    old.write_bytes(before)  # as if it was killed before it could delete the old file
    (tmp_path / "train" / f".{old.name}.resumed.tmp-1").write_bytes(before[:100])  # and once more while writing
    assert [step for step, _ in read_run(tmp_path / "train")["epoch_loss"]] == [0, 1]
    rewind(tmp_path / "train", lambda tag, step: step < 2)
    assert [step for step, _ in read_run(tmp_path / "train")["epoch_loss"]] == [0, 1]
    assert len(list((tmp_path / "train").iterdir())) == 1


def test_a_rewind_without_files_creates_none(tmp_path):
    rewind(tmp_path / "none", lambda tag, step: True)
    assert list(tmp_path.iterdir()) == []


def test_an_unused_callback_creates_no_files(tmp_path):
    board = TensorBoard(tmp_path / "logs")
    board.set_model(FakeModel())
    board.on_train_begin({})
    board.on_train_end({})
    assert not (tmp_path / "logs").exists()


class Words(FakeModel):
    """Two embedding layers, and another layer."""

    def __init__(self):
        super().__init__()
        self.module = nn.ModuleDict(
            {"tokens": nn.Embedding(3, 2), "places": nn.Embedding(2, 4), "head": nn.Linear(2, 1)}
        )


@pytest.mark.parametrize("one_file", [True, False])
def test_embeddings_are_written_with_their_labels(tmp_path, one_file):
    from google.protobuf import text_format
    from tensorboard.plugins.projector import ProjectorConfig

    (tmp_path / "words.tsv").write_text("a\nb\nc\n")
    metadata = "words.tsv" if one_file else {"tokens": tmp_path / "words.tsv"}
    model = Words()
    fit(TensorBoard(tmp_path, embeddings_freq=2, embeddings_metadata=metadata), epochs=3, model=model)
    config = text_format.Parse((tmp_path / "train" / "projector_config.pbtxt").read_text(), ProjectorConfig())
    labeled = {"tokens", "places"} if one_file else {"tokens"}
    assert {e.tensor_name for e in config.embeddings} == {"tokens", "places"}
    assert {e.tensor_name for e in config.embeddings if e.metadata_path} == labeled
    for embedding in config.embeddings:
        written = np.loadtxt(tmp_path / "train" / embedding.tensor_path, dtype="float32", ndmin=2)
        assert np.array_equal(written, model.module[embedding.tensor_name].weight.detach().numpy())
        if embedding.metadata_path:
            assert (tmp_path / "train" / embedding.metadata_path).read_text() == "a\nb\nc\n"


def test_embeddings_are_written_every_few_epochs(tmp_path):
    board, model = TensorBoard(tmp_path, embeddings_freq=2), Words()
    board.set_model(model)
    board.on_train_begin({})
    seen = []
    for epoch in range(4):
        nn.init.constant_(model.module["tokens"].weight, epoch)
        board.on_epoch_end(epoch, {"loss": 1.0})
        seen.append(np.loadtxt(tmp_path / "train" / "tokens.tsv").max())
    board.on_train_end({})
    assert seen == [0, 0, 2, 2]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"head": "words.tsv"}, r"must name embedding layers \(tokens, places\), got 'head'"),
        ("words.tsv", "must be files that exist, got .*words.tsv"),
    ],
)
def test_wrong_metadata_of_embeddings_is_found_before_training(tmp_path, metadata, message):
    board = TensorBoard(tmp_path, embeddings_freq=1, embeddings_metadata=metadata)
    board.set_model(Words())
    with pytest.raises(ArgumentError, match=message):
        board.on_train_begin({})


@pytest.mark.parametrize("update_freq", [0, -1, 2.5, True, "step", None])
def test_wrong_update_freq(update_freq):
    with pytest.raises(ArgumentError, match="update_freq must be 'epoch', 'batch' or a whole number of batches"):
        TensorBoard(update_freq=update_freq)


@pytest.mark.parametrize("name", ["histogram_freq", "embeddings_freq"])
@pytest.mark.parametrize("freq", [-1, 0.5, True])
def test_wrong_number_of_epochs(name, freq):
    with pytest.raises(ArgumentError, match=f"{name} must be a number of epochs, or 0 for none"):
        TensorBoard(**{name: freq})


@pytest.mark.parametrize("profile_batch", [-1, True, 2.5, (3, 2), (0, 2), (1, 2, 3), "10"])
def test_wrong_profile_batch(profile_batch):
    with pytest.raises(ArgumentError, match="profile_batch must be a step from 1, or the first and the last"):
        TensorBoard(profile_batch=profile_batch)
    TensorBoard(profile_batch=[10, 12])  # a list is accepted too


def test_wrong_hparams():
    with pytest.raises(ArgumentError, match=r"numbers, texts or bools by name, got 'sizes': \[1, 2\]"):
        TensorBoard(hparams={"sizes": [1, 2]})


def test_without_a_runtime_the_profile_is_pytorchs(tmp_path):
    board = TensorBoard(tmp_path, profile_batch=(2, 3))
    board.set_model(FakeModel())
    board.on_train_begin({})
    for batch in range(4):
        torch.ones(batch + 2, batch + 2) @ torch.ones(batch + 2, 1)
        board.model.steps_taken += 1
        board.on_train_batch_end(batch, {"loss": 0.5})
    board.on_train_end({})
    (trace,) = tmp_path.glob("train/plugins/profile/*/*.trace.json.gz")
    with gzip.open(trace, "rt") as file:
        events = json.load(file)["traceEvents"]
    assert sum(event.get("name") == "aten::mm" for event in events) == 2
