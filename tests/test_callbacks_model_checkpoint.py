"""ModelCheckpoint: when and where it saves."""

import itertools
import math
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from fake_model import FakeModel

from tpufit.callbacks import ModelCheckpoint
from tpufit.checkpoint import read_weights
from tpufit.errors import ArgumentError


def epochs(checkpoint, logs, steps=0, model=None):
    """Pass each epoch's logs; the weight is the epoch's number. Return the saved files, relative to the folder."""
    checkpoint.set_model(model or FakeModel())
    checkpoint.on_train_begin({})
    for epoch, values in enumerate(logs):
        checkpoint.on_epoch_begin(epoch, {})
        for batch in range(steps):
            checkpoint.model.steps_taken += 1
            checkpoint.on_train_batch_end(batch, values)
        checkpoint.model.weight = epoch
        checkpoint.on_epoch_end(epoch, values)
    checkpoint.on_train_end({})
    return checkpoint.model.saved


def losses(*values):
    return [{"val_loss": value} for value in values]


def test_after_every_epoch_one_file_is_replaced(tmp_path):
    path = tmp_path / "new" / "last.safetensors"
    assert epochs(ModelCheckpoint(path), losses(3, 2, 4)) == [str(path)] * 3
    assert float(read_weights(path)["weight"]) == 2
    assert [p.name for p in path.parent.iterdir()] == ["last.safetensors"]


def test_save_best_only_saves_only_improvements(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path / "{epoch}.safetensors", save_best_only=True)
    saved = epochs(checkpoint, losses(3, 4, math.nan, 2, 2, -math.inf, 1))
    assert [Path(path).stem for path in saved] == ["1", "4", "7"]
    assert checkpoint.best == 1


def test_best_only_leaves_the_best_in_its_one_file(tmp_path):
    path = tmp_path / "best.safetensors"
    epochs(ModelCheckpoint(path, save_best_only=True), losses(3, 1, 2))
    assert float(read_weights(path)["weight"]) == 1  # the second epoch's: the third was worse


@pytest.mark.parametrize(
    ("monitor", "mode", "directions", "expected"),
    [
        ("val_accuracy", "auto", {}, ["1", "2"]),
        ("val_accuracy", "min", {}, ["1", "3"]),
        ("val_loss", "max", {}, ["1", "2"]),
        ("val_perplexity", "auto", {"perplexity": False}, ["1", "3"]),
        ("val_likelihood", "auto", {"likelihood": True}, ["1", "2"]),
    ],
)
def test_mode_decides_which_value_is_best(tmp_path, monitor, mode, directions, expected):
    checkpoint = ModelCheckpoint(tmp_path / "{epoch}.safetensors", monitor, save_best_only=True, mode=mode)
    saved = epochs(checkpoint, [{monitor: value} for value in (0.5, 0.6, 0.4)], model=FakeModel(directions))
    assert [Path(path).stem for path in saved] == expected


@pytest.mark.parametrize(
    ("mode", "threshold", "expected"),
    [("auto", 0.5, ["3"]), ("min", 0.5, ["3"]), ("max", 0.5, ["1"]), ("max", -0.01, ["1"]), ("auto", 0, [])],
)
def test_a_threshold_must_be_beaten_first(tmp_path, mode, threshold, expected):
    options = {"save_best_only": True, "mode": mode, "initial_value_threshold": threshold}
    checkpoint = ModelCheckpoint(tmp_path / "{epoch}.safetensors", **options)
    assert [Path(path).stem for path in epochs(checkpoint, losses(0.7, 0.5, 0.4))] == expected


def test_initial_value_threshold_is_ignored_without_save_best_only(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path / "{epoch}.safetensors", initial_value_threshold=0)
    assert [Path(path).stem for path in epochs(checkpoint, losses(0.7, 0.5))] == ["1", "2"]


def test_the_best_value_carries_over_to_the_next_fit(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path / "best.safetensors", save_best_only=True)
    assert len(epochs(checkpoint, losses(0.5))) == 1
    assert len(epochs(checkpoint, losses(0.6, 0.4))) == 1


def test_a_missing_log_saves_nothing_and_warns_once(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path / "best.safetensors", save_best_only=True)
    with pytest.warns(UserWarning, match="ModelCheckpoint can't find 'val_loss'.*Available: loss") as warned:
        assert epochs(checkpoint, [{"loss": 1.0}] * 3) == []
    assert len(warned) == 1


def test_epochs_without_validation_are_skipped(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path / "{epoch}-{val_loss:.1f}.safetensors", save_best_only=True)
    with pytest.warns(UserWarning):
        saved = epochs(checkpoint, [{"loss": 1.0}, {"loss": 1.0, "val_loss": 0.5}, {"loss": 1.0}])
    assert [Path(path).name for path in saved] == ["2-0.5.safetensors"]


@pytest.mark.parametrize("save_weights_only", [False, True])  # a file contains nothing else anyway
@pytest.mark.parametrize(("save_freq", "expected"), [(4, ["2-1-0.5", "3-2-0.5"]), (6, ["2-3-0.5"])])
def test_save_freq_counts_batches_across_epochs(tmp_path, save_freq, expected, save_weights_only):
    path = tmp_path / "{epoch}-{batch}-{loss:.1f}.safetensors"
    checkpoint = ModelCheckpoint(path, save_freq=save_freq, save_weights_only=save_weights_only)
    saved = epochs(checkpoint, [{"loss": 0.5}] * 3, steps=3)
    assert [Path(path).name for path in saved] == [f"{name}.safetensors" for name in expected]


def test_save_freq_counts_only_batches_since_the_callback_was_added(tmp_path):
    checkpoint, model = ModelCheckpoint(tmp_path / "{epoch}-{batch}.safetensors", save_freq=4), FakeModel()
    model.steps_taken = 5  # trained without the callback
    for expected in (["2-1"], ["2-1", "1-2", "2-3"]):
        saved = epochs(checkpoint, [{"loss": 0.5}] * 2, steps=3, model=model)
        assert [Path(path).stem for path in saved] == expected


def test_save_freq_1_saves_after_every_batch(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path / "{epoch:02d}-{batch:02d}.safetensors", save_freq=1)
    saved = epochs(checkpoint, [{"loss": 0.5}] * 2, steps=2)
    assert [Path(path).stem for path in saved] == ["01-01", "01-02", "02-01", "02-02"]


def test_best_only_between_batches(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path / "{epoch}.safetensors", "loss", save_best_only=True, save_freq=2)
    saved = epochs(checkpoint, [{"loss": value} for value in (0.5, 0.6, 0.4)], steps=2)
    assert [Path(path).stem for path in saved] == ["1", "3"]


class Unreadable(dict):
    def __getitem__(self, name):
        raise AssertionError(f"{name} was read: on a device that waits")

    def items(self):
        raise AssertionError("the logs were read: on a device that waits")


@pytest.mark.parametrize("arguments", [{"save_freq": 2}, {"save_best_only": True, "save_freq": 5, "monitor": "loss"}])
def test_logs_are_read_only_if_needed(tmp_path, arguments):
    checkpoint = ModelCheckpoint(tmp_path / "last.safetensors", **arguments)
    checkpoint.set_model(FakeModel())
    checkpoint.on_train_begin({})
    for batch in range(4):
        checkpoint.model.steps_taken += 1
        checkpoint.on_train_batch_end(batch, Unreadable(loss=0.5))
    assert len(checkpoint.model.saved) == (2 if arguments["save_freq"] == 2 else 0)


def run_of(checkpoint):
    """Return the run directory of each save that the callback has requested."""
    epochs(checkpoint, losses(2, 1, 3), steps=2)
    return [writer.run.path for writer, _ in checkpoint.model.wanted]


@pytest.mark.parametrize("suffix", ["", "/"])
def test_a_run_directory_gets_the_whole_state(tmp_path, suffix):
    checkpoint = ModelCheckpoint(f"{tmp_path}/run{suffix}")
    assert run_of(checkpoint) == [tmp_path / "run"] * 3
    assert [metric.value for _, metric in checkpoint.model.wanted] == [2, 1, 3]
    assert {(metric.name, metric.mode) for _, metric in checkpoint.model.wanted} == {("val_loss", "min")}


def test_a_run_directory_gets_the_best_only(tmp_path):
    assert len(run_of(ModelCheckpoint(tmp_path / "run", save_best_only=True))) == 2


def test_a_run_directory_between_batches(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path / "run", save_freq=4)
    assert len(run_of(checkpoint)) == 1
    assert checkpoint.model.wanted[0][1] is None  # no log was read for it


def test_save_freq_in_minutes(tmp_path, monkeypatch):
    clock = itertools.count(step=100)  # each check comes 100 s later
    monkeypatch.setattr("tpufit.callbacks.model_checkpoint.monotonic", lambda: next(clock))
    assert len(run_of(ModelCheckpoint(tmp_path / "run", save_freq=timedelta(minutes=10)))) == 1
    assert len(run_of(ModelCheckpoint(tmp_path / "run", save_freq=timedelta(seconds=100)))) == 6


def test_weights_only_go_into_a_file(tmp_path):
    with pytest.raises(ArgumentError, match=r"must end in '\.safetensors'"):
        ModelCheckpoint(tmp_path / "run", save_weights_only=True)


def test_the_best_checkpoints_are_kept_by_an_existing_log(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path / "run", "val_f1", keep_best=2)
    with pytest.raises(ArgumentError, match=r"keep_best=2 needs the log 'val_f1'.*Available: val_loss"):
        run_of(checkpoint)


def test_a_remainder_of_joined_steps_is_not_carried_over(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path / "run", save_freq=4)
    checkpoint.set_model(FakeModel())
    checkpoint.on_train_begin({})
    checkpoint.on_epoch_begin(0, {})
    saved = []
    for last in (2, 5, 8, 11):  # steps_per_execution=3: the hook is called once for three steps
        checkpoint.model.steps_taken += 3
        checkpoint.on_train_batch_end(last, {})
        saved.append(len(checkpoint.model.wanted))
    assert saved == [0, 1, 1, 2]
    checkpoint.on_train_end({})


@pytest.mark.parametrize("name", ["run-0.1", ".hidden", "2024.11.21"])
def test_a_dot_in_a_name_is_not_always_a_suffix(tmp_path, name):
    assert run_of(ModelCheckpoint(tmp_path / name))[0] == tmp_path / name


def test_an_existing_directory_may_have_a_suffix(tmp_path):
    (tmp_path / "run.old").mkdir()
    for path in (f"{tmp_path}/run.old", f"{tmp_path}/run.new/"):
        assert run_of(ModelCheckpoint(path))[0] == Path(path)


def test_a_template_fills_its_last_component_only(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path / "{epoch}" / "{epoch:02d}-{val_loss:.2f}.safetensors")
    assert epochs(checkpoint, losses(0.128)) == [str(tmp_path / "{epoch}" / "01-0.13.safetensors")]


def test_signs_and_exponents_may_be_in_a_file_name(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path / "{val_loss:+.1e}.safetensors")
    names = [Path(path).name for path in epochs(checkpoint, losses(12345.0, -0.5, math.nan))]
    assert names == ["+1.2e+04.safetensors", "-5.0e-01.safetensors", "+nan.safetensors"]


def test_an_unknown_field_lists_the_logs(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path / "{epoch}-{val_acc:.2f}.safetensors")
    with pytest.raises(ArgumentError, match=r"no logs for: val_acc\. Available: accuracy, epoch, loss"):
        epochs(checkpoint, [{"loss": 1.0, "accuracy": 0.5}])


def test_an_array_cant_be_part_of_a_file_name(tmp_path):
    with pytest.raises(ArgumentError, match="single numbers only, and 'recall' is"):
        epochs(ModelCheckpoint(tmp_path / "{recall:.1f}.safetensors"), [{"recall": np.zeros(3)}])


@pytest.mark.parametrize(
    ("name", "replacement"),
    [
        ("model.keras", "model.safetensors"),
        ("model.h5", "model.safetensors"),
        ("model.weights.h5", "model.safetensors"),
        ("model.pt", "model.safetensors"),
        ("model.pth", "model.safetensors"),
        ("model.ckpt", "model.safetensors"),
        ("model.safetensor", "model.safetensors"),
    ],
)
def test_other_formats_are_refused_by_name(name, replacement):
    with pytest.raises(ArgumentError, match=f"Use '{replacement}'"):
        ModelCheckpoint(f"ckpt/{name}")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("{epoch}.keras", "must end in '.safetensors'"),
        ("{epoch}", "must end in '.safetensors'"),
        ("{epoch.real}.safetensors", "plain name"),
        ("{epoch[0]}.safetensors", "plain name"),
        ("{epoch!r}.safetensors", "plain name"),
        ("{}.safetensors", "plain name"),
        ("{0}.safetensors", "plain name"),
        ("{loss:{epoch}}.safetensors", "plain name"),
        ("{epoch.safetensors", "is not a valid template"),
        ("epoch}.safetensors", "is not a valid template"),
        ("{loss:02d}.safetensors", "can't be filled"),
        ("{epoch:,}.safetensors", "letters, digits"),
        ("{epoch:>9}.safetensors", "letters, digits"),
        ("{loss:%}.safetensors", "letters, digits"),
        ("my run {epoch}.safetensors", "letters, digits"),
        ("{batch}.safetensors", "needs save_freq"),
    ],
)
def test_invalid_templates_are_refused_immediately(name, message):
    with pytest.raises(ArgumentError, match=message):
        ModelCheckpoint(f"ckpt/{name}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"filepath": ""}, "filepath must be a path, got ''"),
        ({"filepath": "a", "mode": "lowest"}, "got 'lowest'"),
        ({"filepath": "a", "save_freq": 0}, "save_freq .* got 0"),
        ({"filepath": "a", "save_freq": True}, "save_freq .* got True"),
        ({"filepath": "a", "save_freq": "batch"}, "save_freq .* got 'batch'"),
        ({"filepath": "a", "save_freq": 0.15}, "save_freq .* got 0.15"),
        ({"filepath": "a", "save_freq": 5, "save_best_only": True}, "'val_loss' is not known between batches"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        ModelCheckpoint(**arguments)


def test_a_file_instead_of_a_directory_and_vice_versa(tmp_path):
    (tmp_path / "run").touch()
    (tmp_path / "best.safetensors").mkdir()
    with pytest.raises(ArgumentError, match="is a file"):
        ModelCheckpoint(tmp_path / "run")
    with pytest.raises(ArgumentError, match="is a directory"):
        ModelCheckpoint(tmp_path / "best.safetensors")


def test_verbose_prints_each_action(tmp_path, capsys):
    path = tmp_path / "best.safetensors"
    epochs(ModelCheckpoint(path, save_best_only=True), losses(0.5))
    assert capsys.readouterr().out == ""
    epochs(ModelCheckpoint(path, save_best_only=True, verbose=1), losses(0.5, 0.7, 0.25))
    assert capsys.readouterr().out.splitlines() == [
        f"Epoch 1: val_loss is 0.5000, the best so far was none: saved {path}",
        "Epoch 2: val_loss is 0.7000, the best so far was 0.5000: not saved",
        f"Epoch 3: val_loss is 0.2500, the best so far was 0.5000: saved {path}",
    ]


@pytest.mark.parametrize(
    ("argument", "says"), [({"dirpath": "a"}, "filepath is the path"), ({"save_top_k": 3}, "keep_best=3 keeps")]
)
def test_arguments_of_lightning(argument, says):
    with pytest.raises(TypeError, match=rf"ModelCheckpoint\(\) has no argument '{next(iter(argument))}': {says}"):
        ModelCheckpoint(**argument)
