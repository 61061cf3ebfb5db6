"""Disks that are full, folders that are read-only or belong to others, and checkpoints that don't fit."""

import hashlib
import json
import os
import re
import textwrap

import children
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import tpufit
from tpufit.callbacks import ModelCheckpoint
from tpufit.checkpoint import CheckpointDirectory
from tpufit.checkpoint.store import seal
from tpufit.errors import ArgumentError, CheckpointDamagedError, CheckpointMismatchError

X, Y = torch.ones(8, 4), torch.tensor([0, 1] * 4)


def model(width=6, optimizer="adamw", bias=True, dtype=torch.float32):
    made = tpufit.Model(nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2, bias=bias)).to(dtype))
    made.compile(optimizer, "cross_entropy")
    return made


# A separate small disk if allowed, else a limit on the size of files, which has other messages.
FULL = """
    import os, resource, signal, subprocess, sys
    if "small" not in sys.argv:
        mounted = "mkdir disk && mount -t tmpfs -o size={size}k none disk && exec \\"$@\\""
        again = [sys.executable, "-c", open("program").read(), "small"]
        ended = subprocess.run(["unshare", "-rm", "sh", "-c", mounted, "sh", *again])
        if os.path.exists("at work"):
            sys.exit(ended.returncode)
        os.makedirs("disk", exist_ok=True)
    open("at work", "w").close()
    """


@pytest.mark.soak
def test_a_disk_that_fills_up(tmp_path, run_python):
    program = FULL.format(size=330) + (
        """
    import json, os, sys, warnings
    if "small" not in sys.argv:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    from training import *
    from tpufit.errors import CheckpointNotWrittenError
    from tpufit.checkpoint import CheckpointDirectory

    def left():
        return sorted(name for name in os.listdir("disk/run") if name != ".lock")

    keep = ModelCheckpoint("disk/run", save_freq=1, keep_last=None, max_save_failures=3)
    model = compiled()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            fit(model, 8, keep, epochs=30)
        except CheckpointNotWrittenError as error:
            say("error:", error)
    for warning in caught:
        say("warning:", warning.message)
    newest = CheckpointDirectory("disk/run").newest()
    say("step", model.steps_taken, "newest", newest.step if newest else None, "left", len(left()))
    assert all(name.startswith("step-") for name in left()), left()

    # What isn't asynchronous says so at once. First whatever is free is used up.
    with open("disk/filler", "wb", buffering=0) as filler:
        try:
            while "small" in sys.argv:
                filler.write(bytes(4096))
        except OSError as error:
            say("filled:", error)
    try:
        model.save("disk/run/whole")
    except CheckpointNotWrittenError as error:
        say("sync:", error)
    assert not os.path.exists("disk/run/whole") and all(name.startswith("step-") for name in left()), left()
    """
    )
    (tmp_path / "program").write_text(textwrap.dedent(program))
    ended = run_python((tmp_path / "program").read_text(), env=children.ENV)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = ended.stdout.splitlines()
    (where,) = (line.split() for line in lines if line.startswith("step "))
    step, newest, kept = int(where[1]), where[3], int(where[5])
    words = r"no room in disk/run \(need .*, free .*\)|File too large"
    failed = [line for line in lines if line.startswith("warning: the checkpoint of step")]
    assert len(failed) == 2
    for line in failed + [line for line in lines if line.startswith("error: ")]:
        assert re.search(words, line), line
    assert sum(line.startswith("error: ") for line in lines) == 1  # the third in a row ends training
    assert lines[-1].startswith("sync: ")
    assert step - kept in (3, 4)  # the error is raised at the end of the next step at the latest
    assert newest == (str(kept) if kept else "None")


# Each write beyond a limit is refused, after a part of it: as on a full disk, except for the message.
FULL_FILES = """
    import os, resource, sys, warnings
    sys.path.insert(0, {tests!r})
    from fake_model import FakeModel
    from tpufit.callbacks import CSVLogger, ModelCheckpoint, TensorBoard

    one, file = {{
        "csv": (CSVLogger("log.csv"), "log.csv"),
        "board": (TensorBoard("logs", write_graph=False), None),
        "weights": (ModelCheckpoint("w.safetensors", "val_loss", save_best_only=True), None),
    }}[{kind!r}]
    said = []  # printed at last: standard output is a file too
    one.set_model(FakeModel())
    one.on_train_begin()
    for epoch, full in enumerate([0, 1, 1, 0, 1, 1, 1]):
        one.on_epoch_begin(epoch)
        one.model.weight = epoch
        room = resource.RLIM_INFINITY if not full else 5 + (os.path.getsize(file) if file else 0)
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                one.on_epoch_end(epoch, {{"loss": 9.0 - epoch, "val_loss": 9.0 - epoch}})
            except OSError as error:
                said.append(f"{{epoch}} error {{error.strerror}}")
        for warning in caught:
            said.append(f"{{epoch}} {{warning.message}}")
        if epoch == 3:
            kept = open(file).read() if file else None
    half = open(file).read() if file else None
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    one.on_train_end()
    for line in said:
        print(line)
    assert half == kept, half
    """


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param("csv", marks=pytest.mark.soak), pytest.param("board", marks=pytest.mark.soak), "weights"]
)
def test_a_full_disk_is_a_warning_and_the_third_in_a_row_an_error(tmp_path, run_python, kind):
    code = FULL_FILES.format(kind=kind, tests=str(children.FAULTS.parent))
    ended = run_python(code, env=children.ENV)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = ended.stdout.splitlines()
    assert [line[0] for line in lines] == ["1", "2", "4", "5", "6"], ended.stdout
    assert all("File too large" in line and "Training continues" in line for line in lines[:-1])
    assert lines[-1] == "6 error File too large"
    assert "Traceback" not in ended.stderr
    if kind == "csv":  # pending rows are written once
        text = "".join(f"{epoch},{9.0 - epoch},{9.0 - epoch}\n" for epoch in range(7))
        assert (tmp_path / "log.csv").read_text() == f"epoch,loss,val_loss\n{text}"
    elif kind == "weights":
        assert float(tpufit.checkpoint.read_weights(tmp_path / "w.safetensors")["weight"]) == 3
    else:
        events = EventAccumulator(str(tmp_path / "logs" / "train"))
        events.Reload()
        assert [event.step for event in events.Scalars("epoch_loss")] == [*range(7)]


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_to(tmp_path, run_python):
    ended = run_python(
        """
        import os
        from training import *
        from tpufit import runtime

        fit(compiled(), 1, epochs=1)  # imports what there is to import, which may be closed to others than root
        before = runtime.counts()
        os.mkdir("closed")
        os.chmod("closed", 0o555)
        if not os.geteuid():
            os.chmod(".", 0o777)
            os.seteuid(65534)  # root may write anywhere
        open("file", "w").close()
        for path in ("closed", "closed/run", "file/"):
            try:
                fit(compiled(), 1, ModelCheckpoint(path))
            except Exception as error:
                say(type(error).__name__, error)
        assert not (runtime.counts() - before).graphs
        """,
        env=children.ENV,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = ended.stdout.splitlines()
    assert len(lines) == 3
    assert f"checkpoints can't be written to {tmp_path}/closed: Permission denied" in lines[0]
    assert f"checkpoints can't be written to {tmp_path}/closed/run: Permission denied" in lines[1]
    assert "'file/' is a file" in lines[2]


@pytest.mark.soak
def test_two_trainings_in_one_folder(tmp_path, run_python):
    code = "from training import *; run(1, 'run', Say(), epochs=100_000, keep=2)"
    with children.started(code, tmp_path) as child:
        child.wait_for("saved 1")
        ended = run_python(code, env=children.ENV)
        assert ended.returncode == 1
        assert f"process {child.process.pid} on {os.uname().nodename} trains into {tmp_path}/run" in ended.stderr
        assert "done" not in ended.stdout
        child.send(9)
        child.end()
    again = run_python("from training import *; run(1, 'run', Say(), resume=True, epochs=1, keep=2)", env=children.ENV)
    assert again.returncode == 0, again.stderr  # its lock is free


def test_training_never_restarts_if_all_checkpoints_are_damaged(tmp_path):
    made = model()
    for step in (1, 2):
        made.save(tmp_path / f"step-{step:010d}")
        with (tmp_path / f"step-{step:010d}" / "model.safetensors").open("r+b") as file:
            file.seek(100 + step)
            file.write(b"\xff\xff")
    with pytest.raises(CheckpointDamagedError, match=r"none of.*0002/model.*SHA-256.*0001/model.*To start over"):
        made.fit(X, Y, callbacks=[ModelCheckpoint(tmp_path)], resume=True, verbose=0)
    assert CheckpointDirectory(tmp_path).steps() == [1, 2]


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: model(5), r"0\.weight: \(6, 4\) in the weights, \(5, 4\) in the module"),
        (lambda: model(7), r"0\.weight: \(6, 4\) in the weights, \(7, 4\) in the module"),
        (lambda: model(bias=False), r"unknown to the module: 2\.bias"),
        (lambda: model(dtype=torch.float64), r"other dtypes: 0\.weight: torch\.float32 then, torch\.float64 now"),
    ],
)
def test_a_checkpoint_of_another_net_is_refused_and_changes_nothing(tmp_path, made, message):
    model().save(tmp_path / "saved")
    net = made().module
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    with pytest.raises(CheckpointMismatchError, match=message):
        tpufit.load(tmp_path / "saved", net)
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


@pytest.mark.parametrize("change", [{"more": 1}, {"jit_compile": {}}, {"metrics": 7}])
def test_invalid_arguments_of_compile_are_one_sentence(tmp_path, change):
    model().save(tmp_path / "saved")
    state = json.loads((tmp_path / "saved" / "state.json").read_text())
    content = json.dumps(state | {"compile": state["compile"] | change}).encode()
    (tmp_path / "saved" / "state.json").write_bytes(content)
    manifest = json.loads((tmp_path / "saved" / "manifest.json").read_text())
    manifest["files"]["state.json"] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (tmp_path / "saved" / "manifest.json").write_text(seal(manifest))
    with pytest.raises((CheckpointDamagedError, ArgumentError)):
        tpufit.load(tmp_path / "saved", model().module)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("run/{loss.__class__}.safetensors", "must be a plain name.*'loss.__class__'"),
        ("run/{epoch}/../../{loss!s}.safetensors", "must be a plain name"),
        ("run/{a/b}.safetensors", "is not a valid template"),
        ("run/\0{epoch}.safetensors", "without NUL"),
        ("ru\0n", "without NUL"),
        ("a" * 300, "at most 200 bytes"),
        ("run/{epoch}" + "a" * 300 + ".safetensors", "at most 200 bytes"),
        ("run/{epoch:0300d}.safetensors", "longer than 200"),
    ],
)
def test_names_that_leave_the_folder(tmp_path, monkeypatch, path, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError, match=message):
        ModelCheckpoint(path)
    assert not list(tmp_path.iterdir())
