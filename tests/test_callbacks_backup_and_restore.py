"""BackupAndRestore: when it backs up, how many backups it keeps, and which files remain after training."""

import itertools
from datetime import timedelta

import pytest
from fake_model import FakeModel

from tpufit.callbacks import BackupAndRestore
from tpufit.checkpoint import Checkpoint
from tpufit.errors import ArgumentError


class Saving(FakeModel):
    """Writes at once, and records the steps of the existing backups."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def save_checkpoint(self, writer, metric=None):
        writer.run.write(Checkpoint(self.steps_taken, self.state_dict(), {}, {}, ["weight"], None, {"cores": 1}))
        self.kept.append(writer.run.steps())


def train(backup, epochs=3, error=None, out_of_time=False, before=0):
    """Train epochs of three steps. Return the backups after each save, and at the end."""
    model = Saving()
    model.steps_taken = before
    backup.set_model(model)
    backup.on_train_begin({})
    for epoch in range(epochs):
        backup.on_epoch_begin(epoch, {})
        for batch in range(3):
            model.steps_taken += 1
            backup.on_train_batch_end(batch, {})
        backup.on_epoch_end(epoch, {})
    model.out_of_time = out_of_time
    if error is not None:
        backup.on_exception(error, {})
    backup.on_train_end({})
    return model.kept, backup.checkpoint_writer.run.steps()


@pytest.mark.parametrize(
    ("save_freq", "kept"), [("epoch", [[3], [6], [9]]), (4, [[4], [8]]), (1, [[step] for step in range(1, 10)])]
)
def test_backups_follow_each_epoch_or_a_number_of_batches(tmp_path, save_freq, kept):
    assert train(BackupAndRestore(tmp_path / "new" / "backup", save_freq))[0] == kept


def test_the_previous_backup_may_be_kept_too(tmp_path):
    assert train(BackupAndRestore(tmp_path, double_checkpoint=True))[0] == [[3], [3, 6], [6, 9]]


@pytest.mark.parametrize(
    ("options", "end", "left"),
    [
        ({}, {}, []),
        ({"delete_checkpoint": False}, {}, [9]),
        ({}, {"error": ValueError()}, [9]),
        ({}, {"error": KeyboardInterrupt()}, [9]),
        ({}, {"out_of_time": True}, [9]),
    ],
)
def test_a_backup_is_deleted_after_a_complete_training(tmp_path, options, end, left):
    assert train(BackupAndRestore(tmp_path, **options), **end)[1] == left


def test_save_freq_counts_only_steps_since_the_callback_was_added(tmp_path):
    backup = BackupAndRestore(tmp_path, save_freq=4)
    assert train(backup, epochs=2, before=5)[0] == [[9]]  # trained for five steps without the callback
    assert train(backup, before=20)[0] == [[22], [26]]  # two steps were left over


def test_the_folder_is_deleted_unless_it_has_other_files(tmp_path):
    folder = tmp_path / "backup"
    backup = BackupAndRestore(folder)
    train(backup)
    assert not folder.exists() and tmp_path.exists()
    train(backup, error=ValueError())
    (folder / "notes.txt").write_text("mine")
    train(backup)
    assert {path.name for path in folder.iterdir()} == {"notes.txt", ".lock"}
    link = tmp_path / "link"
    folder.rename(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "notes.txt").unlink()
    link.symlink_to(tmp_path / "elsewhere")
    assert train(BackupAndRestore(link))[1] == [] and link.exists()


def test_save_freq_in_seconds(tmp_path, monkeypatch):
    clock = itertools.count(step=50)  # each check comes 50 s later
    monkeypatch.setattr("tpufit.callbacks.backup_and_restore.monotonic", lambda: next(clock))
    assert train(BackupAndRestore(tmp_path, timedelta(seconds=100)), epochs=2)[0] == [[2], [4], [6]]


def test_an_error_affects_only_its_own_fit(tmp_path):
    backup = BackupAndRestore(tmp_path)
    assert train(backup, error=ValueError())[1] == [9]
    assert train(backup)[1] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("",), "backup_dir must be the path of a folder, got ''"),
        ((None,), "backup_dir must be the path of a folder, got None"),
        (("backup", "batch"), "save_freq must be 'epoch' or a whole number of batches of at least 1, got 'batch'"),
        (("backup", 0.15), "save_freq .* got 0.15"),
        (("backup", 0), "save_freq .* got 0"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        BackupAndRestore(*arguments)
