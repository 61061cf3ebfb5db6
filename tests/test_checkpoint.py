"""Checkpoints on disk: whole or not there, verified when read, never anything but safetensors and JSON."""

import json
import math
import os
import shutil
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tpufit.checkpoint import AsyncCheckpointWriter, Checkpoint, CheckpointDirectory, LocalStore, Score, read, save
from tpufit.errors import CheckpointDamagedError, CheckpointError, CheckpointMissingError, CheckpointNotWrittenError
from tpufit.utils.files import Lock

FILES = ["manifest.json", "model.safetensors", "state.json", "training.safetensors"]


def made(step, value=None, metric=None):
    weight = torch.full((3, 2), float(step if value is None else value))
    tied = {"a.weight": weight, "b.weight": weight, "mask": torch.tensor([-math.inf, 0.0])}
    training = {"optimizer/step/a.weight": torch.tensor(float(step))}
    rated = None if metric is None else Score("val_loss", metric, "min")
    return Checkpoint(step, tied, training, {"epoch": step // 10}, ["a.weight", "b.weight"], rated, {"cores": 8})


@pytest.fixture
def run(tmp_path):
    folder = CheckpointDirectory(tmp_path / "run")
    folder.open()
    yield folder
    folder.close()


def folders(run):
    return sorted(path.name for path in run.path.iterdir() if not path.name.startswith("."))


def test_what_is_written_is_read(run):
    path = run.write(made(10, metric=0.5))
    assert sorted(file.name for file in path.iterdir()) == FILES
    found = read(path)
    assert found.step == 10
    assert found.state == {"epoch": 1}
    assert found.metric == Score("val_loss", 0.5, "min")
    assert found.mesh == {"cores": 8}
    assert set(found.versions) == {"tpufit", "torch", "torch_xla"}
    assert found.weights["a.weight"] is found.weights["b.weight"]
    assert torch.equal(found.weights["a.weight"], torch.full((3, 2), 10.0))
    assert torch.equal(found.training["optimizer/step/a.weight"], torch.tensor(10.0))


def test_the_manifest_says_what_is_in_it(run):
    manifest = json.loads((run.write(made(10)) / "manifest.json").read_text())
    assert manifest["format"] == 1
    assert manifest["tensors"]["model.safetensors"]["a.weight"] == {"dtype": "float32", "shape": [3, 2]}
    assert set(manifest["files"]) == set(FILES) - {"manifest.json"}
    for name, file in manifest["files"].items():
        assert file["size"] == (run.path / "step-0000000010" / name).stat().st_size
        assert len(file["sha256"]) == 64


def test_safetensors_alone_reads_the_weights(run):
    weights = safetensors.torch.load_file(run.write(made(10)) / "model.safetensors")
    assert set(weights) == {"a.weight", "mask"}  # a tied tensor is stored once


def test_the_newest_are_kept_and_the_best(tmp_path):
    run = CheckpointDirectory(tmp_path, keep_last=2, keep_best=2)
    for step, loss in ((1, 0.3), (2, math.nan), (3, 0.5), (4, 0.3), (5, 0.9), (6, None)):
        run.write(made(step, metric=loss))
    assert run.steps() == [1, 4, 5, 6]  # of equal ones the earlier first; NaN is worst
    assert run.best().step == 1
    assert run.newest().step == 6


def test_only_the_named_number_is_kept(tmp_path):
    run = CheckpointDirectory(tmp_path, keep_last=1)
    for step in (1, 2, 3):
        run.write(made(step))
    assert run.steps() == [3]


def test_going_back_makes_the_earlier_one_the_newest(tmp_path):
    run = CheckpointDirectory(tmp_path, keep_last=2)
    for step in (10, 20, 30, 15):
        run.write(made(step))
    assert run.newest().step == 15
    assert run.steps() == [15, 30]


def test_the_same_step_is_replaced(run):
    run.write(made(10, value=1))
    run.write(made(10, value=2))
    assert float(run.newest().weights["a.weight"][0, 0]) == 2
    assert folders(run) == ["step-0000000010"]


def test_weights_that_are_not_finite_are_not_written(run):
    run.write(made(10))
    with pytest.raises(CheckpointNotWrittenError, match=r"step 20 .*a\.weight holds NaN.*last good one .* step 10"):
        run.write(made(20, value=math.nan))
    assert run.steps() == [10]


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "a bit": (flip, r"safetensors is damaged: its SHA-256 is"),
    "cut short": (
        lambda path: os.truncate(path, 20),
        r"safetensors is damaged: it has 20 bytes, and [\d,]+ were written",
    ),
    "empty": (lambda path: os.truncate(path, 0), r"safetensors is damaged: it has 0 bytes, and [\d,]+ were written"),
    "missing": (lambda path: path.unlink(), r"safetensors is missing"),
    "a link": (lambda path: (path.rename(f"{path}.x"), path.symlink_to(f"{path.name}.x")), r"safetensors is missing"),
}


@pytest.mark.parametrize("file", ["model.safetensors", "training.safetensors"])
@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_file_is_found_and_the_one_before_taken(run, file, how):
    run.write(made(10))
    path = run.write(made(20)) / file
    damage, message = DAMAGE[how]
    damage(path)
    with pytest.warns(UserWarning, match=rf"{file.split('.')[0]}\.{message}.*Going on from .*step-0000000010"):
        assert run.newest().step == 10
    with pytest.raises(CheckpointDamagedError, match=message):
        read(path.parent)  # a checkpoint that is named never gives way to another


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "has no manifest.json, so it was never finished"),
        ("{", "manifest.json is damaged: Expecting"),
        ("[]", "it names no format"),
        ('{"format": 1, "files": {"../../x": {}}}', "it lists the files"),
    ],
)
def test_a_damaged_manifest(run, text, message):
    run.write(made(10))
    manifest = run.write(made(20)) / "manifest.json"
    manifest.unlink() if text is None else manifest.write_text(text)
    with pytest.warns(UserWarning, match=message):
        assert run.newest().step == 10


def test_all_are_damaged(run):
    for step in (10, 20):
        flip(run.write(made(step)) / "model.safetensors")
    with pytest.raises(CheckpointDamagedError, match=r"none of .*step-0000000020.*SHA-256.*step-0000000010.*SHA-256"):
        run.newest()


def test_there_is_none(run):
    assert run.newest() is None
    assert run.best() is None


def test_a_later_format(run):
    path = run.write(made(10))
    manifest = json.loads((path / "manifest.json").read_text()) | {"format": 7, "versions": {"tpufit": "3.1"}}
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"is of format 7, and this tpufit .* up to 1\. It was made by .* 3\.1"):
        run.newest()


class Canary:
    def __reduce__(self):
        return os.mkdir, ("canary",)


@pytest.mark.parametrize("where", ["file", "folder", "weights", "manifest"])
def test_a_pickle_is_never_opened(tmp_path, monkeypatch, where):
    monkeypatch.chdir(tmp_path)
    target = tmp_path / "pickled"
    if where == "file":
        torch.save(Canary(), target)
    else:
        CheckpointDirectory(tmp_path / "run").write(made(10)).rename(target)
        name = {"folder": "data.pkl", "weights": "model.safetensors", "manifest": "manifest.json"}[where]
        torch.save(Canary(), target / name)
        if where == "folder":
            (target / "manifest.json").unlink()
    with pytest.raises(CheckpointError):
        read(target)
    assert not (tmp_path / "canary").exists()
    with pytest.raises(FileExistsError):  # the canary would have sung: it is no dud
        os.mkdir("canary")
        torch.load(target if where == "file" else target / name, weights_only=False)


def test_a_file_is_no_checkpoint(tmp_path):
    (tmp_path / "model.pt").write_bytes(b"x")
    with pytest.raises(CheckpointMissingError, match=r"not a checkpoint of tpufit: it is a file.*a pickle made by"):
        read(tmp_path / "model.pt")
    with pytest.raises(CheckpointMissingError, match="it does not exist"):
        read(tmp_path / "nothing")


def test_a_link_to_a_checkpoint_is_refused(tmp_path):
    outside = CheckpointDirectory(tmp_path / "outside")
    path = outside.write(made(99))
    run = CheckpointDirectory(tmp_path / "run", keep_last=1)
    run.write(made(10))
    (run.path / "step-0000000099").symlink_to(path)
    assert run.newest().step == 10
    with pytest.raises(CheckpointError, match="is a link"):
        read(run.path / "step-0000000099")
    run.write(made(20))
    assert outside.steps() == [99]  # nothing behind the link was removed


def test_all_of_it_is_on_the_disk_before_it_has_its_name(run, monkeypatch):
    """Else a machine that loses its power may keep the name and lose what it stands for."""
    sync, rename, events = os.fsync, Path.rename, []

    def noted_sync(descriptor):
        sync(descriptor)
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))

    def noted_rename(path, target):
        events.append("named")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    run.write(made(10))
    named = events.index("named")
    *files, draft = events[:named]
    assert {file.name for file in files} == set(FILES) and {file.parent for file in files} == {draft}
    assert events[named + 1 :] == [run.path]  # the name itself


def test_a_killed_process_leaves_nothing(run):
    whole = run.write(made(10))
    shutil.copytree(whole, run.path / ".step-0000000020.tmp-77")
    (run.path / ".step-0000000020.tmp-77" / "manifest.json").unlink()
    run.close()
    with pytest.warns(UserWarning, match=r"dropped from .*: \.step-0000000020\.tmp-77, which a process"):
        run.open()
    assert sorted(os.listdir(run.path)) == [".lock", "step-0000000010"]


def test_a_process_killed_between_two_renames(run):
    run.write(made(10)).rename(run.path / ".step-0000000010.old-77")
    run.close()
    run.open()
    assert run.newest().step == 10


def test_what_was_moved_aside_is_read_before_it_is_brought_back(run, tmp_path):
    run.write(made(10))
    run.write(made(20)).rename(run.path / ".step-0000000020.old-77")
    with pytest.warns(UserWarning, match="a process was killed that replaced it"):
        assert run.newest().step == 20  # as a `fit` that resumes looks before it opens the folder
    save(tmp_path / "model", made(1))
    (tmp_path / "model").rename(tmp_path / ".model.old-77")
    with pytest.warns(UserWarning, match="model is not there"):
        assert read(tmp_path / "model").step == 1
    save(tmp_path / "model", made(2))
    assert read(tmp_path / "model").step == 2 and not list(tmp_path.glob(".model.*"))


@pytest.mark.parametrize("kind", ["tmp", "old"])
def test_a_killed_process_that_had_the_same_id(run, kind):  # as in containers, where each run is process 1
    run.write(made(10)).rename(run.path / f".step-0000000010.{kind}-{os.getpid()}")
    run.close()
    with pytest.warns(UserWarning, match="dropped from") if kind == "tmp" else nullcontext():
        run.open()
    kept = ["step-0000000010"] if kind == "old" else []
    assert sorted(os.listdir(run.path)) == [".lock", *kept]


def test_what_this_process_is_writing_is_not_dropped(run):
    store, found = LocalStore(run.path), []

    def fill(draft):
        (draft / "a").touch()
        store.clean()
        found.extend(os.listdir(draft))

    store.commit("step-0000000010", fill)
    assert found == ["a"] and store.clean() == []


class Full(LocalStore):
    def commit(self, name, fill):
        def fill_up(folder):
            fill(folder)
            raise OSError(28, "No space left on device")

        super().commit(name, fill_up)


def test_a_full_disk(run, monkeypatch):
    run.write(made(10))
    monkeypatch.setattr(run, "_store", Full(run.path))
    with pytest.raises(
        CheckpointNotWrittenError, match=r"step 20 .*no room in .* \(need .*, free .*\).* step 10"
    ) as raised:
        run.write(made(20))
    assert isinstance(raised.value.__cause__, OSError)
    assert sorted(os.listdir(run.path)) == [".lock", "step-0000000010"]


@pytest.mark.parametrize("name", ["a_file/run", "a_file"])
def test_a_folder_that_cannot_be_made(tmp_path, name):
    (tmp_path / "a_file").write_text("")
    with pytest.raises(CheckpointNotWrittenError, match=r"can't be written to .*a_file"):
        CheckpointDirectory(tmp_path / name).open()


@pytest.mark.slow
def test_a_second_process_is_refused(run, run_python):
    code = f"""
        from tpufit.checkpoint import CheckpointDirectory
        CheckpointDirectory({str(run.path)!r}).open()
        """
    ended = run_python(code)
    assert ended.returncode
    assert f"CheckpointBusyError: process {os.getpid()} on" in ended.stderr
    run.close()
    assert run_python(code).returncode == 0  # and that one is dead: its lock is nobody's
    run.open()


def test_a_lock_says_who_holds_it(tmp_path):
    lock = Lock(tmp_path)
    assert (tmp_path / ".lock").read_text().startswith(f"process {os.getpid()} on")
    lock.release()


def test_save_replaces_what_it_wrote_and_nothing_else(tmp_path):
    save(tmp_path / "model", made(1))
    save(tmp_path / "model", made(2))
    assert read(tmp_path / "model").step == 2
    (tmp_path / "mine").mkdir()
    with pytest.raises(CheckpointNotWrittenError, match="exists and is no checkpoint"):
        save(tmp_path / "mine", made(1))


# The writer.


class Slow(CheckpointDirectory):
    """Its writes wait for the test, and fail if it says so."""

    def __init__(self, path, events):
        super().__init__(path)
        self.events = events

    def write(self, checkpoint):
        go, error = self.events.pop(0)
        assert go.wait(30)
        if error is not None:
            raise error
        return super().write(checkpoint)


def writer(tmp_path, *errors, **options):
    events = [(threading.Event(), error) for error in errors]
    return AsyncCheckpointWriter(Slow(tmp_path, list(events)), **options), [event for event, _ in events]


def full():
    return CheckpointNotWrittenError("the checkpoint of step 1 was not written: no room")


def test_training_goes_on_while_it_writes(tmp_path):
    writes, (first, second) = writer(tmp_path, None, None)
    assert writes.submit(made(1)) is None
    assert writes.poll() is None  # it is still at it
    first.set()
    assert writes.submit(made(2)).name == "step-0000000001"  # the second one waited for the first
    second.set()
    assert writes.finish().name == "step-0000000002"
    assert writes.poll() is None


def test_a_failure_is_a_warning_until_there_are_too_many(tmp_path):
    writes, events = writer(tmp_path, full(), None, full(), full(), max_failures=2)
    for event in events:
        event.set()
    for step in (1, 2, 3):  # one success in between: they are counted in a row
        writes.submit(made(step))
        if step == 2:
            assert writes.wait().name == "step-0000000002"
        else:
            with pytest.warns(UserWarning, match="no room. Training goes on"):
                assert writes.wait() is None
    writes.submit(made(4))
    with pytest.raises(CheckpointNotWrittenError, match="no room"):
        writes.wait()


def test_the_last_failure_is_an_error(tmp_path):
    writes, (event,) = writer(tmp_path, full())
    event.set()
    writes.submit(made(1))
    with pytest.raises(CheckpointNotWrittenError, match="no room"):
        writes.finish()


def test_a_fault_of_our_own_is_never_only_a_warning(tmp_path):
    writes, (event,) = writer(tmp_path, ZeroDivisionError("oh"))
    event.set()
    writes.submit(made(1))
    with pytest.raises(ZeroDivisionError):
        writes.wait()
