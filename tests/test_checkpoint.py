"""Checkpoints on disk: complete or absent, verified when they are read, only safetensors and JSON."""

import hashlib
import json
import math
import os
import random
import shutil
import threading
import warnings
import zipfile
from contextlib import nullcontext
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tpufit import runtime
from tpufit.checkpoint import (
    AsyncCheckpointWriter,
    Checkpoint,
    CheckpointDirectory,
    LocalStore,
    Score,
    read,
    read_checkpoint_at,
    save,
)
from tpufit.checkpoint.state_json import check_state
from tpufit.checkpoint.store import seal
from tpufit.errors import (
    CheckpointBusyError,
    CheckpointDamagedError,
    CheckpointError,
    CheckpointMissingError,
    CheckpointNotWrittenError,
)
from tpufit.utils.files import Lock, LockedError

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


def test_a_checkpoint_round_trip(run):
    path = run.write(made(10, metric=0.5))
    assert sorted(file.name for file in path.iterdir()) == FILES
    found = read(path)
    assert found.step == 10
    assert found.state == {"epoch": 1}
    assert found.metric == Score("val_loss", 0.5, "min")
    assert found.mesh == {"cores": 8}
    assert set(found.versions) == {"tpufit", *runtime.versions()} > {"tpufit", "torch"}
    assert found.weights["a.weight"] is found.weights["b.weight"]
    assert torch.equal(found.weights["a.weight"], torch.full((3, 2), 10.0))
    assert torch.equal(found.training["optimizer/step/a.weight"], torch.tensor(10.0))


def test_the_manifest_says_what_is_in_it(run):
    manifest = json.loads((run.write(made(10)) / "manifest.json").read_text())
    assert manifest["format"] == 2
    assert manifest["tensors"]["model.safetensors"]["a.weight"] == {"dtype": "float32", "shape": [3, 2]}
    assert set(manifest["files"]) == set(FILES) - {"manifest.json"}
    for name, file in manifest["files"].items():
        assert file["size"] == (run.path / "step-0000000010" / name).stat().st_size
        assert len(file["sha256"]) == 64


def test_safetensors_alone_reads_the_weights(run):
    weights = safetensors.torch.load_file(run.write(made(10)) / "model.safetensors")
    assert set(weights) == {"a.weight", "mask"}  # a tied tensor is stored once


def test_the_newest_and_the_best_are_kept(tmp_path):
    run = CheckpointDirectory(tmp_path, keep_last=2, keep_best=2)
    for step, loss in ((1, 0.3), (2, math.nan), (3, 0.5), (4, 0.3), (5, 0.9), (6, None)):
        run.write(made(step, metric=loss))
    assert run.steps() == [1, 4, 5, 6]  # of equal values the earlier first; NaN is worst
    assert run.best().step == 1
    assert run.newest().step == 6


def test_only_the_named_number_is_kept(tmp_path):
    run = CheckpointDirectory(tmp_path, keep_last=1)
    for step in (1, 2, 3):
        run.write(made(step))
    assert run.steps() == [3]


def test_a_checkpoint_written_later_is_newest_even_of_an_earlier_step(tmp_path):
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
    with pytest.raises(
        CheckpointNotWrittenError, match=r"step 20 .*a\.weight has NaN.*last good checkpoint is of step 10"
    ):
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
def test_a_damaged_file_is_found_and_the_previous_checkpoint_read(run, file, how):
    run.write(made(10))
    path = run.write(made(20)) / file
    damage, message = DAMAGE[how]
    damage(path)
    with pytest.warns(UserWarning, match=rf"{file.split('.')[0]}\.{message}.*Resuming from .*step-0000000010"):
        assert run.newest().step == 10
    with pytest.raises(CheckpointDamagedError, match=message):
        read(path.parent)  # a checkpoint that is named is never replaced by another


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "has no manifest.json, so it was never finished"),
        ("{", "manifest.json is damaged: Expecting"),
        ("[]", "it has no format"),
        ('{"format": 2, "files": {"../../x": {}}}', "it lists the files"),
    ],
)
def test_a_damaged_manifest(run, text, message):
    run.write(made(10))
    manifest = run.write(made(20)) / "manifest.json"
    manifest.unlink() if text is None else manifest.write_text(text)
    with pytest.warns(UserWarning, match=message):
        assert run.newest().step == 10


def test_all_checkpoints_damaged(run):
    for step in (10, 20):
        flip(run.write(made(step)) / "model.safetensors")
    with pytest.raises(CheckpointDamagedError, match=r"none of .*step-0000000020.*SHA-256.*step-0000000010.*SHA-256"):
        run.newest()


def test_no_checkpoint(run):
    assert run.newest() is None
    assert run.best() is None


def test_a_later_format(run):
    path = run.write(made(10))
    manifest = json.loads((path / "manifest.json").read_text()) | {"format": 7, "versions": {"tpufit": "3.1"}}
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"has format 7, and this tpufit .* reads format 2\. It .* tpufit 3\.1"):
        run.newest()
    run.write(made(20))  # `resume=False` doesn't read it, and keeps it
    assert run.steps() == [10, 20]


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
    # The canary works: PyTorch goes by the name of a file, not of a stream.
    with (target if where == "file" else target / name).open("rb") as pickled:
        torch.load(pickled, weights_only=False)
    assert (tmp_path / "canary").exists()


def test_a_file_instead_of_a_checkpoint(tmp_path):
    (tmp_path / "model.pt").write_bytes(b"x")
    with pytest.raises(CheckpointMissingError, match=r"not a tpufit checkpoint: it is a file.*model.load_weights"):
        read(tmp_path / "model.pt")
    with pytest.raises(CheckpointMissingError, match="it does not exist"):
        read(tmp_path / "nothing")


def test_a_missing_step_is_answered_with_the_existing_steps(tmp_path):
    run = CheckpointDirectory(tmp_path)
    for step in (5, 10):
        run.write(Checkpoint(step, {"weight": torch.ones(1)}, {}, {}))
    with pytest.raises(CheckpointMissingError, match="step-0000000007: .* has step-0000000005, step-0000000010. Model"):
        read_checkpoint_at(tmp_path / "step-0000000007")


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
    assert outside.steps() == [99]  # the link's target wasn't removed


def test_a_checkpoint_is_synced_before_it_is_renamed(run, monkeypatch):
    """Otherwise a machine that loses power might keep the name without the contents."""
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


def test_a_killed_process_leaves_no_files(run):
    whole = run.write(made(10))
    shutil.copytree(whole, run.path / ".step-0000000020.tmp-77")
    (run.path / ".step-0000000020.tmp-77" / "manifest.json").unlink()
    run.close()
    with pytest.warns(UserWarning, match=r"dropped from .*: \.step-0000000020\.tmp-77, which a killed process"):
        run.open()
    assert sorted(os.listdir(run.path)) == [".lock", "step-0000000010"]


def test_a_process_killed_between_two_renames(run):
    run.write(made(10)).rename(run.path / ".step-0000000010.old-77")
    run.close()
    run.open()
    assert run.newest().step == 10


def test_a_checkpoint_that_was_moved_aside_can_be_read(run, tmp_path):
    run.write(made(10))
    run.write(made(20)).rename(run.path / ".step-0000000020.old-77")
    with pytest.warns(UserWarning, match="a process was killed while it replaced"):
        assert run.newest().step == 20  # as a resuming `fit` does before it opens the folder
    save(tmp_path / "model", made(1))
    (tmp_path / "model").rename(tmp_path / ".model.old-77")
    with pytest.warns(UserWarning, match="model is missing"):
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


def test_a_pending_write_of_this_process_is_kept(run):
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


class Gone(LocalStore):
    """A store with an unreachable server: the attributes in `refused` fail."""

    refused: frozenset[str] = frozenset()

    def __getattribute__(self, name):
        if name in type(self).refused:
            raise TimeoutError("timed out")
        return super().__getattribute__(name)


def test_an_unreachable_store_is_named_in_the_error(run, monkeypatch):
    monkeypatch.setattr(run, "_store", Gone(run.path))
    monkeypatch.setattr(Gone, "refused", frozenset({"names", "commit"}))
    with pytest.raises(CheckpointNotWrittenError, match=rf"step 20 .*timed out\. {run.path} can't be listed, either"):
        run.write(made(20))


def test_a_checkpoint_that_cannot_be_removed_is_a_warning(tmp_path, monkeypatch):
    run = CheckpointDirectory(tmp_path, keep_last=1)
    run.write(made(10))
    monkeypatch.setattr(run, "_store", Gone(run.path))
    monkeypatch.setattr(Gone, "refused", frozenset({"remove"}))
    with pytest.warns(UserWarning, match="can't be removed from .*timed out"):
        run.write(made(20))
    assert run.newest().step == 20


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_files_have_the_permissions_of_the_umask(run, umask):
    before = os.umask(umask)
    try:
        folder = run.write(made(10))
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o666 & ~umask}


@pytest.mark.parametrize("name", ["a_file/run", "a_file"])
def test_a_folder_that_cannot_be_created(tmp_path, name):
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
    assert run_python(code).returncode == 0  # this process is dead, so its lock is free
    run.open()


def test_a_lock_names_its_holder(tmp_path):
    lock = Lock(tmp_path)
    assert (tmp_path / ".lock").read_text().startswith(f"process {os.getpid()} on")
    lock.release()


def test_a_second_directory_object_is_refused_the_folder(run):
    (run.path / ".lock").read_text()  # POSIX locks would be released here
    for _ in range(2):
        with pytest.raises(CheckpointBusyError, match="another callback of this process"):
            CheckpointDirectory(run.path).open()
    run.close()
    other = CheckpointDirectory(run.path)
    other.open()
    other.close()
    run.open()


def test_the_same_directory_object_may_be_opened_twice(run):
    run.open()
    run.close()
    with pytest.raises(CheckpointBusyError):  # it is still open once
        CheckpointDirectory(run.path).open()


def test_a_forked_process_does_not_have_the_lock(tmp_path):
    lock = Lock(tmp_path)
    child = os.fork()
    if not child:
        try:
            Lock(tmp_path)
        except LockedError as error:
            os._exit(7 if not error.here else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    with pytest.raises(LockedError):  # its end hasn't released the lock
        Lock(tmp_path)
    lock.release()


@pytest.mark.parametrize("kind", ["link", "dangling link", "file", "pipe"])
def test_a_foreign_lock_is_left_alone(tmp_path, kind):
    precious = tmp_path / "precious"
    (tmp_path / "run").mkdir()
    lock = tmp_path / "run" / ".lock"
    if kind != "dangling link":
        precious.write_text("years of work")
    if kind == "pipe":
        os.mkfifo(lock)
    elif kind == "file":
        precious.rename(lock)
        precious = lock
    else:
        lock.symlink_to(precious)
    with pytest.raises(CheckpointNotWrittenError, match=r"can't be written to .*run: Its \.lock is (a link|another)"):
        CheckpointDirectory(tmp_path / "run").open()
    assert not precious.exists() if kind == "dangling link" else precious.read_text() == "years of work"


# The user's files.


def add_users_files(folder):
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.0123abcd.safetensors").write_text("another program's")
    (folder / "notes").mkdir()
    (folder / "notes" / "a.txt").write_text("years of work")


USERS = ["model.0123abcd.safetensors", "notes", "tokenizer.json"]


def contents(folder):
    assert (folder / "notes" / "a.txt").read_text() == "years of work"
    return sorted(os.listdir(folder))


def test_save_replaces_only_its_own_files(tmp_path):
    save(tmp_path / "model", made(1))
    save(tmp_path / "model", made(2))
    assert read(tmp_path / "model").step == 2
    (tmp_path / "mine").mkdir()
    with pytest.raises(CheckpointNotWrittenError, match="exists and isn't a tpufit checkpoint"):
        save(tmp_path / "mine", made(1))


def test_the_users_files_beside_a_saved_model_stay(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path / "model", made(step))
        if step == 1:
            add_users_files(tmp_path / "model")
        assert contents(tmp_path / "model") == sorted([*FILES, *USERS])
        assert read(tmp_path / "model").step == step
    assert os.listdir(tmp_path) == ["model"]


def foreign(name):
    """Create a folder that resembles a checkpoint, but isn't one."""

    def make(folder):
        save(folder, made(1))
        manifest = json.loads((folder / "manifest.json").read_text())
        if name == "file missing":
            (folder / "state.json").unlink()
        elif name == "other weights":
            (folder / "model.safetensors").write_text("mine")
        elif name == "field missing":
            del manifest["tensors"]
        elif name == "field more":
            manifest["mine"] = 1
        elif name == "no checksum's manifest":
            manifest = {"name": "a browser extension"}
        elif name == "list of files":
            manifest = {"format": 2, "files": {"tokenizer.json": {}}}
        (folder / "manifest.json").write_text(seal(manifest))

    return make


FOREIGN = ["file missing", "other weights", "field missing", "field more", "no checksum's manifest", "list of files"]


@pytest.mark.parametrize("name", FOREIGN)
def test_save_refuses_a_folder_with_foreign_files(tmp_path, name):
    foreign(name)(tmp_path / "model")
    add_users_files(tmp_path / "model")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(CheckpointNotWrittenError, match="exists and isn't a tpufit checkpoint"):
        save(tmp_path / "model", made(2))
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_save_refuses_runs_files_and_links(tmp_path):
    CheckpointDirectory(tmp_path / "run").write(made(10))
    (tmp_path / "file").write_text("mine")
    save(tmp_path / "model", made(1))
    (tmp_path / "link").symlink_to("model")
    (tmp_path / "dangling").symlink_to("nothing")
    for name, message in [
        ("run", "a tpufit checkpoint"),
        ("file", "a tpufit checkpoint"),
        ("link", "is a link"),
        ("dangling", "is a link"),
    ]:
        with pytest.raises(CheckpointNotWrittenError, match=message):
            save(tmp_path / name, made(2))
    assert read(tmp_path / "model").step == 1 and read(tmp_path / "run" / "step-0000000010").step == 10
    assert sorted(os.listdir(tmp_path)) == ["dangling", "file", "link", "model", "run"]


@pytest.mark.parametrize("what", ["pruned", "cleared"])
def test_the_users_files_in_a_pruned_checkpoint_stay(tmp_path, what):
    run = CheckpointDirectory(tmp_path / "run", keep_last=1 if what == "pruned" else None)
    run.open()
    add_users_files(run.write(made(10)))
    run.write(made(20))
    if what == "cleared":
        run.clear()
    run.close()
    assert contents(run.path / "step-0000000010") == USERS
    assert run.steps() == ([20] if what == "pruned" else [])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        newest = run.newest()
    assert newest.step == 20 if what == "pruned" else newest is None


def test_the_users_files_in_a_rewritten_checkpoint_stay(run):
    add_users_files(run.write(made(10)))
    add_users_files(run.path / "step-0000000020")  # a checkpoint only by its name
    for step in (10, 20):
        run.write(made(step, value=2))
        assert contents(run.path / f"step-{step:010}") == sorted([*FILES, *USERS])
    assert folders(run) == ["step-0000000010", "step-0000000020"]


def test_a_file_or_link_with_the_name_of_a_checkpoint_stays(run, tmp_path):
    (run.path / "step-0000000010").write_text("mine")
    (run.path / "step-0000000020").symlink_to(tmp_path)
    for step in (10, 20):
        with pytest.raises(CheckpointNotWrittenError, match="so a checkpoint can't replace it"):
            run.write(made(step))
    assert (run.path / "step-0000000010").read_text() == "mine" and (run.path / "step-0000000020").is_symlink()


def test_folders_named_like_a_killed_processs_stay(run):
    names = [".step-0000000010.tmp-mine", ".step-0000000020.tmp-77", ".step-0000000030.old-77", ".mine.tmp-77"]
    for name in names:
        add_users_files(run.path / name)
    run.close()
    run.open()
    for name in names:
        assert contents(run.path / name) == USERS


def test_the_users_files_in_a_checkpoint_that_was_moved_aside_stay(run):
    add_users_files(run.write(made(10)))
    (run.path / "step-0000000010").rename(run.path / ".step-0000000010.old-77")
    run.write(made(10, value=2))  # killed right before the files were moved back
    assert contents(run.path / "step-0000000010") == sorted([*FILES, *USERS])
    assert folders(run) == ["step-0000000010"] and not list(run.path.glob(".step*"))


def test_a_run_with_an_unknown_manifest_is_still_a_run(run):
    (run.path / "manifest.json").write_text('{"name": "a browser extension"}')
    save_whole(run.path, 10)
    assert read_checkpoint_at(run.path).step == 8


# Wrong content.


def save_whole(folder, step):
    """Put the checkpoint of a real training, of step 8, into a run's folder under the name of another step."""
    path = folder / f"step-{step:010}"
    with zipfile.ZipFile(Path(__file__).parent / "goldens" / "checkpoint-cores1.zip") as archive:
        archive.extractall(folder / "unpacked")
    (folder / "unpacked" / "step-0000000008").rename(path)
    (folder / "unpacked").rmdir()
    manifest = json.loads((path / "manifest.json").read_text())
    score = {"name": "val_loss", "value": 1 / step, "mode": "min"}
    (path / "manifest.json").write_text(seal(manifest | {"number": step, "metric": score}))
    return path


@pytest.fixture
def two(tmp_path):
    """A run's folder with two complete checkpoints, and the newer checkpoint."""
    save_whole(tmp_path, 1)
    return CheckpointDirectory(tmp_path), save_whole(tmp_path, 2)


def same(one, other):
    return (
        all(getattr(one, name) == getattr(other, name) for name in ("step", "state", "mesh", "versions"))
        and all(torch.equal(one.weights[name], other.weights[name]) for name in other.weights)
        and all(torch.equal(one.training[name], other.training[name]) for name in other.training)
    )


def test_undamaged_checkpoints_are_read(two):
    run, _ = two
    assert same(run.newest(check_state), run.best(check_state))


@pytest.mark.parametrize("flips", [40, pytest.param(3000, marks=pytest.mark.soak)])
@pytest.mark.filterwarnings("ignore")
def test_a_flipped_bit_always_gives_a_clear_error(two, flips):
    run, path = two
    draws = random.Random(flips)
    good = read(run.path / "step-0000000001")  # of files that stay, because its tensors are read from there
    files = {name: (path / name).read_bytes() for name in FILES}
    for i in range(flips):
        name = FILES[0] if i % 2 else draws.choice(FILES)  # most in the manifest: no other file contains its hash
        data = bytearray(files[name])
        data[draws.randrange(len(data))] ^= 1 << draws.randrange(8)
        (path / name).write_bytes(data)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = run.best(check_state) if i % 10 == 0 else run.newest(check_state)
        said = [str(warning.message) for warning in caught]
        assert same(found, good), (name, said)  # both belong to the same training
        if not any("is damaged" in text and "step-0000000001" in text for text in said):
            assert json.loads(data) == json.loads(files[name])  # a space between two words of a manifest
        assert run.steps() == [1, 2]
        (path / name).write_bytes(files[name])


DEEP = "[" * 10_000 + "]" * 10_000
MANIFESTS = {
    "nothing": "",
    "a number": "7",
    "null": "null",
    "nested": DEEP,
    "no UTF-8": b"\xff\xfe\x00{}",
    "a name twice": lambda m: seal(m).replace('"step": 8', '"step": 7, "step": 8'),
    "no step": lambda m: m.pop("step") and None,
    "step of text": lambda m: m.update(step="8"),
    "step of nan": lambda m: m.update(step=math.nan),
    "step below zero": lambda m: m.update(step=-1),
    "step beyond all": lambda m: m.update(step=10**400),
    "step true": lambda m: m.update(step=True),
    "number of text": lambda m: m.update(number="1"),
    "no number": lambda m: m.pop("number") and None,
    "format of text": lambda m: m.update(format="2"),
    "format 0": lambda m: m.update(format=0),
    "an earlier format": lambda m: m.update(format=1),
    "a later format by this version": lambda m: m.update(format=9),
    "metric of text": lambda m: m.update(metric="0.5"),
    "metric beyond all": lambda m: m["metric"].update(value=10**400),
    "metric without value": lambda m: m["metric"].pop("value") and None,
    "metric of another mode": lambda m: m["metric"].update(mode="best"),
    "mesh of a list": lambda m: m.update(mesh=[8]),
    "versions of a list": lambda m: m.update(versions=["2.9"]),
    "files of a list": lambda m: m.update(files=["model.safetensors"]),
    "size of text": lambda m: m["files"]["state.json"].update(size="9"),
    "no size": lambda m: m["files"]["state.json"].pop("size") and None,
    "hash of a number": lambda m: m["files"]["state.json"].update(sha256=7),
    "path of a list": lambda m: m["files"]["state.json"].update(path=["state.json"]),
    "path of another file": lambda m: m["files"]["state.json"].update(path="manifest.json"),
    "path with NUL": lambda m: m["files"]["state.json"].update(path="a\0b"),
    "tensors of a list": lambda m: m.update(tensors=[]),
    "something more": lambda m: m.update(more=1),
    "another checksum": lambda m: json.dumps(m | {"number": 3}),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_an_absurd_manifest_is_a_damaged_checkpoint(two, name):
    run, path = two
    manifest = json.loads((path / "manifest.json").read_text())
    text = MANIFESTS[name]
    if callable(text):
        text = text(manifest) or seal(manifest)
    (path / "manifest.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    for found in (run.newest, run.best):
        with pytest.warns(UserWarning, match=r"manifest\.json.* damaged.*Resuming from .*step-0000000001"):
            assert found(check_state).step == 8
    run.write(made(3))  # as `resume=False` does
    assert sorted(set(run.steps()) - {1}) == [2, 3]
    with pytest.raises(CheckpointDamagedError):
        read_checkpoint_at(path)


@pytest.mark.parametrize("kind", ["a folder", "a pipe", "a link to itself"])
def test_a_manifest_that_isnt_a_file_is_a_damaged_checkpoint(two, kind):
    run, path = two
    manifest = path / "manifest.json"
    manifest.unlink()
    {"a folder": manifest.mkdir, "a pipe": lambda: os.mkfifo(manifest)}.get(
        kind, lambda: manifest.symlink_to("manifest.json")
    )()
    with pytest.warns(UserWarning, match=r"manifest\.json.*Resuming from .*step-0000000001"):
        assert run.newest(check_state).step == 8


STATES = {
    "a list": "[]",
    "a number": "1e999",
    "nested": '{"progress": ' + DEEP + "}",
    "nothing in it": "{}",
    "no UTF-8": b'{"\xff": 1}',
    "no model": lambda s: s.pop("model") and None,
    "step of text": lambda s: s["model"].update(step="8"),
    "step of nan": lambda s: s["model"].update(step=math.nan),
    "seed beyond all": lambda s: s["model"].update(seed=10**400),
    "optimizers of a list": lambda s: s.update(optimizers=[]),
    "groups of text": lambda s: s["optimizers"]["optimizer"].update(groups="lr"),
    "no class": lambda s: s["optimizers"]["optimizer"].pop("class") and None,
    "epoch of text": lambda s: s["progress"].update(epoch="1"),
    "batches below zero": lambda s: s["progress"].update(batches=-3),
    "no epoch": lambda s: s["progress"].pop("epoch") and None,
    "an unknown tensor": lambda s: s["progress"].update(trained={"dict": [["loss", {"tensor": "nothing"}]]}),
    "callbacks of a dict": lambda s: s.update(callbacks={}),
    "a callback of text": lambda s: s.update(callbacks=["EarlyStopping"]),
    "a callback without state": lambda s: s["callbacks"][0].pop("state") and None,
    "a callback's state of two": lambda s: s["callbacks"][0].update(state={"dict": [], "tensor": "a"}),
    "no draws": lambda s: s.pop("draws") and None,
    "draws of text": lambda s: s["draws"].update(python="random"),
    "draws cut short": lambda s: s["draws"]["python"].__setitem__(1, [1, 2, 3]),
    "draws of another size": lambda s: s["draws"].update(torch="00ff"),
    "draws that are no hex": lambda s: s["draws"].update(torch="xyz"),
    "data of a list": lambda s: s.update(data=[]),
    "offset of text": lambda s: s["data"].update(offset="48"),
    "no sums": lambda s: s.update(metrics=None),
    "sums of other tensors": lambda s: s["metrics"]["keys"].append([0, "more"]),
    "sums of more batches than there are": lambda s: s["metrics"]["batches"].append([10**12]),
    "settings of a list": lambda s: s.update(settings=[]),
    "objects of text": lambda s: s.update(objects={"module": "x"}),
    "compile of a list": lambda s: s.update(compile=[]),
    "flags of numbers": lambda s: s.update(changes={"requires_grad": {"weight": 1}, "layers": {}}),
    "layers of text": lambda s: s.update(changes={"requires_grad": {}, "layers": {"0": "Tanh"}}),
}


@pytest.mark.parametrize("name", STATES)
def test_an_absurd_state_with_a_right_hash_is_a_damaged_checkpoint(two, name):
    run, path = two
    text = STATES[name]
    if callable(text):
        state = json.loads((path / "state.json").read_text())
        text = text(state) or json.dumps(state)
    content = text if isinstance(text, bytes) else text.encode()
    (path / "state.json").write_bytes(content)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["state.json"] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (path / "manifest.json").write_text(seal(manifest))
    with pytest.warns(UserWarning, match=r"(is damaged|is invalid).*Resuming from .*step-0000000001"):
        assert run.newest(check_state).step == 8
    with pytest.raises(CheckpointDamagedError):
        read_checkpoint_at(path)


def test_the_best_without_a_readable_manifest(two):
    run, path = two
    for folder in (path, run.path / "step-0000000001"):
        (folder / "manifest.json").write_text("{}")
    for found in (run.newest, run.best):
        with pytest.raises(CheckpointDamagedError, match=r"none of the checkpoints .*has no format.*To start over"):
            found(check_state)


@pytest.mark.parametrize("file", ["model.safetensors", "training.safetensors"])
def test_invalid_tensors_with_a_right_hash(two, file):
    run, path = two
    (path / file).write_bytes(b"no tensors")
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][file] = {"size": 10, "sha256": hashlib.sha256(b"no tensors").hexdigest()}
    (path / "manifest.json").write_text(seal(manifest))
    with pytest.warns(UserWarning, match=r"step-0000000002 is damaged: .*Resuming from .*step-0000000001"):
        assert run.newest(check_state).step == 8


# The writer.


class Slow(CheckpointDirectory):
    """Its writes wait for the test, and fail on request."""

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


def test_training_continues_during_a_write(tmp_path):
    writes, (first, second) = writer(tmp_path, None, None)
    assert writes.submit(made(1)) is None
    assert writes.poll() is None  # it is still writing
    first.set()
    assert writes.submit(made(2)).name == "step-0000000001"  # the second save waited for the first
    second.set()
    assert writes.finish().name == "step-0000000002"
    assert writes.poll() is None


def test_failures_are_warnings_until_there_are_too_many(tmp_path):
    writes, events = writer(tmp_path, full(), None, full(), full(), max_failures=2)
    for event in events:
        event.set()
    for step in (1, 2, 3):  # a success in between: only consecutive failures count
        writes.submit(made(step))
        if step == 2:
            assert writes.wait().name == "step-0000000002"
        else:
            with pytest.warns(UserWarning, match="no room. Training continues"):
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


def test_a_bug_is_never_only_a_warning(tmp_path):
    writes, (event,) = writer(tmp_path, ZeroDivisionError("oh"))
    event.set()
    writes.submit(made(1))
    with pytest.raises(ZeroDivisionError):
        writes.wait()
