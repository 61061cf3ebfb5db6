"""Folders behind URLs: checkpoints, logs and caches are stored and read back, completely or not at all."""

import csv
import errno
import io
import json
import shutil
from dataclasses import replace
from uuid import uuid4

import pytest
import torch
from fsspec import register_implementation
from fsspec.implementations.memory import MemoryFileSystem
from torch import nn

import tpufit
from tpufit.callbacks import BackupAndRestore, CSVLogger, ModelCheckpoint, TensorBoard
from tpufit.checkpoint.directory import CheckpointDirectory
from tpufit.checkpoint.find_checkpoint import read_checkpoint_at
from tpufit.checkpoint.format import Checkpoint
from tpufit.data import CachedDataset, presize
from tpufit.errors import ArgumentError, CheckpointDamagedError, CheckpointMissingError, CheckpointNotWrittenError
from tpufit.utils.urls import Mirror, Url

X, Y = torch.randn(48, 4), torch.randint(0, 2, (48,))


@pytest.fixture(scope="module")
def s3_server():
    """A server of S3's protocol, and the variables that lead to it."""
    import s3fs
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        }.items():
            patch.setenv(name, value)
        yield
    s3fs.S3FileSystem.clear_instance_cache()  # they remember the address
    server.stop()


def bucket():
    import s3fs

    name = f"bucket-{uuid4().hex}"
    s3fs.S3FileSystem().mkdir(name)
    return f"s3://{name}"


@pytest.fixture(params=["memory", *(pytest.param(name, marks=pytest.mark.soak) for name in ("file", "s3"))])
def place(request, tmp_path):
    """A folder behind a URL."""
    if request.param == "s3":
        request.getfixturevalue("s3_server")
        yield bucket()
        return
    url = f"memory://{uuid4().hex}" if request.param == "memory" else f"file://{tmp_path}/there"
    yield url
    Url(url).remove()


@pytest.fixture(autouse=True)
def own_copies(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "kept"))


def compiled():
    torch.manual_seed(3)
    model = tpufit.Model(nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.1), nn.Linear(6, 2)))
    model.compile("adamw", "cross_entropy")
    return model


def fit(*callbacks, epochs=3, **how):
    model = compiled()
    model.fit(X, Y, batch_size=8, epochs=epochs, verbose=0, callbacks=list(callbacks), **how)
    return model


def weights_of(model):
    return [value.tolist() for value in model.state_dict().values()]


def checkpoint(step=1):
    return Checkpoint(step, {"weight": torch.ones(2)}, {}, {"epoch": 1})


class Stopped(tpufit.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            raise RuntimeError("broken off")


@pytest.mark.cores(1)
def test_a_training_resumes_from_a_url(cores, place):
    logs = CSVLogger(f"{place}/logs/log.csv"), TensorBoard(f"{place}/board")
    whole = fit(ModelCheckpoint(f"{place}/whole", monitor="loss"))
    with pytest.raises(tpufit.errors.CallbackError, match="broken off"):
        fit(ModelCheckpoint(f"{place}/run", monitor="loss"), *logs, Stopped())
    assert [step for step in CheckpointDirectory(f"{place}/run").steps()] == [6]
    logs = CSVLogger(f"{place}/logs/log.csv"), TensorBoard(f"{place}/board")
    model = fit(ModelCheckpoint(f"{place}/run", monitor="loss"), *logs, resume=True)
    assert weights_of(model) == weights_of(whole)
    rows = list(csv.reader(io.StringIO((Url(place) / "logs/log.csv").read_bytes().decode())))
    assert [row[0] for row in rows] == ["epoch", "0", "1", "2"]
    assert CheckpointDirectory(f"{place}/run").steps() == [6, 12, 18]
    assert len([name for name in Url(f"{place}/board").sizes() if "tfevents" in name]) == 2
    with pytest.warns(UserWarning, match="callbacks that are no longer there"):
        assert weights_of(fit(resume=f"{place}/run")) == weights_of(whole)


@pytest.mark.cores(1)
def test_a_backup_is_deleted_at_the_end(cores, place):
    with pytest.raises(tpufit.errors.CallbackError, match="broken off"):
        fit(BackupAndRestore(f"{place}/backup"), Stopped())
    assert CheckpointDirectory(f"{place}/backup").steps() == [6]
    fit(BackupAndRestore(f"{place}/backup"))
    assert not Url(f"{place}/backup").names()


@pytest.mark.cores(1)
def test_models_and_weights(cores, place):
    model = fit(ModelCheckpoint(f"{place}/weights/{{epoch}}.safetensors", monitor="loss"), epochs=2)
    assert Url(f"{place}/weights").names() == ["1.safetensors", "2.safetensors"]
    model.save(f"{place}/saved")
    again = tpufit.load(f"{place}/saved", nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.1), nn.Linear(6, 2)))
    other = compiled()
    other.load_weights(f"{place}/weights/2.safetensors")
    assert weights_of(again) == weights_of(other) == weights_of(model)
    with pytest.raises(FileNotFoundError, match="no weights at"):
        other.load_weights(f"{place}/weights/3.safetensors")


def test_a_checkpoint_exists_once_its_manifest_does(place):
    run = CheckpointDirectory(place, keep_last=2)
    for step in (1, 2):
        run.write(checkpoint(step))
    (Url(place) / "step-0000000002/manifest.json").remove()  # as if interrupted
    assert run.steps() == [1] and run.newest().step == 1
    with pytest.warns(UserWarning, match="dropped from .*: step-0000000002"):
        run.open()
    assert Url(place).names() == ["step-0000000001"]
    run.write(checkpoint(1))  # replaced
    assert run.newest().step == 1


class Breaking(MemoryFileSystem):
    """A file system that accepts a number of files, and then fails."""

    protocol = "breaking"
    cachable = False
    left = 0

    def put_file(self, *args, **options):
        if Breaking.left == 0:
            raise OSError(errno.ECONNRESET, "Connection reset by peer")
        Breaking.left -= 1
        super().put_file(*args, **options)


def test_a_checkpoint_exists_until_it_is_replaced():
    register_implementation("breaking", Breaking, clobber=True)
    url = f"breaking://{uuid4().hex}"
    run, files = CheckpointDirectory(url), 4
    Breaking.left = files
    run.write(replace(checkpoint(1), state={"sent": -1}))
    for sent in range(files):
        Breaking.left = sent
        with pytest.raises(CheckpointNotWrittenError, match="Connection reset"):
            run.write(replace(checkpoint(1), state={"sent": sent}))
        assert run.steps() == [1] and run.newest().state == {"sent": -1}
    assert len((Url(url) / "step-0000000001").names()) > files
    run.open()  # as the next run does
    assert len((Url(url) / "step-0000000001").names()) == files and run.newest().state == {"sent": -1}
    for again in range(2):
        Breaking.left = files
        run.write(replace(checkpoint(1), state={"again": again}))
        assert run.newest().state == {"again": again}
        names = (Url(url) / "step-0000000001").names()
        assert len(names) == files and "manifest.json" in names
    Url(url).remove()


@pytest.mark.parametrize("path", ["../model.safetensors", "/model.safetensors", 1])
def test_a_manifest_that_names_files_elsewhere_is_damaged(tmp_path, path):
    where = CheckpointDirectory(tmp_path).write(checkpoint())
    manifest = json.loads((where / "manifest.json").read_text())
    manifest["files"]["model.safetensors"]["path"] = path
    (where / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointDamagedError, match="must be in its folder"):
        CheckpointDirectory(tmp_path).newest()


def test_a_damaged_checkpoint_is_named_by_its_url(place):
    run = CheckpointDirectory(place)
    run.write(checkpoint())
    (Url(place) / "step-0000000001/state.json").write_bytes(b"{}")
    with pytest.raises(CheckpointDamagedError, match=f"{place}/step-0000000001/state.json is damaged"):
        run.newest()
    with pytest.raises(CheckpointMissingError, match="there is no checkpoint"):
        read_checkpoint_at(f"{place}/none")


def test_a_cache_is_copied_once(place, tmp_path):
    rows = [(torch.full((3,), float(i)), i) for i in range(10)]
    made = CachedDataset(rows, f"{place}/cache", workers=0)
    made.warm_up(progress=False)
    shutil.rmtree(Mirror(f"{place}/cache", kept=True).path)
    opened = CachedDataset.open(f"{place}/cache")
    assert [int(label) for _, label in opened] == list(range(10))
    copies = [path for path in (tmp_path / "kept").rglob("*") if path.is_file()]
    assert copies and CachedDataset.open(f"{place}/cache")[3][0].tolist() == [3.0] * 3


def test_images_behind_a_url(place, tmp_path):
    image = pytest.importorskip("PIL.Image")
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        image.new("RGB", (20, 10)).save(tmp_path / name / "1.png")
        (Url(place) / f"photos/{name}/1.png").send(tmp_path / name / "1.png")
    cached = presize(f"{place}/photos", 8, f"{place}/small", progress=False, workers=0)
    assert [int(label) for _, label in cached] == [0, 1]
    assert any(name.endswith("meta.json") for name in Url(f"{place}/small").sizes())


def test_a_failed_download_leaves_the_old_file(tmp_path):
    class Partial(MemoryFileSystem):
        """A file system whose downloads end in the middle."""

        protocol = "partial"
        cachable = False

        def get_file(self, _, local, **options):
            with open(local, "w") as file:
                file.write("ne")
            raise OSError(errno.ECONNRESET, "Connection reset by peer")

    register_implementation("partial", Partial, clobber=True)
    (tmp_path / "a.txt").write_text("old")
    with pytest.raises(OSError, match="Connection reset"):
        Url("partial://there/a.txt").fetch(tmp_path / "a.txt")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.txt", "old")]


def test_an_unknown_url():
    with pytest.raises(ArgumentError, match="nowhere://.*install its fsspec library"):
        ModelCheckpoint("nowhere://bucket/run")


def test_a_missing_library(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "gcsfs", None)
    with pytest.raises(ArgumentError, match=r"pip install 'tpufit\[gcs\]'"):
        Url("gs://bucket/run")


@pytest.mark.soak
def test_hosts_with_separate_disks_resume_from_a_url(tmp_path):
    from pods import Pod
    from test_pod_together import COMMON, said

    there = f"file://{tmp_path}/there"
    code = f"""
os.makedirs(f"disk{{me}}", exist_ok=True)
os.chdir(f"disk{{me}}")
model = fit(None, ModelCheckpoint("{there}", monitor="loss"), resume=True, epochs=EPOCHS)
json.dump([model.steps_taken, [v.tolist() for v in model.state_dict().values()]], open(f"../end{{me}}.json", "w"))
"""
    for epochs in (1, 2):
        ended = Pod(2, 2, tmp_path).run(COMMON + code.replace("EPOCHS", str(epochs)))
        assert [host.code for host in ended] == [0, 0], said(ended)
    first, second = (json.loads((tmp_path / f"end{host}.json").read_text()) for host in (0, 1))
    assert first == second and first[0] == 16


@pytest.mark.soak
def test_a_training_resumes_from_the_hub(run_python):
    pytest.importorskip("huggingface_hub")
    from hub_server import Hub

    code = """
        import torch, tpufit
        from torch import nn
        from tpufit.callbacks import ModelCheckpoint
        from tpufit.errors import CallbackError

        def compiled():
            torch.manual_seed(3)
            model = tpufit.Model(nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.1), nn.Linear(6, 2)))
            model.compile("adamw", "cross_entropy")
            return model

        def fit(epochs, place):
            model = compiled()
            saves = ModelCheckpoint(place, monitor="loss", keep_last=1, keep_best=0)
            model.fit(X, Y, batch_size=8, epochs=epochs, verbose=0, callbacks=[saves], resume=True)
            return model

        torch.manual_seed(0)
        X, Y = torch.randn(48, 4), torch.randint(0, 2, (48,))
        whole = fit(3, "here")
        fit(2, "hf://me/digits/run")
        resumed = fit(3, "hf://me/digits/run")
        assert all(torch.equal(a, b) for a, b in zip(whole.state_dict().values(), resumed.state_dict().values()))
        resumed.save("hf://me/digits/model")
        again = tpufit.load("hf://me/digits/model", compiled().module)
        resumed.save_weights("hf://me/digits/model.safetensors")
        other = compiled()
        other.load_weights("hf://me/digits/model.safetensors")
        for model in (again, other):
            assert all(torch.equal(a, b) for a, b in zip(whole.state_dict().values(), model.state_dict().values()))
        try:
            fit(1, "hf://me/other/run")
        except CallbackError as error:
            assert "can't be written to hf://me/other/run: me/other/run" in str(error), error
            assert "repository not found" in str(error), error
        print("done")
    """
    hub = Hub()
    try:
        process = run_python(code, env={"HF_ENDPOINT": hub.address, "HF_TOKEN": "hf_token", "HF_HUB_OFFLINE": None})
    finally:
        hub.shutdown()
        hub.server_close()
    assert process.stdout == "done\n", process.stderr
    steps = {name.split("/")[1] for name in hub.files if name.startswith("run/")}
    assert steps == {"step-0000000018"} and "model.safetensors" in hub.files
